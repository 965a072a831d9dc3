"""Slurm by its own commands (sbatch, squeue, sacct, scancel, scontrol, sinfo), with time limits."""

import contextlib
import datetime
import logging
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpc_rl.core.errors import NoScheduler, SchedulerError
from hpc_rl.schedulers.base import JobSpec, JobState, State
from hpc_rl.schedulers.hostlist import expand
from hpc_rl.schedulers.sinfo import SINFO, Node, parse_sinfo
from hpc_rl.schedulers.slurm_states import classify_state, find_whole_job, has_waiting_task, summarize_parts

logger = logging.getLogger(__name__)

# Variables of a surrounding job and defaults of a user, which would override the options of our calls.
LEAKS = (
    "SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_", "SACCT_", "SCONTROL_", "PMI",
    "OMPI_", "SPANK_",
)  # fmt: skip
# Authentication of a client, and its cluster.
KEPT = ("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS")
# Defaults of the configuration (config/load/load.py); the script states them as options.
OF_CONFIGURATION = (
    "SBATCH_ACCOUNT",
    "SBATCH_PARTITION",
    "SBATCH_QOS",
    "SBATCH_RESERVATION",
    "SBATCH_TIMELIMIT",
)
# Substrings of Slurm's errors after which a call may be made again.
TRANSIENT = (
    "socket timed out",
    "unable to contact slurm controller",
    "resource temporarily unavailable",
    "connection refused",
)
# Substrings of Slurm's errors if a program found no controller: it is down, or none is configured here.
NO_CONTROLLER = ("unable to contact slurm controller", "could not establish a configuration source")
LOCAL_INSTEAD = "without a cluster, launcher.type=local runs trials on this machine"
# Only the message distinguishes Slurm's errors about ended jobs.
IS_OVER = ("invalid job id", "already completed")
# Substrings of answers of `sbatch --test-only` about a job that sbatch would accept, but that would wait.
MAY_WAIT = (
    "required node not available",
    "required nodes are busy",
    "requested nodes are busy",
    "required partition not available",
    "requested partition configuration not available now",
)
_BEFORE_REASON = re.compile(r"sbatch: (?:error: )?|Batch job submission failed: |allocation failure: ")
JOB_ID = re.compile(r"^(\d+)(?:;\S+)?$", re.MULTILINE)
SUBMIT_TIMEOUT_S = 30.0
TRIES = 3  # of sbatch, and of the search for a job if sbatch gave no answer
CALL_TIMEOUT_S = 15.0
# sinfo's states of a node without running jobs.
DEAD_NODES = ("down", "drained", "fail", "powered_down", "powering_down")
# Slurm needs this to end a requeued job after its processes exited, with a site's epilog.
ENDS_WITHIN_S = 15
DEFAULT_KILL_WAIT_S = 30


_reused: list[Node] | None = None  # the nodes, once they are known, within `reuse_nodes`


@contextlib.contextmanager
def reuse_nodes() -> Iterator[None]:
    """Let one sinfo answer every question about the nodes in this block, for plans of several trials."""
    global _reused
    _reused = []
    try:
        yield
    finally:
        _reused = None


@dataclass(frozen=True)
class TestAnswer:
    """Answer of `sbatch --test-only`: when and where the job would start, or why not."""

    __test__ = False  # not a class of tests

    text: str
    is_accepted: bool
    may_wait: bool = False  # nodes or partition are not available now; sbatch itself accepts such a job


