"""The supervisor of a trial: it owns the trial, watches progress and wall time, and handles stop requests."""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from hpc_rl.checkpoint.start_facts import count_failures
from hpc_rl.config.options.experiment import Config
from hpc_rl.core.errors import ExitCode, FailureClass, Stale, StopCause
from hpc_rl.core.records import DoneRecord, DrainIntent, EventKind, JobRecord, ProcessRecord, load_events
from hpc_rl.core.trial import Attempt, load_object, write_json
from hpc_rl.name_resolve import keys
from hpc_rl.name_resolve.roster import Registrar
from hpc_rl.name_resolve.shared_fs import Lease, LeaseView
from hpc_rl.plan.schema import Plan, Unit
from hpc_rl.schedulers.slurm import can_reach_scheduler
from hpc_rl.supervise import failure_policy, ownership
from hpc_rl.supervise.bad_nodes import NodeTrouble
from hpc_rl.supervise.failure_policy import (
    RESUME,
    STOPS,
    UnitExit,
)
from hpc_rl.supervise.host_watch import ISOLATED_S, HostWatch
from hpc_rl.supervise.network_check import NetworkFindings, Preflight
from hpc_rl.supervise.processes import Steps, describe_unplaced
from hpc_rl.supervise.replacements import Replacements
from hpc_rl.supervise.state_machine import DRAIN_GRACE_S, AttemptMachine, Avoid, Finish, Key, Phase
from hpc_rl.supervise.unit_loop import RateLimit, UnitLoop, tolerate_errors
from hpc_rl.weights import disk

OBSERVE_EVERY_S = 1.0
DEADLINE_EVERY_S = 10.0
# Before the stop: if a trainer stops by itself earlier, it has another reason.
ANNOUNCE_S = 3600.0
HANG_UP_S = 1.0  # time for srun to forward the end of a pipe, before it ends its step


