"""Nodes that failed are avoided for a while, by requeues and by later submissions."""

from hpc_rl.core.trial import write_json
from hpc_rl.supervise import bad_nodes


def test_nodes_are_kept_until_their_time_is_over(trial):
    assert bad_nodes.find_bad_nodes(trial, 0) == {}
    bad_nodes.add(trial, trial.attempt("7.0"), ["n3"], "lost", now=0, hours=2)
    bad_nodes.add(trial, trial.attempt("7.1"), ["n1", "n2"], "lost", now=3600, hours=2)
    bad_nodes.write_exclude_file(trial, "7", 3600)
    assert trial.exclude("7").read_text() == "n1,n2,n3\n"
    assert list(bad_nodes.find_bad_nodes(trial, 7300)) == ["n1", "n2"]
    known = {"reason": "lost", "attempt": "7.1", "trouble": "failed"}
    assert bad_nodes.find_bad_nodes(trial, 7300)["n1"] == known | {"since": 3600, "until": 10800}
    assert bad_nodes.find_bad_nodes(trial, 99999) == {}


def test_a_torn_or_foreign_file_is_no_file(trial):
    for content in ("{", '{"nodes": 7}', '{"nodes": {"n1": 3, "n2": {"until": "x"}}}', "[]"):
        trial.bad_nodes.write_text(content)
        assert bad_nodes.find_bad_nodes(trial, 0) == {}
    write_json(trial.bad_nodes, {"nodes": {}})
    bad_nodes.add(trial, trial.attempt("7.0"), ["n1"], "lost", now=0, hours=0)
    assert "n1" in trial.bad_nodes.read_text() and not bad_nodes.find_bad_nodes(trial, 0)


def test_the_exclude_file_is_emptied_once_their_time_is_over(trial):
    bad_nodes.write_exclude_file(trial, "7", 0)
    assert not trial.exclude("7").exists(), "there never was one"
    bad_nodes.add(trial, trial.attempt("7.0"), ["n1"], "lost", now=0, hours=1)
    bad_nodes.write_exclude_file(trial, "7", 0)
    bad_nodes.write_exclude_file(trial, "7", 4000)
    assert trial.exclude("7").read_text() == "\n"


def test_a_server_task_has_a_bad_nodes_file_of_its_own(trial):
    trial.attempt("150_1.0").make_dirs()
    bad_nodes.add(trial, trial.attempt("7.0"), ["n1"], "lost", now=0, hours=2)
    bad_nodes.add(trial, trial.attempt("150_1.0"), ["n2", "n1"], "lost", now=0, hours=3)
    found = bad_nodes.find_bad_nodes(trial, 0)
    assert found["n1"]["attempt"] == found["n2"]["attempt"] == "150_1.0", "the longer time counts"
    assert "n2" not in trial.bad_nodes.read_text()


def test_a_node_that_was_out_of_contact_is_avoided_for_a_shorter_time_the_first_time(trial):
    hour = 3600

    def lose(now: float) -> None:
        trouble = bad_nodes.NodeTrouble.OUT_OF_CONTACT
        bad_nodes.add(trial, trial.attempt("7.0"), ["n1"], "lost", now, hours=24, trouble=trouble)

    lose(0)
    assert "n1" in bad_nodes.find_bad_nodes(trial, 0.9 * hour) and not bad_nodes.find_bad_nodes(
        trial, 1.1 * hour
    )
    lose(5 * hour)
    assert "n1" in bad_nodes.find_bad_nodes(trial, 28 * hour) and not bad_nodes.find_bad_nodes(
        trial, 30 * hour
    )
    lose(60 * hour)
    assert not bad_nodes.find_bad_nodes(trial, 62 * hour), "the earlier ones are long ago"


def test_the_worst_come_first_then_the_newest(trial):
    attempt, contact = trial.attempt("7.0"), bad_nodes.NodeTrouble.OUT_OF_CONTACT
    bad_nodes.add(trial, attempt, ["n1"], "broken", 0, hours=24)
    bad_nodes.add(trial, attempt, ["n2"], "broken", 10, hours=24)
    bad_nodes.add(trial, attempt, ["n4", "n3"], "lost", 20, hours=24, trouble=contact)
    bad_nodes.add(trial, attempt, ["n5"], "lost", 30, hours=24, trouble=contact)
    bad_nodes.write_exclude_file(trial, "7", 40)
    assert trial.exclude("7").read_text() == "n2,n1,n5,n3,n4\n"
