"""Workflow: from one prompt to a group of scored trajectories: `single_turn`, or the user's by import path.

A workflow is `async run(prompt, generate) -> TrajectoryGroup | None`: an object with that method, a class
that makes one, by `create(config)` or by itself, with `rollout.workflow_args`; or such a function. `prompt`
is the row as a dict, plus `input_ids`. None rejects the prompt.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.types import Reply, Trajectory, TrajectoryGroup, Turn, WeightVersion, decode, encode
from hpc_rl.datasets.order import sample_seed
from hpc_rl.rollout.batch_log.ledger import RejectReason, check_note
from hpc_rl.rollout.pipes import RunPrompt
from hpc_rl.rollout.rewards import BatchReward, Rejection, parts_of
from hpc_rl.rollout.server_pool import ChatPool, ServerPool
from hpc_rl.servers.client import GenerateRequest

Workflow = Callable[[dict[str, Any], "Sampler"], Awaitable[TrajectoryGroup | None]]
NOT_FOR_REWARDS = ("prompt", "completion", "input_ids")  # columns that a reward has otherwise, or not at all


T = TypeVar("T")
Note = Callable[[str, bytes], Awaitable[bytes]]


class Sampler:
    """What a workflow generates and scores with: it knows its prompt's index, seeds and sampling settings.

    `pool` is the one that follows the trainer; `others` are those that a workflow may ask by name; `note`
    keeps what `once` makes, and returns what counts once that is on disk.
    """

    def __init__(
        self,
        prompt: RunPrompt,
        seed: int,
        n_samples: int,
        pool: ServerPool,
        others: Mapping[str, ChatPool],
        rewards: BatchReward,
        note: Note,
    ) -> None:
        self.index = prompt["index"]
        self.n_samples = n_samples
        self.tokenizer = pool.tokenizer
        self._pool, self._others, self._rewards = pool, others, rewards
        self._min_version = prompt["version"]
        # with the sample's number these make the sample's seed
        self._identity = (seed, "evaluation" if prompt["evaluate"] else prompt["epoch"], prompt["row"])
        self._turns: Counter[int] = Counter()
        self._note = note
        self._made: dict[str, bytes] = {}  # by `once`, encoded
        self._kept = dict(prompt["notes"])  # of it what is on disk
        self._making: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def __call__(
        self,
        input_ids: Sequence[int],
        sample: int = 0,
        pool: str = "",
        label: str = "",
        max_tokens: int | None = None,
    ) -> Turn:
        """Return one generation, of the model that is trained or of another pool's servers.

        `sample` is the trajectory that it is for: each has its own seed, and each turn of it. A generation of
        another pool has the seed of its `label` and `sample`, as in `ask`. `max_tokens` limits input and
        output together; without room for a token Rejection is raised.
        """
        if not pool:
            request = self._request(list(input_ids), sample, max_tokens)
            return (await self._pool.generate([request]))[0]
        chosen = self._find(pool)
        if not isinstance(chosen, ServerPool):
            raise ConfigError(f"pool {pool!r} is an endpoint elsewhere: it takes messages (ask), not tokens.")
        seed = self._seed(label, sample)
        request = chosen.request(list(input_ids), seed, self._least(chosen), max_tokens=max_tokens)
        return (await chosen.generate([request]))[0]

    async def samples(self, input_ids: Sequence[int]) -> list[Turn]:
        """Return n_samples generations of one input."""
        ids = list(input_ids)
        return await self._pool.generate([self._request(ids, sample) for sample in range(self.n_samples)])

    async def ask(
        self,
        messages: list[dict[str, Any]],
        pool: str,
        n: int = 1,
        label: str = "",
        max_new_tokens: int | None = None,
    ) -> list[Reply]:
        """Return n answers of a pool to a chat, which its tokenizer renders.

        The seeds follow from the label and the answer's number: what is asked twice under one label gets the
        same answers. `max_new_tokens` None means the pool's.
        """
        chosen, seeds = self._find(pool), [self._seed(label, number) for number in range(n)]
        if isinstance(chosen, ServerPool):
            return await chosen.ask(messages, seeds, max_new_tokens, min_version=self._least(chosen))
        return await chosen.ask(messages, seeds, max_new_tokens)

    async def once(self, key: str, make: Callable[[], Awaitable[T]]) -> T:
        """Return what `make()` returns, and the same when the prompt runs again, after a kill or an error.

        It is kept on disk until the prompt has its group: use it for what does not depend on the weights that
        are trained. It is made of what `hpc_rl.core.types.encode` takes. In an evaluation it is not kept.
        """
        check_note(key)
        async with self._making[key]:
            if key not in self._kept:
                if key not in self._made:
                    value = encode(await make())
                    check_note(key, value)
                    decode(value)  # raises for what could not be read again
                    self._made[key] = value
                # a caller that was cancelled here leaves the rest to the next
                self._kept[key] = await self._note(key, self._made[key])
            return decode(self._kept[key])

    async def reward(self, prompt: dict[str, Any], completion: str) -> float:
        """Return what the configured reward function returns, as `rewards`."""
        return (await self.rewards(prompt, [completion]))[0]

    async def rewards(self, prompt: dict[str, Any], completions: list[str]) -> list[float]:
        """Return what the configured reward function returns for completions of a prompt. Raises Rejection.

        Its parts are in the stats of the trajectory that is made with it.
        A column `completion` of the row is not given: the name is that of what is scored.
        """
        question, columns = for_rewards(prompt)
        return await self._rewards(question, completions, columns)

    def _find(self, pool: str) -> ChatPool:
        if pool == self._pool.name:
            return self._pool
        if pool not in self._others:
            known = ", ".join([self._pool.name, *self._others])
            raise ConfigError(f"there is no pool {pool!r} that answers; there are: {known}.")
        return self._others[pool]

    def _least(self, pool: ServerPool) -> str:
        """Return the version that weights must not be older than; those of a frozen pool have none."""
        return self._min_version if pool is self._pool else ""

    def _seed(self, label: str, number: int) -> int:
        return sample_seed(*self._identity, f"{label}/{number}")

    def _request(self, input_ids: list[int], sample: int, max_tokens: int | None = None) -> GenerateRequest:
        turn = self._turns[sample]
        seed = sample_seed(*self._identity, sample if turn == 0 else f"{sample}.{turn}")
        request = self._pool.request(input_ids, seed, self._min_version, max_tokens=max_tokens)
        self._turns[sample] += 1
        return request


def for_rewards(row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return what a reward gets of a row: what was asked, and the columns."""
    columns = {name: value for name, value in row.items() if name not in NOT_FOR_REWARDS}
    return row.get("prompt", row.get("messages")), columns


