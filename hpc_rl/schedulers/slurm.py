"""Slurm by its own commands (sbatch, squeue, sacct, scancel, scontrol, sinfo), with time limits."""

import datetime
import logging
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence

from hpc_rl.errors import NoScheduler, SchedulerError
from hpc_rl.schedulers.base import JobSpec, JobState, State
from hpc_rl.schedulers.sinfo import SINFO, Node, read_sinfo
from hpc_rl.schedulers.slurm_states import sum_up, to_state, whole_job

logger = logging.getLogger(__name__)

# Variables of a surrounding job and defaults of a user, which would override what our calls say.
LEAKS = (
    "SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SCANCEL_", "SACCT_", "SCONTROL_", "PMI",
    "OMPI_", "SPANK_",
)  # fmt: skip
# How a client authenticates, and which cluster it talks to.
KEPT = ("SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS")
# Read as defaults of the configuration (config/loading/load.py), which the script states.
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
# Substrings of Slurm's errors where a program found no controller: it is down, or none is configured here.
NO_CONTROLLER = ("unable to contact slurm controller", "could not establish a configuration source")
LOCAL_INSTEAD = "without a cluster, launcher.type=local runs trials on this machine"
# Slurm's commands tell the errors about a job that has ended apart by their message alone.
IS_OVER = ("invalid job id", "already completed")
JOB_ID = re.compile(r"^(\d+)(?:;\S+)?$", re.MULTILINE)
SUBMIT_TIMEOUT_S = 30.0
TRIES = 3  # of sbatch, and of the search for a job whose sbatch gave no answer
CALL_TIMEOUT_S = 15.0


class SlurmScheduler:
    """Scheduler on a Slurm cluster."""

    name = "slurm"

    def __init__(self, retry_wait_s: float = 2.0) -> None:
        self.retry_wait_s = retry_wait_s

    def submit(self, spec: JobSpec) -> str:
        """Submit by one sbatch; where its answer is lost, look the job up by its tag before another one."""
        ignored = sorted({name for name in os.environ if name.startswith("SBATCH_")} - {*OF_CONFIGURATION})
        if ignored:
            logger.warning("ignored: %s; set launcher.slurm.* instead", ", ".join(ignored))
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
                problem = _message(done)
                if not _is_transient(problem):
                    break
            if job_id := self._look_up(spec, problem):
                return job_id
        raise _failed("sbatch", problem, "sbatch refused the job")

    def _look_up(self, spec: JobSpec, problem: str) -> str | None:
        """Return the job of an sbatch whose answer was lost. Raises SchedulerError."""
        time.sleep(self.retry_wait_s)
        try:
            return self.find(spec)
        except SchedulerError as error:
            check = f"Before you submit it again, check: squeue --me -n {shlex.quote(spec.name)}"
            raise SchedulerError(f"{problem}; Slurm may have accepted the job: {error}. {check}") from error

    def states(self, job_ids: list[str]) -> dict[str, JobState]:
        """Ask by one squeue, and by one sacct for the jobs that squeue has forgotten."""
        found = sum_up(_listed("-j", ",".join(job_ids))) if job_ids else {}
        forgotten = [job_id for job_id in job_ids if job_id not in found]
        if forgotten:
            found |= self.past(forgotten)
        return {job_id: found.get(job_id, JobState(job_id, State.UNKNOWN)) for job_id in job_ids}

    def survey(self, uid: int) -> dict[str, JobState]:
        """Return all jobs of an account by squeue's ids: `7`, `7_3`, `7_[4-9]`, `7+0`."""
        return {state.job_id: state for state in _listed("-u", str(uid))}

    def past(self, job_ids: Sequence[str]) -> dict[str, JobState]:
        """Return what accounting knows of jobs that squeue has forgotten; empty without accounting."""
        columns = "JobID,State,Reason,End,NodeList"
        try:
            text = output(["sacct", "-n", "-P", "-X", "-j", ",".join(job_ids), "-o", columns])
        except SchedulerError as error:
            logger.debug("no accounting: %s", error)
            return {}
        return sum_up(_parsed(text))

    def cancel(self, job_id: str) -> None:
        output(["scancel", job_id], *IS_OVER)

    def nudge(self, job_id: str) -> None:
        output(["scancel", "--batch", "--signal=USR1", job_id], *IS_OVER)

    def end_time(self, job_id: str) -> float | None:
        """Return when the job will be terminated, in Unix seconds, or None."""
        seen = sum_up(_listed("-j", job_id)).get(job_id)
        return seen.end_time if seen else None

    def nodes(self) -> list[Node]:
        """Return every node of every partition, by one sinfo. Raises SchedulerError."""
        return read_sinfo(output(SINFO))

    def test_only(self, script: str) -> tuple[bool, str]:
        """Return whether Slurm would accept a script now, and its message: when and where, or why not."""
        done = call(["sbatch", "--test-only"], SUBMIT_TIMEOUT_S, script)
        said = _message(done)
        if done.returncode != 0 and _is_transient(said):
            raise _failed("sbatch", said, "sbatch --test-only")
        return done.returncode == 0, said

    def find(self, spec: JobSpec) -> str | None:
        """Return the job with this tag, None where there is none. Raises SchedulerError."""
        for attempt in range(1, TRIES):
            try:
                return self._find(spec)
            except SchedulerError as error:
                logger.warning("asking again: %s", error)
                time.sleep(self.retry_wait_s * attempt)
        return self._find(spec)

    def _find(self, spec: JobSpec) -> str | None:
        text = output(["squeue", "-h", "-t", "all", "--me", "-n", spec.name, "-o", "%i|%k"])
        for line in text.splitlines():
            job_id, _, comment = line.partition("|")
            if spec.tag in comment.split():
                return whole_job(job_id)
        return None


