"""attach: the place that is meant, by the records of processes, and the command that goes there."""

import socket

import pytest

from hpc_rl.core.errors import TrialStateError
from hpc_rl.core.trial import write_json
from hpc_rl.status.trial_status import load_status
from hpc_rl.trials.attachment import choose_process, list_role_processes, make_attach_command


@pytest.fixture
def on_slurm(fake_trial):
    """Two trainer ranks on n1 and n2, a server on n3 that was started twice."""
    fake_trial.run_to(3)
    fake_trial.job("7", scheduler="slurm")

    def record(name, rank, node, pid):
        path = fake_trial.trial.attempt("7.0").processes / f"{name}-rank{rank}.json"
        write_json(
            path,
            {
                "pid": pid,
                "host": "h",
                "rank": rank,
                "role": "x",
                "start_ticks": 1,
                "node": node,
                "job_id": "7",
            },
        )

    record("trainer-0.0", 0, "n1", 10)
    record("trainer-0.0", 1, "n2", 11)
    record("server-0.0", 0, "n2", 12)
    record("server-0.1", 0, "n3", 13)
    record("client-server-0.1", 0, "n1", 14)
    (fake_trial.trial.attempt("7.0").processes / "torn-0.0-rank0.json").write_text("{")
    return load_status(fake_trial.trial)


def test_every_place_once_trainer_first(on_slurm):
    assert [(place.name, place.node, place.pid) for place in list_role_processes(on_slurm)] == [
        ("trainer-0 rank 0", "n1", 10),
        ("trainer-0 rank 1", "n2", 11),
        ("server-0 rank 0", "n3", 13),
    ]


def test_on_slurm_an_overlapping_step_on_the_node(on_slurm):
    line = make_attach_command(on_slurm, choose_process(on_slurm, None, None, None), [])
    assert line[0] == "srun" and line[-3:] == ["--pty", "bash", "--login"]
    assert {"--jobid=7", "--overlap", "--mem=0", "--nodelist=n1"} <= set(line)
    line = make_attach_command(on_slurm, choose_process(on_slurm, "trainer", None, 1), ["nvidia-smi"])
    assert "--nodelist=n2" in line and "--pty" not in line and line[-1] == "nvidia-smi"
    assert choose_process(on_slurm, "server", 0, None).node == "n3"


def test_the_shell_shares_the_cpus_of_the_role(on_slurm, fake_trial):
    trainer = {"role": "trainer", "index": 0, "nodes": [0, 1], "tasks_per_node": 2, "cpus_per_task": 7}
    write_json(fake_trial.trial.plan_json, {"units": [trainer]})
    story = load_status(fake_trial.trial)
    assert "--cpus-per-task=14" in make_attach_command(story, choose_process(story, "trainer", 0, 0), [])
    assert "--cpus-per-task=1" in make_attach_command(story, choose_process(story, "server", 0, 0), [])


def leave(fake_trial, attempt, name, **more):
    fake_trial.trial.attempt(attempt).make_dirs()
    path = fake_trial.trial.attempt(attempt).processes / f"{name}-rank0.json"
    write_json(path, {"pid": 20, "start_ticks": 1, "host": "h", "role": "server", "rank": 0, **more})


def test_servers_in_a_job_of_their_own_are_places_too(on_slurm, fake_trial):
    trial = fake_trial.trial
    write_json(trial.job("8"), {"job_id": "8", "kind": "servers", "serves": "7", "num_tasks": 3, "time": 1.0})
    for task, event in (("8_0", "started"), ("8_1", "ended"), ("8_2", "started")):
        fake_trial.script_said(task, event, restart=0)
    leave(fake_trial, "8_0.0", "server-5.0", node="n5", job_id="9")
    leave(fake_trial, "8_1.0", "server-6.0", node="n6", job_id="10")
    for restart, node in (
        (0, "n7"),
        (1, "n8"),
    ):  # its second start is the tenth at the latest: as numbers, not as text
        leave(fake_trial, f"8_2.{9 + restart}", "server-7.0", node=node, job_id="8")
    story = load_status(trial)
    servers = [
        (place.name, place.node, place.attempt)
        for place in list_role_processes(story)
        if place.attempt != "7.0"
    ]
    assert servers == [("server-5 rank 0", "n5", "8_0.0"), ("server-7 rank 0", "n8", "8_2.10")]
    line = make_attach_command(story, choose_process(story, "server", 5, None), [])
    assert "--jobid=9" in line and "--nodelist=n5" in line


def test_the_component_of_a_heterogeneous_job_is_named(on_slurm, fake_trial):
    units = [{"role": "trainer", "index": 0, "nodes": [0]}, {"role": "server", "index": 0, "nodes": [2]}]
    groups = [{"name": "trial", "nodes": [0, 1]}, {"name": "servers", "nodes": [2]}]
    write_json(
        fake_trial.trial.plan_json, {"trainer": "grpo", "layout": "hetjob", "units": units, "groups": groups}
    )
    story = load_status(fake_trial.trial)
    assert "--het-group=0" in make_attach_command(story, choose_process(story, "trainer", None, None), [])
    assert "--het-group=1" in make_attach_command(story, choose_process(story, "server", None, None), [])
    assert not [
        word
        for word in make_attach_command(on_slurm, choose_process(on_slurm, None, None, None), [])
        if "het-group" in word
    ]


def test_what_does_not_run_is_told_with_what_does(on_slurm, fake_trial):
    with pytest.raises(TrialStateError, match=r"--role rollout \(running: trainer-0 rank 0"):
        choose_process(on_slurm, "rollout", None, None)
    fake_trial.ended("7.0", 70, "server-0 gave up")
    with pytest.raises(TrialStateError, match=r"is failed \(server-0 gave up\)"):
        choose_process(load_status(fake_trial.trial), None, None, None)


def test_on_this_machine_a_shell_and_elsewhere_a_word(fake_trial):
    fake_trial.run_to(3)
    for host, role in ((socket.gethostname(), "trainer"), ("elsewhere", "server")):
        path = fake_trial.trial.attempt("7.0").processes / f"{role}-0.0-rank0.json"
        write_json(path, {"pid": 10, "start_ticks": 1, "host": host, "role": role, "rank": 0})
    story = load_status(fake_trial.trial)
    assert make_attach_command(story, choose_process(story, None, None, None), ["ls"]) == ["ls"]
    with pytest.raises(TrialStateError, match="runs on elsewhere"):
        make_attach_command(story, choose_process(story, "server", None, None), [])
