"""Data exchanged between processes: turns, replies, trajectories and batches, as NumPy arrays.

The wire format is msgpack with arrays as `{"__nd__": dtype, "s": shape, "d": bytes}`: decoding never executes
code. The trajectories of a group share one array for each field. Shapes: L = tokens of one trajectory (prompt
and completion).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `submit` reads none of these arrays, and imports this module
    import numpy as np

REGENERATED = "tokens_regenerated"  # among the stats of trajectories, and in the metrics of a step
# stats of the workflow `agent`, which are metrics of a step: completions and sequences of an episode, further
# starts, lost episodes of the group, and chats whose earlier replies were not continued token by token
AGENT_STATS = ("calls", "sequences", "retries", "lost_episodes", "rewritten_chats")


@dataclass(frozen=True, slots=True, order=True)
class WeightVersion:
    """A published set of weights, ordered by lineage, then step.

    Its text form `<lineage>.<step>` is the label everywhere: directory, server, token record.
    """

    lineage: int
    step: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.step}"

    @classmethod
    def parse(cls, label: str) -> WeightVersion:
        lineage, _, step = label.partition(".")
        if not (lineage.isdecimal() and step.isdecimal()):
            raise ValueError(f"a weights version has the form START.STEP, such as 0.12, got {label!r}")
        return cls(int(lineage), int(step))


ONLY_VERSION = WeightVersion(0, 0)  # of the policy in a trial without a trainer


@dataclass(slots=True)
class Turn:
    """One generation of a server for one input.

    `output_ids`, `output_logprobs` have the same length. `versions` are half-open spans over the output
    tokens: `(label, start, end)`. `finish_reason` is stop | length | abort. `num_regenerated` estimates the
    tokens that lost servers had made for it, and another one made again.
    """

    output_ids: list[int]
    output_logprobs: list[float]
    versions: list[tuple[str, int, int]]
    finish_reason: str
    num_regenerated: int = 0


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities of given tokens at temperature 1, and at each the likely tokens, best first.

    Without a request for likely tokens, their lists are empty.
    """

    logprobs: list[float]
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)


@dataclass(slots=True)
class Reply:
    """An answer to a chat as text only: its tokens belong to another model."""

    text: str
    num_tokens: int
    finish_reason: str  # stop | length


@dataclass(slots=True)
class Trajectory:
    """A finished token-level record.

    ids: int32 [L], prompt and completion. loss_mask: bool [L], true where the model made the token.
    logprobs: float32 [L], behaviour log-probabilities, 0 where loss_mask is false (position t holds log
        p(ids[t] | ids[:t])). lineages, steps: int32 [L], the weight version that made each token, -1 where
        loss_mask is false.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    lineages: np.ndarray
    steps: np.ndarray
    reward: float
    finish_reason: str  # stop | length
    stats: dict[str, float] = field(default_factory=dict)
    # optional, from environments and workflows
    has_logprobs: bool = True  # false: the trainer computes the behaviour log-probabilities
    advantages: np.ndarray | None = None  # float32 [L]: replace the trainer's
    turn_rewards: np.ndarray | None = None  # float32 [L]: `reward`, divided among the last tokens of turns
    ref_logprobs: np.ndarray | None = None  # float32 [L]: replace the reference model's
    zero_advantage: bool = False  # counts in its group, but is not trained on
    temperatures: np.ndarray | None = None  # float32 [L], of sampling; None: the trial's
    # float32 [L]: of the teacher of a distillation, at temperature 1, 0 where loss_mask is false
    teacher_logprobs: np.ndarray | None = None
    # the teacher's K likely tokens at each position: int32 and float32 [L, K], log-probability -inf for none
    teacher_top_ids: np.ndarray | None = None
    teacher_top_logprobs: np.ndarray | None = None
    share: float = 1.0  # of its episode: the weight of its reward in means; an episode's sum to 1
    output: str = ""  # text that its agent wrote, shortened; only of kept samples

    def oldest_step(self) -> int:
        """Return the smallest step among the model's tokens, 0 without any."""
        made = self.steps[self.loss_mask]
        return int(made.min()) if made.size else 0


@dataclass(slots=True)
class TrajectoryGroup:
    """The trajectories sampled from one prompt."""

    index: int  # prompt index: counts issued prompts over all epochs, from 0
    trajectories: list[Trajectory]
    # the row of the prompt, shortened by `stats.kept_samples.shorten_columns`
    columns: dict[str, Any] = field(default_factory=dict)
    shortened: list[str] = field(default_factory=list)  # names of shortened columns

    def oldest_step(self) -> int:
        """Return the smallest step among the model's tokens of all trajectories, 0 without any."""
        return min((t.oldest_step() for t in self.trajectories), default=0)

    def lineages(self) -> set[int]:
        """Return the lineages of the weights that sampled its tokens."""
        import numpy as np

        made = np.concatenate([t.lineages[t.loss_mask] for t in self.trajectories] or [np.zeros(0, int)])
        if not made.size or made.min() == made.max():  # as usual
            return {*made[:1].tolist()}
        return {*np.unique(made).tolist()}


