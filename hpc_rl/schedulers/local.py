"""This machine as a scheduler: it starts the rendered runner and derives states from the runner's files.

The runner is detached, or in the foreground of an existing Slurm job and on its nodes.
"""

import ctypes
import datetime
import os
import secrets
import signal
import socket
import subprocess
import time
from dataclasses import replace

from hpc_rl.core.errors import ExitCode, JobEvent, SchedulerError
from hpc_rl.core.proc import find_start_ticks
from hpc_rl.core.records import JobStateLine, ProcessRecord, load_job_state
from hpc_rl.core.trial import Trial
from hpc_rl.schedulers.base import JobSpec, JobState, State
from hpc_rl.schedulers.shared_query import NOT_LISTED, Poller
from hpc_rl.schedulers.slurm import SlurmScheduler, clean_environment

START_TIMEOUT_S = 10.0
ANSWER_S = 5.0  # for the query of another process, about an unknown job
KILLED = "the process that runs the job was killed"
PR_SET_PDEATHSIG = 1

# After the grace period, kill the rest of the process group; end as soon as the runner has ended.
_REAPER = """
for ((tick = 0; tick < $3 * 5; tick++)); do
  { read -r stat </proc/"$1"/stat; } 2>/dev/null || exit 0
  read -ra stat <<<"${stat##*) }"
  [[ ${stat[19]} == "$2" && ${stat[0]} != Z ]] || exit 0
  sleep 0.2
done
kill -KILL -- "$1" "-$1"
"""


class LocalScheduler:
    """Scheduler of one trial's jobs on this machine."""

    name = "local"

    def __init__(self, trial: Trial, grace_s: int = 30) -> None:
        self.trial = trial
        self.grace_s = grace_s  # whole seconds between TERM and KILL of a cancelled job, as Slurm's KillWait

    def submit(self, spec: JobSpec) -> str:
        """Start the runner, and wait until it has started."""
        job_id = self._make_id()
        output = self.trial.job_output(job_id)
        try:
            with output.open("ab") as stream:
                self._start(["bash", str(spec.script), job_id], stream.fileno())
        except (OSError, subprocess.SubprocessError) as error:
            raise SchedulerError(
                f"the processes of job {job_id} could not be started ({spec.script}): {error}"
            ) from error
        deadline = time.monotonic() + START_TIMEOUT_S
        while not load_job_state(self.trial, job_id):
            if time.monotonic() > deadline:
                said = output.read_text(errors="replace").strip()
                raise SchedulerError(
                    f"{spec.script} did not start its job within {START_TIMEOUT_S:g} s. Its output is in "
                    f"{output}: {said or 'nothing'}. Fix this problem, and submit again."
                )
            time.sleep(0.01)
        return job_id

    def query_states(self, job_ids: list[str]) -> dict[str, JobState]:
        return {job_id: self._look(job_id)[0] for job_id in job_ids}

    def cancel(self, *job_ids: str) -> None:
        """Send TERM to each runner, which forwards it; a detached helper sends KILL after the grace."""
        for job_id in job_ids:
            found = self._find_process(job_id)
            if found is not None and _signal(found[0], signal.SIGTERM):
                arguments = map(str, (*found, self.grace_s))
                _start_detached(["bash", "-c", _REAPER, "reaper", *arguments], subprocess.DEVNULL)

    def nudge(self, *job_ids: str) -> None:
        for job_id in job_ids:
            found = self._find_process(job_id)
            if found is not None:
                _signal(found[0], signal.SIGUSR1)

    def _make_id(self) -> str:
        now = datetime.datetime.now(datetime.UTC)
        return f"local-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"

    def _start(self, argv: list[str], output: int) -> None:
        """Start the runner. Raises OSError, subprocess.SubprocessError."""
        _start_detached(argv, output)

    def _look(self, job_id: str) -> tuple[JobState, tuple[int, int] | None]:
        """Return the state, and pid and start time of the runner, or of a supervisor that outlived it."""
        lines = load_job_state(self.trial, job_id)
        starts = [line for line in lines if line.event is JobEvent.STARTED]
        if not starts:
            return JobState(job_id, State.UNKNOWN), None
        start, last = starts[-1], lines[-1]
        state = JobState(job_id, State.RUNNING, native=last.event.value, nodes=start.host)
        if last.event is JobEvent.ENDED:
            code = "" if last.code is None else str(last.code)
            return replace(state, state=_judge_end(last), native=code, reason=last.reason), None
        if start.host != socket.gethostname():
            return self._judge_remote(state, start), None
        if _is_running(start):
            return state, (start.pid, start.start_ticks)
        if orphan := self._find_orphan(job_id):
            return replace(state, native="orphaned", reason=f"{KILLED}; the supervisor is stopping"), orphan
        return replace(state, state=State.FAILED, native="FAILED", reason=KILLED), None

    def _judge_remote(self, state: JobState, start: JobStateLine) -> JobState:
        """Return the state of a job whose runner started on another host."""
        reason = f"it was started on {start.host}; run this command there"
        return replace(state, state=State.UNKNOWN, native="", reason=reason)

    def _find_process(self, job_id: str) -> tuple[int, int] | None:
        """Return the process to signal, or None if none runs. Raises SchedulerError on another host."""
        state, process = self._look(job_id)
        if state.state is State.UNKNOWN and state.nodes:
            raise SchedulerError(f"job {job_id} runs on {state.nodes}: run this command there.")
        return process

    def _find_orphan(self, job_id: str) -> tuple[int, int] | None:
        """Return pid and start time of a supervisor that outlived its runner, from its process record."""
        for path in self.trial.attempts.glob(f"{job_id}.*/processes/supervisor-*.json"):
            left = ProcessRecord.read(path)
            if left is not None and left.host == socket.gethostname() and _is_running(left):
                return left.pid, left.start_ticks or 0
        return None