class TrialRunner(UnitLoop):
    """The supervisor of one attempt of a trial.

    `end_time` returns the end of the job, in Unix seconds, or None; it is called rarely.
    """

    def __init__(
        self,
        attempt: Attempt,
        plan: Plan,
        config: Config,
        steps: Steps,
        end_time: Callable[[], float | None],
        preflight: Preflight | None = None,
    ) -> None:
        machine = AttemptMachine(plan.units, plan.recover_mode, plan.recover_retries)
        super().__init__(attempt, plan, config, steps, machine, end_time)
        self._preflight = preflight
        self._history_bytes = disk.find_history_bytes(config)
        self._hosts: HostWatch | None = None
        self._silent: dict[str, float] = {}  # silent nodes, with the seconds
        self._replacements = Replacements(attempt, plan, lambda: self.clock())
        self._lease: Lease | None = None
        self._registrar: Registrar | None = None
        self._generations: set[tuple[str, int]] = set()
        # without a trainer, by incarnation of the rollout role
        self._progress_at_start: dict[int, int] = {}
        self._with_progress: set[int] = set()
        # The job script may be dead already.
        self._parent = int(os.environ.get("HPC_RL_SCRIPT_PID") or os.getppid())
        self._observing = RateLimit(OBSERVE_EVERY_S)
        self._checking = RateLimit(ownership.CHECK_EVERY_S)
        self._clock_watching = RateLimit(DEADLINE_EVERY_S)

    def begin(self) -> bool:
        """Take over the trial from earlier supervisors. Raises OSError, TrialBusy."""
        if self._is_done():
            return False
        self._take_over()
        # The state machine continues from the state of earlier supervisors.
        self._generations = self._list_generations()
        attempts = self.trial.list_attempts(self.attempt.job_id)
        failures = count_failures([event for one in attempts for event in load_events(one)])
        self.machine.restore(failures, ownership.find_next_incarnations(self.attempt))
        self._load_intents()
        self._check_parent()
        self.grant_requests()
        if self.finish is None:
            self._check_fruitless_attempts()
        if self.finish is None and self._preflight is not None:
            self._check_network(self._preflight)
        return True

    def _is_done(self) -> bool:
        """Return whether this job or a later one finished the trial; remove an earlier job's record."""
        done = DoneRecord.read(self.trial.done)
        if done is not None and done.job_id:
            own, other = (JobRecord.read(self.trial.job(job)) for job in (self.attempt.job_id, done.job_id))
            if done.job_id == self.attempt.job_id:
                self._remove_published(done)  # a supervisor may have been killed before this
                return True
            if own and other and other.time > own.time > 0:
                return True
        self.trial.done.unlink(missing_ok=True)
        return False

    def _take_over(self) -> None:
        number = ownership.find_next_incarnations(self.attempt).get(("supervisor", 0), 0)
        record = ProcessRecord.of("supervisor", os.getpid())
        write_json(self.attempt.process_record("supervisor", 0, number, 0), record.to_json())
        details = {"role": "supervisor", "number": number, "pid": os.getpid()}
        self.write_event(EventKind.SUPERVISOR_STARTED, details)
        self._lease = ownership.take_ownership(self.names, self.attempt)
        prefixes = [keys.servers(pool.name) for pool in self.plan.pools]
        self._registrar = Registrar(self.names, prefixes, self._lease.epoch)
        for left in ownership.kill_leftovers(self.trial):
            reason = "a process of an earlier start can't be killed"
            details = {"role": left.role, "pid": left.pid, "reason": reason}
            self.write_event(EventKind.LEFT_BEHIND, details)

    def _check_fruitless_attempts(self) -> None:
        """End a job whose attempts make no progress, whatever ends them."""
        earlier = [one for one in self.trial.list_attempts(self.attempt.job_id) if one.id != self.attempt.id]
        count = failure_policy.count_fruitless_attempts([load_events(one) for one in earlier])
        if count >= max(failure_policy.MAX_FRUITLESS_ATTEMPTS, self.rules.retries + 1):
            advice = f"look for the cause in the logs, {RESUME}"
            why = f"{count} attempts in a row ended without a new checkpoint; {advice}"
            self.execute(self.machine.abandon(self.clock(), ExitCode.FAILED, why))

    def _check_network(self, preflight: Preflight) -> None:
        """End an attempt before models are loaded if a node does not reach another one."""
        log = self.attempt.dir / "logs" / "preflight.log"
        try:
            found = preflight.run(log, self._is_interrupted)
        except OSError as error:
            found = NetworkFindings(unchecked=str(error))
        self.grant_requests()
        if found is None:
            return
        if found.unchecked:
            self.write_event(EventKind.NETWORK_UNCHECKED, {"reason": found.unchecked})
            return
        if not found.problem:
            own = os.environ.get("SLURMD_NODENAME", "")
            peers = {node: address for node, address in found.addresses.items() if node != own}
            self._hosts = HostWatch(peers, can_reach_scheduler)
            self._hosts.start()
            return
        why = f"the nodes can't reach each other: {found.problem}"
        if found.hopeless:
            why += "; set cluster.interface to a network that joins all nodes"
            self.execute(self.machine.abandon(self.clock(), ExitCode.FAILED, why))
            return
        self.execute([Avoid(found.bad_nodes, why, NodeTrouble.OUT_OF_CONTACT)])
        failure = UnitExit(ExitCode.FAILED, why, FailureClass.NODE, found.bad_nodes)
        rules = (self.plan.recover_mode, self.machine.failures, self.rules.retries)
        follows = failure_policy.decide_after_failure("preflight", failure, *rules)
        self.execute(self.machine.abandon(self.clock(), follows.exit_code, follows.reason))

    def _is_interrupted(self) -> bool:
        """Renew the lease; return whether to stop before anything was started."""
        now = self.clock()
        if self._checking.is_due(now):
            with tolerate_errors("renewing the supervisor's heartbeat"):
                self._keep_lease(now)
        return bool(self.requests) or self.finish is not None

    def observe(self, now: float) -> None:
        """Check intents, generations, the lease, the clock and heartbeats. Raises OSError."""
        if self._observing.is_due(now):
            self._load_intents()
            self._check_parent()
            self._look_for_progress()
            self._replacements.poll()
        self._watch_deadline(now)
        if self._hosts is not None:
            self._watch_hosts(self._hosts)
        if self._checking.is_due(now):
            self._keep_lease(now)
            self.look_for_hangs(now)
        self.observe_servers(now)

    def list_leases(self) -> dict[str, dict[str, LeaseView]]:
        """Return the leases of the servers of each pool, and keep the rosters for all other readers."""
        if self._registrar is None:
            return super().list_leases()
        leases = self._registrar.poll()
        return {pool.name: leases[keys.servers(pool.name)] for pool in self.plan.pools}

    def _watch_hosts(self, hosts: HostWatch) -> None:
        """Report nodes that fall silent or answer again; end if this node is cut off from all others."""
        own = os.environ.get("SLURMD_NODENAME", "")
        cut_off_s = hosts.cut_off_s
        silent = {own: cut_off_s} if cut_off_s else hosts.measure_silence()
        begun = EventKind.NODE_CUT_OFF if cut_off_s else EventKind.NODE_SILENT
        for kind, seconds, others in (
            (EventKind.NODE_ANSWERS, self._silent, silent),
            (begun, silent, self._silent),
        ):
            for node in sorted(seconds.keys() - others.keys()):
                self.write_event(kind, {"node": node, "silent_s": round(seconds[node], 1)})
        self._silent = silent
        if hosts.isolated_s >= ISOLATED_S and self.machine.phase is not Phase.ENDING:
            for handle, _ in self.handles.values():
                handle.hang_up()
            time.sleep(HANG_UP_S)
            why = f"no other node of the job and no scheduler answered for {hosts.isolated_s:.0f} s"
            self.execute(self.machine.abandon(self.clock(), ExitCode.STOPPED, f"{why}: this node is cut off"))

    def replace_unit(self, unit: Unit) -> None:
        with tolerate_errors("replacing lost servers"):
            if nodes := self._replacements.add(unit):
                reason = "another job starts the servers of the lost nodes"
                self.write_event(EventKind.REPLACING, {"plan_nodes": nodes, "reason": reason})

    def start_unit(self, unit: Unit, incarnation: int) -> None:
        super().start_unit(unit, incarnation)
        self._notify_rollout()

    def handle_unit_exit(self, key: Key, incarnation: int, launcher_code: int) -> None:
        with tolerate_errors("looking for checkpoints"):  # progress may be newer than the last look
            self._look_for_progress()
        super().handle_unit_exit(key, incarnation, launcher_code)

    def _load_intents(self) -> None:
        present = set(os.listdir(self.trial.intent)) if self.trial.intent.is_dir() else set()
        if self.trial.cancel_intent(self.attempt.job_id).name in present:
            self.requests.add(StopCause.CANCELLED)
        drain = self.trial.drain_intent(self.attempt.id)
        if drain.name in present:  # from the job script, or from an earlier supervisor that was killed
            intent = DrainIntent.read(drain)
            self.requests.add(intent.cause if intent else StopCause.USER_SIGNAL)

    def _check_parent(self) -> None:
        # Without the job script, no process would record the end, restart anything or forward signals.
        if os.getppid() != self._parent:
            self.requests.add(StopCause.SCRIPT_KILLED)

    def grant_requests(self) -> None:
        if self.requests:
            with tolerate_errors("reading requests to stop"):
                self._load_intents()  # a signal may announce an intent, which has more information
        for cause in self.requests.take():
            if self.plan.recover_mode != "disabled" and self.deadline.is_early_warning(cause):
                left_s, until_stop_s = self.deadline.left_s, self.deadline.until_drain_s
                self.write_event(EventKind.REMINDED, {"left_s": left_s, "until_stop_s": until_stop_s})
            else:
                self._stop(cause)

    def _stop(self, cause: StopCause) -> None:
        # Write it durably first: a later supervisor must not start everything again.
        if self.machine.phase is Phase.RUNNING and cause is not StopCause.CANCELLED:
            reason, _ = STOPS[cause]
            intent = DrainIntent(cause=cause, reason=reason, time=time.time())
            with tolerate_errors("writing the request to stop"):
                write_json(self.trial.drain_intent(self.attempt.id), intent.to_json())
        self.machine.drain_grace_s = self.deadline.compute_grace_s(DRAIN_GRACE_S)
        self.execute(self.machine.stop(self.clock(), cause))

    def _keep_lease(self, now: float) -> None:
        try:
            if self._lease is not None and self._lease.is_due():
                self._lease.renew()
            elif self._lease is not None:
                self._lease.check()
        except Stale as error:
            why = f"another supervisor owns the trial now ({error})"
            self.execute(self.machine.abandon(now, ExitCode.FAILED, why))

    def _list_generations(self) -> set[tuple[str, int]]:
        with os.scandir(self.trial.recover) as entries:
            return {(entry.name, entry.inode()) for entry in entries if entry.name.startswith("gen-")}

    def _look_for_progress(self) -> None:
        found = self._list_generations()
        for name, _ in sorted(found - self._generations):
            step = name.removeprefix("gen-")
            if step.isdecimal():
                self.execute(self.machine.note_progress(int(step)))
        self._generations |= found
        self._look_for_answers()

    def _look_for_answers(self) -> None:
        """In a trial without a trainer, note the first progress of each start of the rollout role."""
        key = ("rollout", 0)
        leader = self.machine.leader
        if leader is None or leader.key != key or key not in self.handles:
            return
        _, incarnation = self.handles[key]
        progress = load_object(self.attempt.rollout_report(incarnation)).get("progress")
        if progress is None:
            return
        begun = self._progress_at_start.setdefault(incarnation, progress)
        if progress > begun and incarnation not in self._with_progress:
            self._with_progress.add(incarnation)
            self.execute(self.machine.note_progress(progress))

    def _watch_deadline(self, now: float) -> None:
        if self.plan.recover_mode == "disabled":
            return  # nothing would be saved
        if self._clock_watching.is_due(now):
            if self.deadline.update():
                details = {"ends_at": self.deadline.ends_at, "reason": "the scheduler ends the job then"}
                self.write_event(EventKind.END_TIME, details)
            self._notify_rollout()
        if self.machine.phase is Phase.RUNNING and self.deadline.is_reached():
            self.requests.add(StopCause.TIME_LIMIT)

    def _notify_rollout(self) -> None:
        """Tell the rollout role when the trainer stops, so that it issues no prompts that can't finish."""
        if self.deadline.ends_at is None:
            return
        if self.deadline.until_drain_s < ANNOUNCE_S:
            self.machine.announce_end(StopCause.TIME_LIMIT)
        for (role, _), (handle, _) in self.handles.items():
            if role == "rollout":
                handle.send(f"ends_in {max(0.0, self.deadline.until_drain_s):.1f}")

    def look_for_hangs(self, now: float) -> None:
        """Kill units that hang, and units that the scheduler can't place. Raises OSError."""
        for (role, index), (_, incarnation) in self.handles.items():
            if role == "trainer":
                activity = load_object(self.attempt.activity(role, index, incarnation))
                mark = json.dumps(activity) if activity else None
                self.hangs.observe((role, index), mark, now, str(activity.get("doing", "")))
        pools = self.observe_servers(now)
        self.hangs.observe_leases(self.names.list_leases(keys.ROLLOUT), self.attempt.id, now)
        self.hangs.observe_pools(pools, now)
        for key in self.hangs.find_unseen(now):
            if key in self.handles and (message := self.handles[key][0].explain_unplaced()):
                why = describe_unplaced(self.machine.slots[key].unit, self.plan, message)
                self.execute(self.machine.kill_unplaced(key, why))
        self.kill_hung(now)

    def leave(self, finish: Finish) -> int:
        """Record the end, remove the published weights of a trial that is done, and release the trial."""
        self.write_ended(finish.code, finish.reason)
        with tolerate_errors("cancelling the servers of lost nodes"):
            self._replacements.cancel()
        with tolerate_errors("writing that the trial is done"), suppress(Stale):
            done = DoneRecord(attempt=self.attempt.id, job_id=self.attempt.job_id, time=time.time())
            if finish.code == ExitCode.DONE:
                write_json(self.trial.done, done.to_json())
            if self._lease is not None:
                self._lease.check()
                if finish.code == ExitCode.DONE:
                    self._remove_published(done)
                self._lease.release()
        return finish.code

    def _remove_published(self, done: DoneRecord) -> None:
        """Remove the published weights of a finished trial beyond its history; record the freed space."""
        with tolerate_errors("removing published weights"):
            if freed := disk.drop(self.trial, self._history_bytes):
                write_json(self.trial.done, replace(done, freed_bytes=freed).to_json())
