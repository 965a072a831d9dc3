"""The exit code and the exit record of every role."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from patience import extend
from small_configs import STORED
from toy_plans import toy_plan, toy_unit

from hpc_rl.core import log, net
from hpc_rl.core.records import EventKind, EventLog
from hpc_rl.core.trial import Attempt, Trial, write_json
from hpc_rl.roles.role import Context
from hpc_rl.supervise.failure_policy import classify_exit
from hpc_rl.supervise.unit_loop import UnitLoop

ROLE = """
import sys
from hpc_rl.roles import role

def body(context):
    with open("/dev/full", "w", buffering=1) as file:
        file.write("something\\n")

role.run("trainer", body)
"""
TELLING = """
import logging, os
from hpc_rl.roles import role

def body(context):
    logging.error("the hub refused %s", os.environ["SITE_KEY"])
    raise RuntimeError(f"401 for {os.environ['SITE_KEY']} of {context.trial.load_variables('env')}")

role.run("server", body)
"""
UNIT = toy_unit()


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    trial = Trial(tmp_path / "u" / "e" / "t")
    trial.make_dirs()
    attempt = trial.attempt("7.0")
    attempt.make_dirs()
    write_json(trial.secret, {"control": "one-token", "data": "another-token"}, 0o600)
    write_json(trial.plan_json, toy_plan([UNIT], sys.executable).to_json())
    write_json(trial.config_json, STORED)
    return attempt


def run(attempt: Attempt, role: str) -> tuple[int, str]:
    """Return exit code and log of a role."""
    command = [sys.executable, "-c", role, "--trial_dir", str(attempt.trial.dir), "--attempt", attempt.id]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        return process.wait(extend(60)), process.stderr.read()


def test_a_full_disk_is_recorded_and_costs_no_retry(attempt: Attempt):
    code, said = run(attempt, ROLE)
    assert "No space left" in said
    end = classify_exit(attempt, UNIT, 0, code)
    assert code == end.code == 73 and "No space left" in end.reason
    assert end.failure == "disk full" and not end.policy.uses_retry and end.policy.action == "restart"


def test_no_log_record_or_event_shows_a_secret_variable_whichever_option_set_it(attempt: Attempt):
    secrets = {"env": "hf_value-of-all", "inference_server_env_vars": "value-of-servers"}
    for option, value in secrets.items():
        path = attempt.trial.secret_variables(option)
        path.write_text(f"SITE_KEY={value}\0")
        path.chmod(0o600)
    code, said = run(attempt, TELLING)
    reason = classify_exit(attempt, toy_unit("server"), 0, code).reason
    assert reason == "RuntimeError: 401 for *** of {'SITE_KEY': '***'}"
    assert "the hub refused ***" in said and not any(value in said for value in secrets.values())
    log.configure("supervisor", secrets=attempt.trial.load_every_secret())
    try:
        loop = SimpleNamespace(attempt=attempt)
        UnitLoop.write_event(loop, EventKind.EXITED, {"reason": "srun: hf_value-of-all"})
    finally:
        log.configure("none")
    assert [event.reason for event in EventLog(attempt).poll()] == ["srun: ***"]


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
    addresses = {"lo": "127.0.0.9", "": "10.0.0.1"}
    monkeypatch.setattr(net, "choose_address", lambda _hosts, interface, _peers: addresses[interface])
    trial = Trial(tmp_path / "u" / "e" / "t")
    trial.make_dirs()
    write_json(trial.config_json, STORED | more)
    write_json(trial.plan_json, toy_plan([UNIT], sys.executable, n_nodes=n_nodes).to_json())
    address = Context("rollout", trial.attempt("7.0"), 0, 0, 0, 1, {}).address
    assert address.startswith("127.") == is_loopback
    with net.bind_published(address) as sock:
        assert (sock.getsockname()[0] == "127.0.0.1") == (address == net.LOOPBACK)
