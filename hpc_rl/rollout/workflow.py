"""Workflow: from one prompt to a group of scored trajectories: `single_turn`, or the user's by import path.

A workflow is `async run(prompt, generate) -> TrajectoryGroup | None`. It is a function, an object with that
method, or a class: the class's `create(config)` or the class itself makes the object, with
`rollout.workflow_args`. `prompt` is the row as a dict, plus `input_ids`. None rejects the prompt.
"""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.types import (
    REGENERATED,
    Reply,
    Trajectory,
    TrajectoryGroup,
    Turn,
    WeightVersion,
    decode,
    encode,
)
from hpc_rl.datasets.order import make_sample_seed
from hpc_rl.rollout.batch_log.ledger import RejectReason, check_note
from hpc_rl.rollout.distillation import TextSource
from hpc_rl.rollout.pipes import RunPrompt
from hpc_rl.rollout.rewards import BatchReward, Rejection, get_parts
from hpc_rl.rollout.server_pool import Answers, Chat, ChatPool, ServerPool, ask_each
from hpc_rl.servers.client import GenerateRequest

Workflow = Callable[[dict[str, Any], "Sampler"], Awaitable[TrajectoryGroup | None]]
# columns that a reward gets in other arguments, or not at all
NOT_FOR_REWARDS = ("prompt", "completion", "input_ids")


T = TypeVar("T")
Note = Callable[[str, bytes], Awaitable[bytes]]


