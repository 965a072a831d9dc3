"""attach: the place that is meant, by the records of processes, and the command that goes there."""

from __future__ import annotations

import socket

import pytest

from hpc_rl.errors import TrialStateError
from hpc_rl.launch.attach import choose, command, places
from hpc_rl.launch.story import tell
from hpc_rl.trial import write_json


@pytest.fixture
def on_slurm(fake_trial):
    """Two trainer ranks on n1 and n2, a server on n3 that was started twice."""
    fake_trial.run_to(3)
    fake_trial.job("7", scheduler="slurm")

    def record(name, rank, node, pid):
        path = fake_trial.trial.attempt("7.0").processes / f"{name}-rank{rank}.json"
        write_json(path, {"pid": pid, "host": "h", "rank": rank, "role": "x", "start_ticks": 1, "node": node, "job_id": "7"})

    record("trainer-0.0", 0, "n1", 10)
    record("trainer-0.0", 1, "n2", 11)
    record("server-0.0", 0, "n2", 12)
    record("server-0.1", 0, "n3", 13)
    record("client-server-0.1", 0, "n1", 14)
    (fake_trial.trial.attempt("7.0").processes / "torn-0.0-rank0.json").write_text("{")
    return tell(fake_trial.trial)


def test_every_place_once_trainer_first(on_slurm):
    assert [(place.name, place.node, place.pid) for place in places(on_slurm)] == [
        ("trainer-0 rank 0", "n1", 10),
        ("trainer-0 rank 1", "n2", 11),
        ("server-0 rank 0", "n3", 13),
    ]


def test_on_slurm_an_overlapping_step_on_the_node(on_slurm):
    line = command(on_slurm, choose(on_slurm, None, None, None), [])
    assert line[0] == "srun" and line[-3:] == ["--pty", "bash", "--login"]
    assert {"--jobid=7", "--overlap", "--mem=0", "--nodelist=n1"} <= set(line)
    line = command(on_slurm, choose(on_slurm, "trainer", None, 1), ["nvidia-smi"])
    assert "--nodelist=n2" in line and "--pty" not in line and line[-1] == "nvidia-smi"
    assert choose(on_slurm, "server", 0, None).node == "n3"


def test_what_does_not_run_is_told_with_what_does(on_slurm, fake_trial):
    with pytest.raises(TrialStateError, match="--role rollout; what runs: trainer-0 rank 0"):
        choose(on_slurm, "rollout", None, None)
    fake_trial.ended("7.0", 70, "server-0 gave up")
    with pytest.raises(TrialStateError, match=r"is failed \(failed: server-0 gave up\)"):
        choose(tell(fake_trial.trial), None, None, None)


def test_on_this_machine_a_shell_and_elsewhere_a_word(fake_trial):
    fake_trial.run_to(3)
    for host, role in ((socket.gethostname(), "trainer"), ("elsewhere", "server")):
        path = fake_trial.trial.attempt("7.0").processes / f"{role}-0.0-rank0.json"
        write_json(path, {"pid": 10, "host": host, "rank": 0})
    story = tell(fake_trial.trial)
    assert command(story, choose(story, None, None, None), ["ls"]) == ["ls"]
    with pytest.raises(TrialStateError, match="runs on elsewhere: give the command there"):
        command(story, choose(story, "server", None, None), [])
