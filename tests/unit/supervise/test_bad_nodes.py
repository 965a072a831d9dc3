"""Nodes that failed are avoided for a while, by requeues and by later submissions."""

from hpc_rl.supervise import bad_nodes
from hpc_rl.trial import Trial, write_json


def test_nodes_are_kept_until_their_time_is_over(tmp_path):
    trial = Trial(tmp_path / "u" / "e" / "t")
    trial.make_dirs()
    assert bad_nodes.current(trial, 0) == {}
    bad_nodes.add(trial, trial.attempt("7.0"), ["n3"], "lost", now=0, hours=2)
    bad_nodes.add(trial, trial.attempt("7.1"), ["n1", "n2"], "lost", now=3600, hours=2)
    bad_nodes.write_exclude_file(trial, "7", 3600)
    assert trial.exclude("7").read_text() == "n1,n2,n3\n"
    assert list(bad_nodes.current(trial, 7300)) == ["n1", "n2"]
    assert bad_nodes.current(trial, 7300)["n1"] == {
        "until": 10800,
        "since": 3600,
        "reason": "lost",
        "attempt": "7.1",
    }
    assert bad_nodes.current(trial, 99999) == {}


def test_a_torn_or_foreign_file_is_no_file(tmp_path):
    trial = Trial(tmp_path / "u" / "e" / "t")
    trial.make_dirs()
    for content in ("{", '{"nodes": 7}', '{"nodes": {"n1": 3, "n2": {"until": "x"}}}', "[]"):
        trial.bad_nodes.write_text(content)
        assert bad_nodes.current(trial, 0) == {}
    write_json(trial.bad_nodes, {"nodes": {}})
    bad_nodes.add(trial, trial.attempt("7.0"), ["n1"], "lost", now=0, hours=0)
    assert "n1" in trial.bad_nodes.read_text() and not bad_nodes.current(trial, 0)


def test_the_exclude_file_is_emptied_once_their_time_is_over(tmp_path):
    trial = Trial(tmp_path / "u" / "e" / "t")
    trial.make_dirs()
    bad_nodes.write_exclude_file(trial, "7", 0)
    assert not trial.exclude("7").exists(), "there never was one"
    bad_nodes.add(trial, trial.attempt("7.0"), ["n1"], "lost", now=0, hours=1)
    bad_nodes.write_exclude_file(trial, "7", 0)
    bad_nodes.write_exclude_file(trial, "7", 4000)
    assert trial.exclude("7").read_text() == "\n"


def test_a_server_task_has_a_bad_nodes_file_of_its_own(tmp_path):
    trial = Trial(tmp_path / "u" / "e" / "t")
    trial.make_dirs()
    trial.attempt("150_1.0").make_dirs()
    bad_nodes.add(trial, trial.attempt("7.0"), ["n1"], "lost", now=0, hours=2)
    bad_nodes.add(trial, trial.attempt("150_1.0"), ["n2", "n1"], "lost", now=0, hours=3)
    assert [bad_nodes.current(trial, 0)[name]["attempt"] for name in ("n1", "n2")] == ["150_1.0"] * 2, (
        "the longer time counts"
    )
    assert "n2" not in trial.bad_nodes.read_text()
