"""The workflow `agent`: any program that uses OpenAI's API plays the episodes, and is trained.

    rollout:
      workflow: agent
      workflow_args: {command: [python, agent.py, "{question}"]}     # or function: "my_agent:solve"

Each sample of a prompt is an episode: a separate process, with OPENAI_BASE_URL and OPENAI_API_KEY in its
environment, and the row as JSON on its standard input. Its calls become the tokens to train on. An episode
that fails is started again, and then lost; the other episodes of its prompt go on.
"""

import asyncio
import contextlib
import logging
import os
import shlex
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from hpc_rl.core.types import Trajectory, TrajectoryGroup, Turn
from hpc_rl.rollout.agent.episode import Episode, EpisodeFailed, EpisodeLimits
from hpc_rl.rollout.agent.functions import OPTION, AgentFunction
from hpc_rl.rollout.agent.joining import join_calls, make_trajectory
from hpc_rl.rollout.agent.processes import AgentEnd, AgentProcesses, describe_code
from hpc_rl.rollout.rewards import Rejection, Score, fill_from_row, parse_score
from hpc_rl.rollout.workflow import Sampler, trajectory

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_FAILURES = 1000  # different ones that are counted
LOCAL_HOSTS = "127.0.0.1,localhost"  # never through a proxy


class AgentWorkflow:
    """Runs an agent for each sample of a prompt.

    Args:
        command: Program and arguments, or one text that is split as by a shell, which is not used. `{name}`
            stands for a column of the row.
        function: Instead of a command, `package.module:name` of a function of the row, async or not.
        timeout_s: Time limit of an episode.
        retries: Number of times that a failed episode is started again.
        failure_reward: Reward of an episode that failed for good, which is then trained on; None loses it.
        max_calls: Completions that one episode may ask for.
        max_episodes: Episodes of one executor worker at once; None for any number.
        keep_tokens: Whether a conversation continues with the very tokens of its replies. False renders it
            again for each call; where the tokens differ, a new sequence begins.
    """

    def __init__(
        self,
        command: str | Sequence[str] = (),
        function: str = "",
        timeout_s: float = 600.0,
        retries: int = 1,
        failure_reward: float | None = None,
        max_calls: int = 256,
        max_episodes: int | None = None,
        keep_tokens: bool = True,
    ) -> None:
        from hpc_rl.rollout.agent.endpoint import AgentEndpoint  # imports aiohttp

        self._argv = shlex.split(command) if isinstance(command, str) else list(command)
        if function:
            AgentFunction(function)  # a mistake ends the trial now, not each prompt
        self._timeout_s, self._retries, self._failure_reward = timeout_s, retries, failure_reward
        self._limits = EpisodeLimits(max_calls, keep_tokens)
        self._places = asyncio.Semaphore(max_episodes) if max_episodes else contextlib.nullcontext()
        self._endpoint, self._processes = AgentEndpoint(), AgentProcesses(function)
        self._failures: Counter[str] = Counter()  # by their texts

    async def run(self, prompt: dict[str, Any], generate: Sampler) -> TrajectoryGroup:
        """Return a group with the sequences of all episodes that did not fail.

        Raises the last failure if all failed, in an evaluation if one did.
        """
        await self._endpoint.open()
        row = {name: value for name, value in prompt.items() if name != "input_ids"}
        argv = [fill_from_row(f"{OPTION}.command", one, row, {}) for one in self._argv]
        played = await _gather(
            [self._play(argv, row, generate, sample) for sample in range(generate.n_samples)]
        )
        failures = [one for one in played if isinstance(one, Exception)]
        if failures and (generate.is_evaluation or len(failures) == len(played)):
            raise failures[-1]
        made = [one for sequences in played if not isinstance(sequences, Exception) for one in sequences]
        for one in made:
            one.stats["lost_episodes"] = float(len(failures))
        return TrajectoryGroup(generate.index, made)

    async def close(self) -> None:
        """End all agents and the endpoint."""
        await self._processes.close()
        await self._endpoint.close()

    async def _play(
        self, argv: list[str], row: dict[str, Any], generate: Sampler, sample: int
    ) -> list[Trajectory] | Exception:
        """Return the sequences of one sample's episode, or the failure of its last try."""
        for number in range(self._retries + 1):
            label = f"{sample}/{number}" if number else f"{sample}"
            episode = Episode(generate, label, self._limits)
            output = ""
            try:
                async with self._places:
                    end = await self._start(argv, row, episode)
                output = end.output
                reward = await self._score(row, generate, episode, end)
                return self._join(generate, episode, reward, output, number)
            except (EpisodeFailed, Rejection) as error:
                failure = error
                output = output or (error.output if isinstance(error, EpisodeFailed) else "")
                self._log(generate, sample, number, error, output)
        if self._failure_reward is not None and (episode.calls or generate.is_evaluation):
            return self._join(generate, episode, self._failure_reward, output, self._retries)
        failure.add_note(f"Output of the agent:\n{output or '(none)'}")
        return failure

    async def _start(self, argv: list[str], row: dict[str, Any], episode: Episode) -> AgentEnd:
        """Return the end of an agent. Raises EpisodeFailed if it failed."""
        with self._endpoint.admit(episode) as url:
            environment = make_environment(os.environ, url, episode.key)
            options = {"base_url": url, "api_key": episode.key}
            limit_s = self._timeout_s
            end = await self._processes.run(argv, environment, row, options, limit_s, episode.broken)
        if "error" in end.result:
            text, _place, trace = end.result["error"]
            raise EpisodeFailed(f"the agent raised {text}", f"{end.output}{trace}")
        if end.code:
            raise EpisodeFailed(f"the agent {describe_code(end.code)}", end.output)
        if episode.reward_problem:
            raise EpisodeFailed(
                f"the agent posted a reward that can't be used: {episode.reward_problem}", end.output
            )
        return end

    async def _score(
        self, row: dict[str, Any], generate: Sampler, episode: Episode, end: AgentEnd
    ) -> Score | float:
        """Return the reward: the posted one, the function's result, or the result of `rollout.reward_fn`.

        Raises EpisodeFailed, or Rejection for a value that is not a reward.
        """
        if not any(call.turn.output_ids for call in episode.calls):
            raise EpisodeFailed("the agent got no completion from the model", end.output)
        if episode.reward is not None:
            return episode.reward
        value = end.result.get("value")
        if value is None or isinstance(value, str):
            return await generate.reward(row, episode.last_text if value is None else value)
        return parse_score(value)

    def _join(
        self, generate: Sampler, episode: Episode, reward: float, output: str, retries: int
    ) -> list[Trajectory]:
        """Return the sequences of an episode. In an evaluation it is one: each is a result there."""
        sequences = join_calls(episode.calls)
        if generate.is_evaluation:
            sequences = sequences[-1:]
        temperature = generate.source.sampling["temperature"]
        made = [make_trajectory(sequence, reward, temperature) for sequence in sequences]
        if not made and generate.is_evaluation:
            # nothing of it is trained on, but its reward counts
            nothing = Turn([], [], [], "stop")
            made = [trajectory([(generate.tokenizer.encode(" ") or [0], nothing)], reward)]
        stats = {"calls": len(episode.calls), "sequences": len(sequences), "retries": retries}
        stats["rewritten_chats"] = episode.num_rewritten
        for one in made:
            one.stats |= {name: float(value) for name, value in stats.items()}
            one.share, one.output = 1.0 / len(made), output
        return made

    def _log(self, generate: Sampler, sample: int, number: int, error: Exception, output: str) -> None:
        """Log a failed episode; of equal failures only the 1st, 2nd, 4th, 8th and so on."""
        if len(self._failures) >= MAX_FAILURES:
            self._failures.clear()
        self._failures[str(error)] += 1
        count = self._failures[str(error)]
        if count & (count - 1) == 0:
            form = "prompt %d, episode %d, try %d failed (%d times so far): %s; the agent's output:\n%s"
            logger.warning(form, generate.index, sample, number + 1, count, error, output or "(none)")


def make_environment(own: Mapping[str, str], url: str, key: str) -> dict[str, str]:
    """Return the environment of an agent: this process's, with the two variables of its episode."""
    made = {**own, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "HPC_RL_REWARD_URL": f"{url}/reward"}
    for name in ("NO_PROXY", "no_proxy"):
        made[name] = ",".join(filter(None, [own.get(name), LOCAL_HOSTS]))
    return made


async def _gather(episodes: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of coroutines; the first exception is raised, and cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in episodes]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return [task.result() for task in tasks]