DTYPES = {
    "ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "lineages": np.int32,
    "steps": np.int32,
    "advantages": np.float32,
    "ref_logprobs": np.float32,
}
FLOATS = [name for name, dtype in DTYPES.items() if dtype == np.float32]
OPTIONAL = ("advantages", "ref_logprobs")


NUMBER = Real | np.bool_
LARGEST_NUMBER = 1e6  # of scores, advantages and log-probabilities: their squares fit into float32


def token_id_problem(ids: np.ndarray, vocab_size: int) -> str:
    """Return which token id, of at least one, the model does not have, or ""."""
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest >= 0 and largest < vocab_size:
        return ""
    return f"token id {smallest if smallest < 0 else largest}; the model has 0 to {vocab_size - 1}"


def check_group(
    group: Any, index: int, vocab_size: int, num_trajectories: int | None = None, strict: bool = False
) -> None:
    """Raise Rejection unless the result for prompt `index` can be trained on.

    `vocab_size` is the model's number of tokens; `num_trajectories` is the size that the group must have,
    None for any; `strict` checks what `rollout.check_trajectory_format` asks for as well.
    """
    if not isinstance(group, TrajectoryGroup):
        kind = type(group).__name__
        raise _bad_group(f"prompt {index}: the workflow returned {kind}, not TrajectoryGroup or None")
    found = len(group.trajectories)
    if num_trajectories is not None and found != num_trajectories:
        raise _bad_group(
            f"prompt {index}: the group has {found} trajectories; gconfig.n_samples is {num_trajectories}"
        )
    for number, one in enumerate(group.trajectories):
        where = f"prompt {index}, trajectory {number}"
        if not isinstance(one, Trajectory):
            raise _bad_group(f"{where} is {type(one).__name__}; it must be a Trajectory")
        _check_arrays(one, where)
        if problem := token_id_problem(one.ids, vocab_size):
            raise _bad_group(f"{where} has {problem}: does the workflow use the model's tokenizer?")
        if strict and not one.loss_mask.any():
            raise _bad_group(f"{where}: loss_mask marks no token, so there is nothing to learn from")
        if strict and (one.logprobs[one.loss_mask] > 0).any():
            raise _bad_group(f"{where}: logprobs must be at most 0 where loss_mask is true")


