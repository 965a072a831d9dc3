"""Decisions of a job script: the names of its job, whether to start again, which nodes to avoid. Pure.

The job script starts before anything else of a trial, in some 50 ms. So job_*.py import only a little of the
standard library, and keep paths as text; a test compares these with the paths of trial.py.
"""

import enum
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpc_rl.core.errors import ExitCode, StopCause

KILLED_BY_SYSTEM = int(ExitCode.KILLED_BY_SYSTEM)
SERVERS = "servers.sbatch"
# Variables that sbatch derived from the job's request: every srun states its needs explicitly.
SLURM_DEFAULTS = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK"),
    *("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_TRES_PER_TASK"),
    *("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK"),
)
STEP_PREFIXES = ("SLURM_STEP", "SLURM_CPU_BIND")
STEP_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_TASK_PID", "SLURM_DISTRIBUTION")


class ScriptAction(enum.StrEnum):
    """Action of the job script after its supervisor has exited."""

    DONE = "done"
    START_AGAIN = "start_again"  # requeue, or a successor; on this machine, in place
    RESTART_SUPERVISOR = "restart_supervisor"  # in place, within `recover.retries`
    END = "end"


class ScriptRule(NamedTuple):
    """An action of the job script, and the reason to report if the job ends with it."""

    action: ScriptAction
    reason: str


# A known stop takes precedence over the exit code, except for code 0. With recover.mode disabled nothing is
# started again. The last line in `jobs/<job id>.state` has the cause of the stop under `cause`.
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
# for a code above 128
AFTER_SIGNAL = ScriptRule(
    ScriptAction.RESTART_SUPERVISOR,
    "the supervisor was killed more often in a row without a new checkpoint than recover.retries allows",
)
AFTER_OTHER_EXIT = ScriptRule(ScriptAction.END, "the supervisor gave up; see events.jsonl of the attempt")


class JobSettings(NamedTuple):
    """Settings of the rendered script, passed as words `name=value`."""

    trial_dir: str
    python: str
    workdir: str
    scheduler: str  # slurm, local; or allocation: in the foreground of a Slurm job
    script_name: str
    attempts: str  # folder of the trial
    recover_mode: str
    recover_retries: int
    start_mode: str
    from_step: str = ""
    new_batches: bool = False
    n_nodes: int = 1
    backend: str = "sbatch"
    layout: str = "allocation"
    continue_by: str = "requeue"
    job_name: str = ""
    exclude: str = ""  # nodes excluded by the configuration
    pre_job: tuple[str, ...] = ()  # file names below scripts/
    pre_node: tuple[str, ...] = ()
    post_node: tuple[str, ...] = ()
    post_job: tuple[str, ...] = ()
    on_preempt: tuple[str, ...] = ()
    hook_limit_s: float = 300.0
    on_preempt_limit_s: float = 20.0
    stop_asked: bool = False  # a signal requested a stop before this program could receive it

    @property
    def is_slurm(self) -> bool:
        return self.scheduler == "slurm"

    @property
    def is_server_task(self) -> bool:
        return self.script_name == SERVERS

    @property
    def steps(self) -> str:
        """The supervisor's way to start processes."""
        return "process" if self.scheduler == "local" else "srun"


def parse_words(words: Sequence[str]) -> tuple[JobSettings, list[str]]:
    """Return the settings, and the arguments of the script after the word `--`. Raises ValueError."""
    end = words.index("--")
    hints = JobSettings.__annotations__
    values: dict[str, object] = {}
    for word in words[:end]:
        name, equals, text = word.partition("=")
        if name not in hints or not equals:
            raise ValueError(f"{word!r} is not a setting of a job script.")
        if hints[name] is bool:
            values[name] = text == "1"
        elif hints[name] in (int, float):
            values[name] = hints[name](text)
        else:
            values[name] = text if hints[name] is str else tuple(text.split())
    return JobSettings(**values), list(words[end + 1 :])  # type: ignore[arg-type]


# --- names ------------------------------------------------------------------------------------------------


class JobNames(NamedTuple):
    """The ids of a job, and the files shared with the commands of its trial."""

    trial_dir: str
    attempts: str
    job_id: str  # of the submission; a successor keeps it
    slurm_job: str  # Slurm's id of the current job; empty without Slurm
    trial_job: str  # for a task of a server array: the job that it serves
    restart: int

    @property
    def attempt(self) -> str:
        return f"{self.job_id}.{self.restart}"

    @property
    def attempt_dir(self) -> str:
        return f"{self.trial_dir}/{self.attempts}/{self.attempt}"

    @property
    def state(self) -> str:
        return f"{self.trial_dir}/jobs/{self.job_id}.state"

    @property
    def submission(self) -> str:
        return f"{self.trial_dir}/jobs/{self.job_id}.json"

    @property
    def exclude(self) -> str:
        return f"{self.trial_dir}/jobs/{self.job_id}.exclude"

    @property
    def cancel_intent(self) -> str:
        return f"{self.trial_dir}/intent/cancel-{self.job_id}.json"

    @property
    def drain_intent(self) -> str:
        return f"{self.trial_dir}/intent/drain-{self.attempt}.json"


