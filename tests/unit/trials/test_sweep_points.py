"""The points of a sweep: which words vary, in which combinations, and the names of trials."""

import pytest

from hpc_rl.core.errors import ConfigError
from hpc_rl.trials.sweep_points import (
    list_values,
    make_grid,
    name_trials,
    pair_values,
    parse_list,
    split_options,
)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-6,3e-6", ["1e-6", "3e-6"]),
        ("1..4", ["1", "2", "3", "4"]),
        ("-1..1", ["-1", "0", "1"]),
        ("1..2,8", ["1", "2", "8"]),
        ("4..1", ["4..1"]),
        ("[1,2]", ["[1,2]"]),
        ("'a,b'", ["'a,b'"]),
        ("{a: 1, b: 2}", ["{a: 1, b: 2}"]),
        ("../x", ["../x"]),
        ("", [""]),
    ],
)
def test_values_of_a_word(text, values):
    assert list_values(text) == values


def test_only_options_with_several_values_vary():
    words = ["actor.optimizer.lr=1e-6,3e-6", "--n_nodes", "1,2", "--a.b=1,2", "seed=1..2", "x=1", "~y=1,2"]
    shared, varied = split_options(words)
    assert shared == ["--n_nodes", "1,2", "--a.b=1,2", "x=1", "~y=1,2"]
    assert varied == {"actor.optimizer.lr": ["1e-6", "3e-6"], "seed": ["1", "2"]}
    points = make_grid(varied)
    assert [tuple(point.values()) for point in points] == [
        ("1e-6", "1"),
        ("1e-6", "2"),
        ("3e-6", "1"),
        ("3e-6", "2"),
    ]
    assert [tuple(point.values()) for point in pair_values(varied)] == [("1e-6", "1"), ("3e-6", "2")]
    assert make_grid({}) == []


@pytest.mark.parametrize(
    "words", [["seed=1,2", "seed=3,4"], ["trial_name=a,b"], ["launcher.type=local,slurm"]]
)
def test_what_can_not_vary_is_refused(words):
    with pytest.raises(ConfigError, match=words[0].partition("=")[0]):
        name_trials("first", make_grid(split_options(words)[1]))


def test_pairs_need_equal_numbers():
    with pytest.raises(ConfigError, match="a has 2, b has 3"):
        pair_values({"a": ["1", "2"], "b": ["1", "2", "3"]})


def test_a_list_has_a_trial_per_line():
    text = "# all\na.b=1 c='x y'\n\na.b=2  # second\n"
    assert parse_list(text, "points") == [{"a.b": "1", "c": "x y"}, {"a.b": "2"}]
    for wrong in ("--a.b 1", "a.b", "a='"):
        with pytest.raises(ConfigError, match=r"^points:2: "):
            parse_list(f"a=1\n{wrong}", "points")


def test_trials_are_named_by_their_options():
    points = make_grid({"actor.optimizer.lr": ["1e-6", "3e-6"], "actor.path": ["/m/base model"]})
    assert [one.name for one in name_trials("first", points)] == [
        "first-lr1e-6-pathbase_model",
        "first-lr3e-6-pathbase_model",
    ]
    alike = [{"a.path": "/x/model"}, {"a.path": "/y/model"}]
    assert [one.name for one in name_trials("first", alike)] == ["first-1", "first-2"]
    long = [{"a": "x" * 80}, *({"a": str(number)} for number in range(9))]
    assert name_trials("first", long)[0].name == "first-01"


@pytest.mark.parametrize("points", [[], [{"a": "1"}, {"a": "1"}], [{"a": str(one)} for one in range(1001)]])
def test_sweeps_of_a_wrong_size_are_refused(points):
    with pytest.raises(ConfigError):
        name_trials("first", points)
