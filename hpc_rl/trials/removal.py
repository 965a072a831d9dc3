"""Removal of a trial: the contents of its directory, and its deletion once no job lives."""

import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.core.errors import CannotWrite
from hpc_rl.core.trial import Trial
from hpc_rl.trials import trial_index
from hpc_rl.trials.lock import TrialLock
from hpc_rl.trials.submission import check_idle

# directory of the trial -> kind of content; the rest is records and scripts
HOLDS = {
    "recover": "checkpoints",
    "weights": "published weights",
    "rollout": "batch log",
    "exports": "exports",
    "attempts": "logs and metrics",
    "tensorboard": "logs and metrics",
    "mlflow": "logs and metrics",
    "trackio": "logs and metrics",
}
REST = "records and scripts"


@dataclass(frozen=True)
class Content:
    """What a trial holds of one kind."""

    name: str
    num_files: int
    size_bytes: int


def measure_contents(trial: Trial) -> list[Content]:
    """Return the disk use of a trial by kind; a file with several names counts once."""
    found = {name: [0, 0] for name in (*HOLDS.values(), REST)}
    seen: set[tuple[int, int]] = set()
    for folder, _, files in os.walk(trial.dir):
        first = Path(folder).relative_to(trial.dir).parts[:1]
        total = found[HOLDS.get(first[0], REST) if first else REST]
        for file in files:
            try:
                status = os.lstat(os.path.join(folder, file))
            except FileNotFoundError:
                continue
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                total[0] += 1
                total[1] += status.st_size
    return [Content(name, *total) for name, total in found.items()]


def remove_trial(trial: Trial, keep_exports: bool) -> None:
    """Remove the directory of a trial and its entry in the index; with `keep_exports` all but `exports/`.

    What is removed is renamed first, and exports that are kept never move. A removal that was killed is
    finished by the next. Raises TrialBusy while a job of the trial lives or another command prepares one,
    SchedulerError if that can't be asked, CannotWrite.
    """
    directory = Path(os.path.realpath(trial.dir))
    moved = directory.with_name(f".{directory.name}.{uuid.uuid4().hex[:12]}.removed")
    with TrialLock(trial, "removed"):
        check_idle(trial)
        try:
            if keep_exports and any((directory / "exports").iterdir()):
                moved.mkdir(mode=0o700)
                for name in set(os.listdir(directory)) - {"exports"}:
                    os.rename(directory / name, moved / name)
            else:
                os.rename(directory, moved)
        except OSError as error:
            raise CannotWrite(f"{directory} can't be removed: {error.strerror or error}") from error
    ours = re.compile(rf"\.{re.escape(directory.name)}\.[0-9a-f]{{12}}\.removed")
    for left in (one for one in directory.parent.iterdir() if ours.fullmatch(one.name)):
        shutil.rmtree(left, ignore_errors=True)
        if left.exists():
            raise CannotWrite(f"a part of {left} can't be removed; remove it by hand")
    for entry in trial_index.list_entries():
        if os.path.realpath(entry.dir) == str(directory):
            entry.file.unlink(missing_ok=True)