class SlurmScheduler:
    """Scheduler on a Slurm cluster."""

    name = "slurm"

    def __init__(self, retry_wait_s: float = 2.0) -> None:
        self.retry_wait_s = retry_wait_s

    def submit(self, spec: JobSpec) -> str:
        """Submit by sbatch; if its answer is lost, look for the job by its tag before trying again."""
        ignored = sorted({name for name in os.environ if name.startswith("SBATCH_")} - {*OF_CONFIGURATION})
        if ignored:
            form = "the environment variables %s are ignored; set launcher.slurm.* instead"
            logger.warning(form, ", ".join(ignored))
        argv = ["sbatch", "--parsable", *spec.options, str(spec.script), *spec.arguments]
        problem = ""
        for _ in range(TRIES):
            try:
                done = call(argv, SUBMIT_TIMEOUT_S)
            except _TimedOut as error:
                problem = str(error)
            else:
                # A site's banner comes before the id.
                if done.returncode == 0 and (found := JOB_ID.findall(done.stdout)):
                    return found[-1]
                problem = _parse_message(done)
                if not _is_transient(problem):
                    break
            if job_id := self._look_up(spec, problem):
                return job_id
        raise _make_error("sbatch", problem, "sbatch refused the job")

    def _look_up(self, spec: JobSpec, problem: str) -> str | None:
        """Return the job of an sbatch call without an answer. Raises SchedulerError."""
        time.sleep(self.retry_wait_s)
        try:
            return self.find(spec)
        except SchedulerError as error:
            check = f"Before you submit it again, check: squeue --me -n {shlex.quote(spec.name)}"
            raise SchedulerError(f"{problem}; Slurm may have accepted the job: {error}. {check}") from error

    def query_states(self, job_ids: list[str]) -> dict[str, JobState]:
        """Query by one squeue, and by one sacct for jobs that squeue has forgotten."""
        listed = _query_jobs("-j", ",".join(job_ids)) if job_ids else []
        found = summarize_parts(listed)
        for job_id in job_ids:
            if job_id not in found:
                for one in listed:
                    if has_waiting_task(one.job_id, job_id):
                        found[job_id] = replace(one, job_id=job_id)
        forgotten = [job_id for job_id in job_ids if job_id not in found]
        if forgotten:
            found |= self.query_past(forgotten)
        return {job_id: found.get(job_id, JobState(job_id, State.UNKNOWN)) for job_id in job_ids}

    def query_account(self, uid: int) -> dict[str, JobState]:
        """Return all jobs of an account by squeue's ids: `7`, `7_3`, `7_[4-9]`, `7+0`."""
        return {state.job_id: state for state in _query_jobs("-u", str(uid))}

    def query_past(self, job_ids: Sequence[str]) -> dict[str, JobState]:
        """Return the accounting records of jobs that squeue has forgotten; empty without accounting."""
        columns = "JobID,State,Reason,End,NodeList"
        try:
            text = query_output(["sacct", "-n", "-P", "-X", "-j", ",".join(job_ids), "-o", columns])
        except SchedulerError as error:
            logger.debug("no accounting: %s", error)
            return {}
        return summarize_parts(_parse_jobs(text))

    def cancel(self, *job_ids: str) -> None:
        cancel_jobs(*job_ids)

    def nudge(self, *job_ids: str) -> None:
        _call_scancel("--batch", "--signal=USR1", *job_ids)

    def end_time(self, job_id: str) -> float | None:
        """Return when the job will be terminated, in Unix seconds, or None."""
        seen = summarize_parts(_query_jobs("-j", job_id)).get(job_id)
        return seen.end_time if seen else None

    def query_nodes(self) -> list[Node]:
        """Return every node of every partition, by one sinfo. Raises SchedulerError."""
        if _reused is None:
            return parse_sinfo(query_output(SINFO))
        if not _reused:
            _reused.extend(parse_sinfo(query_output(SINFO)))
        return _reused

    def test_only(self, script: str) -> TestAnswer:
        """Return whether Slurm would accept a script now. Raises SchedulerError."""
        done = call(["sbatch", "--test-only"], SUBMIT_TIMEOUT_S, script)
        said = _parse_message(done)
        if done.returncode != 0 and _is_transient(said):
            raise _make_error("sbatch", said, "sbatch --test-only")
        may_wait = any(words in said.lower() for words in MAY_WAIT)
        return TestAnswer(_strip_own_words(said), done.returncode == 0, may_wait)

    def find(self, spec: JobSpec) -> str | None:
        """Return the job with this tag, or None. Raises SchedulerError."""
        for attempt in range(1, TRIES):
            try:
                return self._find(spec)
            except SchedulerError as error:
                logger.warning("Slurm did not answer and is asked again: %s", error)
                time.sleep(self.retry_wait_s * attempt)
        return self._find(spec)

    def _find(self, spec: JobSpec) -> str | None:
        text = query_output(["squeue", "-h", "-t", "all", "--me", "-n", spec.name, "-o", "%i|%k"])
        for line in text.splitlines():
            job_id, _, comment = line.partition("|")
            if spec.tag in comment.split():
                return find_whole_job(job_id)
        return None


