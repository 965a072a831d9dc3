"""The rounds of a trial's supervisor, without processes: leases, requests, a file system that fails."""

import dataclasses
from types import SimpleNamespace

import pytest
from small_configs import STORED, stored
from toy_plans import toy_plan, toy_unit

from hpc_rl.core.errors import ExitCode, FailureClass, StopCause
from hpc_rl.core.records import DrainIntent, EventKind, load_events
from hpc_rl.core.trial import write_json
from hpc_rl.name_resolve.roster import RosterReader
from hpc_rl.plan.schema import Plan
from hpc_rl.roles import supervisor as app
from hpc_rl.supervise import runner as driving
from hpc_rl.supervise.hangs import PLACED_S
from hpc_rl.supervise.host_watch import ISOLATED_S
from hpc_rl.supervise.network_check import NetworkFindings
from hpc_rl.supervise.runner import TrialRunner
from hpc_rl.supervise.state_machine import AttemptMachine, Phase
from hpc_rl.supervise.unit_loop import StopRequests

TRAINER, ROLLOUT, SERVER = ("trainer", 0), ("rollout", 0), ("server", 0)
PLAN = toy_plan([toy_unit(role, module="none") for role in ("server", "rollout", "trainer")], "/python")


class FakeHandle:
    """A unit that runs until it is killed."""

    def __init__(self) -> None:
        self.children: list = []
        self.launcher_log = None
        self.message, self.killed, self.lines = "", False, []

    def poll(self) -> int | None:
        return 137 if self.killed else None

    def explain_unplaced(self) -> str:
        return self.message

    def kill(self) -> None:
        self.killed = True

    def hang_up(self) -> None:
        self.lines.append("end of the pipe")

    def send(self, line: str) -> None:
        self.lines.append(line)

    def dump_stacks(self) -> None:
        self.lines.append("dump")


@pytest.fixture
def make(attempt):
    """Makes runners whose units were all started at 0 s."""

    def make(servers_away_s: float = 0.5, plan: Plan = PLAN) -> TrialRunner:
        steps = SimpleNamespace(start=lambda *_: FakeHandle())
        recover = {"hang_max_s": 300.0, "hang_min_s": 300.0}
        config = stored(recover=recover, rollout={"setup_timeout": servers_away_s})
        runner = TrialRunner(attempt, plan, config, steps, lambda: None)
        runner.clock = lambda: 0.0
        runner.execute(runner.machine.start(0.0))
        return runner

    return make


def events_of(runner: TrialRunner, *kinds: EventKind) -> list:
    return [event for event in load_events(runner.attempt) if event.kind in kinds]


@pytest.mark.parametrize(("state", "to_blame"), [("loading", []), ("serving", [ROLLOUT])])
def test_the_trainer_may_wait_as_long_as_no_server_serves(make, state, to_blame):
    runner = make(servers_away_s=1800.0)
    runner.names.lease("server/rollout/0", {"attempt": "7.0", "incarnation": 0, "state": state}, 1e9)
    write_json(runner.attempt.activity("trainer", 0, 0), {"doing": "wait", "step": 3})
    rollout = runner.names.lease("rollout/0", {"attempt": "7.0"}, 1e9)
    for now in range(0, 1200, 10):
        rollout.renew()
        runner.look_for_hangs(float(now))
    assert [event.unit for event in events_of(runner, EventKind.HUNG)] == to_blame
    assert (runner.machine.slots[SERVER].served_at is not None) is (state == "serving")


def test_a_unit_that_slurm_starts_nowhere_needs_other_nodes(make):
    runner = make()
    trainer, _ = runner.handles[TRAINER]
    trainer.message = "srun: Job 7 step creation still disabled, retrying (Requested nodes are busy)"
    runner.look_for_hangs(PLACED_S)
    assert not trainer.killed
    runner.machine.slots[TRAINER].incarnation = 1  # its first start had a place
    runner.handles[TRAINER] = (trainer, 1)
    runner.look_for_hangs(PLACED_S + 1)
    assert trainer.killed
    runner.do_round()
    [exited] = events_of(runner, EventKind.EXITED)
    assert exited.unit == TRAINER and exited.failure is FailureClass.NODE
    assert runner.machine.phase is Phase.ENDING, "the job is requeued"


