"""What a teaching is worth: the parts of its reward, the leak check, and where the teaching stands."""

import pytest

from hpc_rl.core.errors import ConfigError
from hpc_rl.rollout.rewards import Rejection
from hpc_rl.rollout.teacher.leak import contains_answer, find_teaching, has_leaked
from hpc_rl.rollout.teacher.reward import Lesson, compute_values, load_parts

ALL = load_parts(["gain", "solved", "efficiency", "leak"])


def lesson(baseline: float, taught: float, num_tokens: int = 100, leaks: bool = False, **options) -> Lesson:
    known = {"teaching": "t", "num_tokens": num_tokens, "leaks": leaks, "has_answer": True}
    return Lesson(baseline=baseline, taught=taught, **known, **options)


def reward(*args, **options) -> float:
    return sum(compute_values(ALL, lesson(*args, **options)).values())


def test_the_worked_example():
    """One question, four teachings; the last one holds the answer."""
    plain = [reward(0.5, taught, num_tokens) for taught, num_tokens in ((1.0, 40), (0.5, 100), (0.0, 60))]
    rewards = [*plain, reward(0.5, 1.0, 80, leaks=True)]
    assert rewards == pytest.approx([0.857143, 0.375, -1.0, 0.0], abs=1e-6)


def test_each_part_is_known_by_itself():
    values = compute_values(ALL, lesson(0.5, 1.0, 80, leaks=True))
    expected = {"gain": 0.5, "solved": 0.0, "efficiency": 0.277778, "leak": -0.777778}
    assert values == pytest.approx(expected, abs=1e-6)
    assert compute_values(ALL, lesson(0.5, 0.5))["solved"] == 0.25
    lost = compute_values(ALL, lesson(1.0, 0.5, leaks=True))
    assert lost == {"gain": -1.0, "solved": 0.0, "efficiency": 0.0, "leak": 0.0}


def test_weights():
    assert reward(0.0, 1.0, 100, efficiency_weight=3.0) == 2.5
    assert reward(1.0, 0.0, degradation_penalty_multiplier=0.5) == -0.5


def test_nothing_solved_and_nothing_lost_is_zero():
    assert reward(0.0, 0.0) == 0.0 and reward(0.0, 0.0, leaks=True) == 0.0


def test_parts_of_the_users_own(tmp_path, monkeypatch):
    source = "def brevity(lesson, so_far):\n    return -lesson.num_tokens\nx = 1\n"
    (tmp_path / "own_parts.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    parts = load_parts(["gain", "own_parts:brevity"])
    assert compute_values(parts, lesson(0.0, 1.0, 7)) == {"gain": 1.0, "brevity": -7.0}
    refused = {"own_parts:x": "function", "own_parts:y": "no attribute", "gains": "neither built in"}
    for paths, words in [*(([path], words) for path, words in refused.items()), (["gain", "gain"], "twice")]:
        with pytest.raises(ConfigError, match=words):
            load_parts(paths)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1"])
def test_a_part_without_a_number_is_named(value):
    with pytest.raises(Rejection, match=f"part 'brevity' of teacher.reward_parts is '?{value}") as raised:
        compute_values({"gain": ALL["gain"], "brevity": lambda lesson, so_far: value}, lesson(0.0, 1.0))
    assert raised.value.reason == "reward_exception"


OCCURS = [
    ("26", "it is 26."), ("26", r"\boxed{26}"), ("26", "26 cm"), ("26", "$26"), ("26", r"x=\$26\$"), ("26", "26.0"), ("26", "26/1"),
    ("26", "the 26th"), ("26", "10-26"), ("26 apples", "26"), ("1000", "1,000"), ("0.5", r"\frac{1}{2}"), ("1/2", "50%"),
    ("1/2", r"\frac12"), ("50%", "50"), ("Paris", "It is paris!"), ("New York", "new  york"), ("A", "choose (A)."),
    (r"\sqrt{2}", r"x=\sqrt{ 2 }."), ("7", r"\text{7}"),
    ("3x+1", "so 3x + 1."), ("3x + 1", "3x+1"), ("3x+1", "it is $3 x+1$"), ("x=5, y=2", "x = 5, y = 2"), ("(1,2)", "is (1, 2)."),
    ("(1, 2)", "x, y = 1, 2"), ("[2,3]", "in [2, 3]"), ("x^2+1", "x^2 + 1"), ("x^2+1", "$x^{2} + 1$"), ("10:30", "at 10:30."),
    ("东京", "答案是东京，因为"), ("東京", "東京です"), ("B", "Choose b)."), ("(B)", "Choose b."), ("b)", "It is B, not C"), ("B", "选B。"),
    ("A", "A is right"), ("A", "the answer is a"), ("A", "Answer: a\nThen"), ("A", "option a fits"), ("a", "It's 'a'"), ("A", "so it's A"),
    ("A", "pick a because"), ("B", "B cells"), ("I", "I is right"), ("C", "(c)"), (r"2\pi", r"$2 \pi$"), ("3 and 5", "3 and 5."),
]  # fmt: skip
OCCURS_NOT = [
    ("26", "126"), ("26", "2.6"), ("26", "52/2"), ("26", "26,000"), ("26", "1,026"), ("26", "-26"), ("26", "2^26"), ("5", "V5"),
    ("Paris", "Parisian"), ("A", "A student"), ("B", "a b c"), ("26", ""), ("3 m", "3%"),
    ("A", "A pen costs 2."), ("A", "Answer a simpler question"), ("A", "choose a number"), ("A", "the answer is a number"), ("A", "f(a) at a"),
    ("A", "at 5 a.m. it"), ("E", "i.e. this"), ("I", "I was here, I'm"), ("A", "A 5 cm line"), ("A", "an A-level"), ("3x+1", "13x+1"),
    ("3x+1", "3x + 12"), ("3x+1", "3x+1.5"), ("(1,2)", "steps 1, 2 and 3"), ("(1,2)", "1, 2, 3"), ("(2,3)", "1, 2, 3"), ("是", "答案是东京"),
    ("New York", "in new yorkshire"), ("", "x"), ("()", "f()"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "text"), OCCURS)
def test_an_answer_that_occurs(answer, text):
    assert contains_answer(answer, text)


@pytest.mark.parametrize(("answer", "text"), OCCURS_NOT)
def test_an_answer_that_does_not_occur(answer, text):
    assert not contains_answer(answer, text)


def test_a_leak_is_what_question_and_approach_do_not_have():
    assert has_leaked("26", "The cost is 26.", "2 pens and 4 pads?", "Multiply and add.")
    assert not has_leaked("26", "The cost is 26.", "2 pens of 26?", "Multiply and add.")
    assert not has_leaked("26", "The cost is 26.", "2 pens and 4 pads?", "So I get 26?")
    assert not has_leaked("26", "Check the product with 126.", "2 pens?", "")


def test_the_teaching_stands_between_tags_or_is_everything():
    assert find_teaching("I think.\n<teaching> Add\nfirst. </teaching> Done") == "Add\nfirst."
    assert find_teaching(" Add first. ") == "Add first."
    assert find_teaching("better: <teaching>b") == "b" and find_teaching("<teaching>a <teaching>b") == "b"
    assert find_teaching("<teaching>a</teaching> I used the <teaching> tag.") == "a"
    assert find_teaching("<teaching>a</teaching> no: <teaching>b</teaching>") == "b"
    assert find_teaching("Well.\n<Teaching>a</TEACHING> Done") == "a"
    assert find_teaching("in <teaching> tags: <teaching>b</teaching>") == "b"
    assert find_teaching("<teaching></teaching>") == ""