def _query_jobs(*selection: str) -> list[JobState]:
    """Return the jobs that squeue lists. Raises SchedulerError."""
    columns = "%i|%T|%r|%e|%N|%S"
    return _parse_jobs(
        query_output(["squeue", "-h", "-t", "all", *selection, "-o", columns], "invalid job id")
    )


def _parse_jobs(text: str) -> list[JobState]:
    """Parse lines `id|state|reason|end|nodes|start`; the last record of a requeued job is its newest."""
    found: dict[str, JobState] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) >= 5:
            job_id, native, reason, end, nodes, *start = fields
            found[job_id] = JobState(
                job_id,
                classify_state(native),
                native,
                reason,
                _parse_time(end),
                nodes,
                _parse_time(start[0] if start else ""),
            )
    return list(found.values())


class _TimedOut(SchedulerError):
    """A command gave no answer in time; it may still have taken effect."""


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables of a surrounding job or defaults of the user."""
    return {name: value for name, value in environ.items() if name in KEPT or not name.startswith(LEAKS)}


def require(program: str) -> None:
    """Raise NoScheduler if this machine lacks a program of Slurm."""
    if shutil.which(program) is None:
        raise _make_missing_error(program)


def _make_missing_error(program: str) -> NoScheduler:
    return NoScheduler(f"{program} is not on the PATH: run this on a login node of a Slurm cluster.")


def call(
    argv: list[str], timeout_s: float = CALL_TIMEOUT_S, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm. Raises SchedulerError if it is missing or gives no answer in time."""
    env = clean_environment(os.environ)
    if argv[0] != "sbatch":  # sbatch would pass the environment on to the job
        env["SLURM_TIME_FORMAT"] = "%Y-%m-%dT%H:%M:%S%z"
    try:
        return subprocess.run(
            argv, input=stdin, capture_output=True, text=True, errors="replace", timeout=timeout_s, env=env
        )
    except FileNotFoundError as error:
        raise _make_missing_error(argv[0]) from error
    except subprocess.TimeoutExpired as error:
        raise _TimedOut(f"{argv[0]} of Slurm did not answer within {timeout_s:g} s") from error


def can_reach_scheduler() -> bool:
    """Return whether the controller answers this node."""
    try:
        return call(["sinfo", "--noheader", "--format=%P"]).returncode == 0
    except SchedulerError:
        return False


@dataclass(frozen=True)
class JobFacts:
    """The controller's facts about a job; of a heterogeneous job, about all its components."""

    is_running: bool
    num_requeues: int
    nodes: frozenset[str]
    script_signal: int = 0  # that killed the job script; 0 while it lives, or if it exited


def query_job_facts(job_id: str) -> JobFacts:
    """Return the facts of `scontrol show job`. Raises SchedulerError."""
    told = query_output(["scontrol", "show", "job", "-o", job_id])
    states, requeues, nodes, codes = (
        re.findall(rf"(?:^|\s){name}=(\S*)", told, re.MULTILINE)
        for name in ("JobState", "Restarts", "NodeList", "ExitCode")
    )
    if not states:
        raise SchedulerError(f"`scontrol show job {job_id}` shows no state of the job: {told[:200]!r}")
    return JobFacts(
        is_running=all(state == "RUNNING" for state in states),
        num_requeues=max((int(number) for number in requeues if number.isdecimal()), default=0),
        nodes=frozenset(name for names in nodes for name in expand(names)),
        script_signal=max(
            (int(number) for code in codes if (number := code.partition(":")[2]).isdecimal()), default=0
        ),
    )


