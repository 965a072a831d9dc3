"""The trial index: one small file per trial in the user's state directory, so that `<trial>` may be a mere name.

The index is a convenience, never an authority: trials are found by path without it, stale entries are shown as gone,
and a state directory that can't be written costs a log line, not a submission.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from hpc_rl.errors import TrialNameError
from hpc_rl.trial import Trial, read_json, state_home, write_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexEntry:
    """One indexed trial. `time` is when it was last submitted, Unix seconds."""

    trial: Trial
    time: float
    file: Path

    @property
    def gone(self) -> bool:
        return not self.trial.dir.is_dir()


def directory() -> Path:
    """Where the index lies: `$XDG_STATE_HOME/hpc-rl/trials`, by default below ~/.local/state."""
    return state_home() / "trials"


def record(trial: Trial) -> bool:
    """Remember a trial (again). False, and a log line, where the state directory can't be written."""
    path = _real(trial.dir)
    file = directory() / f"{hashlib.sha256(path.encode()).hexdigest()[:16]}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(
            file, {"dir": path, "experiment": trial.experiment, "trial": trial.name, "time": time.time()}
        )
    except OSError as error:
        logger.warning("the trial is not in the index (%s): name it by its path", error)
        return False
    return True


def entries() -> list[IndexEntry]:
    """All indexed trials, newest submission first. Files that are no entries are passed over."""
    found = []
    for file in directory().glob("*.json"):
        data = read_json(file)
        if isinstance(data, dict) and isinstance(data.get("dir"), str) and os.path.isabs(data["dir"]):
            when = data.get("time")
            found.append(
                IndexEntry(
                    Trial(Path(data["dir"])), float(when) if isinstance(when, (int, float)) else 0.0, file
                )
            )
    return sorted(found, key=lambda entry: (-entry.time, str(entry.trial.dir)))


def prune() -> list[IndexEntry]:
    """Forget the trials whose directory is gone; returns them."""
    gone = [entry for entry in entries() if entry.gone]
    for entry in gone:
        entry.file.unlink(missing_ok=True)
    return gone


def is_trial(path: Path) -> bool:
    """Whether a directory is one that submit made."""
    return any((path / name).is_file() for name in ("plan.json", "config.json"))


def resolve(text: str) -> Trial:
    """The trial that a person means: a path, `experiment/trial`, or a trial name that only one trial has.

    Raises TrialNameError that lists the candidates, or near names where there is none.
    """
    path = Path(os.path.expanduser(text))
    spelt_as_path = path.is_absolute() or text.split("/")[0] in (".", "..", "~") or text.startswith("~")
    if spelt_as_path:
        return _by_path(text, path)
    found = {_real(path): Trial(path.absolute())} if is_trial(path) else {}
    known = entries()
    wanted = text.strip("/")
    for entry in known:
        if wanted in (entry.trial.name, str(entry.trial)):
            found.setdefault(_real(entry.trial.dir), entry.trial)
    present = [trial for trial in found.values() if trial.dir.is_dir()]
    if len(present) == 1:
        return present[0]
    if present:
        lines = "\n".join(
            f"  {trial}  {trial.dir}" for trial in sorted(present, key=lambda trial: str(trial.dir))
        )
        words = f"{text!r} is the name of {len(present)} trials; name one by experiment/trial or by its path:"
        raise TrialNameError(f"{words}\n{lines}")
    if found:
        gone = next(iter(found.values())).dir
        raise TrialNameError(
            f"trial {text!r} was at {gone}; that directory is gone (`hpc-rl list --prune` forgets such trials)"
        )
    raise TrialNameError(f"no trial is called {text!r}. {_suggestion(wanted, known)}")


def cli_name(trial: Trial) -> str:
    """What to type for this trial: experiment/trial where that means it and no other, else its path, quoted for a shell."""
    try:
        if _real(resolve(str(trial)).dir) == _real(trial.dir):
            return str(trial)
    except TrialNameError:
        pass
    return shlex.quote(str(trial.dir))


def _by_path(text: str, path: Path) -> Trial:
    if is_trial(path):
        return Trial(Path(os.path.normpath(path.absolute())))
    what = "is not a trial directory (it has no plan.json)" if path.is_dir() else "is not there"
    raise TrialNameError(f"{text} {what}. `hpc-rl list` shows the trials that this account submitted.")


def _suggestion(wanted: str, known: list[IndexEntry]) -> str:
    names = {name for entry in known if not entry.gone for name in (entry.trial.name, str(entry.trial))}
    near = difflib.get_close_matches(wanted, sorted(names), n=3, cutoff=0.5)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return "`hpc-rl list` shows the trials that this account submitted; any other is named by its path."


def _real(path: Path) -> str:
    return os.path.realpath(path)
