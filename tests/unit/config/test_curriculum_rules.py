"""Mixtures of data sets and curricula: what submission refuses, and that every set is looked at."""

import json

import pytest

from hpc_rl.config.changes import list_changes
from hpc_rl.config.load.load import load
from hpc_rl.config.options.experiment import list_training_paths
from hpc_rl.config.rules.check import check
from hpc_rl.config.rules.container_rules import list_bound_paths
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind
from tests.unit.config.test_dataset_rules import load_checked, make_place

ROWS = [{"prompt": "1+2=", "answer": "3", "weight": 1.5}]
CODE = {"question": "def f", "answer": "x"}


@pytest.fixture
def place(tmp_path):
    return make_place(tmp_path)


def write_code(place, row=CODE):
    (place / "code.jsonl").write_text(json.dumps(row) + "\n")
    return [f"train_dataset.mix.code.path={place / 'code.jsonl'}", "train_dataset.mix.code.share=0.25"]


def test_a_mixture_loads_and_every_set_is_checked_as_the_first(place):
    columns = "train_dataset.mix.code.columns={prompt: question}"
    config = load_checked(place, ROWS, *write_code(place), columns).config
    assert list_training_paths(config) == [str(place / "d.jsonl"), str(place / "code.jsonl")]
    assert [float(share) for share in config.train_dataset.shares] == [0.75, 0.25]
    assert ("train_dataset.mix.code.path", str(place / "code.jsonl")) in list_bound_paths(config)
    assert config.train_dataset.parts["mix.code"].columns == {"prompt": "question"}
    # a share moves every later prompt
    other = load_checked(place, ROWS, *write_code(place), columns, "train_dataset.mix.code.share=0.5").config
    (change,) = list_changes(config, other)
    assert change.name == "train_dataset.mix.code.share" and not change.safe
    # a band applies to the draws from now on
    band = load_checked(place, ROWS, *write_code(place), columns, "train_dataset.curriculum=band").config
    assert all(change.safe for change in list_changes(config, band))


@pytest.mark.parametrize(
    ("overrides", "option", "kind", "words"),
    [
        (["train_dataset.pass_band=[0.9, 0.1]", "train_dataset.curriculum=band"], "train_dataset.pass_band",
         Kind.VALUE, "the lowest and the highest mean reward"),
        (["train_dataset.pass_band=[0.1, 0.9, 1]", "train_dataset.curriculum=band"],
         "train_dataset.pass_band", Kind.VALUE, "two numbers"),
        (["train_dataset.outside_share=0.5"], "train_dataset.outside_share", Kind.NO_EFFECT,
         "train_dataset.curriculum uniform"),
        (["train_dataset.weight_column=w", "train_dataset.curriculum=band"], "train_dataset.weight_column",
         Kind.NO_EFFECT, "train_dataset.curriculum band"),
        (["train_dataset.weight_column=w", "train_dataset.curriculum=weights"],
         "train_dataset.weight_column", Kind.FILE, "d.jsonl row 1: its column w must be a number"),
        (["train_dataset.mix.main.share=0.5", "train_dataset.mix.main.path=/d"], "train_dataset.mix.main",
         Kind.VALUE, "the name of the rows of train_dataset.path"),
        (["train_dataset.mix.a.share=0.5", "train_dataset.mix.a.path=d.jsonl",
          "train_dataset.mix.b.share=0.5", "train_dataset.mix.b.path=d.jsonl"], "train_dataset.mix",
         Kind.VALUE, "0.5 + 0.5"),
        (["train_dataset.mix.a.share=0.5", "train_dataset.mix.a.path=/none.jsonl"],
         "train_dataset.mix.a.path", Kind.FILE, "does not exist"),
    ],
)  # fmt: skip
def test_submission_refuses(place, overrides, option, kind, words):
    with pytest.raises(ConfigError) as caught:
        load_checked(place, ROWS, *overrides)
    found = [one for one in caught.value.refusals if one.option == option]
    assert found and found[0].kind is kind and words in str(found[0]), str(caught.value)


def test_rows_of_a_further_set_that_can_not_be_read_are_named(place):
    given = write_code(place, {"query": "def f", "expected": "x"})
    with pytest.raises(ConfigError, match=r"code\.jsonl row 1: .*train_dataset\.mix\.code\.columns"):
        load_checked(place, ROWS, *given)


def test_supervised_trainers_have_neither(place):
    words = ["trial_name=t", "experiment_name=e", "trainer=sft", f"model.path={place / 'model'}"]
    words += [f"train_dataset.path={place / 'd.jsonl'}", "train_dataset.curriculum=band"]
    with pytest.raises(ConfigError, match=r"train_dataset\.curriculum"):
        check(load([], words), files=False)
