"""The program that a job script executes.

It starts the supervisor, and restarts it if it is killed; runs the hooks; records each start and end; and
requests the next start. The loop (job_loop.py) takes the signals, job_policy.py decides.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from hpc_rl.core.errors import ExitCode, JobEvent, StopCause
from hpc_rl.core.resource_limits import raise_limits
from hpc_rl.supervise.job_hooks import EventHooks, HookRun, HookStep, describe_failures
from hpc_rl.supervise.job_loop import Child, JobLoop
from hpc_rl.supervise.job_policy import (
    AFTER_STOP,
    KILLED_BY_SYSTEM,
    Decision,
    Facts,
    JobSettings,
    ScriptAction,
    choose_excluded,
    choose_rule,
    compute_environment_changes,
    count_slurm_restarts,
    decide_requeue,
    name_job,
)

MAX_RESTARTS = 20  # on this machine, without a scheduler that limits them
HANG_S = 600.0  # of a supervisor without any activity
ANSWER_S = 20.0  # time for one query of Slurm
ASK_EVERY_S, NUM_ASKS = 10.0, 360  # while Slurm does not answer: an hour
TEARDOWN = "BASH_FUNC_teardown%%"  # a function exported by bash, from an override of the script


APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class Superseded(Exception):
    """Slurm has started this job again on other nodes."""


class JobRunner:
    """One start of a job, from the first line of its script to its exit code."""

    def __init__(self, settings: JobSettings, arguments: Sequence[str]) -> None:
        self.settings = settings
        self.names = name_job(settings, arguments, os.environ, time.time(), os.urandom(2).hex())
        self.loop = JobLoop(self._handle_signal)
        self._teardown = os.environ.pop(TEARDOWN, "")
        self._hang_s = float(os.environ.get("HPC_RL_SUPERVISOR_HANG_S") or HANG_S)
        self._supervisor: Child | None = None
        self._hooks: EventHooks | None = None
        self._on_preempt: EventHooks | None = None
        self._hook_failure = ""
        self._generations: set[str] = set()
        self._is_attempting = False
        self._has_term = False  # by a TERM
        self._is_asking = False  # Slurm, for the next start
        self._is_time_limit: bool | None = None  # unknown before a TERM
        self._is_requeued = False

    # --- signals -------------------------------------------------------------------------------------------

    def _handle_signal(self, number: signal.Signals) -> None:
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            self._leave_drain_intent()
            self._forward(signal.SIGUSR1)
            return
        self._has_term = True
        if self._is_asking:
            return  # a requeue itself causes a TERM
        self._forward(signal.SIGTERM)
        if self._hooks is not None:
            self._hooks.end()
        self._start_on_preempt()

    def _forward(self, number: signal.Signals) -> None:
        if self._supervisor is not None:
            self._supervisor.kill(number)

    def _leave_drain_intent(self) -> None:
        """Write a request to stop: it outlives a killed supervisor, and waits for one that is starting."""
        request = {"cause": StopCause.USER_SIGNAL, "reason": "SIGUSR1", "time": int(time.time())}
        try:
            with open(self.names.drain_intent, "x") as file:
                file.write(json.dumps(request) + "\n")
        except FileExistsError:
            pass
        except OSError as error:
            self._print(f"the request to stop can't be written: {error}")

    # --- records -------------------------------------------------------------------------------------------

    def _print(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        with contextlib.suppress(OSError):
            print(f"{stamp} job {self.names.job_id}: {text}", file=sys.stderr, flush=True)

    def _record(self, event: JobEvent, **more: Any) -> None:
        """Append one line to jobs/<job id>.state by one write."""
        row = {"event": event, "time": int(time.time()), "restart": self.names.restart, **more}
        try:
            with open(self.names.state, "ab", buffering=0) as file:
                file.write(json.dumps(row).encode() + b"\n")
        except OSError as error:
            self._print(
                f"can't write jobs/{self.names.job_id}.state: {error}; the job continues, and "
                "`hpc-rl status` may show an older state"
            )

    def _leave_submission_record(self) -> None:
        """Record a submission by hand; keep an existing record of `hpc-rl submit`."""
        settings = self.settings
        row: dict[str, Any] = {"job_id": self.names.job_id, "scheduler": settings.scheduler}
        row["start_mode"] = settings.start_mode
        if settings.from_step:
            row["from_step"] = int(settings.from_step)
        if settings.new_batches:
            row["new_batches"] = True
        row |= {"time": int(time.time()), "command": [settings.scheduler]}
        if self.names.slurm_job not in ("", self.names.job_id):
            row["native_id"] = self.names.slurm_job
        folder, name = os.path.split(self.names.submission)
        temp = f"{folder}/.{name}.{os.getpid()}"
        with contextlib.suppress(OSError):
            if not os.path.exists(self.names.submission):
                with open(temp, "w") as file:
                    file.write(json.dumps(row) + "\n")
                with contextlib.suppress(FileExistsError):
                    os.link(temp, self.names.submission)
                os.unlink(temp)

    def _identify(self) -> dict[str, Any]:
        """Return host, pid and kernel start time, which identify this process."""
        ticks = _load_stat(os.getpid())[19]
        return {"host": os.uname().nodename, "pid": os.getpid(), "start_ticks": int(ticks)}

    # --- the job -------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run the job; return the exit code of the script."""
        settings = self.settings
        raise_limits()
        dropped, changed = compute_environment_changes(settings, self.names, os.environ)
        for name in dropped:
            os.environ.pop(name, None)
        os.environ.update(changed)
        if settings.stop_asked:
            self._leave_drain_intent()
        watch = self._start_watch()
        try:
            if settings.is_slurm and settings.layout == "jobs" and not settings.is_server_task:
                # Submit servers again that gave their nodes back while this job waited.
                self.loop.spawn(self._submit_again("servers"))
            self._leave_submission_record()
            return self._repeat_attempts()
        except Superseded:
            self._print("Slurm has started this job again on other nodes: this start ends")
            return int(ExitCode.STOPPED)
        finally:
            if watch is not None:
                watch.kill(signal.SIGTERM)

    def _start_watch(self) -> Child | None:
        """Start the keeper of watches on two other nodes, which give the job back if Slurm loses this node.

        With --no-kill the job would continue without this script and the supervisor, and no process would end
        it.
        """
        settings, names = self.settings, self.names
        if settings.n_nodes < 2 or not settings.is_slurm:
            return None
        argv = [settings.python, "-m", "hpc_rl.roles.first_node_watch", "keep"]
        argv += ["--trial_dir", settings.trial_dir, "--job_id", names.job_id, "--restart", str(names.restart)]
        argv += ["--slurm_job", self.names.slurm_job, "--first_node", os.environ["SLURMD_NODENAME"]]
        log = os.open(f"{settings.trial_dir}/jobs/{names.job_id}.watch.log", APPEND, 0o666)
        try:
            return self.loop.spawn(argv, output=log, errors=log)
        finally:
            os.close(log)

    def _repeat_attempts(self) -> int:
        while True:
            code = self._make_attempt()
            decision = self._decide(code)
            if decision.starts_again and self.settings.is_slurm:
                if self._is_requeued or self._ask_again(code=code):
                    self._print(f"stopped with its state saved (code {code}): requeued")
                    return code
                # A cancel may have come in between, and is then the reason.
                decision = self._decide(code)
                if decision.starts_again:
                    reason = f"{decision.reason}, but Slurm accepted neither a requeue nor a successor job"
                    decision = Decision(False, reason)
            elif decision.starts_again and not (reason := self._explain_no_restart()):
                self._record(JobEvent.REQUEUED, code=code)
                self.names = self.names._replace(restart=self.names.restart + 1)
                continue
            elif decision.starts_again:
                decision = Decision(False, reason)
            self._print(f"exits with code {code}: {decision.reason}")
            cause = {"cause": decision.cause} if decision.cause else {}
            ended = {"code": code, "cancelled": decision.is_cancelled, "reason": decision.reason}
            self._record(JobEvent.ENDED, **ended, **cause)
            return self._tear_down(code)

    def _make_attempt(self) -> int:
        """Run one attempt with its hooks; return its code."""
        self._record(JobEvent.STARTED, **self._identify())
        self._is_attempting = True
        code = KILLED_BY_SYSTEM
        if self._call_hooks("pre_job", code) and self._call_hooks("pre_node", code):
            code = self._supervise_attempt()
        elif self._has_term:
            self._hook_failure = ""
        else:
            code = int(ExitCode.FAILED)
        # After every attempt that began, also before a restart.
        failure, self._is_attempting = self._hook_failure, False
        if (hooks := self._on_preempt) is not None:
            self._wait(lambda: hooks.is_over)
            if problem := describe_failures(hooks.answers, hooks.limit_s):
                self._print(f"hook: {problem}; see {self.names.attempt_dir}/hooks")
            self._on_preempt = None
        self._call_hooks("post_node", code)
        self._call_hooks("post_job", code)
        self._hook_failure = failure
        return code

    def _explain_no_restart(self) -> str:
        """Return why a job without Slurm is not restarted in place, or ""."""
        if self.settings.scheduler == "allocation":
            # Somebody requested the stop, or the time of the surrounding job is over.
            if os.path.exists(self.names.drain_intent):
                return choose_rule(ExitCode.STOPPED).reason
            if bad := ",".join(self._find_blamed_nodes()):
                return (
                    f"the attempt failed because of {bad}, and a restart here has the same nodes: "
                    f"use another allocation, by salloc --exclude={bad}"
                )
        return f"stopped {MAX_RESTARTS} times" if self.names.restart >= MAX_RESTARTS else ""

    def _find_blamed_nodes(self) -> list[str]:
        """Return the nodes in the newest event about bad nodes of this attempt."""
        nodes: list[str] = []
        with contextlib.suppress(OSError), open(f"{self.names.attempt_dir}/events.jsonl") as file:
            for line in file:
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    row = json.loads(line)
                    if row["event"] == "bad_nodes":
                        nodes = [str(node) for node in row["nodes"]]
        return nodes

    def _decide(self, code: int) -> Decision:
        self.loop.take_pending()
        if self._has_term:
            self._look_for_time_limit()
        return decide_requeue(
            Facts(
                code,
                self.settings.recover_mode,
                is_cancelled=self._is_cancelled(),
                has_term=self._has_term,
                is_time_limit=self._is_time_limit is True,
                is_requeued=self._is_requeued,
                hook_failure=self._hook_failure,
            )
        )

    def _is_cancelled(self) -> bool:
        return os.path.exists(self.names.cancel_intent)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Wait; after a TERM, ask Slurm at once whether the time limit sent it, and for the next start."""
        while not is_over():
            self.loop.turn()
            if self._has_term:
                self._look_for_time_limit()

    def _tear_down(self, code: int) -> int:
        """Run the teardown function of an override of the script; return the final exit code."""
        if not self._teardown:
            return code
        # A function exported by bash begins with `() {`.
        text = f'teardown {self._teardown}\nteardown\nexit "$rc"'
        own = {"rc": str(code), "trial_dir": self.settings.trial_dir, "python": self.settings.python}
        own["workdir"] = self.settings.workdir
        child = self.loop.spawn(["bash", "-euo", "pipefail", "-c", text, "teardown"], env=own)
        self.loop.wait_until(lambda: child.code is not None)
        return child.code or 0

    # --- the supervisor ------------------------------------------------------------------------------------

    def _supervise_attempt(self) -> int:
        """Run the supervisor; restart it in place if it is killed, as often as a failed role."""
        num_kills, code = 0, KILLED_BY_SYSTEM
        self._has_new_generation()
        while not self._has_term and not self._is_cancelled():
            code = self._start_supervisor()
            self.loop.take_pending()
            if self._has_new_generation():
                num_kills = 0
            # After a TERM, Slurm may have killed it: start nothing.
            is_killed = choose_rule(code).action is ScriptAction.RESTART_SUPERVISOR
            if not is_killed or num_kills >= self.settings.recover_retries or self._has_term:
                return code
            num_kills += 1
            self._record(JobEvent.SUPERVISOR_KILLED, code=code)
            self._print(
                f"the supervisor was killed (code {code}) and is started again: restart {num_kills} of "
                f"{self.settings.recover_retries} without a new checkpoint (recover.retries)"
            )
        return code

    def _start_supervisor(self) -> int:
        argv = [self.settings.python, "-m", "hpc_rl.roles.supervisor", "--trial_dir", self.settings.trial_dir]
        argv += ["--attempt", self.names.attempt, "--steps", self.settings.steps]
        env = {"HPC_RL_SCRIPT_PID": str(os.getpid())}
        # USR1 waits until the supervisor listens: it must not kill a starting supervisor.
        supervisor = self.loop.spawn(argv, env=env, held=[signal.SIGUSR1])
        self._supervisor = supervisor
        self._guard_supervisor(supervisor, "", 0.0)
        if self._has_term:
            self._forward(signal.SIGTERM)
        self._wait(lambda: supervisor.code is not None)
        self._supervisor = None
        assert supervisor.code is not None
        return supervisor.code

    def _guard_supervisor(self, supervisor: Child, last_ticks: str, idle_s: float) -> None:
        """Kill a supervisor without any activity for `hang_s`: it is stopped or stuck."""
        if supervisor.code is not None:
            return
        stat = _load_stat(supervisor.pid)
        ticks, state = ".".join(stat[11:13]), "".join(stat[:1])
        period_s = min(self._hang_s, 10.0)
        # In state D it waits for a file system or a device; their fail-over may take minutes.
        idle_s = idle_s + period_s if ticks == last_ticks and state != "D" else 0.0
        if idle_s >= self._hang_s:
            self._print(f"the supervisor used no CPU time for {idle_s:g} s, so the job script kills it")
            supervisor.kill(signal.SIGKILL)
        self.loop.call_after(period_s, lambda: self._guard_supervisor(supervisor, ticks, idle_s))

    def _has_new_generation(self) -> bool:
        """Return whether there is a new checkpoint since the last call."""
        try:
            names = set(os.listdir(f"{self.settings.trial_dir}/recover"))
        except OSError:
            return False
        new = {name for name in names if name.startswith("gen-")} - self._generations
        self._generations |= new
        return bool(new)

    # --- hooks ---------------------------------------------------------------------------------------------

    def _call_hooks(self, event: str, code: int) -> bool:
        """Run the hooks of an event; return whether all succeeded, else set `_hook_failure`."""
        names: tuple[str, ...] = getattr(self.settings, event)
        if not names:
            return True
        self._hook_failure = ""
        on_nodes = event.endswith("_node") and self.settings.steps == "srun"
        try:
            hooks = self._make_hooks(
                HookStep if on_nodes else HookRun, event, names, {"HPC_RL_CODE": str(code)}
            )
            self._hooks = hooks
            hooks.start()
            self._wait(lambda: hooks.is_over)
        except OSError as error:
            self._hook_failure = f"{event} can't run: {error}"
            return False
        finally:
            self._hooks = None
        problems = [describe_failures(hooks.answers, hooks.limit_s), hooks.explain_missing()]
        self._hook_failure = "; ".join(filter(None, problems))
        if self._hook_failure:
            self._print(f"hook: {self._hook_failure}; see {self.names.attempt_dir}/hooks")
        return not self._hook_failure and not (self._has_term and event.startswith("pre_"))

    def _make_hooks(
        self, kind: type[EventHooks], event: str, names: Sequence[str], env: dict[str, str]
    ) -> EventHooks:
        logs = f"{self.names.attempt_dir}/hooks"
        os.makedirs(logs, exist_ok=True)
        paths = [f"{self.settings.trial_dir}/scripts/{name}" for name in names]
        limit_s = self.settings.hook_limit_s
        if event == "on_preempt":
            limit_s = self.settings.on_preempt_limit_s
        env = env | {"HPC_RL_TRIAL_DIR": self.settings.trial_dir, "HPC_RL_ATTEMPT": self.names.attempt}
        return kind(self.loop, event, paths, limit_s, logs, env)

    def _start_on_preempt(self) -> None:
        """Start these hooks once, while the supervisor saves."""
        names = self.settings.on_preempt
        if not names or not self._is_attempting or self._on_preempt is not None or self._is_cancelled():
            return
        with contextlib.suppress(OSError):
            hooks = self._make_hooks(HookRun, "on_preempt", names, {})
            self._on_preempt = hooks
            hooks.start()

    # --- the next start ------------------------------------------------------------------------------------

    def _look_for_time_limit(self) -> None:
        """Find out once whether the time limit sent a TERM; if so, request the next start now."""
        if self._is_time_limit is not None:
            return
        self._is_time_limit = False
        self._is_time_limit = self._is_out_of_time()
        if not self._is_time_limit or self.settings.recover_mode == "disabled" or self._is_cancelled():
            return
        if AFTER_STOP[StopCause.TIME_LIMIT].action is ScriptAction.START_AGAIN:
            self._is_requeued = self._ask_again(cause=StopCause.TIME_LIMIT, reason="the time limit")

    def _is_out_of_time(self) -> bool:
        """Return whether Slurm reports the time limit as the reason; after a cancel it reports another."""
        return self.settings.is_slurm and " Reason=TimeLimit " in (self._show_job() or "")

    def _show_job(self) -> str | None:
        """Return Slurm's description of this job; None if it does not answer."""
        command = ["scontrol", "show", "job", "-o", self.names.slurm_job]
        code, text = self.loop.run(command, ANSWER_S)
        return None if code else text

    def _ask_again(self, **details: Any) -> bool:
        """Requeue this script, or submit a successor; return whether Slurm accepted one of them."""
        if not self.settings.is_slurm:
            return False
        if self.settings.backend == "submitit":
            # submitit requeues a job if its last record is this one.
            self._record(JobEvent.REQUEUED, **details)
            return True
        if not self._is_newest_start():
            raise Superseded
        self._is_asking = True
        try:
            # This may take long, so do it before the last look for a cancel.
            excluded = self._choose_excluded()
            if not self._is_wanted():
                return False
            if self.settings.continue_by == "requeue":
                if self._requeue(excluded):
                    self._record(JobEvent.REQUEUED, **details)
                    return True
                self._print(
                    f"Slurm refuses to requeue job {self.names.slurm_job}; a successor job is submitted"
                )
            return self._submit_successor(excluded, details)
        finally:
            self._is_asking = False

    def _is_newest_start(self) -> bool:
        """Return whether Slurm has not restarted this job elsewhere, because this node may be cut off.

        Waits up to an hour while Slurm does not answer.
        """
        for _ in range(NUM_ASKS):
            if self._has_term:
                return True
            answer = self._show_job()
            if answer is not None:
                own = f" Restarts={count_slurm_restarts(os.environ)} "
                return " Restarts=" not in answer or own in f"{answer} "
            self._print(f"Slurm does not answer; trying again in {ASK_EVERY_S:g} s")
            self.loop.sleep(ASK_EVERY_S, lambda: self._has_term)
        return True

    def _is_wanted(self) -> bool:
        """Return False once the job was cancelled, or got a TERM not caused by the time limit."""
        self.loop.take_pending()
        if self._has_term and self._is_time_limit is None:
            self._is_time_limit = self._is_out_of_time()
        return not self._is_cancelled() and (not self._has_term or self._is_time_limit is True)

    def _requeue(self, excluded: str) -> bool:
        """Request another start under the same job id. Only a pending job accepts nodes to exclude."""
        job = self.names.slurm_job
        code, _ = self.loop.run(["scontrol", "requeue", job], is_disturbed=False)
        if code:
            return False
        if os.path.exists(self.names.exclude):  # otherwise there never was a bad node
            job_id = os.environ["SLURM_JOB_ID"]
            components = [job_id, f"{job_id}+1"] if self.settings.layout == "hetjob" else [job]
            for component in components:
                update = ["scontrol", "update", f"jobid={component}", f"ExcNodeList={excluded}"]
                code, _ = self.loop.run(update, is_disturbed=False)
                if code:
                    self._print(f"job {component} is requeued, but Slurm did not exclude {excluded} from it")
        return True

    def _submit_successor(self, excluded: str, details: dict[str, Any]) -> bool:
        """Submit the job that continues this one; cancel it if a signal came meanwhile."""
        settings = self.settings
        flags = ["--restart", str(self.names.restart + 1), "--after", self.names.slurm_job]
        if os.path.exists(self.names.exclude):
            flags += ["--exclude", excluded]
        flags += ["--name", settings.job_name, "--script", settings.script_name]
        if settings.is_server_task:
            flags += ["--array", os.environ["SLURM_ARRAY_TASK_ID"], self.names.trial_job]
        code, text = self.loop.run([*self._submit_again("successor"), *flags], is_disturbed=False)
        job_id = text.strip()
        if code or not job_id:
            return False
        if self._is_wanted():
            self._record(JobEvent.REQUEUED, **details, successor=job_id)
            return True
        self._print(f"a signal stopped this job, so its new successor, job {job_id}, is cancelled")
        self.loop.run(["scancel", job_id], is_disturbed=False)
        return False

    def _submit_again(self, what: str) -> list[str]:
        argv = [self.settings.python, "-m", "hpc_rl.roles.submit_again", what]
        return [*argv, "--trial_dir", self.settings.trial_dir, "--job_id", self.names.job_id]

    def _choose_excluded(self) -> str:
        """Return the nodes of the configuration, and as many currently bad nodes as can be spared."""
        configured = self.settings.exclude
        try:
            with open(self.names.exclude) as file:
                bad = [node for node in file.read().strip().split(",") if node]
        except OSError:
            return configured
        if not bad:
            return configured
        parts = ("_HET_GROUP_0", "_HET_GROUP_1") if self.settings.layout == "hetjob" else ("",)
        partitions = ",".join(os.environ.get(f"SLURM_JOB_PARTITION{part}", "") for part in parts)
        num_needed = sum(int(os.environ.get(f"SLURM_JOB_NUM_NODES{part}") or 1) for part in parts)
        own: list[str] = []
        if configured:
            _, text = self.loop.run(["scontrol", "show", "hostnames", configured], ANSWER_S)
            own = text.split()
        _, text = self.loop.run(["sinfo", "-h", "-N", "-p", partitions, "-o", "%N"], ANSWER_S)
        chosen = choose_excluded(bad, text.split(), own, num_needed)
        if chosen:
            self._print(f"bad nodes that the next start avoids: {','.join(chosen)}")
        if left := [node for node in bad if node not in chosen and node not in own]:
            self._print(f"bad nodes that stay in use, because too few others are left: {','.join(left)}")
        return ",".join(filter(None, [configured, *chosen]))


def _load_stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the program's name; an empty list if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
