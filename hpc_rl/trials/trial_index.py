"""The trial index: one file per trial in the user's state directory, so that `<trial>` may be a mere name.

The index is a convenience: trials are found by path without it, entries of removed trials are shown as gone,
and a state directory that can't be written costs a log line, not a submission.
"""

import contextlib
import difflib
import hashlib
import logging
import os
import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from hpc_rl.core.errors import TrialNameError
from hpc_rl.core.records import JsonRecord
from hpc_rl.core.trial import Trial, find_state_home, write_json
from hpc_rl.status.formatting import find_program_name

logger = logging.getLogger(__name__)
LIST_HINT = "Run `hpc-rl list` to see your trials, or pass a trial directory."


@dataclass(frozen=True)
class IndexEntry(JsonRecord):
    """The file of one trial."""

    dir: str
    experiment: str = ""
    name: str = field(default="", metadata={"key": "trial"})
    time: float = 0.0  # when it was last submitted, Unix seconds

    @property
    def trial(self) -> Trial:
        return Trial(Path(self.dir))

    @property
    def gone(self) -> bool:
        return not os.path.isdir(self.dir)

    @property
    def file(self) -> Path:
        return find_directory() / f"{hashlib.sha256(self.dir.encode()).hexdigest()[:16]}.json"


def find_directory() -> Path:
    """Return the directory of the index: `$XDG_STATE_HOME/hpc-rl/trials`, by default below ~/.local/state."""
    return find_state_home() / "trials"


def record_trial(trial: Trial) -> bool:
    """Add or renew a trial; return False, and log a line, where the state directory can't be written."""
    entry = IndexEntry(os.path.realpath(trial.dir), trial.experiment, trial.name, time.time())
    try:
        find_directory().mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(entry.file, entry.to_json())
    except OSError as error:
        form = "the trial can't be added to the index of trials (%s): name the trial by its path in commands"
        logger.warning(form, error)
        return False
    return True


def list_entries() -> list[IndexEntry]:
    """Return all indexed trials, newest submission first. Files that are not entries are skipped."""
    read = map(IndexEntry.read, find_directory().glob("*.json"))
    found = [entry for entry in read if entry is not None and os.path.isabs(entry.dir)]
    return sorted(found, key=lambda entry: (-entry.time, entry.dir))


def prune_index() -> list[IndexEntry]:
    """Remove and return the entries of trials whose directory is gone."""
    gone = [entry for entry in list_entries() if entry.gone]
    for entry in gone:
        entry.file.unlink(missing_ok=True)
    return gone


def is_trial(path: Path) -> bool:
    """Return whether submit or render made a directory."""
    return any(os.path.isfile(path / name) for name in ("plan.json", "config.json"))


def resolve_all(names: Iterable[str]) -> list[Trial]:
    """Return the trials with the names; * and ? match. Raises TrialNameError as `resolve` does."""
    found: dict[Path, Trial] = {}
    for text in names:
        known = list_entries() if is_pattern(text) else []
        match = [one.trial for one in known if not one.gone and is_named(one.trial, text)]
        found |= {trial.dir: trial for trial in match or [resolve(text)]}
    return list(found.values())


def is_pattern(name: str) -> bool:
    """Return whether a name may match several trials."""
    return not {*name}.isdisjoint("*?")


def is_named(trial: Trial, pattern: str) -> bool:
    """Return whether a trial's name, or experiment/name, matches."""
    return any(fnmatchcase(name, pattern) for name in (trial.name, str(trial)))


def resolve(text: str) -> Trial:
    """Return the trial with a path, an `experiment/trial`, or a trial name that only one trial has.

    Raises TrialNameError that lists the candidates, or near names if there is none; also for a trial that
    this account can't read.
    """
    trial = _resolve(text)
    check_readable(trial)
    return trial


def _resolve(text: str) -> Trial:
    path = Path(os.path.expanduser(text))
    if path.is_absolute() or text.split("/")[0] in (".", "..") or text.startswith("~"):
        return _resolve_path(text, path)
    found = {os.path.realpath(path): Trial(path.absolute())} if is_trial(path) else {}
    known = list_entries()
    wanted = text.strip("/")
    for entry in known:
        if wanted in (entry.trial.name, str(entry.trial)):
            found.setdefault(os.path.realpath(entry.dir), entry.trial)
    present = [trial for trial in found.values() if os.path.isdir(trial.dir)]
    if len(present) == 1:
        return present[0]
    if present:
        present.sort(key=str)
        lines = "\n".join(f"  {trial}  {trial.dir}" for trial in present)
        raise TrialNameError(
            f"{len(present)} trials match {text!r}; use experiment/trial or a path:\n{lines}"
        )
    if found:
        gone = next(iter(found.values())).dir
        raise TrialNameError(
            f"trial {text!r} was in {gone}, and that directory is gone "
            "(`hpc-rl list --prune` removes such trials from the index)"
        )
    raise TrialNameError(f"there is no trial {text!r}. {_suggest(wanted, known)}")


def check_readable(trial: Trial) -> None:
    """Raise TrialNameError for a trial of another account, which keeps its files private."""
    folders = (trial.jobs, trial.attempts, trial.recover, trial.lineages, trial.rollout, trial.intent)
    for folder in (trial.dir, *folders):
        try:
            os.stat(folder / ".")
            os.scandir(folder).close()
        except PermissionError as error:
            raise TrialNameError(
                f"trial {trial} belongs to another account: {folder} can't be read ({error.strerror}). "
                "Run this command as its owner, or ask the owner for access."
            ) from error
        except OSError:  # missing, or not a folder: for its readers to tell
            continue


def format_name(trial: Trial) -> str:
    """Return what to type for a trial: experiment/trial if that is unique, else its quoted path."""
    with contextlib.suppress(TrialNameError):
        if os.path.realpath(_resolve(str(trial)).dir) == os.path.realpath(trial.dir):
            return str(trial)
    return shlex.quote(str(trial.dir))


def list_commands(trial: Trial, *verbs: str) -> list[str]:
    """Return what to type about a trial: for `logs --follow`, `hpc-rl logs TRIAL --follow`."""
    program, name = find_program_name(), format_name(trial)
    return [" ".join([program, *verb.split()[:1], name, *verb.split()[1:]]) for verb in verbs]


def _resolve_path(text: str, path: Path) -> Trial:
    trial = Trial(Path(os.path.normpath(path.absolute())))
    if is_trial(path):
        return trial
    check_readable(trial)
    what = "is not a trial directory (it has no plan.json)" if path.is_dir() else "does not exist"
    raise TrialNameError(f"{text} {what}. {LIST_HINT}")


def _suggest(wanted: str, known: list[IndexEntry]) -> str:
    names = {name for entry in known if not entry.gone for name in (entry.trial.name, str(entry.trial))}
    near = difflib.get_close_matches(wanted, sorted(names), n=3, cutoff=0.5)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return LIST_HINT
