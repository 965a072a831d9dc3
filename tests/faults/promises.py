"""The promises of the batch log, checked on what a trial has on disk: while it runs (`look`, again and
again), and at its end.

In every order: each batch is sealed once and stays as it was, no prompt index is in two, each has one fate,
each step counts once. In order: batches are those of a run that was never killed, consecutive indexes less
the rejected ones.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from hpc_rl.core.files import JsonLines
from hpc_rl.core.trial import Trial
from hpc_rl.core.types import TrajectoryGroup, decode
from hpc_rl.rollout.batch_log.ledger import (
    GroupRecord,
    LedgerDamaged,
    RecordPlace,
    get_segment_path,
    list_segments,
    load_group,
    load_segment,
)
from hpc_rl.rollout.batch_log.replay import LogState, load_state
from hpc_rl.rollout.batch_log.seals import Seal, encode_batch, load_seals
from hpc_rl.stats import read as stats

OF_THE_BATCH = (
    "reward",
    "seq_len",
    "num_tokens",
    "truncated",
)  # numbers that depend on nothing but the batch


@dataclass
class Promises:
    """Args:
    trial: Whose.
    batch_size: Prompts per batch.
    total_steps: Of the trial.
    in_order: Whether `rollout.batch_order` is that.
    eta: `rollout.max_head_offpolicyness`.
    """

    trial: Trial
    batch_size: int
    total_steps: int
    in_order: bool
    eta: int
    _seen: dict[int, tuple[Seal, str, str]] = field(
        default_factory=dict
    )  # step -> seal, digest of its file, of its batch

    def look(self) -> None:
        """Remember the batches that are new; those seen before must be as they were."""
        for path in sorted((self.trial.rollout / "batches").glob("[0-9]*.seal")):
            try:
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                step = int(path.stem)
                if step not in self._seen:
                    seal = load_seals(self.trial.rollout)[step]
                    self._seen[step] = (seal, digest, batch_digest(self.trial.rollout, seal))
            except (FileNotFoundError, KeyError, LedgerDamaged):
                if path.exists():
                    raise
                continue  # trimmed meanwhile
            assert self._seen[step][1] == digest, f"the seal of batch {step} is another than before"

    def check(self) -> None:
        """The trial is over: all of it."""
        self.look()
        state = load_state(self.trial.rollout)
        self._batches(state)
        self._fates(state)
        self._contents(state)
        self._metrics()

    def batches(self) -> dict[int, list[int]]:
        """Prompt indexes of each batch, in their order."""
        return {step: list(seal.places) for step, (seal, _, _) in sorted(self._seen.items())}

    def _batches(self, state: LogState) -> None:
        batches = self.batches()
        missed = set(range(1, self.total_steps + 1)) - batches.keys()  # trimmed between two looks
        assert state.top == self.total_steps == max(batches) and all(
            step <= state.trimmed for step in missed
        ), f"no {missed}"
        assert {len(batch) for batch in batches.values()} == {self.batch_size}
        used = [index for batch in batches.values() for index in batch]
        twice = sorted({index for index in used if used.count(index) > 1})
        assert not twice, f"prompts {twice} are in two batches"
        assert not set(used) & state.rejected.keys(), "prompts are in a batch and rejected"
        assert all(state.rejected.values()), "a rejection without a reason"
        if self.in_order:
            assert not state.rejections, "these trials have nothing to reject"
            for step, batch in batches.items():
                assert batch == list(range((step - 1) * self.batch_size, step * self.batch_size)), (
                    f"batch {step}: {batch}"
                )

    def _fates(self, state: LogState) -> None:
        """Nothing was skipped: what was issued is in a batch, rejected, or among the few that were in the air
        at the end.
        """
        in_batches = {index for batch in self.batches().values() for index in batch}
        num_resolved = state.resolved.floor + len(state.resolved.above)
        assert state.consumed == self.total_steps * self.batch_size
        assert num_resolved == state.consumed + state.rejections.total(), "a prompt has two fates"
        assert all(index in state.resolved for index in in_batches | state.rejected.keys())
        issued = max(in_batches | state.rejected.keys() | state.ready.keys()) + 1
        at_the_end = (
            self.eta + self.total_steps + 1
        )  # the evaluation of the last version lets one more batch begin
        most = at_the_end * self.batch_size + state.rejections.total()
        assert issued <= most, f"{issued} prompts were issued, {most} may be: some were lost and replaced"
        records: dict[int, int] = {}
        for number in list_segments(self.trial.rollout):
            for _, record in load_segment(self.trial.rollout, number):
                if isinstance(record, GroupRecord):
                    records[record.index] = records.get(record.index, 0) + 1
        again = {index: count for index, count in records.items() if count > 1}
        assert not again, f"finished groups were made again: {again}"

    def _contents(self, state: LogState) -> None:
        for step, seal in state.seals.items():
            assert batch_digest(self.trial.rollout, seal) == self._seen[step][2], (
                f"batch {step} is not what it was"
            )

    def _metrics(self) -> None:
        history = stats.load_history(self.trial)
        assert [row["step"] for row in history.steps] == list(range(1, self.total_steps + 1))
        first: dict[int, dict] = {}
        for row in every_row(self.trial):
            if not stats.is_evaluation(row):
                before = first.setdefault(row["step"], row)
                differ = {
                    name: (before[name], row[name]) for name in OF_THE_BATCH if before[name] != row[name]
                }
                assert not differ, (
                    f"step {row['step']} was trained on another batch by lineage {row['lineage']}: {differ}"
                )

    def steps_repeated(self) -> int:
        """Steps that were trained more than once."""
        steps = [row["step"] for row in every_row(self.trial) if not stats.is_evaluation(row)]
        return len(steps) - len(set(steps))


def every_row(trial: Trial) -> list[stats.Row]:
    """Lines of metrics of all incarnations, those of lost steps included."""
    return [
        row for path in sorted(trial.attempts.glob("*/metrics.*.jsonl")) for row in JsonLines(path).poll()
    ]


def batch_digest(folder: Path, seal: Seal) -> str:
    """Of the bytes that the trainer gets for this seal. Raises LedgerDamaged."""
    body = encode_batch(seal.step, [_group(folder, place) for place in seal.places.values()])
    return hashlib.sha256(body).hexdigest()


def read_groups(folder: Path, seal: Seal) -> list[TrajectoryGroup]:
    """The groups of a batch, in their order. Raises LedgerDamaged."""
    return [decode(_group(folder, place)) for place in seal.places.values()]


def _group(folder: Path, place: RecordPlace) -> bytes:
    try:
        fd = os.open(get_segment_path(folder, place.segment), os.O_RDONLY)
    except OSError as error:
        raise LedgerDamaged(str(error)) from error
    try:
        return load_group(fd, place)
    finally:
        os.close(fd)


def story(trial: Trial) -> str:
    """What happened, for whoever reads a failed test."""
    lines = []
    for attempt in sorted(trial.attempts.iterdir()):
        for row in JsonLines(attempt / "events.jsonl").poll():
            lines.append(json.dumps({name: value for name, value in row.items() if name != "time"}))
    logs = sorted(trial.attempts.glob("*/logs/*.log"), key=lambda path: path.stat().st_mtime)
    tails = [
        f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])
        for path in logs[-6:]
    ]
    return "\n".join([*lines[-60:], *tails])
