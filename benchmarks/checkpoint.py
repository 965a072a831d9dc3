"""Saving and loading a state of 1 GB against torch.distributed.checkpoint and safetensors, interleaved, on
one rank.

    python benchmarks/checkpoint.py [--pairs 5] [--gb 1.0] [--dir DIR] [--out benchmarks/results/checkpoint.json]

Save: until the state is durable. Ours is a whole generation (space reserved, shards hashed, fsynced,
manifest, rename, read back by retention's scan); DCP fsyncs its files itself; safetensors' file is fsynced by
us. Load: cold (the page cache of the files is dropped before, some seconds after the saves: a disk goes on
writing after an fsync), into the tensors that exist; ours checks every block on the way, the peers check
nothing. Stall: how long an asynchronous save holds the training thread up, against a plain copy of the state
into a buffer that is used again, and against DCP's async_save. A ratio is ours / peer of rates (stall: of
seconds), taken within a round; the median over the rounds counts. Torch has as many threads as torchrun gives
a rank, on all sides: one. The disk of a virtual machine varies threefold: read the ranges too.
"""

import argparse
import contextlib
import gc
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from run_record import describe_run, spread, write_record
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.generation import Commit, Manifest
from hpc_rl.checkpoint.retention import RetentionPolicy, retain
from hpc_rl.config.options.training import OptimizerConfig
from hpc_rl.core.checked_file import FileRecord
from hpc_rl.core.trial import Trial
from hpc_rl.engines.base import Snapshot
from hpc_rl.engines.shared import state
from hpc_rl.engines.shared.mesh import Mesh
from hpc_rl.engines.shared.optimizer import Optimizer, make_shards
from hpc_rl.trainers.ranks import Ranks
from hpc_rl.trainers.saving import Saving

TENSOR_BYTES = 8 << 20
SETTLE_S = 5.0


