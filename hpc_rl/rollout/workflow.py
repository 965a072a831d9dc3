"""Workflow: from one prompt to a group of scored trajectories: `single_turn`, or the user's by import path.

A workflow is `async run(prompt, generate) -> TrajectoryGroup | None`: an object with that method, a class
that makes one without arguments, or such a function. `prompt` is the row as a dict, plus `input_ids`. None
rejects the prompt.
"""

import asyncio
import uuid
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from hpc_rl.config.sections.inference import GenerationHyperparameters
from hpc_rl.datasets.order import sample_seed
from hpc_rl.datasets.tokenizer import Tokenizer
from hpc_rl.errors import InputRefused
from hpc_rl.rollout.batch_log.ledger import RejectReason
from hpc_rl.rollout.pipes import RunPrompt
from hpc_rl.rollout.rewards import Rejection, Reward
from hpc_rl.servers.client import GenerateRequest
from hpc_rl.types import Trajectory, TrajectoryGroup, Turn, WeightVersion, decode, encode

Workflow = Callable[[dict[str, Any], "Sampler"], Awaitable[TrajectoryGroup | None]]


T = TypeVar("T")
Generate = Callable[[list[GenerateRequest]], Awaitable[list[Turn]]]


class Sampler:
    """What a workflow generates and scores with: it knows its prompt's index, seeds and sampling settings.

    `context` are the tokens that the servers take for input and output, None where that is not known; `note`
    keeps what `once` makes.
    """

    def __init__(
        self,
        prompt: RunPrompt,
        seed: int,
        gconfig: GenerationHyperparameters,
        tokenizer: Tokenizer,
        generate: Generate,
        reward: Reward,
        context: int | None,
        note: Callable[[str, bytes], None] = lambda key, value: None,
    ) -> None:
        self.index = prompt["index"]
        self.n_samples = 1 if prompt["evaluate"] else gconfig.n_samples
        self.tokenizer = tokenizer
        self._gconfig, self._generate, self._reward = gconfig, generate, reward
        self._min_version = prompt["version"]
        # with the sample's number these make the sample's seed
        self._identity = (seed, "evaluation" if prompt["evaluate"] else prompt["epoch"], prompt["row"])
        self._sampling = sampling(gconfig, tokenizer.eos_token_ids)
        self._turns: Counter[int] = Counter()
        self._note = note
        self._made = dict(prompt["notes"])  # by `once`, encoded
        self._making: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._limit, self._limited_by = gconfig.max_tokens, f"gconfig.max_tokens is {gconfig.max_tokens}"
        if context is not None and context < self._limit:
            self._limit, self._limited_by = context, f"the model's context is {context}"

    async def __call__(self, input_ids: Sequence[int], sample: int = 0) -> Turn:
        """Return one generation.

        `sample` is the trajectory that it is for: each has its own seed, and each turn of it.
        """
        return (await self._generate([self._request(list(input_ids), sample)]))[0]

    async def samples(self, input_ids: Sequence[int]) -> list[Turn]:
        """Return n_samples generations of one input."""
        ids = list(input_ids)
        requests = [self._request(ids, sample) for sample in range(self.n_samples)]
        return await self._generate(requests)

    async def once(self, key: str, make: Callable[[], Awaitable[T]]) -> T:
        """Return what `make()` returns, and the same when the prompt runs again, after a kill or an error.

        It is kept on disk until the prompt has its group: use it for what does not depend on the weights that
        are trained. It is made of what `hpc_rl.types.encode` takes. In an evaluation it is not kept.
        """
        async with self._making[key]:
            if key not in self._made:
                self._made[key] = encode(await make())
                self._note(key, self._made[key])
            return decode(self._made[key])

    async def reward(self, prompt: dict[str, Any], completion: str) -> float:
        """Return what the configured reward function returns. Raises Rejection."""
        columns = {name: value for name, value in prompt.items() if name not in ("prompt", "input_ids")}
        question = prompt.get("prompt", prompt.get("messages"))
        return await self._reward(question, completion, columns)

    def _request(self, input_ids: list[int], sample: int) -> GenerateRequest:
        if not input_ids:
            raise InputRefused("it has no token")
        gconfig = self._gconfig
        room = min(self._limit - len(input_ids), gconfig.max_new_tokens)
        if room <= 0:
            raise Rejection(RejectReason.TOO_LONG, f"{len(input_ids)} tokens, {self._limited_by}")
        turn = self._turns[sample]
        self._turns[sample] += 1
        own = {
            "max_new_tokens": room,
            "min_new_tokens": min(gconfig.min_new_tokens, room),
            "sampling_seed": sample_seed(*self._identity, sample if turn == 0 else f"{sample}.{turn}"),
        }
        return GenerateRequest(input_ids, {**self._sampling, **own}, uuid.uuid4().hex, self._min_version)


def sampling(gconfig: GenerationHyperparameters, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """What is the same in each request's sampling parameters, under SGLang's names."""
    made = {
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": -1 if gconfig.top_k >= 100_000_000 else gconfig.top_k,
        "stop_token_ids": list(dict.fromkeys([*gconfig.stop_token_ids, *eos_token_ids])),
    }
    unusual: dict[str, tuple[Any, Any]] = {
        "stop": (gconfig.stop or None, None),
        "frequency_penalty": (gconfig.frequency_penalty, 0.0),
        "min_p": (gconfig.min_p, 0.0),
        "repetition_penalty": (gconfig.repetition_penalty, 1.0),
    }
    return made | {name: value for name, (value, neutral) in unusual.items() if value != neutral}


DTYPES = {
    "ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "lineages": np.int32,
    "steps": np.int32,
}


NUMBER = Real | np.bool_


def check_group(group: Any, index: int, num_trajectories: int | None = None, strict: bool = False) -> None:
    """Raise Rejection unless the result for prompt `index` can be trained on.

    `num_trajectories` is the size that it must have, None for any; `strict` checks what
    `rollout.check_trajectory_format` asks for as well.
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
        if strict and not one.loss_mask.any():
            raise _bad_group(f"{where}: loss_mask marks no token, so there is nothing to learn from")
        if strict and (one.logprobs[one.loss_mask] > 0).any():
            raise _bad_group(f"{where}: logprobs must be at most 0 where loss_mask is true")


def _check_arrays(one: Trajectory, where: str) -> None:
    for name, dtype in DTYPES.items():
        array = getattr(one, name)
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != dtype:
            raise _bad_group(f"{where}: {name} must be a one-dimensional array of {np.dtype(dtype).name}")
        if len(array) != len(one.ids):
            raise _bad_group(f"{where}: {name} has {len(array)} entries, ids has {len(one.ids)}")
    if not len(one.ids):
        raise _bad_group(f"{where} has no token")
    if not np.isfinite(one.logprobs).all():
        raise _bad_group(f"{where}: logprobs must be finite")
    if not all(isinstance(name, str) and isinstance(value, NUMBER) for name, value in one.stats.items()):
        raise _bad_group(f"{where}: stats must have a number for each name")
    if (one.steps[one.loss_mask] < 0).any() or (one.lineages[one.loss_mask] < 0).any():
        raise _bad_group(f"{where}: steps and lineages must name a weight version where loss_mask is true")


def _bad_group(message: str) -> Rejection:
    return Rejection(RejectReason.BAD_GROUP, message)


def trajectory(turns: Sequence[tuple[Sequence[int], Turn]], reward: float) -> Trajectory:
    """One token-level record of (context that was added, what the model made of it), turn after turn.

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
