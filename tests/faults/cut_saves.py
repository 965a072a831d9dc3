"""Saves that are cut: `python cut_saves.py FOLDER HOW,HOW STRIDE` forks a child for every cut point and
prints what is left.

The child saves generation 3 of two ranks over generations 1 and 2, of which retention keeps the newest two.
Before its n-th call that changes the disk it dies: as it stands (`before`), with half of a write done
(`torn`), or with whatever was not fsynced gone (`lossy`, as after a power failure): contents of files, and
names given by renames of which the folder was not fsynced. With `threads` the save of one rank is the
trainer's own (saving.py), and its thread is cut. The parent then loads what a trainer would load, and saves
once more.
"""

import ctypes
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.generation import Commit, Manifest, clear_leftovers, scan, verify
from hpc_rl.checkpoint.retention import RetentionPolicy, retain
from hpc_rl.config.options.training import OptimizerConfig
from hpc_rl.core import checked_file
from hpc_rl.core.checked_file import FileRecord
from hpc_rl.core.trial import Trial, write_json
from hpc_rl.engines.shared import state
from hpc_rl.engines.shared.mesh import Mesh
from hpc_rl.engines.shared.optimizer import Optimizer, Shard
from hpc_rl.trainers.ranks import Ranks
from hpc_rl.trainers.saving import Saving

CUT = 9  # exit code of a child that was cut
NUM_RANKS, ROWS = 2, 40
CALLS = (
    "write",
    "pwritev",
    "fsync",
    "link",
    "rename",
    "replace",
    "mkdir",
    "unlink",
    "rmdir",
    "ftruncate",
    "open",
)


