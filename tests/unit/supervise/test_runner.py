"""The driver's rounds, without processes: what it makes of leases, and a file system that fails for a moment."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from toy_plans import toy_plan

from hpc_rl.app import supervisor as app
from hpc_rl.config.loading.load import from_dict
from hpc_rl.config.sections.operations import RecoverConfig
from hpc_rl.name_resolve.memory import MemoryNames
from hpc_rl.plan.schema import Unit
from hpc_rl.supervise import runner as driving
from hpc_rl.supervise.failures import End
from hpc_rl.supervise.hangs import PLACED_S
from hpc_rl.supervise.runner import Driver
from hpc_rl.supervise.state_machine import Phase, Record, Supervisor
from hpc_rl.trial import Trial, write_json

TRAINER, ROLLOUT, SERVER = ("trainer", 0), ("rollout", 0), ("server", 0)
UNIT = Unit(
    role="",
    index=0,
    nodes=[0],
    tasks_per_node=1,
    cpus_per_task=1,
    mem_mb_per_task=1,
    gpus_per_task=0,
    module="none",
)
PLAN = toy_plan(
    [dataclasses.replace(UNIT, role=role) for role in ("server", "rollout", "trainer")], "/python"
)


@pytest.fixture
def make(tmp_path):
    trial = Trial(tmp_path / "e" / "t")
    trial.make_dirs()

    def make(**more) -> Driver:
        attempt = trial.attempt("7.0")
        attempt.make_dirs()
        made = Driver(attempt, PLAN, None, MemoryNames(), lambda: None, RecoverConfig(), **more)
        made._machine = Supervisor(PLAN.units, "auto", 3)
        made._machine.start(0)
        made._handles = {key: (SimpleNamespace(unplaced=lambda: ""), 0) for key in (TRAINER, ROLLOUT, SERVER)}
        for key in made._handles:
            made._liveness.started(key, 0.0)
        return made

    return make


def hung(driver: Driver, seconds: int) -> list:
    """Whom the driver's looks of so many seconds find, while the rollout role lives and the trainer waits."""
    found = []
    driver._machine.hung = lambda now, key, why: found.append(key) or []
    driver._measured = SimpleNamespace(step_s=1.0)
    write_json(driver.attempt.activity("trainer", 0, 0), {"doing": "wait", "step": 3})
    rollout = driver.names.lease("rollout/0", {"attempt": "7.0"}, 1e9)
    for now in range(0, seconds, 10):
        rollout.renew()
        driver._watch_liveness(float(now))
    return found


@pytest.mark.parametrize(("state", "to_blame"), [("loading", []), ("serving", [ROLLOUT])])
def test_the_trainer_may_wait_as_long_as_no_server_serves(make, state, to_blame):
    driver = make(servers_away_s=1800.0)
    driver.names.lease("server/0", {"attempt": "7.0", "incarnation": 0, "state": state}, 1e9)
    assert sorted(set(hung(driver, 1200))) == to_blame
    assert (driver._machine.slots[SERVER].served_at is not None) is (state == "serving")


def test_a_unit_that_slurm_starts_nowhere_is_ended_for_other_nodes(make):
    driver, killed = make(), []
    said = "srun: Job 7 step creation still disabled, retrying (Requested nodes are busy)"
    driver._handles[TRAINER] = (
        SimpleNamespace(unplaced=lambda: said, kill=lambda: killed.append(TRAINER)),
        0,
    )
    driver._watch_liveness(PLACED_S)
    assert not killed
    driver._machine.slots[TRAINER].incarnation = 1  # its first start had a place
    driver._watch_liveness(PLACED_S + 1)
    assert killed == [TRAINER]
    actions = driver._machine.exited(PLACED_S + 2, TRAINER, 1, End(1, ""))
    assert any(isinstance(action, Record) and action.details.get("class") == "node" for action in actions)
    assert driver._machine.phase is Phase.ENDING, "the job is requeued"


def test_how_long_servers_may_be_away_is_what_the_configuration_says(tmp_path, monkeypatch):
    trial = Trial(tmp_path / "e" / "t")
    trial.make_dirs()
    trial.make_secret()
    data = {
        "experiment_name": "e",
        "trial_name": "t",
        "cluster": {"fileroot": str(tmp_path)},
        "train_dataset": {"path": "/data"},
        "actor": {"path": "/model"},
        "rollout": {"setup_timeout": 7200.0},
    }
    from_dict(data)
    write_json(trial.config_json, data)
    write_json(trial.plan_json, PLAN.to_json())
    seen = []
    monkeypatch.setattr(app, "Driver", lambda *args: seen.append(args[-1]) or SimpleNamespace(run=lambda: 0))
    monkeypatch.setattr(
        "sys.argv", ["supervisor", "--trial_dir", str(trial.dir), "--attempt", "7.0", "--steps", "process"]
    )
    assert app.main() == 0
    assert seen == [7200.0]


def test_a_signal_while_the_file_system_fails_is_obeyed_all_the_same(make, monkeypatch):
    driver = make()

    def fails(path):
        raise OSError("stale file handle")

    driver.trial.intent.mkdir(exist_ok=True)
    monkeypatch.setattr(driving.os, "listdir", fails)
    driver._wishes.append("SIGTERM")
    stopped = []
    driver._stop = stopped.append
    driver._grant_wishes()
    assert stopped == ["SIGTERM"]
