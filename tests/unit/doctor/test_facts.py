"""What the doctor finds out for real: this machine, directories that are well and that are not, several nodes in one folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from hpc_rl.doctor import filesystem
from hpc_rl.doctor.facts import Facts, cgroup_memory, gather, leftovers, versions
from hpc_rl.doctor.filesystem import FileSystem, look, probe
from hpc_rl.doctor.job_probe import reports
from hpc_rl.doctor.node import Visit
from hpc_rl.doctor.slurm_facts import PROGRAMS, ask


def test_a_good_directory(tmp_path):
    fs = probe(tmp_path)
    assert (fs.error, fs.exists, fs.rename, fs.link, fs.exclusive, fs.flock) == (
        "",
        True,
        True,
        True,
        True,
        True,
    )
    assert fs.kind and fs.free_bytes > 0 and abs(fs.skew_s) < 60
    assert list(tmp_path.iterdir()) == [], "something was left behind"


def test_a_directory_that_is_not_there_yet_is_probed_by_its_parent(tmp_path):
    fs = probe(tmp_path / "a" / "b")
    assert (fs.error, fs.exists) == ("", False)
    assert list(tmp_path.iterdir()) == []


def test_a_path_below_a_file_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    assert "can't be written" in probe(tmp_path / "file" / "x").error


def test_a_mount_that_hangs_costs_a_time_limit(tmp_path, monkeypatch):
    slow = tmp_path / "python"
    slow.write_text("#!/bin/bash\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(filesystem.sys, "executable", str(slow))
    assert "no answer within 0.3 s" in look(tmp_path, timeout_s=0.3).error


def test_the_smallest_memory_limit_above_a_process_counts(tmp_path):
    (tmp_path / "own").write_text("0::/job/step\n")
    (tmp_path / "fs" / "job" / "step").mkdir(parents=True)
    (tmp_path / "fs" / "job" / "memory.max").write_text("1000000\n")
    (tmp_path / "fs" / "job" / "step" / "memory.max").write_text("max\n")
    assert cgroup_memory(tmp_path / "fs", tmp_path / "own") == 1_000_000
    (tmp_path / "own").write_text("5:memory:/job\n")
    (tmp_path / "fs" / "memory" / "job").mkdir(parents=True)
    (tmp_path / "fs" / "memory" / "job" / "memory.limit_in_bytes").write_text("77\n")
    assert cgroup_memory(tmp_path / "fs", tmp_path / "own") == 77


def test_this_machine_tells_all_and_survives_json(tmp_path, state_home):
    facts = gather(tmp_path, sys.executable)
    assert facts.cpus > 0 and facts.mem_bytes > 0 and facts.port > 0 and facts.nofile[0] != 0
    assert isinstance(facts.trainer, dict) and facts.trainer["torch"]
    assert Facts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_the_packages_asked_for_are_those_that_the_project_names(tmp_path):
    project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())["project"]
    named = {re.match(r"[\w-]+", one).group() for one in project["dependencies"]}
    assert set(gather(tmp_path).packages) == named


def test_an_interpreter_that_is_none():
    assert "not a program" in versions("/no/such/python")


def test_a_process_whose_supervisor_is_gone_is_found_and_no_other(tmp_path):
    """`proc` is made by hand: 10 is held by a supervisor, 11 by 10, 12 by a step daemon, 13 and 15 by nobody, 14 is not ours."""

    def process(pid: int, parent: int, words: str, comm: str = "python", ours: bool = True) -> None:
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} ({comm}) S {parent} 0 0")
        (folder / "comm").write_text(f"{comm}\n")
        (folder / "cmdline").write_text(words.replace(" ", "\0") + "\0")
        (folder / "environ").write_text("A=b\0" + ("HPC_RL_STEPS=srun\0SLURM_JOB_ID=7\0" if ours else ""))

    process(5, 1, "python -m hpc_rl.app.supervisor", ours=False)
    process(6, 1, "slurmstepd: [7.1]", comm="slurmstepd", ours=False)
    process(10, 5, "python -m hpc_rl.app.rollout")
    process(11, 10, "python -m hpc_rl.app.rollout_worker")
    process(12, 6, "python -m hpc_rl.app.server")
    process(13, 1, "sglang::scheduler")
    process(14, 1, "bash", ours=False)
    process(7, 1, "/lib/systemd/systemd --user", comm="systemd", ours=False)
    process(15, 7, "python -m hpc_rl.app.trainer")
    (tmp_path / "self").mkdir()
    assert [(left.pid, left.job_id) for left in leftovers(tmp_path)] == [(13, "7"), (15, "7")]


def test_without_slurm_only_that_is_said(tmp_path):
    assert ask({"PATH": str(tmp_path)}).missing == list(PROGRAMS)


def test_sinfo_is_read(tmp_path):
    for name in PROGRAMS:
        (tmp_path / name).write_text("#!/bin/bash\nexit 0\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "sinfo").write_text(
        '#!/bin/bash\nif [[ $1 == --version ]]; then echo "slurm-wlm 22.05.8"; else '
        "echo 'main*|up|infinite|4|64|256000|gpu:8'; echo 'old|down|1:00|2+|8|1000+|(null)'; echo junk; fi\n"
    )
    (tmp_path / "sacct").write_text("#!/bin/bash\necho 'Slurm accounting storage is disabled' >&2; exit 1\n")
    (tmp_path / "sacct").chmod(0o755)
    found = ask({"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert (found.version, found.missing, found.error) == ("22.05.8", [], "")
    assert "disabled" in found.accounting
    main = found.partitions[0]
    assert (main.name, main.default, main.up, main.num_nodes, main.gpus, main.mem_mb) == (
        "main",
        True,
        True,
        4,
        8,
        256000,
    )


def test_three_nodes_meet_and_see_each_other(tmp_path):
    plain = Facts(fs=FileSystem(path=str(tmp_path)))
    visits = [Visit(tmp_path, rank, 3, patience_s=60) for rank in range(3)]
    threads = [threading.Thread(target=visit.run, args=(lambda: plain,)) for visit in visits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    found = reports(tmp_path)
    assert [report.seen.rank for report in found] == [0, 1, 2]
    for kind in ("open", "link", "mkdir"):
        assert sum(kind in report.seen.won for report in found) == 1
    assert all(
        not report.seen.missing and report.seen.reached == 2 and not report.seen.unreachable
        for report in found
    )
    assert [report.seen.lock for report in found] == [False, False, False]
    assert all(report.seen.stale_content_s is not None and report.seen.name_s is not None for report in found)


def test_a_node_that_never_comes_is_missed_in_bounded_time(tmp_path):
    visit = Visit(tmp_path, 0, 2, patience_s=0.5)
    visit.run(Facts)
    assert reports(tmp_path)[0].seen.missing == [1]


@pytest.mark.parametrize("content", ["{", '{"facts": {}, "seen": {}}', "[]", '{"facts": 1}'])
def test_a_torn_report_is_left_out(tmp_path, content):
    (tmp_path / "result-0").write_text(content)
    assert reports(tmp_path) == []


def test_the_node_program_knows_its_options(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "hpc_rl.doctor.node", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "--patience_s" in done.stdout
