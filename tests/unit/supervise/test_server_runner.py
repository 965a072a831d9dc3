"""The supervisor of a server node: it keeps its replica alive, and stops soon when it is no longer needed."""

import json
import re
import threading
import time
from dataclasses import replace

import pytest
from patience import extend, wait_until
from small_configs import stored
from toy_plans import toy_plan, toy_unit

from hpc_rl.core.files import JsonLines
from hpc_rl.core.trial import Trial, load_json, write_json
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.plan.schema import Group
from hpc_rl.schedulers.base import JobState, State
from hpc_rl.supervise import bad_nodes, replacements, server_array, server_runner, state_machine, unit_loop
from hpc_rl.supervise.replacements import Replacements
from hpc_rl.supervise.server_array import describe_array, ensure_servers, load_arrays, replace_servers
from hpc_rl.supervise.server_runner import ServerRunner

pytestmark = pytest.mark.waits

SIZE = {"cpus_per_node": 1, "mem_mb_per_node": 1}
GROUPS = [Group(name=name, nodes=nodes, **SIZE) for name, nodes in (("trial", [0]), ("servers", [1, 2]))]
ALLOCATION = "embedded:d2+fsdp:d1"
UNITS = [toy_unit("server", index=index, nodes=[1 + index]) for index in (0, 1)]
PLAN = toy_plan(UNITS, "/python", allocation=ALLOCATION, n_nodes=3, layout="jobs", groups=GROUPS, **SIZE)


class FakeHandle:
    def __init__(self) -> None:
        self.children, self.code, self.launcher_log = [], None, None

    def poll(self):
        return self.code

    def kill(self) -> None:
        self.code = -9

    def send(self, line: str) -> None:
        if line == "stop":
            self.code = 75

    def dump_stacks(self) -> None:
        self.dumped = self.code is None


class FakeSteps:
    def __init__(self) -> None:
        self.started: list[FakeHandle] = []

    def start(self, unit, argv, attempt, incarnation) -> FakeHandle:
        self.started.append(FakeHandle())
        return self.started[-1]


@pytest.fixture(autouse=True)
def no_signals(monkeypatch) -> None:
    """Signals can't be caught in a thread."""
    monkeypatch.setattr("hpc_rl.supervise.unit_loop.obey_signals", lambda request: None)


class Running:
    """A server job in a thread, with an owner of its trial whose lease is renewed while `owned`."""

    def __init__(
        self, trial: Trial, serves: str = "100", idle_s: float = 60.0, end_time=lambda: None, **rules
    ) -> None:
        self.trial, self.steps, self.names = trial, FakeSteps(), open_names(trial)
        self.owner = self.names.lease(keys.OWNER, {"attempt": "100.0"}, 60.0)
        attempt = trial.attempt("150_0.0")
        config = stored(recover=rules, launcher={"slurm": {"servers": {"idle_s": idle_s}}})
        self.job = ServerRunner(
            attempt, PLAN, config, self.steps, end_time, [toy_unit("server", index=1)], serves
        )
        self.code = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.code = self.job.run()

    def ended(self) -> tuple[int, str]:
        self.thread.join(extend(30))
        assert not self.thread.is_alive()
        ended = load_json(self.trial.attempt("150_0.0").ended)
        assert ended["exit_code"] == self.code
        return self.code, ended["reason"]


@pytest.fixture
def trial(trial, monkeypatch) -> Trial:
    monkeypatch.setattr(unit_loop, "TICK_S", 0.01)
    monkeypatch.setattr(server_runner, "OBSERVE_EVERY_S", 0.02)
    return trial


def started(running: Running) -> Running:
    wait_until(lambda: running.steps.started)
    return running


def test_a_replica_that_dies_is_started_again(trial):
    running = started(Running(trial))
    held = {"attempt": "150_0.0", "incarnation": 0, "state": "serving"}
    running.names.lease("server/rollout/1", held)
    running.steps.started[0].code = -9
    wait_until(lambda: len(running.steps.started) == 2)
    assert not running.names.list_leases("server/rollout"), "no reader waits until its time to live is over"
    write_json(trial.done, {"job_id": "100"})
    assert running.ended() == (0, "the trial has reached its end")
    assert running.steps.started[1].code == 75
    assert trial.attempt("150_0.0").dir.parent == trial.server_attempts, "no attempt of the trial"


