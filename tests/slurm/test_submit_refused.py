"""What a real sbatch refuses: its words, exit code 69, and nothing left behind."""

import json
from pathlib import Path

import pytest
from command_line import Shell, make_python, small_trial


@pytest.fixture
def shell(cluster, tmp_path: Path) -> Shell:
    shell = small_trial(tmp_path)
    shell.env |= {name: value for name, value in cluster.client_env.items() if name != "PATH"}
    return shell


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--partition", "nowhere"], "invalid partition specified: nowhere"),
        (["launcher.slurm.mem=900T"], "Memory specification can not be satisfied"),
        (["launcher.slurm.constraint=unobtainium"], "Invalid feature specification"),
    ],
)
def test_sbatch_refuses(shell, cluster, arguments, words):
    message = shell.refused(69, "submit", "--no_check", "--config", "grpo.yaml", *arguments)
    assert message.startswith("hpc-rl: sbatch refused the job: ")
    assert words in message
    assert message.count("\n") == 1
    assert cluster.run("squeue", "-h") == ""


def known_jobs(cluster) -> set[str]:
    """The ids of all jobs that Slurm has taken and still knows, over or not."""
    return set(cluster.run("squeue", "-h", "-t", "all", "-o", "%i").split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cluster.fileroot=/proc/foo"], "no file can be created in /proc"),
        (["allocation_mode=sglang:d1+fsdp:d1", "stats_logger.wandb.mode=offline"], "lacks"),
        (["--n_nodes", "9", "allocation_mode=embedded:d8+fsdp:d1"], "has 4 nodes; 9 were requested"),
    ],
)
def test_all_commands_refuse_the_same_before_the_queue(shell, cluster, tmp_path, arguments, words):
    python = make_python(tmp_path / "python")
    before = known_jobs(cluster)
    common = ["--config", "grpo.yaml", f"launcher.python={python}", *arguments]
    said = [shell.run(*command, *common) for command in (["check"], ["submit", "--dry_run"], ["submit"])]
    assert len({one.stderr for one in said}) == 1 and words in said[0].stderr
    assert {one.returncode for one in said} <= {64, 73}
    found = json.loads(shell.run("doctor", *common, "--json").stdout)["findings"]
    failed = {row["found"] for row in found if row["status"] == "fail"}
    assert {*said[0].stderr.removeprefix("hpc-rl: ").splitlines()} <= failed
    assert known_jobs(cluster) == before


def test_what_all_commands_accept_enters_the_queue(shell, cluster):
    before = known_jobs(cluster)
    for command in (["check"], ["submit", "--dry_run"]):
        done = shell.run(*command, "--config", "grpo.yaml")
        assert done.returncode == 0, done.stderr
    assert known_jobs(cluster) == before
    job = shell.run("submit", "--parsable", "--config", "grpo.yaml", "launcher.slurm.extra_args=[--hold]")
    assert job.returncode == 0, job.stderr
    assert known_jobs(cluster) - before == {job.stdout.strip()}
    cluster.run("scancel", job.stdout.strip())
