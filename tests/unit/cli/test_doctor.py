"""doctor on the command line: its exit code, its table, and the short job that it asks for."""

import json
import os

import pytest

from hpc_rl.cli.__main__ import build_parsers, main
from hpc_rl.cli.options import arrange_arguments
from hpc_rl.cli.outcome import collect_sources
from hpc_rl.config.options.cluster import SlurmLauncherConfig
from hpc_rl.doctor.finding import Requirements
from hpc_rl.doctor.slurm_checks import PROGRAMS
from hpc_rl.trials.requirements import find_requirements, make_srun_options

pytestmark = pytest.mark.usefixtures("state_home")


def test_the_short_job_asks_for_what_the_trial_asks_for():
    asked = make_srun_options(
        Requirements(num_nodes=3, cpus=4, gpus=8, mem_mb=1000),
        SlurmLauncherConfig(account="x", partition="p"),
    )
    assert asked == ["--cpus-per-task=4", "--mem=1000M", "--gpus-per-node=8", "--partition=p", "--account=x"]
    assert make_srun_options(Requirements(num_nodes=3), SlurmLauncherConfig()) == ["--cpus-per-task=1"]


def test_a_failure_is_exit_code_1_with_its_fix_below(tmp_path, monkeypatch, capsys):
    """Here two: the directory, and a Slurm without a controller, whose nodes are not visited then."""
    for name in ("SLURM_JOB_ID", "SLURM_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name in PROGRAMS:
        (tmp_path / name).write_text(f"#!/bin/bash\necho {name} >>{tmp_path}/calls; echo down >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "file").write_text("")
    words = ["--fileroot", str(tmp_path / "file" / "runs"), "--allocation", "--wait_s", "5", "--json"]
    assert main(["doctor", *words]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["failed"] is True
    rows = {row["check"]: row for row in told["findings"]}
    row = rows["fileroot"]
    assert row["status"] == "fail" and "can't be written" in row["found"] and "cluster.fileroot" in row["fix"]
    assert rows["slurm controller"]["status"] == "fail" and "nodes reported" not in rows
    assert {"scontrol", "sinfo"} == {*(tmp_path / "calls").read_text().split()}


def test_options_of_a_configuration_need_one(capsys):
    assert main(["doctor", "cluster.n_nodes=3"]) == 64
    assert "--config FILE" in capsys.readouterr().err


def test_a_missing_file_of_the_configuration_is_a_finding_among_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    lines = [
        "train_dataset: {path: /no/such/data.jsonl, batch_size: 64}",
        "actor: {path: /m}",
        "cluster: {n_gpus_per_node: 0}",
        "trial_name: t",
        "experiment_name: e",
    ]
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    argv = ["doctor", "--config", str(tmp_path / "config.yaml"), "--fileroot", str(tmp_path), "--json"]
    assert main(argv) == 1
    rows = json.loads(capsys.readouterr().out)["findings"]
    failed = [row["found"] for row in rows if (row["check"], row["status"]) == ("configuration", "fail")]
    assert any("/no/such/data.jsonl" in found for found in failed)
    assert [row["status"] for row in rows if row["check"] == "python"] == ["ok"]


def test_an_unknown_profile_of_a_cluster_is_refused(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("trial_name: t\n")
    assert main(["doctor", "--config", str(tmp_path / "config.yaml"), "--cluster", "nope"]) == 64
    assert "nope" in capsys.readouterr().err


def requirements(*argv: str):
    parser = build_parsers(["doctor"])[("doctor",)]
    args = parser.parse_args(arrange_arguments(parser, list(argv)))
    args.argv = ["doctor"]
    return find_requirements(collect_sources(args), args.fileroot, args.partition, args.nodes)


def test_the_profile_of_a_cluster_is_examined(tmp_path, monkeypatch):
    monkeypatch.setenv("HPC_RL_SITE_DIR", str(tmp_path))
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "big.yaml").write_text(
        "cluster: {fileroot: /shared/big}\nlauncher: {type: slurm, slurm: {partition: gpu, account: lab}}\n"
    )
    wanted, options, verdict = requirements("--cluster", "big")
    assert (wanted.fileroot, wanted.partition, wanted.on_slurm) == ("/shared/big", "gpu", True)
    assert options.account == "lab" and verdict is None
    (tmp_path / "a.yaml").write_text(
        "experiment_name: e\ntrial_name: t\nactor: {path: /m}\ntrain_dataset: {path: /d, batch_size: 64}\n"
    )
    wanted, *_ = requirements(str(tmp_path / "a.yaml"), "--cluster", "big", "--partition", "cpu")
    assert (wanted.fileroot, wanted.partition) == ("/shared/big", "cpu")