def _listed(*selection: str) -> list[JobState]:
    """Return the jobs that squeue lists. Raises SchedulerError."""
    columns = "%i|%T|%r|%e|%N|%S"
    return _parsed(output(["squeue", "-h", "-t", "all", *selection, "-o", columns], "invalid job id"))


def _parsed(text: str) -> list[JobState]:
    """Read lines `id|state|reason|end|nodes|start`; of a requeued job the newest record is last."""
    found: dict[str, JobState] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) >= 5:
            job_id, native, reason, end, nodes, *start = fields
            found[job_id] = JobState(
                job_id, to_state(native), native, reason, _unix(end), nodes, _unix(start[0] if start else "")
            )
    return list(found.values())


class _TimedOut(SchedulerError):
    """A command gave no answer in time; it may have had its effect."""


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what a surrounding job or a user's defaults would say in our place."""
    return {name: value for name, value in environ.items() if name in KEPT or not name.startswith(LEAKS)}


def require(program: str) -> None:
    """Raise NoScheduler where this machine lacks a program of Slurm."""
    if shutil.which(program) is None:
        raise _absent(program)


def _absent(program: str) -> NoScheduler:
    return NoScheduler(f"{program} is not on the PATH: run this on a login node of a Slurm cluster.")


def call(
    argv: list[str], timeout_s: float = CALL_TIMEOUT_S, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm. Raises SchedulerError where it is missing or gives no answer in time."""
    env = clean_environment(os.environ)
    if argv[0] != "sbatch":  # which would pass it on to the job
        env["SLURM_TIME_FORMAT"] = "%Y-%m-%dT%H:%M:%S%z"
    try:
        return subprocess.run(
            argv, input=stdin, capture_output=True, text=True, errors="replace", timeout=timeout_s, env=env
        )
    except FileNotFoundError as error:
        raise _absent(argv[0]) from error
    except subprocess.TimeoutExpired as error:
        raise _TimedOut(f"{argv[0]} gave no answer within {timeout_s:g} s") from error


def scheduler_answers() -> bool:
    """Return whether the controller answers this node."""
    try:
        return call(["sinfo", "--noheader", "--format=%P"]).returncode == 0
    except SchedulerError:
        return False


def output(argv: list[str], *accepted: str) -> str:
    """Return what a command of Slurm prints. Raises SchedulerError for an error without `accepted` words."""
    done = call(argv)
    if done.returncode != 0 and not any(words in done.stderr.lower() for words in accepted):
        raise _failed(argv[0], _message(done), argv[0])
    return done.stdout


def _failed(program: str, said: str, what: str) -> SchedulerError:
    """Return the error of a program: that no controller answers it, else `what` failed with what it said."""
    if any(words in said.lower() for words in NO_CONTROLLER):
        last = said.rpartition(f"{program}: ")[2]
        return SchedulerError(
            f"{program} is on the PATH, but no Slurm controller answers it ({last}): on a cluster, see "
            f"`hpc-rl doctor`; {LOCAL_INSTEAD}"
        )
    return SchedulerError(f"{what}: {said}")


def _is_transient(problem: str) -> bool:
    return any(words in problem.lower() for words in TRANSIENT)


def _message(done: subprocess.CompletedProcess[str]) -> str:
    """Return the command's own message, on one line."""
    said = done.stderr.strip() or done.stdout.strip()
    return " ".join(said.split()) or f"exit code {done.returncode} without a message"


def _unix(text: str) -> float | None:
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:  # N/A, Unknown, NONE
        return None
