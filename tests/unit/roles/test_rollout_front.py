"""The socket of a rollout role over its restarts."""

import socket

import pytest

from hpc_rl.core import net
from hpc_rl.core.trial import Trial, load_json, write_json
from hpc_rl.roles import rollout_front
from hpc_rl.roles.rollout_front import listen


@pytest.fixture
def trial(tmp_path):
    made = Trial(tmp_path)
    made.rollout.mkdir()
    return made


def port_of(listener: socket.socket) -> int:
    with listener:
        return listener.getsockname()[1]


def test_the_port_stays_over_a_kill(trial):
    port = port_of(listen(trial, 0))
    assert port_of(listen(trial, 0)) == port


def test_a_port_that_is_taken_or_of_another_host_is_replaced(trial, monkeypatch):
    monkeypatch.setattr(rollout_front, "PORT_WAIT_S", 0.2)
    with net.bind() as other:
        port = other.getsockname()[1]
        write_json(trial.rollout_port, {"host": socket.gethostname(), "port": port})
        assert port_of(listen(trial, 0)) != port
        write_json(trial.rollout_port, {"host": "elsewhere", "port": port})
        monkeypatch.setattr(rollout_front, "PORT_WAIT_S", 1e9)  # it is not tried there
        new = port_of(listen(trial, 0))
    assert new != port and load_json(trial.rollout_port) == {"host": socket.gethostname(), "port": new}


def test_a_port_that_is_asked_for_is_taken(trial):
    port = port_of(net.bind())
    assert port_of(listen(trial, port)) == port
