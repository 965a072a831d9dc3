"""The text, the places and the order of refusals."""

import pickle

import pytest

from hpc_rl.core.errors import ConfigError, DoesNotFit
from hpc_rl.core.refusal import Kind, Refusal, make_idle_note, make_note, order_refusals


def refuse(option: str, *related: str, kind: Kind = Kind.CONFLICT) -> Refusal:
    return Refusal(option=option, kind=kind, why="can't be used", related=related)


@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        (
            Refusal(option="seed", value=1, kind=Kind.VALUE, why="is odd", use="use 2"),
            "seed 1 is odd; use 2.",
        ),
        (Refusal(option="seed", kind=Kind.VALUE, why=": it is odd"), "seed: it is odd."),
        (
            Refusal(option="seed", origin="a.yaml:3", value="x", kind=Kind.VALUE, why="is no number"),
            "seed (a.yaml:3): x is no number.",
        ),
        (
            Refusal(option="sed", origin="a.yaml:3", kind=Kind.UNKNOWN, why="did you mean seed?"),
            "unknown key sed (a.yaml:3): did you mean seed?",
        ),
        (make_note("seed", "is 1", origin="a.yaml:3"), "seed (a.yaml:3) is 1."),
        (make_note("seed", "is odd", is_warning=True), "WARNING: seed is odd."),
        (make_idle_note(["a", "b"], "nothing reads them"), "a, b: no effect: nothing reads them."),
    ],
)
def test_the_text(refusal, text):
    assert str(refusal) == text
    assert str(Refusal.from_json(refusal.to_json())) == text


def test_places_of_the_option_and_of_related_ones_are_appended():
    origins = {"a": "f.yaml:1", "b": "f.yaml:2", "c": "f.yaml:2"}
    located = refuse("a", "b", "c", "d").locate(origins)
    assert str(located) == "a can't be used. (f.yaml:1, f.yaml:2)"
    assert located.locate({}) == located
    assert make_note("a", "is 1").locate(origins).places == ()


def test_causes_come_before_consequences_and_sections_stay_together():
    refusals = [
        refuse("actor.dtype", "cluster.n_gpus_per_node"),
        refuse("cluster.n_nodes"),
        refuse("actor.path"),
        refuse("sglang.dtype", "actor.dtype"),
        refuse("cluster.n_gpus_per_node"),
    ]
    assert [one.option for one in order_refusals(refusals, lambda one: one)] == [
        "actor.path",
        "cluster.n_nodes",
        "cluster.n_gpus_per_node",
        "actor.dtype",
        "sglang.dtype",
    ]


def test_two_refusals_that_depend_on_each_other_keep_their_order():
    both = [refuse("a.x", "b.y"), refuse("b.y", "a.x")]
    assert order_refusals(both, lambda one: one) == both


def test_an_error_carries_refusals_in_order_and_survives_pickling():
    error = DoesNotFit(refuse("b.y", "a.x"), "a text about no option", refuse("a.x"))
    assert [one.option for one in error.refusals] == ["a.x", "b.y"]
    assert str(error).splitlines()[0] == "a text about no option"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is DoesNotFit and str(again) == str(error) and again.refusals == error.refusals
    assert isinstance(error, ConfigError) and ConfigError("text").refusals == ()


def test_a_quoted_sentence_ends_once():
    bad = Refusal(option="a.b", kind=Kind.FILE, why=": row 1: it is no number.", use="use another column")
    assert str(bad) == "a.b: row 1: it is no number; use another column."
    assert str(Refusal(option="a.b", kind=Kind.FILE, why=": it is no number.")) == "a.b: it is no number."
