"""Where a submission came from: version, commit, command line, host, hashes."""

from __future__ import annotations

import hashlib
import platform
import socket
import subprocess
from pathlib import Path
from typing import Any

import hpc_rl
from hpc_rl.trial import account

GIT_TIMEOUT_S = 2.0


def sha256(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def collect(command: list[str], workdir: Path, hashes: dict[str, str]) -> dict[str, Any]:
    """What provenance.json says, apart from the time, which the job's record has."""
    return {
        "version": hpc_rl.__version__,
        "git": git_state(Path(hpc_rl.__file__).parent.parent),
        "command": command,
        "workdir": str(workdir),
        "user": account(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "sha256": hashes,
    }


def git_state(checkout: Path) -> dict[str, Any] | None:
    """Commit of the checkout that this code runs from, and whether it has changes; None where it is no checkout."""
    if not (checkout / ".git").exists():
        return None
    commit = _git(checkout, "rev-parse", "--verify", "--quiet", "HEAD")
    changes = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit.strip() if commit else None,
        "dirty": bool(changes.strip()) if changes is not None else None,
    }


def _git(checkout: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(checkout), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
