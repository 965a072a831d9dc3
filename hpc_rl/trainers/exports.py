"""Exports: folders of weights, each whole under its name at any instant, and what happens where the disk is full.

A folder that takes the place of another comes in by two renames: the old one out of sight, the new one in. A kill between
them is mended by the next start (`repair`).
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from hpc_rl import files
from hpc_rl.engines.base import Engine
from hpc_rl.errors import RoleFailed
from hpc_rl.trainers.ranks import Ranks
from hpc_rl.trial import fsync_dir

_LEFTOVER = re.compile(r"\.(best|final|step-\d{8,})\.(tmp|old|gone)")


def beside(folder: Path, mark: str) -> Path:
    return folder.with_name(f".{folder.name}.{mark}")


def begin(folder: Path) -> Path:
    """An empty folder that readers don't see, to write into. Raises OSError."""
    temporary = beside(folder, "tmp")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    return temporary


def put(folder: Path) -> None:
    """Give what was written into `begin`'s folder its name, durably, in place of what has it. Raises OSError."""
    temporary, old = beside(folder, "tmp"), beside(folder, "old")
    fsync_dir(temporary)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    os.rename(temporary, folder)
    fsync_dir(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove(folder: Path) -> None:
    """First out of sight: nobody sees half of it. Raises OSError."""
    gone = beside(folder, "gone")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(folder, gone)
    fsync_dir(folder.parent)  # a power failure must not bring the name back to a half
    shutil.rmtree(gone, ignore_errors=True)


def repair(exports: Path) -> None:
    """Mend what a killed incarnation left. Only the owner of the trial does this. Raises OSError."""
    for entry in sorted(os.listdir(exports)) if exports.is_dir() else []:
        if match := _LEFTOVER.fullmatch(entry):
            name, mark = match.groups()
            if mark == "old" and not (exports / name).exists():  # killed between the two renames
                os.rename(exports / entry, exports / name)
                fsync_dir(exports)
            else:
                shutil.rmtree(exports / entry, ignore_errors=True)


class Writer:
    """Writes weights for all ranks together. Nothing that a full disk keeps from being written is lost: it is tried again.

    Args:
        engine: Whose weights.
        ranks: All ranks.
        stopping: Ends the waiting for room.
        tokenizer: Folder whose tokenizer files go with the weights.
        waits: Called at each further try.
    """

    def __init__(
        self,
        engine: Engine,
        ranks: Ranks,
        stopping: threading.Event,
        tokenizer: Path,
        waits: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine, self.ranks, self.stopping, self.tokenizer, self.waits = (
            engine,
            ranks,
            stopping,
            tokenizer,
            waits,
        )

    def weights(
        self,
        what: str,
        folder: Path,
        begin: Callable[[], Path],
        finish: Callable[[], object],
        durable: bool,
        patient: bool = True,
    ) -> bool:
        """Write the weights into the folder that `begin` makes, then `finish`; both are rank 0's. Collective.

        On a full disk: waits for room, or with `patient` false gives up at once. False where nothing was written, because of that
        or because the trainer was told to stop meanwhile. Raises on every rank what is no matter of room.
        """

        def export() -> None:
            self.engine.export(temporary, self.tokenizer, durable=durable)
            if self.ranks.rank == 0:
                finish()

        temporary = beside(folder, "tmp")
        return self.until_room(
            what,
            folder.parent,
            [lambda: begin() if self.ranks.rank == 0 else None, export],
            temporary,
            patient,
        )

    def until_room(
        self,
        what: str,
        where: Path,
        parts: Sequence[Callable[[], object]],
        temporary: Path,
        patient: bool = True,
    ) -> bool:
        """Do the parts, one after another, again and again while rank 0 finds the disk full; see `weights`."""
        told = False
        for pause_s in files.pauses():
            error: OSError | None = None
            for part in parts:
                try:
                    part()
                except OSError as caught:
                    error = caught
                full, broken, stop = self.ranks.any(
                    files.is_full(error),
                    error is not None and not files.is_full(error),
                    self.stopping.is_set(),
                )
                if broken:
                    raise error or RoleFailed(f"rank 0 could not write {what}; its log says why")
                if full:
                    break
            else:
                if told and self.ranks.rank == 0:
                    files.tell_room(what)
                return True
            if self.ranks.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)  # others need what little it took
                if patient and not told:
                    files.tell_full(what, error, where)
            if stop or not patient:
                return False
            told = True
            self.waits()
            self.stopping.wait(pause_s)
        raise AssertionError("pauses don't end")