@dataclass(slots=True)
class Batch:
    """Training batch `step`: whole groups in their sealed order."""

    step: int
    groups: list[TrajectoryGroup]


@dataclass(slots=True)
class EvalResult:
    """Answer of `POST /evaluate`: mean reward over the held-out prompts with the weights of `version`.

    `stats` are the means of the trajectories' stats, and counts: num_tokens, left_out, asked_again.
    """

    version: str
    num_prompts: int
    reward: float
    stats: dict[str, float] = field(default_factory=dict)
    # of the first prompts, as many as `evaluator.keep_samples`
    groups: list[TrajectoryGroup] = field(default_factory=list)


_DEFAULTS: dict[str, Any] = {
    "stats": {},
    "has_logprobs": True,
    "zero_advantage": False,
    "share": 1.0,
    "output": "",
}
_PLAIN = ("reward", "finish_reason", *_DEFAULTS)  # fields of a trajectory that are not arrays
_ARRAYS = tuple(name for name in Trajectory.__slots__ if name not in _PLAIN)
_WIRE = {cls.__name__: cls for cls in (Turn, Reply, Trajectory, TrajectoryGroup, Batch, EvalResult)}


def _encode_value(value: Any) -> Any:
    import numpy as np

    if isinstance(value, np.ndarray):
        return {"__nd__": value.dtype.str, "s": list(value.shape), "d": np.ascontiguousarray(value).tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    if type(value).__name__ in _WIRE:
        fields = {name: getattr(value, name) for name in value.__slots__}
        if isinstance(value, TrajectoryGroup) and (joined := _join_trajectories(value.trajectories)):
            fields["trajectories"] = joined
        return {"__t__": type(value).__name__, "v": fields}
    raise TypeError(f"{type(value).__name__} objects can't be sent to other processes of the trial")


def _decode_value(value: dict[str, Any]) -> Any:
    if "__nd__" in value:
        import numpy as np

        dtype = np.dtype(value["__nd__"])
        if dtype.hasobject:
            raise ValueError("arrays of Python objects are not accepted: only arrays of numbers")
        return np.frombuffer(value["d"], dtype).reshape(value["s"]).copy()
    if "__t__" in value:
        fields = value["v"]
        if value["__t__"] == "TrajectoryGroup" and isinstance(fields["trajectories"], dict):
            fields["trajectories"] = _split_trajectories(fields["trajectories"])
        return _WIRE[value["__t__"]](**fields)
    return value


def _join_trajectories(rows: list[Trajectory]) -> dict[str, Any] | None:
    """Return the trajectories of a group with one array for each field; None if they do not fit together.

    A field that only some trajectories have comes with their numbers.
    """
    import numpy as np

    if not rows or not all(type(one) is Trajectory for one in rows):
        return None
    lengths = [len(one.ids) for one in rows]
    arrays: dict[str, Any] = {}
    for name in _ARRAYS:
        parts: list[Any] = [getattr(one, name) for one in rows]
        having = [number for number, part in enumerate(parts) if part is not None]
        if not having:
            continue
        own, numbers = lengths, None
        if len(having) < len(rows):
            parts, own, numbers = [parts[at] for at in having], [lengths[at] for at in having], having
        first = parts[0]
        for part, length in zip(parts, own, strict=True):
            if type(part) is not np.ndarray or part.dtype != first.dtype or len(part) != length:
                return None
            if part.ndim != first.ndim or (part.ndim > 1 and part.shape[1:] != first.shape[1:]):
                return None
        arrays[name] = [np.concatenate(parts), numbers]
    plain = {name: [getattr(one, name) for one in rows] for name in _PLAIN}
    for name, default in _DEFAULTS.items():
        if all(one == default for one in plain[name]):
            del plain[name]
    return {"lengths": lengths, "arrays": arrays, "plain": plain}


def _split_trajectories(joined: dict[str, Any]) -> list[Trajectory]:
    """Return the trajectories that `_join_trajectories` has joined. Their arrays are views."""
    lengths, plain = joined["lengths"], joined["plain"]
    rows: list[dict[str, Any]] = [{} for _ in lengths]
    for name, (array, numbers) in joined["arrays"].items():
        at = 0
        for number in range(len(rows)) if numbers is None else numbers:
            end = at + lengths[number]
            rows[number][name] = array[at:end]
            at = end
    for name, values in plain.items():
        for row, one in zip(rows, values, strict=True):
            row[name] = one
    return [Trajectory(**row) for row in rows]


def encode(value: Any) -> bytes:
    """Encode plain data, arrays and the dataclasses above as msgpack. Raises TypeError for anything else."""
    import msgpack  # not at the top: a server role starts in an image of SGLang, which lacks msgpack

    return msgpack.packb(value, default=_encode_value, use_bin_type=True)


def decode(data: bytes) -> Any:
    """Decode bytes of `encode`. Raises ValueError or KeyError for other bytes."""
    import msgpack

    return msgpack.unpackb(data, object_hook=_decode_value, raw=False, strict_map_key=False)
