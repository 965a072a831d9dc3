"""Slurm by its own commands: sbatch, squeue, sacct, scancel, scontrol. One call per question, each with a time limit."""

from __future__ import annotations

import datetime
import logging
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence

from hpc_rl.errors import SchedulerError
from hpc_rl.schedulers.base import JobSpec, JobState, State
from hpc_rl.schedulers.sinfo import SINFO, Node, read_sinfo
from hpc_rl.schedulers.slurm_parts import fold, whole
from hpc_rl.schedulers.slurm_states import parse

logger = logging.getLogger(__name__)

LEAKS = (
    "SLURM_",
    "SBATCH_",
    "SRUN_",
    "SALLOC_",
    "SQUEUE_",
    "SINFO_",
    "SCANCEL_",
    "SACCT_",
    "SCONTROL_",
    "PMI",
    "OMPI_",
    "SPANK_",
)
TRANSIENT = (
    "socket timed out",
    "unable to contact slurm controller",
    "resource temporarily unavailable",
    "connection refused",
)
JOB_ID = re.compile(r"^(\d+)(?:;\S+)?$", re.MULTILINE)
SUBMIT_TIMEOUT_S = 30.0
TRIES = 3  # of sbatch, and of the look for a job whose sbatch gave no answer
CALL_TIMEOUT_S = 15.0


class SlurmScheduler:
    """Scheduler on a Slurm cluster."""

    name = "slurm"

    def __init__(self, retry_wait_s: float = 2.0) -> None:
        self.retry_wait_s = retry_wait_s

    def submit(self, spec: JobSpec) -> str:
        """One sbatch. Where its answer is lost, the job is looked up by its tag before anything is tried again."""
        ignored = sorted(name for name in os.environ if name.startswith("SBATCH_"))
        if ignored:
            logger.warning("not passed on to sbatch, the script says what is wanted: %s", ", ".join(ignored))
        job_id, problem = "", ""
        for _ in range(TRIES):
            job_id, problem, lost = self._sbatch(spec)
            job_id = job_id or (self._look_up(spec, problem) if lost else "")
            if job_id or not lost:
                break
        if not job_id:
            raise SchedulerError(f"sbatch refused the job: {problem}")
        return job_id

    @staticmethod
    def _sbatch(spec: JobSpec) -> tuple[str, str, bool]:
        """Id of the job; else what went wrong, and whether the job may be there all the same."""
        try:
            done = _call(
                ["sbatch", "--parsable", *_beside(spec), str(spec.script), *spec.arguments], SUBMIT_TIMEOUT_S
            )
        except _TimedOut as error:
            return "", str(error), True
        found = JOB_ID.findall(done.stdout)
        if done.returncode == 0 and found:
            return found[-1], "", False  # a site's banner comes before it
        problem = _words(done)
        return "", problem, any(words in problem.lower() for words in TRANSIENT)

    def _look_up(self, spec: JobSpec, problem: str) -> str:
        """The job of an sbatch whose answer was lost; "" where there is none. Raises SchedulerError where that can't be told."""
        time.sleep(self.retry_wait_s)
        try:
            return self.find(spec) or ""
        except SchedulerError as error:
            look = f"Before it is submitted again, look: squeue --me -n {shlex.quote(spec.name)}"
            raise SchedulerError(
                f"{problem}; whether Slurm has the job can't be told: {error}. {look}"
            ) from error

    def states(self, job_ids: list[str]) -> dict[str, JobState]:
        """One squeue; sacct only for the jobs that squeue has forgotten. Works without accounting."""
        found = self._squeue(job_ids) if job_ids else {}
        forgotten = [job_id for job_id in job_ids if job_id not in found]
        if forgotten:
            found |= self._sacct(forgotten)
        return {job_id: found.get(job_id, JobState(job_id, State.UNKNOWN)) for job_id in job_ids}

    def survey(self, uid: int) -> dict[str, JobState]:
        """Every job of an account that Slurm remembers, by one squeue. Ids are squeue's own: `7`, `7_3`, `7_[4-9]`, `7+0`."""
        return self._listed(["-u", str(uid)])

    def past(self, job_ids: list[str]) -> dict[str, JobState]:
        """What accounting knows of jobs that squeue has forgotten, by one sacct; empty where there is none."""
        return self._sacct(job_ids)

    def cancel(self, job_id: str) -> None:
        _checked(["scancel", job_id])

    def nudge(self, job_id: str) -> None:
        _checked(["scancel", "--batch", "--signal=USR1", job_id])

    def requeue(self, job_id: str) -> None:
        _checked(["scontrol", "requeue", job_id])

    def end_time(self, job_id: str) -> float | None:
        seen = self._squeue([job_id]).get(job_id)
        return seen.end_time if seen else None

    def nodes(self) -> list[Node]:
        """Every node of every partition, by one sinfo. Raises SchedulerError."""
        done = _call(SINFO, CALL_TIMEOUT_S)
        if done.returncode != 0:
            raise SchedulerError(f"sinfo: {_words(done)}")
        return read_sinfo(done.stdout)

    def test_only(self, script: str) -> tuple[bool, str]:
        """Whether Slurm would take a script now, and its words: when and where, or why not. Raises SchedulerError."""
        done = _call(["sbatch", "--test-only"], SUBMIT_TIMEOUT_S, script)
        said = _words(done)
        if done.returncode != 0 and any(words in said.lower() for words in TRANSIENT):
            raise SchedulerError(f"sbatch --test-only: {said}")
        return done.returncode == 0, said

    def find(self, spec: JobSpec) -> str | None:
        """The job that carries this tag, where Slurm knows one. Raises SchedulerError where it does not answer, asked again."""
        for attempt in range(1, TRIES):
            try:
                return self._find(spec)
            except SchedulerError as error:
                logger.warning("asking again: %s", error)
                time.sleep(self.retry_wait_s * attempt)
        return self._find(spec)

    def _find(self, spec: JobSpec) -> str | None:
        done = _call(["squeue", "-h", "-t", "all", "--me", "-n", spec.name, "-o", "%i|%k"], CALL_TIMEOUT_S)
        if done.returncode != 0:
            raise SchedulerError(f"squeue: {_words(done)}")
        for line in done.stdout.splitlines():
            job_id, _, comment = line.partition("|")
            if spec.tag in comment.split():
                return whole(job_id)
        return None

    def _squeue(self, job_ids: Sequence[str]) -> dict[str, JobState]:
        return fold(self._listed(["-j", ",".join(job_ids)]).values())

    def _listed(self, selection: list[str]) -> dict[str, JobState]:
        done = _call(["squeue", "-h", "-t", "all", *selection, "-o", "%i|%T|%r|%e|%N|%S"], CALL_TIMEOUT_S)
        if done.returncode != 0 and "invalid job id" not in done.stderr.lower():
            raise SchedulerError(f"squeue: {_words(done)}")
        return {state.job_id: state for state in _parsed(done.stdout)}

    def _sacct(self, job_ids: Sequence[str]) -> dict[str, JobState]:
        """Empty where the site keeps no accounting: then the trial's own files tell."""
        try:
            done = _call(
                ["sacct", "-n", "-P", "-X", "-j", ",".join(job_ids), "-o", "JobID,State,Reason,End,NodeList"],
                CALL_TIMEOUT_S,
            )
        except SchedulerError as error:
            logger.debug("no accounting: %s", error)
            return {}
        return fold(_parsed(done.stdout)) if done.returncode == 0 else {}