class Subject:
    """A model with its optimizer, as the engine holds it: parameters and two moments in float32."""

    def __init__(self, gb: float) -> None:
        count = max(1, round(gb * 1e9 / TENSOR_BYTES / 3))
        torch.manual_seed(0)
        parameters = {
            f"layer.{i}.weight": nn.Parameter(torch.randn(2048, TENSOR_BYTES // 8192)) for i in range(count)
        }
        self.shards = make_shards(parameters)
        self.optimizer = Optimizer(OptimizerConfig(), self.shards)
        for first, second in self.optimizer.moments.values():
            first.normal_()
            second.uniform_()
        self.buffer = state.Buffer()
        pieces = self.optimizer.pieces()
        self.state = state.RankState(Mesh(), pieces, {one.piece.name: one.piece.shape for one in pieces})

    def tensors(self) -> dict[str, torch.Tensor]:
        pieces = self.optimizer.pieces()
        return {f"{one.kind}/{one.piece.name}": one.piece.local.detach() for one in pieces}

    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    # what Saving wants of an engine
    def snapshot(self, copied: bool) -> Snapshot:
        return self.state.take({"updates": 1}, self.buffer if copied else None)

    def state_bytes(self) -> int:
        return self.state.size_bytes()


def manifest(step: int) -> Manifest:
    who = {"attempt": "1.0", "incarnation": 0, "submission": "1", "version": f"0.{step}", "config_hash": ""}
    return Manifest(step=step, lineage=0, num_ranks=1, **who)


class Ours:
    def __init__(self, folder: Path, subject: Subject) -> None:
        self.trial, self.subject, self.step = Trial(folder / "ours"), subject, 0
        self.trial.make_dirs()

    def save(self) -> None:
        self.step += 1
        commit = Commit(self.trial, self.step, "1.0", 0)
        commit.begin()
        commit.record_rank(0, self.subject.snapshot(copied=False).write(commit.folder))
        commit.commit(manifest(self.step))
        retain(self.trial, RetentionPolicy(2))

    def load(self) -> None:
        found = generation.verify(generation.scan(self.trial)[0], generation.LIGHT_BYTES)
        assert found.manifest is not None and not found.problem
        files: dict[str, FileRecord] = {file.name: file for file in found.manifest.files}
        self.subject.state.load(found.path, 1, files)

    def folder(self) -> Path:
        return self.trial.generation(self.step)

    def clear(self) -> None:
        shutil.rmtree(self.trial.recover)
        self.trial.recover.mkdir()


class DCP:
    def __init__(self, folder: Path, subject: Subject) -> None:
        self.path, self.subject = folder / "dcp", subject

    def save(self) -> None:
        dcp.save(self.subject.tensors(), checkpoint_id=str(self.path))
        fsync(self.path)

    def load(self) -> None:
        dcp.load(self.subject.tensors(), checkpoint_id=str(self.path))

    def folder(self) -> Path:
        return self.path

    def clear(self) -> None:
        shutil.rmtree(self.path)


class Safetensors:
    def __init__(self, folder: Path, subject: Subject) -> None:
        self.path, self.subject = folder / "safetensors", subject

    def save(self) -> None:
        self.path.mkdir()
        save_file(self.subject.tensors(), self.path / "state.safetensors")
        fsync(self.path / "state.safetensors")
        fsync(self.path)

    def load(self) -> None:
        with safe_open(self.path / "state.safetensors", "pt") as file:
            for name, tensor in self.subject.tensors().items():
                tensor.copy_(file.get_tensor(name))

    def folder(self) -> Path:
        return self.path

    def clear(self) -> None:
        shutil.rmtree(self.path)


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def drop_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """(wall, CPU) seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def wipe(subject: Subject) -> None:
    for tensor in subject.tensors().values():
        tensor.zero_()


def one_round(
    sides: dict[str, Any], order: list[str], subject: Subject, sums: list[float]
) -> dict[str, dict[str, float]]:
    """Every side saves, then every side loads."""
    gb = subject.num_bytes() / 1e9
    rows: dict[str, dict[str, float]] = {name: {} for name in order}
    for name in order:
        os.sync()
        save_s, cpu_s = timed(sides[name].save)
        rows[name] |= {"save_gb_s": gb / save_s, "save_cpu_s_per_gb": cpu_s / gb}
    os.sync()
    time.sleep(SETTLE_S)
    for name in order:
        wipe(subject)
        drop_cache(sides[name].folder())
        load_s, cpu_s = timed(sides[name].load)
        rows[name] |= {"load_gb_s": gb / load_s, "load_cpu_s_per_gb": cpu_s / gb}
        found = [float(tensor.double().sum()) for tensor in subject.tensors().values()]
        assert found == sums, "what was loaded is not what was saved"
    for side in sides.values():
        side.clear()
    return rows


class Stall:
    """How long a training thread stands still for one save."""

    def __init__(self, folder: Path, subject: Subject) -> None:
        self.subject, self.folder = subject, folder / "dcp-async"
        self.trial = Trial(folder / "stall")
        self.trial.make_dirs()
        self.saving = Saving(self.trial, "1.0", 0, [subject], Ranks(), RetentionPolicy(1))  # type: ignore[list-item]
        self.into = [torch.zeros_like(tensor) for tensor in subject.tensors().values()]
        self.step = 0

    def copy(self) -> float:
        return timed(
            lambda: [
                there.copy_(here)
                for there, here in zip(self.into, self.subject.tensors().values(), strict=True)
            ]
        )[0]

    def ours(self) -> float:
        self.step += 1
        stall_s, _ = timed(lambda: self.saving.start(self.step, lambda: manifest(self.step), copied=True))
        assert self.saving.settle(wait=True) is not None, self.saving.problem
        return stall_s

    def dcp(self) -> float | None:
        future: list[Any] = []
        try:
            stall_s, _ = timed(
                lambda: future.append(dcp.async_save(self.subject.tensors(), checkpoint_id=str(self.folder)))
            )
            future[0].result()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        return stall_s


def measure(folder: Path, gb: float, rounds: int) -> dict[str, Any]:
    subject = Subject(gb)
    sums = [float(tensor.double().sum()) for tensor in subject.tensors().values()]
    sides = {
        "ours": Ours(folder, subject),
        "dcp": DCP(folder, subject),
        "safetensors": Safetensors(folder, subject),
    }
    rows: list[dict[str, dict[str, float]]] = []
    for number in range(rounds):
        order = list(sides)[number % 3 :] + list(sides)[: number % 3]
        rows.append(one_round(sides, order, subject, sums))
        gc.collect()
        print(
            number,
            {name: {key: round(value, 2) for key, value in row.items()} for name, row in rows[-1].items()},
            flush=True,
        )
    result: dict[str, Any] = {
        name: {key: spread([row[name][key] for row in rows]) for key in rows[0][name]} for name in sides
    }
    for what in ("save", "load"):
        for peer in ("dcp", "safetensors"):
            ratios = [row["ours"][f"{what}_gb_s"] / row[peer][f"{what}_gb_s"] for row in rows]
            result[f"{what}_ratio_to_{peer}"] = spread(ratios)
    return {"state_gb": subject.num_bytes() / 1e9, **result, "stall": stalls(Stall(folder, subject), rounds)}


def stalls(stall: Stall, rounds: int) -> dict[str, Any]:
    stall.ours()  # makes the buffer
    stall.copy()
    found: dict[str, list[float]] = {"copy": [], "ours": [], "dcp": []}
    for number in range(rounds):
        for name in ("copy", "ours", "dcp") if number % 2 else ("ours", "copy", "dcp"):
            found[name].append(getattr(stall, name)())
    ratios = [ours / copy for ours, copy in zip(found["ours"], found["copy"], strict=True)]
    result = {f"{name}_s": spread(values) for name, values in found.items()} | {
        "ratio_to_copy": spread(ratios)
    }
    print("stall", {name: round(value["median"], 3) for name, value in result.items()}, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pairs", type=int, default=5, help="rounds; each has one run of ours and of every peer"
    )
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument(
        "--dir",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where the files go: the disk to measure",
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module=r"torch\.distributed.*")
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # async_save wants one
    with (
        tempfile.TemporaryDirectory(dir=args.dir, prefix="checkpoint-benchmark-") as folder,
        contextlib.suppress(KeyboardInterrupt),
    ):
        result = describe_run("torch", "safetensors", "xxhash")
        result |= {"pairs": args.pairs, "threads": args.threads, **measure(Path(folder), args.gb, args.pairs)}
        print(json.dumps(result, indent=2))
        if args.out:
            write_record(args.out, result)


if __name__ == "__main__":
    main()
