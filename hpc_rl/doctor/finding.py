"""What a check says: how bad it is, what was found, and what to do about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.StrEnum):
    OK = "ok"
    WARN = "warn"  # works, or may work, but not as well as it could
    FAIL = "fail"  # a trial will not work


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's table.

    Args:
        check: Name of the check.
        status: How bad it is.
        found: What was found, in words.
        fix: What to do; empty where nothing is to be done.
        where: Node or host; empty for the machine that asks.
    """

    check: str
    status: Status
    found: str
    fix: str = ""
    where: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, Status.OK, found)


def warn(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Status.WARN, found, fix)


def fail(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Status.FAIL, found, fix)


@dataclass(frozen=True)
class Wanted:
    """What the trials of this configuration ask of a machine. Zeros and empty texts ask for nothing.

    Args:
        on_slurm: Whether trials go to Slurm.
        slurm_explicit: Whether the configuration says so itself.
        num_nodes: Nodes of a trial.
        cpus: CPUs of the fullest node.
        gpus: GPUs of a node.
        mem_mb: Memory of the fullest node, in MB.
        fileroot: Where trials lie.
        python: Interpreter of the trainer.
        server_python: Interpreter of SGLang.
        sglang: Whether the trial generates with SGLang.
        megatron: Whether it trains with Megatron.
        partition: Partition that it names.
    """

    on_slurm: bool = False
    slurm_explicit: bool = False
    num_nodes: int = 1
    cpus: int = 1
    gpus: int = 0
    mem_mb: int = 0
    fileroot: str = ""
    python: str = ""
    server_python: str = ""
    sglang: bool = False
    megatron: bool = False
    partition: str = ""