def test_setup_timeout_is_how_long_servers_may_be_away(trial, tmp_path, monkeypatch):
    trial.make_secret()
    here = {"path": str(tmp_path)}  # it must exist
    data = STORED | {"rollout": {"setup_timeout": 7200.0}, "actor": here, "train_dataset": here}
    write_json(trial.config_json, data)
    write_json(trial.plan_json, PLAN.to_json())
    seen = []
    monkeypatch.setattr(TrialRunner, "run", lambda runner: seen.append(runner.hangs.away_s) or 0)
    argv = ["supervisor", "--trial_dir", str(trial.dir), "--attempt", "7.0", "--steps", "process"]
    monkeypatch.setattr("sys.argv", argv)
    assert app.main() == 0
    assert seen == [7200.0]


@pytest.mark.parametrize(("n_nodes", "checked"), [(1, None), (2, ["n1", "n2"])])
def test_only_nodes_that_the_plan_uses_are_checked(monkeypatch, n_nodes, checked):
    """The job of `hpc-rl run` may have more nodes."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    plan = dataclasses.replace(PLAN, n_nodes=n_nodes)
    check = app._make_preflight(app.open_steps("srun", plan), plan, stored())
    assert (check and check.hosts) == checked


def test_a_signal_is_obeyed_while_the_file_system_fails(make, monkeypatch):
    runner = make()

    def fails(path):
        raise OSError("stale file handle")

    runner.trial.intent.mkdir(exist_ok=True)
    monkeypatch.setattr(driving.os, "listdir", fails)
    runner.requests.add(StopCause.PREEMPTION)
    runner.grant_requests()
    assert runner.machine.stop_cause is StopCause.PREEMPTION


def test_a_stop_is_durable_before_it_is_obeyed_and_names_its_cause(make):
    runner = make()
    runner.requests.add(StopCause.TIME_LIMIT)
    runner.grant_requests()
    intent = DrainIntent.read(runner.trial.drain_intent("7.0"))
    assert intent is not None and intent.cause is StopCause.TIME_LIMIT
    assert runner.handles[TRAINER][0].lines == ["stop"] and not runner.handles[SERVER][0].lines


def test_a_cancel_comes_before_the_signal_that_announced_it(make):
    runner = make()
    write_json(runner.trial.cancel_intent("7"), {})
    runner.requests.add(StopCause.USER_SIGNAL)
    runner.grant_requests()
    assert runner.machine.stop_cause is StopCause.CANCELLED


def test_each_request_is_taken_once_and_a_cancel_first():
    requests = StopRequests()
    assert not requests and requests.take() == []
    for cause in (StopCause.PREEMPTION, StopCause.CANCELLED, StopCause.PREEMPTION):
        requests.add(cause)
    assert requests and requests.take() == [StopCause.CANCELLED, StopCause.PREEMPTION]
    requests.add(StopCause.CANCELLED)
    assert requests.take() == []


class FakeHosts:
    """The answers of a HostWatch."""

    def __init__(self) -> None:
        self.silent, self.isolated_s, self.cut_off_s = {}, 0.0, 0.0

    def measure_silence(self) -> dict[str, float]:
        return self.silent


def test_silent_nodes_are_reported_once_and_a_supervisor_that_is_cut_off_ends(make, monkeypatch):
    runner, hosts = make(), FakeHosts()
    runner._hosts = hosts
    monkeypatch.setattr(driving, "HANG_UP_S", 0.0)
    for hosts.silent in ({}, {"n3": 12.0}, {"n3": 14.0}, {}, {"n2": 11.0, "n3": 11.0}):
        runner.observe(0.0)
    about_nodes = events_of(runner, EventKind.NODE_SILENT, EventKind.NODE_ANSWERS)
    told = [(event.kind, event.node, event.silent_s) for event in about_nodes]
    assert told[:2] == [(EventKind.NODE_SILENT, "n3", 12.0), (EventKind.NODE_ANSWERS, "n3", 14.0)]
    assert sorted(told[2:]) == [(EventKind.NODE_SILENT, name, 11.0) for name in ("n2", "n3")]
    assert runner.machine.phase is Phase.RUNNING
    hosts.isolated_s = ISOLATED_S
    for _ in range(3):
        runner.observe(0.0)
    assert runner.handles[TRAINER][0].killed and runner.handles[TRAINER][0].lines == ["end of the pipe"]
    [abandoned] = events_of(runner, EventKind.ABANDONING)
    assert "cut off" in abandoned.reason
    runner.do_round()
    assert runner.finish is not None and runner.finish.code == ExitCode.STOPPED


def test_a_supervisor_that_is_cut_off_blames_its_own_node(make, monkeypatch):
    runner, hosts = make(), FakeHosts()
    runner._hosts = hosts
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    for hosts.silent, hosts.cut_off_s in (({"n2": 30.0}, 0.0), ({"n2": 40.0, "n3": 11.0}, 11.0), ({}, 0.0)):
        runner.observe(0.0)
    silent, cut_off, answers = EventKind.NODE_SILENT, EventKind.NODE_CUT_OFF, EventKind.NODE_ANSWERS
    told = [(event.kind, event.node) for event in events_of(runner, silent, cut_off, answers)]
    assert told == [(silent, "n2"), (answers, "n2"), (cut_off, "n1"), (answers, "n1")]


@pytest.mark.parametrize("mode", ["auto", "disabled"])
def test_an_attempt_whose_nodes_do_not_reach_each_other_starts_nothing(make, mode):
    runner = make()
    runner.plan = dataclasses.replace(runner.plan, recover_mode=mode)
    found = NetworkFindings(problem="n2 and n3 do not reach each other", bad_nodes=("n3",))
    runner._check_network(SimpleNamespace(run=lambda log, interrupted: found))
    [bad] = events_of(runner, EventKind.BAD_NODES)
    assert "n2 and n3" in bad.reason
    runner.do_round()
    assert runner.finish is not None and "n2 and n3" in runner.finish.reason
    assert runner.finish.code == (ExitCode.STOPPED if mode == "auto" else ExitCode.FAILED)


def test_a_stop_during_the_check_of_the_network_is_granted_before_anything_starts(make):
    runner = make()
    runner.handles.clear()
    runner.machine = AttemptMachine(PLAN.units, "auto", 1)
    looks = iter([False, True])

    def run(log, interrupted) -> None:
        assert interrupted() is next(looks)
        runner.requests.add(StopCause.CANCELLED)
        assert interrupted() is next(looks)

    runner._check_network(SimpleNamespace(run=run))
    assert runner.machine.stop_cause is StopCause.CANCELLED and runner.finish is not None


def test_a_check_of_the_network_that_can_not_run_stops_nothing(make):
    def run(log, interrupted) -> None:
        raise FileNotFoundError("srun")

    runner = make()
    runner._check_network(SimpleNamespace(run=run))
    assert runner.finish is None and runner.machine.phase is Phase.RUNNING
    [told] = events_of(runner, EventKind.NETWORK_UNCHECKED)
    assert "srun" in told.reason


def test_the_supervisor_of_a_trial_keeps_the_rosters_of_its_pools(make):
    runner = make()
    runner.names.lease("server/rollout/0", {"attempt": "7.0", "incarnation": 0, "state": "serving"}, 1e9)
    runner._take_over()
    runner.observe(0.0)
    reader = RosterReader(runner.names, "server/rollout")
    reader.list_leases()
    runner.names.lease("server/rollout/1", {"attempt": "7.0", "incarnation": 0, "state": "loading"}, 1e9)
    runner.observe(1.0)
    runner.names.list_leases = None  # not needed by a reader of the roster
    assert {key: seen.value["state"] for key, seen in reader.list_leases().items()} == {
        "server/rollout/0": "serving",
        "server/rollout/1": "loading",
    }
    assert runner.machine.slots[SERVER].served_at is not None


def test_without_a_trainer_the_results_since_a_start_are_progress(make):
    runner = make(plan=toy_plan([toy_unit(role, module="none") for role in ("server", "rollout")], "/python"))
    runner.attempt.make_dirs()

    def report(progress: int) -> list[int | None]:
        write_json(runner.attempt.rollout_report(0), {"progress": progress})
        runner._look_for_progress()
        return [event.step for event in events_of(runner, EventKind.PROGRESS)]

    runner.trial.recover.mkdir(parents=True, exist_ok=True)
    assert report(5) == [], "what earlier starts finished"
    assert report(7) == [7]
    assert report(9) == [7], "once for each start"
