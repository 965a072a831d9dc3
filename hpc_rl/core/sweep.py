"""A sweep: trials of one experiment that differ in some options. Its directory stands beside theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hpc_rl.core.records import JsonRecord
from hpc_rl.core.trial import Trial, load_object

SUFFIX = ".sweep"  # of the directory; its name is the sweep's
SEED = "seed"  # the option over which results are averaged


@dataclass(frozen=True, kw_only=True)
class SweepTrial(JsonRecord):
    """One trial of a sweep."""

    name: str  # trial_name
    options: dict[str, str] = field(default_factory=dict)  # that the sweep varies, as typed


@dataclass(frozen=True, kw_only=True)
class SweepRecord(JsonRecord):
    """The content of `sweep.json`."""

    name: str
    trials: tuple[SweepTrial, ...] = ()
    metric: str = ""  # that compares trials, as `hpc-rl plot --metric`
    stop_from: int | None = None  # the median rule stops bad trials from this step; None for never
    command: tuple[str, ...] = ()
    time: float = 0.0  # Unix seconds


@dataclass(frozen=True, kw_only=True)
class ArrayRecord(JsonRecord):
    """One job array of a sweep, recorded before its submission."""

    tag: str  # finds the job if the answer to the submission was lost
    job_name: str
    trials: tuple[str, ...] = ()  # trial_name of each task
    job_id: str = ""  # empty until the answer
    start_mode: str = ""


@dataclass(frozen=True)
class Sweep:
    """A sweep, by its directory `{fileroot}/{user}/{experiment}/{name}.sweep`."""

    dir: Path

    @property
    def name(self) -> str:
        return self.dir.name.removesuffix(SUFFIX)

    @property
    def experiment(self) -> str:
        return self.dir.parent.name

    @property
    def record_path(self) -> Path:
        return self.dir / "sweep.json"

    def __str__(self) -> str:
        return f"{self.experiment}/{self.name}"

    def load(self) -> SweepRecord | None:
        """Return the record; None if it is missing or damaged."""
        return SweepRecord.read(self.record_path)

    def trial(self, name: str) -> Trial:
        return Trial(self.dir.parent / name)

    @property
    def cancel_path(self) -> Path:
        """The request to submit no further trials; it is there from a cancel to the next command."""
        return self.dir / "cancel.json"

    def load_cancel(self) -> str:
        """Return the token of the request to submit no further trials, or ""."""
        return str(load_object(self.cancel_path).get("token") or "")

    def array_path(self, number: int) -> Path:
        return self.dir / f"array-{number}.json"

    def list_arrays(self) -> list[tuple[Path, ArrayRecord]]:
        """Return the job arrays of this sweep, oldest first, with the paths of their records."""
        paths = sorted(self.dir.glob("array-*.json"), key=lambda path: (len(path.name), path.name))
        return [(path, record) for path in paths if (record := ArrayRecord.read(path)) is not None]


def list_sweeps(experiment_dir: Path) -> Iterator[Sweep]:
    """Yield the sweeps among the trials of an experiment."""
    for path in sorted(experiment_dir.glob(f"*{SUFFIX}/sweep.json")):
        yield Sweep(path.parent)


def find_sweep_of(trial: Trial) -> tuple[Sweep, SweepRecord] | None:
    """Return the sweep that a trial belongs to."""
    for sweep in list_sweeps(trial.dir.parent):
        record = sweep.load()
        if record is not None and any(one.name == trial.name for one in record.trials):
            return sweep, record
    return None
