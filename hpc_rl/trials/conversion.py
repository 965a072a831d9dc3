"""Conversion of checkpoints from and to Hugging Face, by a process with torch; exports of weights."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from hpc_rl.checkpoint.generation import Found
from hpc_rl.core.errors import CannotWrite, ConfigError, ExitCode
from hpc_rl.core.trial import Trial, fsync_dir
from hpc_rl.trials import published_weights
from hpc_rl.trials.checkpoints import Weights, hold_export

RENEW_EVERY_S = 60.0  # of the lock, while the process with torch works


def require_torch(why: str) -> None:
    """Raise ConfigError if torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(f"{why}, and torch is not installed: pip install 'hpc-rl[train]'")


def write_export(
    trial: Trial,
    chosen: Weights,
    there: Path,
    merge: bool = False,
    add_files: Callable[[Path], object] = lambda _folder: None,
) -> int:
    """Write the weights of a checkpoint or a published version to a new folder; return the exit code.

    `add_files` writes more into the folder before it gets its name.

    Raises CannotWrite, Damaged, NothingToResume.
    """

    def write(folder: Path) -> int:
        if isinstance(chosen, Found):
            merged = ["--merge"] if merge else []
            code = convert("export", trial, chosen.step, "--to", str(folder), *merged)
            if code != 0:
                return code
        else:
            published_weights.write_export(trial, chosen, folder)
        add_files(folder)
        return ExitCode.DONE

    # Held from now on: while torch is imported, a fast trial makes and removes many checkpoints.
    with hold_export(trial, chosen, f"export to {there}"):
        return _export_to(there, write)


def _export_to(there: Path, write: Callable[[Path], int]) -> int:
    """Write an export under a temporary name, then rename it to a new one. Raises CannotWrite."""
    temporary = there.parent / f".{there.name}.{uuid.uuid4().hex[:12]}.tmp"  # `/` has no name
    try:
        if os.path.lexists(there):
            raise FileExistsError
        temporary.mkdir(parents=True)
        code = write(temporary)
        if code == 0:
            os.rename(temporary, there)
            fsync_dir(there.parent)
        return code
    except OSError as error:
        if os.path.lexists(there):
            problem = "exists and is not overwritten: give another folder by --to, or remove it"
        else:
            problem = f"can't be written: {error.strerror or error}; give another folder by --to"
        raise CannotWrite(f"{there} {problem}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def convert(
    action: str, trial: Trial, step: int, *rest: str, meanwhile: Callable[[], object] = lambda: None
) -> int:
    """Run the process with torch and return its exit code; it is killed when this process exits."""
    require_torch(f"checkpoint {action} reads a model")
    where = ["--trial_dir", str(trial.dir), "--step", str(step)]
    command = [sys.executable, "-m", "hpc_rl.tools.convert", action, *where, *rest]
    sys.stdout.flush()
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(RENEW_EVERY_S)
                    return code if code >= 0 else ExitCode.FAILED
                meanwhile()
        finally:  # a Ctrl-C
            process.kill()
            process.wait()
