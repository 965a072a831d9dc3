"""Completions that a trial keeps readable: some groups of each step, some prompts of each evaluation.

Each trainer incarnation writes `samples.<incarnation>.jsonl` beside its metrics: one line per step or
evaluation, with `samples`, a list of the fields of Sample. They are merged as metrics are. No torch here.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hpc_rl.core.records import JsonRecord
from hpc_rl.core.trial import Trial
from hpc_rl.core.types import Trajectory, TrajectoryGroup, WeightVersion
from hpc_rl.stats.read import MetricsReader
from hpc_rl.stats.sinks import JsonlSink

MAX_COLUMN_CHARS = 1000  # of one column of a row; the rest is not kept
MAX_ROW_CHARS = 4000  # of all columns of a row
NOT_KEPT = ("prompt", "messages", "input_ids")  # columns that the text of the prompt shows


def short_columns(row: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the columns of a row as JSON has them, and the names of those that were shortened.

    A long text is cut. A long list or object becomes the beginning of its JSON.
    """
    kept: dict[str, Any] = {}
    shortened, left = [], MAX_ROW_CHARS
    for name, value in row.items():
        if name in NOT_KEPT:
            continue
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        room = min(MAX_COLUMN_CHARS, left)
        if len(text) > room:
            shortened.append(name)
            kept[name] = text[:room]
        else:
            kept[name] = value if isinstance(value, str) else json.loads(text)
        left -= min(len(text), room)
    return kept, shortened


@dataclass(frozen=True, kw_only=True)
class Sample(JsonRecord):
    """One completion. The text has special tokens; that of several turns has what came between them, too."""

    step: int
    evaluation: bool
    prompt_index: int  # counts the prompts that were issued; of an evaluation the row of the file, from 0
    sample: int  # number in its group
    prompt: str
    completion: str
    reward: float
    stats: dict[str, float]  # what the workflow or the reward measured
    advantage: float | None  # mean over its tokens; None if it was not trained on
    finish_reason: str
    versions: tuple[str, ...]  # of the weights that made its tokens, oldest first
    num_tokens: int  # that the model made
    given: tuple[
        tuple[int, int], ...
    ] = ()  # from and to which character of `completion` the model wrote nothing
    columns: dict[str, Any] = field(default_factory=dict)  # of the row, without the prompt
    shortened: tuple[str, ...] = ()  # columns that are not whole

    def texts(self) -> Iterator[tuple[bool, str]]:
        """Yield the completion in pieces, each with whether the model wrote it."""
        at = 0
        for start, end in self.given:
            yield True, self.completion[at:start]
            yield False, self.completion[start:end]
            at = end
        if at < len(self.completion) or not at:
            yield True, self.completion[at:]


class SampleWriter:
    """Writes samples of a trainer incarnation to a sink; `decode` makes text of token ids."""

    def __init__(self, sink: JsonlSink, decode: Callable[[list[int]], str], num_groups: int) -> None:
        self._sink, self._decode, self._num_groups = sink, decode, num_groups

    def write_step(
        self,
        step: int,
        groups: Sequence[TrajectoryGroup],
        rows: Sequence[Trajectory],
        advantages: Sequence[np.ndarray],
    ) -> None:
        """Write the first groups of a batch; `advantages` are those of `rows`, float32 [L]."""
        kept = groups[: self._num_groups]
        by_row = {id(row): one for row, one in zip(rows, advantages, strict=True)}
        if kept:
            self._sink.log(step, {"samples": self._rows(step, kept, by_row, evaluation=False)})

    def write_evaluation(self, step: int, reward: float, groups: Sequence[TrajectoryGroup]) -> None:
        """Write the groups of an evaluation, whose mean reward tells it from a step."""
        if groups:
            rows = self._rows(step, groups, {}, evaluation=True)
            self._sink.log(step, {"eval_reward": reward, "samples": rows})

    def _rows(
        self,
        step: int,
        groups: Iterable[TrajectoryGroup],
        advantages: Mapping[int, np.ndarray],
        evaluation: bool,
    ) -> list[dict[str, Any]]:
        return [
            asdict(self._sample(one, advantages.get(id(one)), step, evaluation, group, number))
            for group in groups
            for number, one in enumerate(group.trajectories)
        ]

    def _sample(
        self,
        one: Trajectory,
        advantages: np.ndarray | None,
        step: int,
        evaluation: bool,
        group: TrajectoryGroup,
        number: int,
    ) -> Sample:
        made = one.loss_mask
        first = int(made.argmax()) if made.any() else len(one.ids)
        pairs = {(int(a), int(b)) for a, b in zip(one.lineages[made], one.steps[made], strict=True)}
        mean = None if advantages is None or not made.any() else float(advantages[made].mean())
        return Sample(
            step=step,
            evaluation=evaluation,
            prompt_index=group.index,
            sample=number,
            prompt=self._decode(one.ids[:first].tolist()),
            completion=self._decode(one.ids[first:].tolist()),
            reward=float(one.reward),
            stats={name: float(value) for name, value in one.stats.items() if math.isfinite(value)},
            advantage=mean,
            finish_reason=one.finish_reason,
            versions=tuple(str(WeightVersion(*pair)) for pair in sorted(pairs)),
            num_tokens=int(made.sum()),
            given=self._given(one.ids[first:], made[first:]),
            columns=group.columns,
            shortened=tuple(group.shortened),
        )

    def _given(self, ids: np.ndarray, made: np.ndarray) -> tuple[tuple[int, int], ...]:
        """Return the stretches of the text of these tokens of which the model made none."""
        changes = (np.flatnonzero(np.diff(made)) + 1).tolist()  # the first token is the model's
        chars = [len(self._decode(ids[:at].tolist())) for at in [*changes, len(ids)]]
        return tuple(zip(chars[::2], chars[1::2], strict=False))


def read_samples(trial: Trial) -> Iterator[Sample]:
    """Yield the samples of the steps and evaluations that entered the final weights, by step."""
    history = MetricsReader(trial, "samples").poll()
    rows = [*history.steps, *history.evaluations]
    for row in sorted(rows, key=lambda row: int(row["step"])):
        found = row.get("samples")
        yield from filter(None, map(Sample.parse, found if isinstance(found, list) else []))