@pytest.mark.parametrize("seen", [True, False], ids=["that served", "that never came up"])
def test_a_replica_that_hangs_leaves_its_stacks_and_is_started_again(trial, monkeypatch, seen):
    monkeypatch.setattr(state_machine, "STACKS_S", 0.05)
    running = Running(trial, hang_min_s=0.3 if seen else 60.0, hang_max_s=60.0 if seen else 0.3)
    if seen:
        running.names.lease("server/rollout/1", {"attempt": "150_0.0", "state": "serving"}, 0.2)
    started(running)
    wait_until(lambda: len(running.steps.started) >= 2)
    assert running.steps.started[0].dumped and running.steps.started[0].code == -9
    events = JsonLines(trial.attempt("150_0.0").events).poll()
    [reason, *_] = [row["reason"] for row in events if row["event"] == "hung"]  # the next one may hang, too
    assert re.match(r"server 1 hangs: nothing moved for \d+ s", reason)
    assert ("after its start" in reason) is not seen
    write_json(trial.done, {"job_id": "100"})
    running.ended()


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("intent/cancel-100.json", {}, "cancelled by the user"),
        ("intent/cancel-150.json", {}, "cancelled by the user"),
        ("jobs/100.state", {"event": "ended", "code": 70, "reason": "gave up"}, "job 100 has ended: gave up"),
    ],
)
def test_it_ends_with_its_trial(trial, file, content, reason):
    running = started(Running(trial))
    (trial.dir / file).write_text(json.dumps(content) + "\n")
    assert running.ended() == (0, reason)


def test_a_requeue_of_the_trial_is_no_end_and_an_old_mark_is_none(trial):
    write_json(trial.done, {"job_id": "90"})
    (trial.jobs / "100.state").write_text('{"event": "started"}\n{"event": "requeued", "code": 75}\n')
    running = started(Running(trial))
    time.sleep(0.3)
    assert running.code is None
    running.names.lease(keys.OWNER, {"attempt": "101.0"}, 60.0)
    assert running.ended() == (0, "job 101 runs the trial now, with its own servers")


@pytest.mark.parametrize(
    ("change", "reason"),
    [("requeued", "starts again, with all its servers"), ("attempt", "attempt 100.1 runs the trial now")],
)
def test_servers_for_lost_ones_end_with_the_attempt_that_lost_them(trial, change, reason):
    write_json(trial.job("150"), {"kind": "servers", "serves": "100", "replaces": "100.0", "num_tasks": 1})
    running = started(Running(trial))
    time.sleep(0.1)
    assert running.code is None
    if change == "requeued":
        (trial.jobs / "100.state").write_text('{"event": "requeued", "code": 75}\n')
    else:
        running.names.lease(keys.OWNER, {"attempt": "100.1"}, 60.0)
    code, told = running.ended()
    assert code == 0 and reason in told


def test_without_a_supervisor_of_the_trial_it_gives_its_node_back(trial):
    running = started(Running(trial, idle_s=0.2))
    running.owner.release()
    code, reason = running.ended()
    assert code == 0 and "no supervisor for 0.2 s (launcher.slurm.servers.idle_s)" in reason


def test_near_its_end_it_stops_to_be_started_again(trial, monkeypatch):
    monkeypatch.setattr(server_runner, "LEAD_S", 0.1)
    running = started(Running(trial, end_time=lambda: time.time() + 0.05))
    assert running.ended() == (75, "the job's time is nearly over")


def test_a_replica_that_can_not_be_launched_names_its_node(trial):
    running = started(Running(trial))
    trial.attempt("150_0.0").log("server", 1, 0).write_text(
        "srun: error: launch of step 150.0 failed on node n3: no\n"
    )
    running.steps.started[0].code = 1
    code, reason = running.ended()
    assert code == 75 and reason.endswith("other nodes are needed")
    assert list(bad_nodes.find_bad_nodes(trial, time.time())) == ["n3"] and not trial.bad_nodes.exists()
    assert trial.exclude("150_0").read_text() == "n3\n", "its own script is told"


def test_what_is_over_already_starts_nothing(trial):
    write_json(trial.cancel_intent("100"), {})
    running = Running(trial)
    assert running.ended()[0] == 0
    assert not running.steps.started


class FakeSlurm:
    name = "slurm"

    def __init__(self, states: dict[str, State]) -> None:
        self.found, self.specs = states, []

    def query_states(self, job_ids):
        return {job_id: JobState(job_id, self.found.get(job_id, State.UNKNOWN)) for job_id in job_ids}

    def submit(self, spec):
        self.specs.append(spec)
        return str(300 + len(self.specs))