def is_dead(node: str) -> bool:
    """Return whether, according to the controller, a node can't run jobs. Raises SchedulerError."""
    states = query_output(["sinfo", "--noheader", "--Node", f"--nodes={node}", "--format=%T"]).split()
    return bool(states) and states[0].rstrip("*~#!%$@^-+") in DEAD_NODES


def requeue(job_id: str, *, processes_live: bool) -> None:
    """Have a running or ending job start again soon, under its id. Raises SchedulerError.

    Slurm lets a requeued job wait for two minutes, unless its begin time is after the end of its processes.

    Args:
        job_id: Slurm's id; for a heterogeneous job, the id of its first component.
        processes_live: Whether roles may still run. Slurm kills the rest after KillWait.
    """
    query_output(["scontrol", "requeue", job_id])
    wait_s = ENDS_WITHIN_S + (_kill_wait_s() if processes_live else 0)
    for _ in range(TRIES):
        try:
            query_output(["scontrol", "update", f"jobid={job_id}", f"StartTime=now+{wait_s}"])
            return
        except SchedulerError as error:  # Slurm may refuse this just after losing a node
            logger.warning(
                "job %s is requeued, but may start late, because Slurm refused its start time: %s",
                job_id,
                error,
            )


def _kill_wait_s() -> int:
    try:
        told = re.search(r"^KillWait\s*=\s*(\d+)", query_output(["scontrol", "show", "config"]), re.MULTILINE)
    except SchedulerError:
        told = None
    return int(told[1]) if told else DEFAULT_KILL_WAIT_S


def cancel_jobs(*job_ids: str) -> None:
    """End jobs for good; those that are over already are accepted. Raises SchedulerError."""
    _call_scancel(*job_ids)


def _call_scancel(*words: str) -> None:
    """Call scancel, which has a message for each job that it can't signal. Raises SchedulerError."""
    done = call(["scancel", *words])
    said = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    wrong = [line for line in said if not any(over in line.lower() for over in IS_OVER)]
    if done.returncode != 0 and (wrong or not said):
        problem = " ".join(" ".join(wrong).split()) or _parse_message(done)
        raise _make_error("scancel", problem, "scancel")


def query_output(argv: list[str], *accepted: str) -> str:
    """Return the output of a command of Slurm. Raises SchedulerError for errors without `accepted` words."""
    done = call(argv)
    if done.returncode != 0 and not any(words in done.stderr.lower() for words in accepted):
        raise _make_error(argv[0], _parse_message(done), argv[0])
    return done.stdout


def _make_error(program: str, said: str, what: str) -> SchedulerError:
    """Return the error of a program: no controller answers it, else `what` failed with its message."""
    if any(words in said.lower() for words in NO_CONTROLLER):
        last = said.rpartition(f"{program}: ")[2]
        return SchedulerError(
            f"{program} is on the PATH, but no Slurm controller answers it ({last}): on a cluster, see "
            f"`hpc-rl doctor`; {LOCAL_INSTEAD}"
        )
    return SchedulerError(f"{what}: {_strip_own_words(said)}")


def _strip_own_words(said: str) -> str:
    """Return a message of sbatch without words that differ between a submission and its test."""
    return _BEFORE_REASON.sub("", said)


def _is_transient(problem: str) -> bool:
    return any(words in problem.lower() for words in TRANSIENT)


def _parse_message(done: subprocess.CompletedProcess[str]) -> str:
    """Return the command's own message, on one line."""
    said = done.stderr.strip() or done.stdout.strip()
    return " ".join(said.split()) or f"exit code {done.returncode} without a message"


def _parse_time(text: str) -> float | None:
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:  # N/A, Unknown, NONE
        return None
