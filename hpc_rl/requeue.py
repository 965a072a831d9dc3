"""What decides whether anything is started again: four tables, in the order in which they are asked.

1. A role fails: POLICIES says by the class of the failure whether it is started again in place, the job gets
   other nodes, or the attempt ends. supervise/exit_policy.py finds the class and counts the retries.
2. The attempt is asked to stop: STOPS has the reason and the class of each cause.
3. The supervisor has exited, or the job is stopped without it: AFTER_STOP, AFTER_EXIT, AFTER_SIGNAL and
   AFTER_OTHER_EXIT say what the job script does (supervise/job_policy.py).
4. The next start chooses its checkpoint, or refuses: the table in checkpoint/decide.py.

The job script imports this module, and starts in some 50 ms: no dataclasses here, which cost half of that.
"""

import enum
from typing import Literal, NamedTuple

from hpc_rl.errors import ExitCode, FailureClass, StopCause


class FailurePolicy(NamedTuple):
    """What follows from a failure of one class."""

    # the role in place; the job, for other nodes; wait for the user
    action: Literal["restart", "requeue", "end"]
    uses_retry: bool  # it counts against `recover.retries`; a new generation resets the count
    advice: str  # what the user has to do once the attempt has ended for it
    max_restarts: int | None = None  # without a new generation, where `recover.retries` allows more
    exclude_nodes: bool = False  # the nodes that it happened on are avoided for a while
    # before each restart in place; None: the longer the more failures there were
    pause_s: float | None = None


NOT_RETRIED = "not retried: it would fail the same way."
RESUME = "then run the command that `hpc-rl status` shows under 'next'"
POLICIES: dict[FailureClass, FailurePolicy] = {
    FailureClass.USER: FailurePolicy(
        "end",
        True,
        f"{NOT_RETRIED} Fix the reward, the workflow or the configuration, {RESUME}",
    ),
    FailureClass.DATA: FailurePolicy(
        "end",
        True,
        f"{NOT_RETRIED} Check the data, the workflow and the reward, {RESUME}",
    ),
    FailureClass.OUT_OF_MEMORY: FailurePolicy(
        "restart",
        True,
        f"give it more memory, or make its batches smaller (max_tokens_per_mb), {RESUME}",
        max_restarts=1,
    ),
    FailureClass.NODE: FailurePolicy(
        "requeue", True, f"ask the administrators about the nodes, {RESUME}", exclude_nodes=True
    ),
    FailureClass.INFRASTRUCTURE: FailurePolicy("restart", True, f"look for the cause in the logs, {RESUME}"),
    FailureClass.DISK_FULL: FailurePolicy(
        "restart", False, f"make room where the trial is stored, {RESUME}", pause_s=20.0
    ),
    FailureClass.PREEMPTION: FailurePolicy("requeue", False, "nothing: the scheduler starts it again"),
    FailureClass.WALL_TIME: FailurePolicy("requeue", False, "nothing: it continues where it stopped"),
    FailureClass.UNKNOWN: FailurePolicy("restart", True, f"look for the cause in the logs, {RESUME}"),
}

# the reason that is recorded, and the class that counts
WARNING_S = 450.0  # before the end of a job: where its script asks for SIGUSR1, at the earliest
STOPS: dict[StopCause, tuple[str, FailureClass]] = {
    StopCause.PREEMPTION: (
        "SIGTERM from the scheduler: a cancel, a preemption or the time limit",
        FailureClass.PREEMPTION,
    ),
    StopCause.USER_SIGNAL: ("SIGUSR1: asked to save and stop", FailureClass.USER),
    StopCause.INTERRUPTED: ("SIGINT: interrupted by the user", FailureClass.USER),
    StopCause.TIME_LIMIT: ("the job's time is nearly over", FailureClass.WALL_TIME),
    StopCause.CANCELLED: ("cancelled by the user", FailureClass.USER),
    StopCause.SCRIPT_KILLED: ("the job script that started the supervisor was killed", FailureClass.USER),
    StopCause.NOT_NEEDED: ("the trial does not need these servers any more", FailureClass.USER),
}


class JobEvent(enum.StrEnum):
    """What the job script reports in `jobs/<job id>.state`."""

    STARTED = "started"
    SUPERVISOR_KILLED = "supervisor_killed"
    REQUEUED = "requeued"
    # By a watch on another node, which then requeues or cancels the job.
    FIRST_NODE_LOST = "first_node_lost"
    SCRIPT_KILLED = "script_killed"
    ENDED = "ended"


class ScriptAction(enum.StrEnum):
    """What the job script does once its supervisor has exited."""

    DONE = "done"
    START_AGAIN = "start_again"  # requeue, or a successor; on this machine in place
    RESTART_SUPERVISOR = "restart_supervisor"  # in place, within `recover.retries`
    END = "end"


class ScriptRule(NamedTuple):
    """An action of the job script, and the reason that it reports where the job ends with it."""

    action: ScriptAction
    reason: str


# A stop that the script knows of comes before the exit code, but for code 0. With recover.mode disabled
# nothing is started again. Its last line in `jobs/<job id>.state` has the cause of the stop under `cause`.
AFTER_STOP: dict[StopCause, ScriptRule] = {
    StopCause.CANCELLED: ScriptRule(ScriptAction.END, "cancelled by the user"),
    StopCause.TIME_LIMIT: ScriptRule(ScriptAction.START_AGAIN, "the time limit was reached"),
    # A requeue of a cancelled job would revive it; the scheduler itself requeues preempted jobs.
    StopCause.PREEMPTION: ScriptRule(ScriptAction.END, "stopped by a signal"),
}
AFTER_EXIT: dict[ExitCode, ScriptRule] = {
    ExitCode.DONE: ScriptRule(ScriptAction.DONE, "done"),
    ExitCode.STOPPED: ScriptRule(ScriptAction.START_AGAIN, "stopped on request"),
}
# of a code above 128
AFTER_SIGNAL = ScriptRule(
    ScriptAction.RESTART_SUPERVISOR,
    "the supervisor was killed more often in a row without a new checkpoint than recover.retries allows",
)
AFTER_OTHER_EXIT = ScriptRule(ScriptAction.END, "the supervisor gave up; see events.jsonl of the attempt")