class Sampler:
    """Generation and scoring for a workflow, with its prompt's index, seeds and sampling settings.

    `pool` follows the trainer; the workflow may ask the `others` by name; `note` stores a value of `once`,
    and returns the valid value once that is on disk. `source` samples in place of `pool`: its weights are
    frozen, and its tokens get the version of the trainer, so that they do not age. A source of texts serves
    `samples` alone.
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
        source: ServerPool | TextSource | None = None,
    ) -> None:
        self._columns = prompt["columns"]
        self.index = prompt["index"]
        self.n_samples = n_samples
        self.tokenizer = pool.tokenizer
        self._pool, self._others, self._rewards = pool, others, rewards
        self._source = source or pool
        self._min_version = prompt["version"]
        # together with the sample's number they give the sample's seed
        self._identity = (seed, "evaluation" if prompt["evaluate"] else prompt["epoch"], prompt["row"])
        self._turns: Counter[int] = Counter()
        self._note = note
        self._made: dict[str, bytes] = {}  # values of `once`, encoded
        self._kept = dict(prompt["notes"])  # those values that are on disk
        self._making: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def __call__(
        self,
        input_ids: Sequence[int],
        sample: int = 0,
        pool: str = "",
        label: str = "",
        max_tokens: int | None = None,
    ) -> Turn:
        """Return one generation, from the trained model or another pool's servers.

        `sample` is the number of its trajectory: each trajectory and each turn has its own seed. A generation
        of another pool has the seed of its `label` and `sample`, as in `ask`. `max_tokens` limits input and
        output together; without room for a token Rejection is raised.
        """
        if not pool:
            return (await self._generate([self._request(list(input_ids), sample, max_tokens)]))[0]
        chosen = self._find(pool)
        if not isinstance(chosen, ServerPool):
            raise ConfigError(
                f"pool {pool!r} is an external endpoint, which takes messages, not tokens: call ask()."
            )
        seed = self.make_seed(label, sample)
        request = chosen.request(list(input_ids), seed, self._get_min_version(chosen), max_tokens=max_tokens)
        return (await chosen.generate([request]))[0]

    async def samples(self, input_ids: Sequence[int]) -> list[Turn]:
        """Return n_samples generations of one input."""
        ids = list(input_ids)
        if isinstance(self._source, TextSource):
            seeds = [make_sample_seed(*self._identity, sample) for sample in range(self.n_samples)]
            return await self._source.sample(self._columns, len(ids), seeds, self._min_version)
        return await self._generate([self._request(ids, sample) for sample in range(self.n_samples)])

    async def ask(
        self,
        messages: Chat,
        pool: str,
        n: int = 1,
        label: str = "",
        max_new_tokens: int | None = None,
    ) -> list[Reply]:
        """Return n answers of a pool to a chat, which its tokenizer renders.

        The seeds follow from the label and the answer's number: a repeated question under one label gets the
        same answers. `max_new_tokens` None means the pool's limit.
        """
        chosen, seeds = self._find(pool), [self.make_seed(label, number) for number in range(n)]
        if isinstance(chosen, ServerPool):
            return await chosen.ask(
                messages, seeds, max_new_tokens, min_version=self._get_min_version(chosen)
            )
        return await chosen.ask(messages, seeds, max_new_tokens)

    async def ask_many(
        self, chats: Mapping[str, Chat], pool: str, n: int = 1, max_new_tokens: int | None = None
    ) -> dict[str, Answers]:
        """Return n answers of a pool to each of several chats, by their labels, as `ask` for each would.

        A chat that can't be input of the model has its exception, InputRefused or Rejection, in place of
        answers.
        """
        chosen = self._find(pool)
        seeds = [[self.make_seed(label, number) for number in range(n)] for label in chats]
        if isinstance(chosen, ServerPool):
            least = self._get_min_version(chosen)
            found = await chosen.ask_many([*chats.values()], seeds, max_new_tokens, least)
        else:  # an endpoint takes one chat at a time
            asks = zip(chats.values(), seeds, strict=True)
            found = await ask_each(chosen.ask(chat, own, max_new_tokens) for chat, own in asks)
        return dict(zip(chats, found, strict=True))

    @property
    def source(self) -> ServerPool:
        """The servers that sample."""
        assert not isinstance(self._source, TextSource), "a source of texts takes no tokens"
        return self._source

    @property
    def is_evaluation(self) -> bool:
        return self._identity[1] == "evaluation"

    async def send(self, requests: Sequence[GenerateRequest]) -> list[Turn]:
        """Return the turns of requests that have their own sampling and seeds, all from one server."""
        least = self._get_min_version(self.source)
        return await self._generate([self.source.bind(request, least) for request in requests])

    async def once(self, key: str, make: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `make()`; a repeated run of the prompt, as after a kill, gets the same one.

        It is stored on disk until the prompt has its group: use it for values that do not depend on the
        trained weights. It must consist of types that `hpc_rl.core.types.encode` takes. An evaluation does
        not store it.
        """
        check_note(key)
        async with self._making[key]:
            if key not in self._kept:
                if key not in self._made:
                    value = encode(await make())
                    check_note(key, value)
                    decode(value)  # raises for values that could not be read again
                    self._made[key] = value
                # a caller cancelled here leaves the rest to the next one
                self._kept[key] = await self._note(key, self._made[key])
            return decode(self._kept[key])

    async def reward(self, prompt: dict[str, Any], completion: str) -> float:
        """Return the configured reward of one completion, as `rewards`."""
        return (await self.rewards(prompt, [completion]))[0]

    async def rewards(self, prompt: dict[str, Any], completions: list[str]) -> list[float]:
        """Return the configured reward function's result for completions of a prompt. Raises Rejection.

        A trajectory made with it gets its parts as stats. The row's column `completion`, if any, is left out,
        because the scored text has that name.
        """
        question, columns = make_reward_arguments(prompt)
        return await self._rewards(question, completions, columns)

    def _find(self, pool: str) -> ChatPool:
        if pool == self._pool.name:
            return self._pool
        if pool not in self._others:
            known = ", ".join([self._pool.name, *self._others])
            raise ConfigError(f"unknown pool {pool!r}; allowed: {known}.")
        return self._others[pool]

    def _get_min_version(self, pool: ServerPool) -> str:
        """Return the minimum version of the weights; "" for a frozen pool."""
        return self._min_version if pool is self._pool else ""

    def make_seed(self, label: str, number: int) -> int:
        """Return the seed of a generation with its own label, the same in a repeated run."""
        return make_sample_seed(*self._identity, f"{label}/{number}")

    def _request(self, input_ids: list[int], sample: int, max_tokens: int | None = None) -> GenerateRequest:
        assert not isinstance(self._source, TextSource), "a source of texts takes no tokens"
        turn = self._turns[sample]
        seed = make_sample_seed(*self._identity, sample if turn == 0 else f"{sample}.{turn}")
        least = self._get_min_version(self._source)
        request = self._source.request(input_ids, seed, least, max_tokens=max_tokens)
        self._turns[sample] += 1
        return request

    async def _generate(self, requests: list[GenerateRequest]) -> list[Turn]:
        assert not isinstance(self._source, TextSource), "a source of texts takes no tokens"
        turns = await self._source.generate(requests)
        if self._source is self._pool:
            return turns
        return [replace(turn, versions=[(self._min_version, 0, len(turn.output_ids))]) for turn in turns]