def _parsed(text: str) -> list[JobState]:
    """Lines `id|state|reason|end|nodes|start`; of several records of a requeued job the newest comes last."""
    found: dict[str, JobState] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) >= 5:
            job_id, native, reason, end, nodes, *start = fields
            found[job_id] = JobState(
                job_id, parse(native), native, reason, _unix(end), nodes, _unix(start[0] if start else "")
            )
    return list(found.values())


def _beside(spec: JobSpec) -> list[str]:
    """What the script does not say itself; on the command line it wins over the script."""
    return [
        *([f"--dependency=afterany:{spec.after}"] if spec.after else []),
        *([f"--array={spec.array}"] if spec.array else []),
        *([f"--exclude={spec.exclude}"] if spec.exclude is not None else []),
        *([] if spec.known_as else [f"--comment={spec.tag} {spec.comment}".rstrip()]),
    ]


class _TimedOut(SchedulerError):
    """A command gave no answer in time; it may have done its work."""


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what a surrounding job or a user's defaults would say in our place; SLURM_CONF stays."""
    return {
        name: value for name, value in environ.items() if name == "SLURM_CONF" or not name.startswith(LEAKS)
    }


def require(program: str) -> None:
    """Raises SchedulerError where this machine does not have a program of Slurm's."""
    if shutil.which(program) is None:
        raise _absent(program)


def _absent(program: str) -> SchedulerError:
    return SchedulerError(f"{program} is not on the PATH: this machine is no login node of a Slurm cluster.")


def _call(argv: list[str], timeout_s: float, said: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv,
            input=said,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=clean_environment(os.environ) | {"SLURM_TIME_FORMAT": "%Y-%m-%dT%H:%M:%S%z"},
        )
    except FileNotFoundError as error:
        raise _absent(argv[0]) from error
    except subprocess.TimeoutExpired as error:
        raise _TimedOut(f"{argv[0]} gave no answer within {timeout_s:g} s") from error


def _checked(argv: list[str]) -> None:
    done = _call(argv, CALL_TIMEOUT_S)
    if (
        done.returncode != 0
        and "invalid job id" not in done.stderr.lower()
        and "already completed" not in done.stderr.lower()
    ):
        raise SchedulerError(f"{argv[0]}: {_words(done)}")


def _words(done: subprocess.CompletedProcess[str]) -> str:
    """The command's own words, on one line."""
    said = done.stderr.strip() or done.stdout.strip()
    return " ".join(said.split()) or f"exit code {done.returncode} without a word"


def _unix(text: str) -> float | None:
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:  # N/A, Unknown, NONE
        return None
