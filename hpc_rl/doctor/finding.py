"""What a check of the doctor gets and returns; a check is one function, which looks and judges."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hpc_rl.errors import SchedulerError

SLURM_FIX = "check SLURM_CONF and that munge is running; otherwise contact your administrators."


class Status(enum.StrEnum):
    OK = "ok"
    WARN = "warn"  # works, or may work, but not as well as it could
    FAIL = "fail"  # a trial will not work


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's table.

    Args:
        check: Name of the check.
        status: How severe it is.
        found: What was found.
        fix: What to do; empty where nothing has to be done.
        where: Node or host; empty for the machine that runs the command.
    """

    check: str
    status: Status
    found: str
    fix: str = ""
    where: str = ""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Finding:
        """Return a finding of another process. Raises TypeError, KeyError, ValueError for anything else."""
        return cls(**{**data, "status": Status(data["status"])})


def ok(check: str, found: str) -> Finding:
    return Finding(check, Status.OK, found)


def warn(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Status.WARN, found, fix)


def fail(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Status.FAIL, found, fix)


@dataclass(frozen=True)
class Requirements:
    """What a trial asks of a machine. Zeros and empty texts ask for nothing.

    Args:
        on_slurm: Whether trials go to Slurm.
        num_nodes: Nodes of a trial.
        cpus: CPUs of the fullest node.
        gpus: GPUs of a node.
        mem_mb: Memory of the fullest node, in MB.
        fileroot: Directory of the trials.
        python: Interpreter of the trainer.
        server_python: Interpreter of SGLang.
        sglang: Whether the trial generates with SGLang.
        megatron: Whether it trains with Megatron.
        partition: Partition that it names.
        interface: Network interface that its roles publish.
    """

    on_slurm: bool = False
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
    interface: str = ""


Check = Callable[[Requirements], Finding]


def run_checks(checks: Iterable[Check], needs: Requirements) -> list[Finding]:
    """Run checks in order: what the machine forbids is a warning, a lack of Slurm a failure."""
    findings = []
    for check in checks:
        try:
            findings.append(check(needs))
        except SchedulerError as error:
            findings.append(fail(_name(check), str(error), SLURM_FIX))
        except OSError as error:
            found = f"could not be checked: {error}"
            findings.append(warn(_name(check), found, "try it by hand as this user."))
    return findings


def _name(check: Check) -> str:
    return check.__name__.removeprefix("check_").replace("_", " ")
