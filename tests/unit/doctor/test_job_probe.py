"""What several nodes see of each other: for real in one folder, and every check across nodes shown to
fail.
"""

import json
import subprocess
import sys
import threading
from dataclasses import asdict, replace

import pytest
from patience import extend

from hpc_rl.doctor import node
from hpc_rl.doctor.finding import Finding, Requirements, Status, ok
from hpc_rl.doctor.job_probe import VisitResult, check_nodes, find_error, load_reports
from hpc_rl.doctor.node import NodeObservations, NodeReport, Visit

NEEDS = Requirements(num_nodes=1)
TWO_CPUS = Finding("cpus", Status.OK, "2 usable")


@pytest.fixture
def only_one_check(monkeypatch):
    def check_cpus(needs):
        return ok("2 usable")

    monkeypatch.setattr(node, "MACHINE_CHECKS", (check_cpus,))


def test_three_nodes_meet_and_see_each_other(tmp_path, only_one_check):
    visits = [Visit(tmp_path, rank, 3, patience_s=60) for rank in range(3)]
    threads = [threading.Thread(target=visit.run, args=(NEEDS,)) for visit in visits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(extend(90))
    found = load_reports(tmp_path)
    assert [report.seen.rank for report in found] == [0, 1, 2]
    assert all(report.findings == [TWO_CPUS] for report in found)
    for kind in ("open", "link", "mkdir"):
        assert sum(kind in report.seen.won for report in found) == 1
    for seen in (report.seen for report in found):
        assert not seen.missing and seen.reached == 2 and not seen.unreachable
        assert seen.stale_content_s is not None and seen.name_s is not None
    assert [report.seen.lock for report in found] == [False, False, False]


def test_a_node_that_never_comes_is_missed_in_bounded_time(tmp_path, only_one_check):
    Visit(tmp_path, 0, 2, patience_s=0.5).run(NEEDS)
    assert load_reports(tmp_path)[0].seen.missing == [1]


@pytest.mark.parametrize("content", ["{", '{"findings": [{}], "seen": {}}', "[]", '{"findings": 1}'])
def test_an_incomplete_report_is_left_out(tmp_path, content):
    (tmp_path / "result-0").write_text(content)
    assert load_reports(tmp_path) == []


def test_a_report_survives_json():
    report = NodeReport("n1", "Python 3.12", [TWO_CPUS], NodeObservations(1, name_s=0.5))
    assert NodeReport.from_json(json.loads(json.dumps(asdict(report)))) == report


def test_the_node_program_knows_its_options():
    argv = [sys.executable, "-m", "hpc_rl.doctor.node", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=extend(60))
    assert done.returncode == 0 and "--patience_s" in done.stdout


FINE = NodeObservations(1, name_s=0.2, lock=False, reached=2)


def result(
    *seen: NodeObservations, num_nodes: int = 3, complaint: str = "", software=lambda rank: "Python 3.12"
) -> VisitResult:
    """Three nodes that see each other well, but for what is given."""
    given = {one.rank: one for one in seen}
    reports = []
    for rank in range(3):
        won = ["open", "link", "mkdir"] if rank == 0 else []
        default = NodeObservations(rank, name_s=0.2, won=won, lock=False, reached=2)
        reports.append(NodeReport(f"n{rank}", software(rank), [], given.get(rank, default)))
    return VisitResult(reports, num_nodes, complaint)


WRONG = [  # check, what the nodes reported, how severe, tokens of the finding and of the fix
    ("nodes reported", result(num_nodes=4, complaint="node n3 is down"), "fail", "3 of 4; srun: node n3", "exclude"),
    ("visible to all", result(replace(FINE, missing=[2])), "fail", "n1 did not see", "one file system"),
    ("visible soon", result(replace(FINE, name_s=None)), "fail", "did not show", "acdirmax"),
    ("visible soon", result(replace(FINE, name_s=31.0)), "warn", "31.0 s", "acdirmax"),
    ("absent names", result(replace(FINE, stale_name_s=None)), "warn", "more than 5 s", "exists"),
    ("replaced files", result(replace(FINE, stale_content_s=None)), "fail", "old content", "nocto"),
    ("replaced files", result(replace(FINE, stale_content_s=4.0)), "warn", "4.0 s", "acregmax"),
    ("one winner", result(replace(FINE, won=["link"])), "fail", "link was won by n0, n1", "both own"),
    ("lock scope", result(replace(FINE, lock=True)), "warn", "does not keep out n1", "HF_HOME"),
    ("clocks", result(replace(FINE, skew_s=40.0)), "warn", "n0 and n1 are 40.0 s apart", "NTP"),
    ("network", result(replace(FINE, unreachable=["10.0.0.3:4000 of node 2"])), "fail", "n1 can't reach 10.0.0.3", "firewall"),
    ("same software", result(software=lambda rank: f"torch 2.{rank}"), "fail", "torch 2.1 on n1", "launcher.python"),
]  # fmt: skip


def test_all_is_well_with_good_nodes():
    findings = check_nodes(result())
    assert [finding for finding in findings if finding.status is not Status.OK] == []
    assert {name for name, *_ in WRONG} == {finding.check for finding in findings}


@pytest.mark.parametrize(("name", "wrong", "status", "found", "fix"), WRONG)
def test_nodes_with_a_fault(name, wrong, status, found, fix):
    [finding] = [finding for finding in check_nodes(wrong) if finding.check == name]
    assert finding.status == status and found in finding.found and fix in finding.fix


def test_where_no_node_came_only_that_is_reported():
    [finding] = check_nodes(VisitResult([], 2, "Requested node configuration is not available"))
    assert (finding.status, finding.check) == (Status.FAIL, "nodes reported")
    assert "not available" in finding.found


def test_a_traceback_of_a_node_is_shown_as_its_last_line():
    frames = '  File "/a/node.py", line 3, in main\n    import xxhash\n'
    traceback = f"Traceback (most recent call last):\n{frames}ModuleNotFoundError: No module named 'xxhash'\n"
    printed = f"module: warning\n{traceback}{traceback}srun: error: n1: task 0: Exited with exit code 1\n"
    assert (
        find_error(printed) == "the program on a node failed: ModuleNotFoundError: No module named 'xxhash'"
    )


def test_equal_errors_of_nodes_are_shown_once():
    line = "slurmstepd: error: execve(): /opt/python: No such file or directory"
    assert find_error(f"{line}\n{line}\nsrun: error: n1\n") == f"{line} srun: error: n1"