def _check_arrays(one: Trajectory, where: str) -> None:
    for name, dtype in DTYPES.items():
        array = getattr(one, name)
        if array is None and name in OPTIONAL:
            continue
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != dtype:
            raise _bad_group(f"{where}: {name} must be a one-dimensional array of {np.dtype(dtype).name}")
        if len(array) != len(one.ids):
            raise _bad_group(f"{where}: {name} has {len(array)} entries, ids has {len(one.ids)}")
    if not len(one.ids):
        raise _bad_group(f"{where} has no token")
    for name in FLOATS:
        array = getattr(one, name)
        if array is not None and not (np.abs(array) <= LARGEST_NUMBER).all():
            limits = f"-{LARGEST_NUMBER:g} to {LARGEST_NUMBER:g}"
            raise _bad_group(f"{where}: {name} must be finite numbers from {limits}")
    if not all(isinstance(name, str) and isinstance(value, NUMBER) for name, value in one.stats.items()):
        raise _bad_group(f"{where}: stats must have a number for each name")
    if (one.steps[one.loss_mask] < 0).any() or (one.lineages[one.loss_mask] < 0).any():
        raise _bad_group(f"{where}: steps and lineages must name a weight version where loss_mask is true")


def _bad_group(message: str) -> Rejection:
    return Rejection(RejectReason.BAD_GROUP, message)


def trajectory(turns: Sequence[tuple[Sequence[int], Turn]], reward: float) -> Trajectory:
    """One token-level record of (context that was added, what the model made of it), turn after turn.

    Its stats are the parts of the reward, if that has any.
    For a single turn `[(input_ids, turn)]`. Versions come from the turns' spans, not from a clock.
    """
    num_tokens = sum(len(context) + len(turn.output_ids) for context, turn in turns)
    made = Trajectory(
        ids=np.empty(num_tokens, np.int32),
        loss_mask=np.zeros(num_tokens, bool),
        logprobs=np.zeros(num_tokens, np.float32),
        lineages=np.full(num_tokens, -1, np.int32),
        steps=np.full(num_tokens, -1, np.int32),
        reward=float(reward),
        finish_reason=turns[-1][1].finish_reason,
        stats={f"reward/{name}": value for name, value in parts_of(reward).items()},
    )
    at = 0
    for context, turn in turns:
        start, end = at + len(context), at + len(context) + len(turn.output_ids)
        made.ids[at:start] = context
        made.ids[start:end] = turn.output_ids
        made.loss_mask[start:end] = True
        made.logprobs[start:end] = turn.output_logprobs
        for label, first, last in turn.versions:
            version = WeightVersion.parse(label)
            made.lineages[start + first : start + last] = version.lineage
            made.steps[start + first : start + last] = version.step
        at = end
    return made
