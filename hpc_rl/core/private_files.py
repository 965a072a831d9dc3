"""Find files that other accounts could read or replace."""

import contextlib
import grp
import os
import pwd
import shlex
import stat
from pathlib import Path
from typing import NamedTuple

from hpc_rl.core.errors import NotPrivate


class Exposure(NamedTuple):
    """A way for other accounts to rename or replace files of a directory, and its remedy."""

    problem: str
    remedy: str


def find_exposure(path: Path, only_by_all: bool = False) -> Exposure | None:
    """Return how a directory is exposed to other accounts, or None.

    Root is trusted, and so is the group with the name of this account.
    """
    if not path.exists():
        return None
    found = path.stat()
    strangers = {found.st_uid, path.lstat().st_uid} - {0, os.geteuid()}
    if strangers and not only_by_all:
        return Exposure(
            f"belongs to account {describe_account(min(strangers))}", "choose a directory that you own"
        )
    writers = stat.S_IWOTH if only_by_all or _is_own_group(found.st_gid) else stat.S_IWOTH | stat.S_IWGRP
    if found.st_mode & writers and not found.st_mode & stat.S_ISVTX:
        command = f"chmod go-w {shlex.quote(str(path))}"
        remedy = f"run {command}, or choose a directory that you own"
        if os.geteuid() not in (0, found.st_uid):  # only these can change the mode
            owner = (
                "your administrators" if found.st_uid == 0 else f"account {describe_account(found.st_uid)}"
            )
            remedy = f"ask {owner} to run {command}, or choose a directory that you own"
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        return Exposure(f"can be written by other accounts (mode {mode})", remedy)
    return None


def describe_account(uid: int) -> str:
    """Return the number of an account, with its name if it has one."""
    with contextlib.suppress(KeyError):
        return f"{uid} ({pwd.getpwuid(uid).pw_name})"
    return f"{uid}"


def _is_own_group(number: int) -> bool:
    with contextlib.suppress(KeyError):
        group = grp.getgrgid(number)
        name = pwd.getpwuid(os.geteuid()).pw_name
        return group.gr_name == name and not {*group.gr_mem} - {name}
    return False


def load_secret(path: Path) -> str:
    """Return the text of a file that only this account can read.

    Raises NotPrivate if others can read it, OSError.
    """
    with open(path, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            whose = f"account {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):03o}"
            raise NotPrivate(
                f"{path} belongs to {whose}: others may know its content, so it is not used. "
                "Remove the file and submit the trial again."
            )
        return file.read()