class Shim:
    """Counts the calls of this process that change the disk, and ends it before the n-th."""

    def __init__(self, cut_at: int, how: str) -> None:
        self.left, self.how, self.lock = cut_at, how, threading.Lock()
        self.unsynced: dict[int, str] = {}  # descriptor -> path of what was written and not fsynced
        self.renamed: list[tuple[str, str]] = []  # (old, new) of renames whose folder was not fsynced since
        self.real_open, self.real_rename = os.open, os.rename
        for name in CALLS:
            setattr(os, name, self.wrapped(name, getattr(os, name)))
        checked_file._libc = self  # type: ignore[assignment]
        self.mincore = ctypes.CDLL(None, use_errno=True).mincore

    def fallocate(self, *_: Any) -> int:
        self.count("fallocate", None, ())
        return 0

    def wrapped(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or args[1] & os.O_CREAT:
                self.count(name, real, args)
            result = real(*args, **kwargs)
            if name in ("write", "pwritev"):
                self.unsynced[args[0]] = os.readlink(f"/proc/self/fd/{args[0]}")
            elif name == "fsync":
                path = os.readlink(f"/proc/self/fd/{args[0]}")  # also what went through another descriptor
                self.unsynced = {fd: other for fd, other in self.unsynced.items() if other != path}
                self.renamed = [(old, new) for old, new in self.renamed if os.path.dirname(new) != path]
            elif name in ("rename", "replace"):
                self.renamed.append((os.fspath(args[0]), os.fspath(args[1])))
            return result

        return call

    def count(self, name: str, real: Any, args: tuple[Any, ...]) -> None:
        with self.lock:
            self.left -= 1
            if self.left:
                return
            if self.how == "torn" and name == "write":
                real(args[0], bytes(args[1])[: len(args[1]) // 2])
            elif self.how == "torn" and name == "pwritev":
                fd = self.real_open(
                    f"/proc/self/fd/{args[0]}", os.O_WRONLY
                )  # half a block is not for a direct write
                os.pwrite(fd, bytes(args[1][0])[: len(args[1][0]) // 2], args[2])
            elif self.how == "lossy":
                for path in set(self.unsynced.values()):
                    if os.path.exists(path):
                        os.truncate(path, 0)
                for old, new in reversed(self.renamed):
                    if os.path.exists(new):
                        self.real_rename(new, old)
            os._exit(CUT)


class Rank:
    """A rank's part of a state whose numbers are all `value`."""

    def __init__(self, rank: int, num_ranks: int, value: float) -> None:
        per_rank = ROWS // num_ranks
        parameter = nn.Parameter(torch.full((per_rank, 300), value))
        self.shards = [Shard("w", parameter, parameter.data, (ROWS, 300), (rank * per_rank, 0))]
        pieces = Optimizer(OptimizerConfig(), self.shards).pieces()
        self.state = state.RankState(Mesh(rank, num_ranks), pieces, {"w": (ROWS, 300)})

    def write(self, folder: Path) -> list[FileRecord]:
        return self.state.take({"updates": 1}, None).write(folder)


def save(trial: Trial, step: int) -> None:
    commit = Commit(trial, step, "7.0", 0)
    commit.begin()
    for rank in range(NUM_RANKS):
        commit.record_rank(rank, Rank(rank, NUM_RANKS, float(step)).write(commit.folder))
    who = {"attempt": "7.0", "incarnation": 0, "submission": "7", "version": f"0.{step}", "config_hash": ""}
    commit.commit(Manifest(step=step, lineage=0, num_ranks=NUM_RANKS, **who))
    retain(trial, RetentionPolicy(2))


def save_by_thread(trial: Trial, step: int) -> None:
    """As the trainer does it while training goes on."""
    rank = Rank(0, 1, float(step))
    engine = SimpleNamespace(
        state_bytes=rank.state.size_bytes,
        snapshot=lambda copied: rank.state.take({"updates": 1}, state.Buffer() if copied else None),
    )
    saving = Saving(trial, "7.0", 0, [engine], Ranks(), RetentionPolicy(2))  # type: ignore[arg-type]
    who = {"attempt": "7.0", "incarnation": 0, "submission": "7", "version": f"0.{step}", "config_hash": ""}
    saving.start(step, lambda: Manifest(step=step, lineage=0, num_ranks=1, **who), copied=True)
    assert saving.settle(wait=True) is not None, saving.problem


def loaded(trial: Trial) -> list[tuple[int, float, str]]:
    """(step, what its numbers are, problem) of every generation that a start would look at, by one rank."""
    out = []
    for found in map(verify, scan(trial)):
        one, value = Rank(0, 1, -1.0), -1.0
        if not found.problem and found.manifest is not None:
            files = {file.name: file for file in found.manifest.files}
            one.state.load(found.path, found.manifest.num_ranks, files)
            numbers = one.shards[0].local.unique().tolist()
            value = numbers[0] if len(numbers) == 1 else -2.0
        out.append((found.step, value, found.problem))
    return out


def cut_once(folder: Path, template: Path, cut_at: int, how: str) -> dict[str, Any]:
    trial = Trial(folder / f"trial-{cut_at}")
    shutil.copytree(template, trial.dir)
    child = os.fork()
    if child == 0:
        try:
            Shim(cut_at, how)
            (save_by_thread if how == "threads" else save)(trial, 3)
            os._exit(0)
        except BaseException as error:  # told by the exit code; a forked child must not run the parent's ends
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    after = loaded(trial)
    clear_leftovers(trial)
    left = sorted(name for name in os.listdir(trial.recover) if name.startswith("."))
    save(trial, 4)
    row = {"cut_at": cut_at, "code": code, "after": after, "left": left, "next": loaded(trial)}
    shutil.rmtree(trial.dir)
    return row


def main() -> None:
    folder, hows, stride = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])
    torch.set_num_threads(1)
    checked_file.BLOCK_BYTES, checked_file.DIRECT_BYTES = (
        8192,
        60_000,
    )  # several writes a file; the files are larger
    generation.LIGHT_BYTES = 1 << 40
    template = Trial(folder / "template")
    template.make_dirs()
    write_json(template.config_json, {"a": 1})
    for step in (1, 2):
        save(template, step)
    for number, how in enumerate(hows):
        cut_at = 1 + number * stride // len(hows)  # each way has points of its own
        while True:
            row = cut_once(folder, template.dir, cut_at, how)
            print(json.dumps({"how": how, **row}), flush=True)
            if row["code"] != CUT:
                break
            cut_at += stride


if __name__ == "__main__":
    main()