class AllocationScheduler(LocalScheduler):
    """Scheduler within a Slurm job: the runner is a child of this process, its roles are steps of the job.

    When this process dies, of any cause, the runner gets TERM: it saves, and ends.
    """

    name = "allocation"
    runner: subprocess.Popen[bytes] | None = None  # of this process

    def _make_id(self) -> str:
        # Several trials may use one job, and one trial a job several times.
        return f"{os.environ['SLURM_JOB_ID']}-{secrets.token_hex(3)}"

    def _start(self, argv: list[str], output: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.runner = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )

    def cancel(self, *job_ids: str) -> None:
        for job_id in job_ids:
            state, process = self._look(job_id)
            if process is None and state.state.alive:
                raise SchedulerError(
                    f"job {job_id} runs on {state.nodes}: its processes can be ended only there. Its "
                    "supervisor sees the request to cancel, saves the state and ends it."
                )
            super().cancel(job_id)

    def _judge_remote(self, state: JobState, start: JobStateLine) -> JobState:
        """Return the state of the runner, by a shared query about its Slurm job.

        Raises SchedulerError if Slurm does not answer.
        """
        job_id = state.job_id.partition("-")[0]
        account = self.trial.job_state(state.job_id).stat().st_uid
        answer = Poller(SlurmScheduler()).look({job_id: start.time}, account, patience_s=ANSWER_S)
        found = answer.states[job_id]
        if found.state.alive:
            return replace(state, end_time=found.end_time)
        if found.state is State.UNKNOWN and found.native != NOT_LISTED:
            raise SchedulerError(
                answer.complaint or f"Slurm does not know job {job_id} yet; try again in a few seconds"
            )
        return replace(state, state=State.FAILED, native="FAILED", reason=f"the Slurm job {job_id} has ended")


def _is_running(start: JobStateLine | ProcessRecord) -> bool:
    return start.pid > 1 and find_start_ticks(start.pid) == start.start_ticks


def _judge_end(line: JobStateLine) -> State:
    if line.code == ExitCode.DONE:
        return State.DONE
    return State.CANCELLED if line.cancelled else State.FAILED


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    except PermissionError as error:
        raise SchedulerError(
            f"process {pid} can't be signalled, because another user started it; run the command as that user"
        ) from error
    return True


def _start_detached(argv: list[str], output: int) -> None:
    """Start a process in a new session. Raises OSError, subprocess.SubprocessError."""
    subprocess.run(
        ["setsid", "--fork", *argv],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        check=True,
        env=clean_environment(os.environ),
    )
