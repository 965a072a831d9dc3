"""The exception tree, the exit codes, and the classes of failures and stops."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc_rl.core.refusal import Refusal

# A job script requests SIGUSR1 at most this many seconds before the end of its job.
WARNING_S = 450.0


class ExitCode(enum.IntEnum):
    """Exit codes of roles, jobs and the command line."""

    DONE = 0
    USAGE = 2
    NOTHING_TO_RESUME = 3
    REFUSED = 64
    SCHEDULER = 69
    FAILED = 70
    CANNOT_WRITE = 73
    STOPPED = 75  # of a role or job: state saved, start it again
    BUSY = 75  # of the command line: the trial is running, or has state and the mode is fresh
    BAD_CONFIG = 78
    KILLED_BY_PERSON = 130
    KILLED_BY_SYSTEM = 143


class FailureClass(enum.StrEnum):
    """Origin of a failure; supervise/failure_policy.py maps it to an action."""

    USER = "user"
    DATA = "data"
    OUT_OF_MEMORY = "out of memory"
    NODE = "node"
    INFRASTRUCTURE = "infrastructure"
    DISK_FULL = "disk full"
    PREEMPTION = "preemption"
    WALL_TIME = "wall time"
    UNKNOWN = "unknown"  # not recorded


class StopCause(enum.StrEnum):
    """Why an attempt was asked to stop, in `events.jsonl`, intents and `jobs/<job id>.state`."""

    TIME_LIMIT = "time_limit"  # by the supervisor's clock, or as Slurm answered the job script after a TERM
    PREEMPTION = "preemption"  # SIGTERM: the scheduler sends the same for a cancel and for a time limit
    USER_SIGNAL = "user_signal"  # SIGUSR1: also Slurm's warning some time before the limit
    INTERRUPTED = "interrupted"  # SIGINT
    CANCELLED = "cancelled"  # `hpc-rl cancel`
    SCRIPT_KILLED = "script_killed"  # the job script is gone: no process would record the end
    NOT_NEEDED = "not_needed"  # of servers: their trial is over, or has other servers


class HpcRlError(Exception):
    """Base of all errors that this package raises on purpose. The command line exits with `exit_code`."""

    exit_code = ExitCode.FAILED
    failure = FailureClass.UNKNOWN


class ConfigError(HpcRlError, ValueError):
    """An invalid configuration: refusals, and texts about no option; causes before consequences.

    Never retried; a role exits with BAD_CONFIG.
    """

    exit_code = ExitCode.REFUSED
    failure = FailureClass.USER

    def __init__(self, *problems: Refusal | str) -> None:
        from hpc_rl.core.refusal import order_refusals  # a job script has no time to import dataclasses

        super().__init__(*order_refusals(problems, lambda one: None if isinstance(one, str) else one))

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The refusals among the problems, with option, value, reason and remedy as fields."""
        return tuple(one for one in self.args if not isinstance(one, str))

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class DoesNotFit(ConfigError):
    """An allocation that does not fit the nodes; the message names the nearest one that does."""


class NotBuilt(ConfigError):
    """An option that this version does not implement."""


class TrialStateError(HpcRlError):
    """The state of the trial directory forbids the request."""


class NotPrivate(TrialStateError):
    """Another account could change a trial's code, or read its secrets."""

    exit_code = ExitCode.REFUSED


class TrialNameError(TrialStateError):
    """No trial, or several, by that name."""

    exit_code = ExitCode.REFUSED


class TrialBusy(TrialStateError):
    """The trial is running, or has state and the mode is a fresh start."""

    exit_code = ExitCode.BUSY


class NothingToResume(TrialStateError):
    """`resume` found no valid generation, or not the requested one."""

    exit_code = ExitCode.NOTHING_TO_RESUME


class TrialFailed(TrialStateError):
    """A trial ended before its last step; the message has the reason and the end of its log."""


class SchedulerError(HpcRlError):
    """The scheduler refused a request or could not be reached; the message quotes it."""

    exit_code = ExitCode.SCHEDULER
    failure = FailureClass.INFRASTRUCTURE


class NoScheduler(SchedulerError):
    """This machine lacks a program of the scheduler."""


class CannotWrite(HpcRlError, OSError):
    """A path that must be writable is not."""

    exit_code = ExitCode.CANNOT_WRITE
    failure = FailureClass.INFRASTRUCTURE


class RoleFailed(HpcRlError):
    """A role failed; the policy of its class may retry."""

    failure = FailureClass.INFRASTRUCTURE


class NodeFailed(RoleFailed):
    """Some `nodes` behave differently from the others; the next start avoids them."""

    failure = FailureClass.NODE

    def __init__(self, message: str, nodes: list[str]) -> None:
        super().__init__(message)
        self.nodes = nodes


class DataUnusable(RoleFailed):
    """The data, the workflow or the reward function give nothing to train on; a retry would not help."""

    failure = FailureClass.DATA


class UserCodeFailed(RoleFailed):
    """The user's reward or workflow raises for every prompt; a retry would not help."""

    failure = FailureClass.USER


class Damaged(RoleFailed):
    """A file differs from its checksum; the message begins with its path. An older generation is used."""


class GivenUp(RoleFailed):
    """A role failed for good: the supervisor does not start it again."""

    failure = FailureClass.USER


class ServerUnavailable(RoleFailed):
    """A generation server can't be reached or can't serve now; another one may."""


class ServerLost(ServerUnavailable):
    """A generation server was lost in the middle of a request, with the tokens that it had not sent."""


class EndpointUnavailable(ServerUnavailable):
    """An external endpoint has not answered within the time limit; no prompt is to blame."""


class ServerStale(RoleFailed):
    """The weights of a generation server are older than the request allows."""


class RequestRefused(HpcRlError, ValueError):
    """A server refused a request as invalid (400, 401 …); the message quotes it."""


class InputRefused(RequestRefused):
    """A server refused this input (400, 413, 422), for example because of its length; others may succeed."""


class Stale(HpcRlError):
    """The epoch or lineage of a request is older than the current one."""


class JobEvent(enum.StrEnum):
    """Events of a job script in `jobs/<job id>.state`."""

    STARTED = "started"
    SUPERVISOR_KILLED = "supervisor_killed"
    REQUEUED = "requeued"
    # By a watch on another node, which then requeues or cancels the job.
    FIRST_NODE_LOST = "first_node_lost"
    SCRIPT_KILLED = "script_killed"
    ENDED = "ended"