def name_job(
    settings: JobSettings, arguments: Sequence[str], env: Mapping[str, str], now: float, suffix: str
) -> JobNames:
    """Return the names of this start. `arguments` of the script: [SUBMISSION [START [TRIAL_JOB]]].

    `now` is in Unix seconds; `suffix` distinguishes jobs of the same second. A successor gets the
    submission and the number of its start as arguments.
    """
    submission, start, trial_job = (*arguments, "", "", "")[:3]
    folders = (settings.trial_dir, settings.attempts)
    if not settings.is_slurm:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
        return JobNames(*folders, submission or f"{settings.scheduler}-{stamp}-{suffix}", "", "", 0)
    slurm_job = env["SLURM_JOB_ID"]
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")  # or left from a parent job
    if settings.is_server_task or submission == f"{array}-{task}":
        slurm_job = f"{array}_{task}"  # in one task of every array, SLURM_JOB_ID is the id of the whole array
    restart = int(start or 0) + count_slurm_restarts(env)
    return JobNames(*folders, submission or slurm_job, slurm_job, trial_job, restart)


def count_slurm_restarts(env: Mapping[str, str]) -> int:
    """Return how often Slurm has restarted this job."""
    return int(env.get("SLURM_RESTART_COUNT") or 0)


# --- the environment of all processes ---------------------------------------------------------------------


def compute_environment_changes(
    settings: JobSettings, names: JobNames, env: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the variables to drop, and the variables to set."""
    dropped: list[str] = []
    changed: dict[str, str] = {}
    if settings.is_server_task:
        changed = {"HPC_RL_TRIAL_JOB": names.trial_job, "HPC_RL_ARRAY_TASK": env["SLURM_ARRAY_TASK_ID"]}
    if settings.steps == "srun":
        dropped = [name for name in SLURM_DEFAULTS if name in env]
        changed["SLURM_EXPORT_ENV"] = "ALL"
    if settings.scheduler == "allocation" or settings.backend == "submitit":
        # These schedulers run the script in a step: its variables would mislead the steps of the roles.
        dropped += [name for name in env if name.startswith(STEP_PREFIXES) or name in STEP_VARIABLES]
        if "SLURM_JOB_NUM_NODES" in env:
            changed["SLURM_NNODES"] = env["SLURM_JOB_NUM_NODES"]
    return dropped, changed


# --- consequences of an exit ------------------------------------------------------------------------------


def choose_rule(code: int) -> ScriptRule:
    """Return the rule for an exit code of the supervisor."""
    if code > 128:
        return AFTER_SIGNAL
    return {int(known): rule for known, rule in AFTER_EXIT.items()}.get(code, AFTER_OTHER_EXIT)


class Facts(NamedTuple):
    """Facts at the end of an attempt."""

    code: int
    recover_mode: str
    is_cancelled: bool = False  # by `hpc-rl cancel`
    has_term: bool = False  # a TERM came
    is_time_limit: bool = False  # the time limit caused the TERM
    is_requeued: bool = False  # the job is requeued already
    hook_failure: str = ""


class Decision(NamedTuple):
    """Whether to start the job again; the other fields are recorded if not."""

    starts_again: bool
    reason: str
    cause: str = ""  # a StopCause
    is_cancelled: bool = False


def decide_requeue(facts: Facts) -> Decision:
    """Decide whether the job is started again after the end of an attempt: requeued, or by a successor.

    After a TERM nothing is started again, unless the time limit sent it: a requeue of a cancelled job would
    succeed, and revive it. Slurm itself requeues preempted jobs and jobs that lost a node.
    """
    rule = choose_rule(facts.code)
    if rule.action is ScriptAction.DONE:
        return Decision(False, rule.reason)
    if facts.is_requeued:
        return Decision(True, rule.reason)
    if facts.hook_failure:
        return Decision(False, f"hook {facts.hook_failure}")
    if facts.is_cancelled or facts.has_term:
        cause = StopCause.TIME_LIMIT if facts.is_time_limit else StopCause.PREEMPTION
        if facts.is_cancelled:
            cause = StopCause.CANCELLED
        stop = AFTER_STOP[cause]
        if stop.action is ScriptAction.START_AGAIN:
            reason = f"{stop.reason}, and the job could not be started again"
            return Decision(False, reason, str(cause))
        return Decision(False, stop.reason, str(cause), is_cancelled=True)
    if rule.action is ScriptAction.START_AGAIN and facts.recover_mode != "disabled":
        return Decision(True, rule.reason)
    if rule.action is ScriptAction.START_AGAIN:
        return Decision(False, f"{rule.reason}, and recover.mode is disabled")
    return Decision(False, rule.reason)


# --- bad nodes --------------------------------------------------------------------------------------------


def choose_excluded(
    bad: Sequence[str], all_nodes: Sequence[str], configured: Sequence[str], num_needed: int
) -> list[str]:
    """Return the bad nodes to exclude from the next start, worst first, as many as leave enough others.

    `configured`: nodes that are excluded anyway.
    """
    others = set(all_nodes) - set(configured)
    chosen: list[str] = []
    for node in bad:
        if node in configured or node in chosen:
            continue
        if node not in others:  # excluding a name outside the partition costs nothing
            chosen.append(node)
        elif len(others) > num_needed:
            others.discard(node)
            chosen.append(node)
    return chosen