@pytest.mark.parametrize(
    ("states", "made"),
    [
        ({"150": State.RUNNING}, ""),
        ({"150": State.PENDING}, ""),
        ({"150": State.DONE, "160": State.PENDING}, ""),  # a task that goes on by a successor
        ({"150": State.DONE}, "301"),
        ({}, "301"),
    ],
)
def test_a_trainer_job_without_servers_submits_them_again(trial, states, made):
    write_json(trial.job("150"), {"kind": "servers", "serves": "100", "num_tasks": 2, "time": 1.0})
    write_json(trial.job("140"), {"kind": "servers", "serves": "99", "num_tasks": 2, "time": 0.0})
    trial.successor("150_1", 1).write_text('{"job_id": "160"}')
    slurm = FakeSlurm(states)
    assert ensure_servers(trial, PLAN, "100", "tag", slurm) == made
    assert [spec.arguments for spec in slurm.specs] == ([("", "0", "100")] if made else [])
    assert [array.job_id for array in load_arrays(trial)] == ["140", "150", *([made] if made else [])]


def test_a_trainer_job_waits_for_the_submitter_of_its_servers(trial, monkeypatch):
    monkeypatch.setattr(server_array, "POLL_S", 0.01)
    trial.submitting.touch()
    slurm, made = FakeSlurm({"150": State.PENDING}), []
    starting = threading.Thread(target=lambda: made.append(ensure_servers(trial, PLAN, "100", "tag", slurm)))
    starting.start()
    time.sleep(0.1)
    write_json(trial.job("150"), {"kind": "servers", "serves": "100", "num_tasks": 2, "time": 1.0})
    trial.submitting.unlink()
    starting.join()
    assert made == [""] and slurm.specs == []


def test_a_trainer_job_submits_for_a_submitter_that_died(trial, monkeypatch):
    monkeypatch.setattr(server_array, "SUBMITTING_S", 0.1)
    trial.submitting.touch()
    slurm = FakeSlurm({})
    assert ensure_servers(trial, PLAN, "100", "tag", slurm) == "301"
    [spec] = slurm.specs
    assert (spec.tag, *spec.options) == ("tag:0:servers", "--comment=tag:0:servers"), "not the script's tag"


def test_lost_servers_get_a_task_of_their_own(trial):
    slurm = FakeSlurm({})
    assert (
        replace_servers(trial, replace(PLAN, layout="allocation"), "100", "100.0", 1, "tag", slurm) == "301"
    )
    [spec] = slurm.specs
    assert spec.options == ("--comment=tag:servers:100.0:1", "--array=1", "--nodes=1")
    assert spec.arguments == ("", "0", "100")
    [array] = load_arrays(trial)
    assert [task.id for task in array.tasks] == ["301_1"]


def test_each_lost_node_is_replaced_once_and_a_failed_submission_is_repeated(attempt, tmp_path):
    code, calls = tmp_path / "code", tmp_path / "calls"
    code.write_text("1")
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/bash\necho "$@" >>{calls}\nexit "$(cat {code})"\n')
    fake.chmod(0o755)
    together = [*UNITS, toy_unit("server", index=2, nodes=[2]), toy_unit("trainer")]
    plan, now = replace(PLAN, layout="allocation", units=together, python=str(fake)), [0.0]
    one = Replacements(attempt, plan, lambda: now[0])
    assert one.add(UNITS[0]) == [], "this submission has no script for servers"
    attempt.trial.scripts.mkdir(exist_ok=True)
    (attempt.trial.scripts / "servers.sbatch").touch()
    assert one.add(UNITS[1]) == [2] and one.add(together[2]) == []
    wait_until(lambda: (one.poll(), calls.exists() and not one._submitting)[1])
    code.write_text("0")
    now[0] = replacements.AGAIN_S
    wait_until(lambda: (one.poll(), len(calls.read_text().splitlines()) == 2 and not one._submitting)[1])
    now[0] *= 3
    one.poll()
    assert not one._submitting
    first, second = calls.read_text().splitlines()
    assert first == second and first.endswith(
        f"replacement --trial_dir {attempt.trial.dir} --job_id 7 --attempt 7.0 --task 1"
    )
    assert Replacements(attempt, replace(plan, layout="jobs"), lambda: 0.0).add(UNITS[0]) == []
    assert Replacements(attempt, plan, lambda: 0.0).add(toy_unit("server", nodes=[0])) == [], "trainer's node"


def test_status_tells_of_every_server_node(trial):
    write_json(trial.job("150"), {"kind": "servers", "serves": "100", "num_tasks": 3, "time": 1.0})
    told = [("started", 0), ("requeued", 0), ("started", 1)]
    lines = [{"event": event, "restart": restart} for event, restart in told]
    (trial.jobs / "150_0.state").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (trial.jobs / "150_1.state").write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    [array] = load_arrays(trial)
    states = "1 running, 1 waiting for a restart, 1 not started, restarted 1 time"
    assert describe_array(array) == f"job 150, 3 server nodes: {states}"
