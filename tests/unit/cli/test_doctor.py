"""doctor on the command line: its exit code, its table, and the short job that it asks for."""

from __future__ import annotations

import json

import pytest

from hpc_rl.cli.__main__ import main
from hpc_rl.cli.doctor import srun_options
from hpc_rl.config.sections.cluster import SlurmLauncherConfig
from hpc_rl.doctor.finding import Wanted

pytestmark = pytest.mark.usefixtures("state_home")


def test_the_short_job_asks_for_what_the_trial_asks_for():
    asked = srun_options(
        Wanted(num_nodes=3, cpus=4, gpus=8, mem_mb=1000), SlurmLauncherConfig(account="x", partition="p")
    )
    assert asked == ["--cpus-per-task=4", "--mem=1000M", "--gpus-per-node=8", "--partition=p", "--account=x"]
    assert srun_options(Wanted(num_nodes=3), SlurmLauncherConfig()) == ["--cpus-per-task=1"]


def test_a_failure_is_exit_code_1_with_its_fix_below(tmp_path, monkeypatch, capsys):
    for name in ("SLURM_JOB_ID", "SLURM_CONF"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "file").write_text("")
    assert main(["doctor", "--fileroot", str(tmp_path / "file" / "runs"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["failed"] is True
    [row] = [row for row in told["findings"] if row["check"] == "fileroot"]
    assert row["status"] == "fail" and "can't be written" in row["found"] and "cluster.fileroot" in row["fix"]


def test_options_of_a_configuration_need_one(capsys):
    assert main(["doctor", "cluster.n_nodes=3"]) == 64
    assert "--config FILE" in capsys.readouterr().err
