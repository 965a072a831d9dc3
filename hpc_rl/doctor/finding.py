"""What a check of the doctor gets and returns; a check is one function, which looks and judges."""

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from hpc_rl.core.errors import SchedulerError

Subject = TypeVar("Subject")
SLURM_FIX = "check SLURM_CONF and that munge is running; otherwise contact your administrators."


class Status(enum.StrEnum):
    OK = "ok"
    WARN = "warn"  # works, or may work, but not as well as it could
    FAIL = "fail"  # a trial will not work


class Verdict(NamedTuple):
    """What a check returns; `fix` is empty if nothing has to be done."""

    status: Status
    found: str
    fix: str = ""


ok, warn, fail = (partial(Verdict, status) for status in (Status.OK, Status.WARN, Status.FAIL))


def judge(found: str, fix: str, fail: bool = False, warn: bool = False) -> Verdict:
    """Return a failure or a warning with its fix if one is due, else that all is well."""
    status = Status.FAIL if fail else Status.WARN if warn else Status.OK
    return Verdict(status, found, fix if fail or warn else "")


@dataclass(frozen=True)
class Finding:
    """One row of the doctor's table."""

    check: str
    status: Status
    found: str
    fix: str = ""
    where: str = ""  # node or host; empty for the machine that runs the command


def parse_finding(data: dict[str, Any]) -> Finding:
    """Return a finding of another process. Raises TypeError, KeyError, ValueError for anything else."""
    return Finding(**{**data, "status": Status(data["status"])})


@dataclass(frozen=True)
class Requirements:
    """What a trial asks of a machine. Zeros and empty texts ask for nothing."""

    on_slurm: bool = False
    is_login: bool = False  # the trial runs on other machines than this one
    num_nodes: int = 1
    cpus: int = 1  # of the fullest node
    gpus: int = 0  # of a node
    mem_mb: int = 0  # of the fullest node
    fileroot: str = ""
    python: str = ""  # interpreter of the trainer
    server_python: str = ""  # interpreter of SGLang or vLLM
    servers: tuple[str, ...] = ()  # their backends
    megatron: bool = False
    mpi: bool = False  # ranks find each other by MPI
    mpiexec: str = ""  # program that starts them; empty for srun
    partition: str = ""
    interface: str = ""
    local_dir: str = ""
    modules: tuple[str, ...] = ()
    sandbox: str = ""  # rollout.sandbox, where code_tests runs code


def make_finding(check: Callable[[Subject], Verdict], subject: Subject) -> Finding:
    """Run a check, named as its function."""
    return Finding(_find_name(check), *check(subject))


def apply_checks(checks: Iterable[Callable[[Requirements], Verdict]], needs: Requirements) -> list[Finding]:
    """Run checks in order; a refusal of the machine is a warning, a lack of Slurm a failure."""
    findings = []
    for check in checks:
        try:
            findings.append(make_finding(check, needs))
        except SchedulerError as error:
            findings.append(Finding(_find_name(check), Status.FAIL, str(error), SLURM_FIX))
        except OSError as error:
            found = f"could not be checked: {error}"
            findings.append(Finding(_find_name(check), Status.WARN, found, "try it by hand as this user."))
    return findings


def _find_name(check: Callable[..., Verdict]) -> str:
    return check.__name__.removeprefix("check_").replace("_", " ")
