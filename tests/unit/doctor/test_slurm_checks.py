"""The checks of Slurm, against programs that only speak like Slurm."""

import os

import pytest

from hpc_rl.doctor.finding import Requirements, Status
from hpc_rl.doctor.slurm_checks import PROGRAMS, SLURM_CHECKS, check_slurm

NEEDS = Requirements(on_slurm=True, num_nodes=2, cpus=32, gpus=8, mem_mb=128_000, partition="gpu")
LINES = [
    f"{partition}|up|1-00:00:00|1-infinite|n{number}|64|500000|(null)|{gres}|2"
    for number in range(1, 5)
    for partition, gres in (("gpu", "gpu:h100:8(S:0-1)"), ("cpu", "(null)"))
]
NODES = "\\n".join(LINES)
WELL = {
    "sinfo": f"if [[ $1 == --version ]]; then echo 'slurm-wlm 23.11.4'; else printf '{NODES}\\n'; fi",
    "scontrol": "echo 'Slurmctld(primary) at ctl is UP'",
    "sacct": "true",
}


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """`programs(sinfo="bash text", …)`: all of Slurm's programs and nothing else of it."""
    clean = [part for part in os.environ["PATH"].split(":") if not os.path.exists(f"{part}/sinfo")]
    monkeypatch.setenv("PATH", ":".join([str(tmp_path), *clean]))

    def make(**texts: str) -> None:
        for name, text in (dict.fromkeys(PROGRAMS, "true") | WELL | texts).items():
            program = tmp_path / name
            program.write_text(f"#!/bin/bash\n{text}\n")
            program.chmod(0o755)

    return make


WRONG = [  # check, program, what is asked for, how severe, tokens of the finding and of the fix
    ("slurm version", {"sinfo": "echo slurm 21.08.8"}, {}, "fail", "21.08.8", "22.05"),
    ("slurm controller", {"scontrol": "echo 'Unable to contact' >&2; exit 1"}, {}, "fail", "Unable", "munge"),
    ("slurm controller", {"scontrol": "echo 'backup is UP'; echo 'primary is DOWN'; exit 1"}, {}, "warn", "DOWN", "admin"),
    ("slurm accounting", {"sacct": "echo 'storage is disabled' >&2; exit 1"}, {}, "warn", "disabled", "without it"),
    ("capacity", {"sinfo": "[[ $1 != --version ]] || echo 23.11"}, {}, "warn", "no nodes", "administrators"),
    ("capacity", {}, {"partition": "gpus"}, "fail", "gpus", "--partition gpu"),
    ("capacity", {}, {"partition": ""}, "fail", "no default", "--partition"),
    ("capacity", {}, {"num_nodes": 5}, "fail", "4 nodes", "--n_nodes 4"),
    ("capacity", {}, {"gpus": 16}, "fail", "16 GPUs", "n_gpus_per_node=8"),
    ("capacity", {"sinfo": f"if [[ $1 == --version ]]; then echo 23.11; else printf '{NODES}\\n' | sed s/up/down/; fi"}, {},
     "warn", "not up", "less"),
]  # fmt: skip


def test_all_is_well_with_a_good_cluster(programs):
    programs()
    findings = check_slurm(NEEDS)
    assert {finding.status for finding in findings} == {Status.OK}, findings
    assert {name for name, *_ in WRONG} | {"slurm programs"} == {finding.check for finding in findings}
    assert len(findings) == len(SLURM_CHECKS) + 3


@pytest.mark.parametrize(("name", "texts", "asked", "status", "found", "fix"), WRONG)
def test_a_cluster_with_a_fault(programs, name, texts, asked, status, found, fix):
    programs(**texts)
    needs = Requirements(**{**vars(NEEDS), **asked})
    [finding] = [finding for finding in check_slurm(needs) if finding.check == name]
    assert finding.status == status and found in finding.found and fix in finding.fix


def test_sinfo_that_does_not_answer_is_one_failed_check(programs):
    programs(sinfo="if [[ $1 == --version ]]; then echo 23.11; else echo no controller >&2; exit 1; fi")
    bad = [finding for finding in check_slurm(NEEDS) if finding.status is not Status.OK]
    assert [finding.check for finding in bad] == ["capacity"] and "no controller" in bad[0].found


def test_without_a_controller_nothing_else_is_asked_and_this_machine_is_named(programs):
    dead = "echo 'x: fatal: Could not establish a configuration source' >&2; exit 1"
    programs(sinfo=dead, scontrol=dead, sacct=dead)
    [_, finding] = check_slurm(NEEDS)
    assert (finding.check, finding.status) == ("slurm controller", Status.FAIL)
    assert "configuration source" in finding.found and "launcher.type=local" in finding.fix
    assert [one.status for one in check_slurm(Requirements())] == [Status.OK, Status.WARN]  # a local trial


def test_a_program_that_is_missing(programs, tmp_path):
    programs()
    (tmp_path / "scancel").unlink()
    first = check_slurm(NEEDS)[0]
    assert first.status is Status.FAIL and "scancel" in first.found and "module" in first.fix


def test_no_slurm_is_fine_where_none_is_asked_for(programs):
    assert [finding.status for finding in check_slurm(Requirements())] == [Status.OK]
    assert [finding.status for finding in check_slurm(NEEDS)] == [Status.FAIL]