def make_reward_arguments(row: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a reward's arguments from a row: the question, and the columns."""
    columns = {name: value for name, value in row.items() if name not in NOT_FOR_REWARDS}
    return row.get("prompt", row.get("messages")), columns


DTYPES = {
    "ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "lineages": np.int32,
    "steps": np.int32,
    "advantages": np.float32,
    "turn_rewards": np.float32,
    "ref_logprobs": np.float32,
    "teacher_logprobs": np.float32,
}
FLOATS = {name for name, dtype in DTYPES.items() if dtype == np.float32}
OPTIONAL = ("advantages", "turn_rewards", "ref_logprobs", "teacher_logprobs")


NUMBER = Real | np.bool_
LARGEST_NUMBER = 1e6  # of scores, advantages and log-probabilities: their squares fit into float32


def find_bad_token(ids: np.ndarray, vocab_size: int) -> str:
    """Return which of the token ids (at least one) the model lacks, or ""."""
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest >= 0 and largest < vocab_size:
        return ""
    return f"token id {smallest if smallest < 0 else largest}; the model has 0 to {vocab_size - 1}"


def check_group(
    group: Any, index: int, vocab_size: int, num_trajectories: int | None = None, strict: bool = False
) -> None:
    """Raise Rejection unless the result for prompt `index` can be trained on.

    `vocab_size` is the model's number of tokens; `num_trajectories` is the required size of the group, None
    for any; `strict` adds the checks of `rollout.check_trajectory_format`.
    """
    if not isinstance(group, TrajectoryGroup):
        kind = type(group).__name__
        raise _make_bad_group(f"prompt {index}: the workflow returned {kind}, not TrajectoryGroup or None")
    num_found = len(group.trajectories)
    if num_trajectories is not None and num_found != num_trajectories:
        raise _make_bad_group(
            f"prompt {index}: the workflow returned {num_found} trajectories; gconfig.n_samples is "
            f"{num_trajectories}"
        )
    for number, entry in enumerate(group.trajectories):
        where = f"prompt {index}, trajectory {number}"
        if not isinstance(entry, Trajectory):
            raise _make_bad_group(f"{where} is {type(entry).__name__}; it must be a Trajectory")
        _check_arrays(entry, where)
        if strict and not entry.loss_mask.any():
            raise _make_bad_group(f"{where}: loss_mask marks no token, so there is nothing to learn from")
    try:  # few operations on all rows together
        _check_values(group.trajectories, f"prompt {index}", vocab_size, strict)
    except Rejection:
        for number, entry in enumerate(group.trajectories):
            _check_values([entry], f"prompt {index}, trajectory {number}", vocab_size, strict)
        raise


def _check_arrays(one: Trajectory, where: str) -> None:
    for name, dtype in DTYPES.items():
        array = getattr(one, name)
        if array is None and name in OPTIONAL:
            continue
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != dtype:
            raise _make_bad_group(
                f"{where}: {name} must be a one-dimensional array of {np.dtype(dtype).name}"
            )
        if len(array) != len(one.ids):
            raise _make_bad_group(
                f"{where}: {name} has {len(array)} entries, but needs {len(one.ids)}, as ids"
            )
    if not len(one.ids):
        raise _make_bad_group(f"{where} is empty: its ids have no token")
    if not all(isinstance(name, str) and isinstance(value, NUMBER) for name, value in one.stats.items()):
        raise _make_bad_group(f"{where}: stats must map names to numbers")


def _check_values(rows: Sequence[Trajectory], where: str, vocab_size: int, strict: bool) -> None:
    """Raise Rejection unless the arrays of rows, at least one token together, have allowed values."""
    if not rows:
        return
    arrays = {name: [array for row in rows if (array := getattr(row, name)) is not None] for name in DTYPES}
    joined = {name: np.concatenate(parts) for name, parts in arrays.items() if parts}
    for name in filter(FLOATS.__contains__, joined):
        if not (np.abs(joined[name]) <= LARGEST_NUMBER).all():
            limits = f"-{LARGEST_NUMBER:g} to {LARGEST_NUMBER:g}"
            raise _make_bad_group(f"{where}: {name} must be finite numbers from {limits}")
    mask = joined["loss_mask"]
    if (joined["steps"][mask] < 0).any() or (joined["lineages"][mask] < 0).any():
        raise _make_bad_group(
            f"{where}: steps and lineages (the weights version of a token) must be at least 0 where "
            "loss_mask is true"
        )
    if problem := find_bad_token(joined["ids"], vocab_size):
        raise _make_bad_group(f"{where} has {problem}: does the workflow use the model's tokenizer?")
    if strict and (joined["logprobs"][mask] > 0).any():
        raise _make_bad_group(f"{where}: logprobs must be at most 0 where loss_mask is true")


def _make_bad_group(message: str) -> Rejection:
    return Rejection(RejectReason.BAD_GROUP, message)


def trajectory(
    turns: Sequence[tuple[Sequence[int], Turn]],
    reward: float,
    turn_rewards: Sequence[float] | None = None,
) -> Trajectory:
    """Return one token-level record from pairs of (added context, the model's turn), in order.

    `turn_rewards` are the parts of the reward that each turn got: then credit begins at the last token of the
    turn, not of the trajectory. Raises ValueError if their sum is not the reward.

    Its stats are the parts of the reward, if any, and `tokens_regenerated`, if a server was lost. For a
    single turn pass `[(input_ids, turn)]`. Versions come from the turns' spans, not from a clock.
    """
    num_tokens = sum(len(context) + len(turn.output_ids) for context, turn in turns)
    result = Trajectory(
        ids=np.empty(num_tokens, np.int32),
        loss_mask=np.zeros(num_tokens, bool),
        logprobs=np.zeros(num_tokens, np.float32),
        lineages=np.full(num_tokens, -1, np.int32),
        steps=np.full(num_tokens, -1, np.int32),
        reward=float(reward),
        finish_reason=turns[-1][1].finish_reason,
        stats={f"reward/{name}": value for name, value in get_parts(reward).items()},
    )
    if regenerated := sum(turn.num_regenerated for _, turn in turns):
        result.stats[REGENERATED] = regenerated
    if turn_rewards is not None:
        _add_turn_rewards(result, turns, turn_rewards)
    at = 0
    for context, turn in turns:
        start, end = at + len(context), at + len(context) + len(turn.output_ids)
        result.ids[at:start] = context
        result.ids[start:end] = turn.output_ids
        result.loss_mask[start:end] = True
        result.logprobs[start:end] = turn.output_logprobs
        for label, first, last in turn.versions:
            version = WeightVersion.parse(label)
            result.lineages[start + first : start + last] = version.lineage
            result.steps[start + first : start + last] = version.step
        at = end
    return result


def _add_turn_rewards(
    result: Trajectory, turns: Sequence[tuple[Sequence[int], Turn]], turn_rewards: Sequence[float]
) -> None:
    if len(turn_rewards) != len(turns) or not math.isclose(
        sum(turn_rewards), result.reward, rel_tol=1e-6, abs_tol=1e-6
    ):
        raise ValueError(
            f"turn_rewards {list(turn_rewards)} must be a number for each of {len(turns)} turns, with the "
            f"reward, {result.reward:g}, as their sum"
        )
    result.turn_rewards = np.zeros(len(result.ids), np.float32)
    ends = np.cumsum([len(context) + len(turn.output_ids) for context, turn in turns])
    for end, value in zip(ends, turn_rewards, strict=True):
        result.turn_rewards[end - 1] += value
