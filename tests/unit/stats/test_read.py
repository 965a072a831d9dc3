"""The history of a trial out of its attempts: each step once, as it entered the final weights."""

import json

from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.core.files import JsonLines
from hpc_rl.stats.read import MetricsReader, load_history, load_known_lineages, merge


def rows(first: int, last: int, mark: str) -> list[dict]:
    return [{"step": step, "by": mark} for step in range(first, last + 1)]


def test_a_later_lineage_cuts_the_earlier_at_the_step_that_it_starts_from():
    history = merge([(0, rows(1, 17, "a")), (12, rows(13, 15, "b"))])
    assert [row["step"] for row in history.steps] == list(range(1, 16))
    assert [row["by"] for row in history.steps] == ["a"] * 12 + ["b"] * 3


def test_a_lineage_that_has_logged_nothing_yet_cuts_too():
    assert merge([(0, rows(1, 17, "a")), (12, [])]).last_step == 12


def test_evaluations_are_kept_apart_and_cut_alike():
    first = [*rows(1, 9, "a"), {"step": 0, "eval_reward": 0.3}, {"step": 8, "eval_reward": 0.5}]
    history = merge([(0, first), (4, [{"step": 4, "eval_reward": 0.4}])])
    assert [(row["step"], row["eval_reward"]) for row in history.evaluations] == [(0, 0.3), (4, 0.4)]


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 8)), min_size=1, max_size=6))
def test_every_step_appears_once_from_the_newest_possible_lineage(parts):
    made, reached = [], 0
    for number, (wish, count) in enumerate(parts):
        start = min(wish, reached)
        made.append((start, [{"step": start + 1 + i, "by": number} for i in range(count)]))
        reached = start + count
    history = merge(made)
    assert [row["step"] for row in history.steps] == list(range(1, reached + 1))
    owners = [row["by"] for row in history.steps]
    assert owners == sorted(owners)


def test_json_lines_gives_whole_lines_once_and_passes_over_torn_ones(tmp_path):
    path = tmp_path / "events.jsonl"
    file = JsonLines(path)
    assert file.poll() == []
    path.write_bytes(b'{"a": 1}\n{"a": 2')
    assert file.poll() == [{"a": 1}]
    with path.open("ab") as more:
        more.write(b'}\n{"torn": {"a": 3}\n[4]\n\xff\n{"a": 5}\n')
    assert file.poll() == [{"a": 2}, {"a": 5}]
    assert file.poll() == []
    path.write_bytes(b'{"a": 6}\n')
    assert file.poll() == [{"a": 6}]
    assert file.rows == [{"a": 6}]


def test_attempts_and_incarnations_are_merged_by_their_lineages(fake_trial):
    fake_trial.run_to(17)
    fake_trial.lineage(1, 12, "7.0", incarnation=1)
    fake_trial.steps("7.0", 13, 20, lineage=1, incarnation=1, at=100)
    fake_trial.lineage(2, 20, "8.0")
    fake_trial.steps("8.0", 21, 22, lineage=2, at=200)
    history = load_history(fake_trial.trial)
    assert [row["step"] for row in history.steps] == list(range(1, 23))
    assert [row["lineage"] for row in history.steps] == [0] * 12 + [1] * 8 + [2] * 2


def test_without_its_lineage_record_a_file_is_placed_by_its_rows(fake_trial):
    fake_trial.run_to(17)
    (fake_trial.trial.lineages / "0001.json").write_text('{"lineage": 1, "from')
    fake_trial.steps("7.0", 13, 14, lineage=1, incarnation=1, at=100)
    assert [line.lineage for line in load_known_lineages(fake_trial.trial)] == [0]
    assert [row["lineage"] for row in load_history(fake_trial.trial).steps] == [0] * 12 + [1] * 2


def test_a_reader_sees_growth_and_remembers_what_each_attempt_reached(fake_trial):
    reader = MetricsReader(fake_trial.trial)
    assert reader.poll().steps == []
    fake_trial.run_to(5)
    assert reader.poll().last_step == 5
    fake_trial.lineage(1, 2, "8.0")
    fake_trial.row("8.0", json.loads('{"step": 3, "lineage": 1}'))
    assert reader.poll().last_step == 3
    assert reader.last_steps() == {"7.0": 5, "8.0": 3}


def test_a_teachers_evaluations_show_how_much_the_student_gains():
    row = {"step": 5, "eval_reward": 1.8, "eval_accuracy_delta": 0.9}
    assert merge([(0, [row])]).held_out == ("accuracy delta", [(5, 0.9)])
    assert merge([(0, [{"step": 5, "eval_reward": 1.8}])]).held_out == ("reward", [(5, 1.8)])
