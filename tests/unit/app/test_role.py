"""What every role leaves when it ends: its code, and a record that says why."""

import subprocess
import sys
from pathlib import Path

import pytest
from toy_plans import toy_plan

from hpc_rl import net
from hpc_rl.app.role import Context
from hpc_rl.plan.schema import Unit
from hpc_rl.supervise.exit_policy import unit_exit
from hpc_rl.trial import Trial, write_json

ROLE = """
import sys
from hpc_rl.app import role

def body(context):
    with open("/dev/full", "w", buffering=1) as file:
        file.write("something\\n")

role.run("trainer", body)
"""
UNIT = Unit(
    role="trainer",
    index=0,
    nodes=[0],
    tasks_per_node=1,
    cpus_per_task=1,
    mem_mb_per_task=1,
    gpus_per_task=0,
    module="m",
)


def test_a_full_disk_is_recorded_and_costs_no_retry(tmp_path: Path):
    trial = Trial(tmp_path / "u" / "e" / "t")
    trial.make_dirs()
    attempt = trial.attempt("7.0")
    attempt.make_dirs()
    write_json(trial.secret, {"control": "one-token", "data": "another-token"}, 0o600)
    write_json(trial.plan_json, toy_plan([UNIT], sys.executable).to_json())
    config = {
        "experiment_name": "e",
        "trial_name": "t",
        "train_dataset": {"path": "/x"},
        "actor": {"path": "/m"},
    }
    write_json(trial.config_json, config)
    command = [sys.executable, "-c", ROLE, "--trial_dir", str(trial.dir), "--attempt", attempt.id]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        code = process.wait(60)
        assert process.stderr is not None and "No space left" in process.stderr.read()
    end = unit_exit(attempt, UNIT, 0, code)
    assert code == end.code == 73 and "No space left" in end.reason
    assert end.failure == "disk full" and not end.policy.uses_retry and end.policy.action == "restart"


@pytest.mark.parametrize(
    ("n_nodes", "more", "is_loopback"),
    [
        (1, {}, True),
        (2, {}, False),
        (1, {"environments": {}}, False),
        (1, {"cluster": {"interface": "lo"}}, True),
    ],
    ids=["one node", "two nodes", "environments from elsewhere", "interface"],
)
def test_services_listen_on_loopback_where_no_other_host_needs_them(
    tmp_path, n_nodes, more, is_loopback, monkeypatch
):
    monkeypatch.setattr(
        net, "published_address", lambda _hosts, interface, _peers: "127.0.0.9" if interface else "10.0.0.1"
    )
    trial = Trial(tmp_path / "u" / "e" / "t")
    trial.make_dirs()
    config = {
        "experiment_name": "e",
        "trial_name": "t",
        "train_dataset": {"path": "/x"},
        "actor": {"path": "/m"},
    }
    write_json(trial.config_json, config | more)
    write_json(trial.plan_json, toy_plan([UNIT], sys.executable, n_nodes=n_nodes).to_json())
    address = Context("rollout", trial.attempt("7.0"), 0, 0, 0, 1, {}).address
    assert address.startswith("127.") == is_loopback
    with net.bind_published(address) as sock:
        assert (sock.getsockname()[0] == "127.0.0.1") == (address == net.LOOPBACK)
