"""Rewards `final_answer` and `math_verify`: what the answer of a completion is, and when two are the same."""

import time

import pytest

from hpc_rl.rollout.rewards import Rejection, make_built_in
from hpc_rl.rollout.rewards.algebra import math_verify
from hpc_rl.rollout.rewards.answers import final_answer, find_answers, find_truth, is_same


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so \boxed{\frac{1}{2}} it is, not 7", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{f(\{x\}) = 2} and \boxed{3", r"f(\{x\}) = 2"),
        (r"\boxed{9}</think> It is 8.", "8"),
        ("1 <solution>we get 5 and 6</solution> 7", "6"),
        ("2 * 3 + 4 * 5 = 26.", "26"),
        ("The answer is 26 because 2 * 3 = 6 and 4 * 5 = 20.", "26"),
        ("**Answer:** $26$ dollars. Check: 26 - 6 = 20.", "$26 dollars"),
        ("The final answer is\n\n2 * 13 = 26", "26"),
        ("The answer is Paris. It has 2 million inhabitants", "Paris"),
        ("#### 1,234", "1,234"),
        ("10 − 26 = −16", "-16"),
        ("from 3-5", "5"),
        (r"$x = \frac{3}{4}$ then", "x = 3/4 then"),
        ("purple", "purple"),
        ("9^9^9", "9^9^9"),
        ("", ""),
        ("word " * 100, ""),
    ],
)
def test_the_answer_of_a_completion(completion, answer):
    assert (find_answers(completion) or [""])[0] == answer


SAME = [
    (r"\frac{1}{2}", "0.5"), ("1/2", "0.5"), (r"\dfrac12", "50%"), (r"-\frac{1}{2}", "-0.5"), (r"\frac{-1}{2}", "-1/2"),
    (r"1\frac{1}{2}", "1.5"), ("1,000", "1000"), (r"1{,}000", "1000.0"), ("$26", "26 dollars"), (r"\$26", "26"),
    ("50%", "0.5"), ("50", "50%"), ("50 percent", r"50\%"), ("3 meters", "3 meter"), (r"26\text{ cm}^2", "26"),
    (r"2\times10^{3}", "2000"), ("1.5e3", "1500"), ("2^{10}", "1024"), ("x = 7", "7"), ("007", "7"), (r"30^\circ", "30"),
    (r"\text{(B)}", "B"), ("Paris.", "paris"), (r"\sqrt{ 2 }", r"\sqrt{2}"), ("(1, 2)", "(1,2)"), (r"\left(1,2\right)", "(1, 2)"),
]  # fmt: skip
DIFFERENT = [
    ("0.001", "0.004"), ("126", "26"), ("2.6", "26"), ("-26", "26"), ("1/0", "0"), ("3 m", "3 km"), ("2 ms", "2 m"),
    ("9^9^9", "9"), ("1e999999999", "1"), ("", "26"), ("9" * 5000, "9"), ("0.3333", "1/3"), ("B", "C"), ("26", "26x + 1"),
    ("0.5%", "0.05"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "truth"), SAME)
def test_the_same_by_value(answer, truth):
    assert is_same(answer, truth) and is_same(truth, answer)


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_different_by_value(answer, truth):
    assert not is_same(answer, truth) and not is_same(truth, answer)


def test_the_column_with_the_truth():
    assert find_truth({"answer": 26}) == "26" and find_truth({"answer": None, "ground_truth": "4"}) == "4"
    assert (
        find_truth({"answer": "3 * 2 = 6\n#### 6"}) == "6" and find_truth({"answer": r"so \boxed{7}."}) == "7"
    )
    assert find_truth({"answer": " ", "x": 1}) is None and find_truth({"answer": 0}) == "0"


def test_the_reward():
    assert final_answer("q", r"\boxed{0.50}", ground_truth="1/2", other=1) == 1.0
    assert final_answer("q", "3 + 4i", answer="3+4i") == 1.0  # short: also as a whole
    assert final_answer("q", "4", answer="5") == 0.0


STATED = [
    ("The answer is (1, 2).", "(1, 2)"), ("The answer is 2x + 3.", "2x+3"), ("So the answer is [0, 1].", "[0,1]"),
    ("The answer is 10:30.", "10:30"), (r"The answer is $2\sqrt{3}$.", r"2\sqrt{3}"), (r"The answer is $2\pi$", r"2\pi"),
    ("The answer is 3 and 5.", "3 and 5"), ("#### 2x+3", "2x + 3"), ("The answer is x = 5, y = 2.", "x=5,y=2"),
    ("The answer is 5 apples", "5"), ("The answer is 5, because 6 - 1 = 5.", "5"), ("The answer is 5, not 6.", "5"),
    ("The answer is about 26 (rounded up).", "26"), ("The answer is 26 (2*13)", "26"), ("The answer is 26 ✅", "26"),
    ("<answer>The answer is 26</answer>", "26"), ("The answer is 26<|im_end|>", "26"), ("The answer is f(x) = 2x + 3 for all x.", "2x+3"),
    ("The answer is 10:30 in the morning.", "10:30"), ("The answer is (B) 12.", "12"), ("The answer is (B) 12.", "B"),
    ("The answer is 1/2 or 0.5.", "0.5"), ("The answer is 22/7 ≈ 3.14.", "22/7"), ("The answer is (approximately 26)", "26"),
    ("The answer is 5 apples and 3 oranges.", "5 apples and 3 oranges"), ("The answer is 26，因为 2 * 13.", "26"),
    ("At first I thought the answer is 5. But then I saw that the answer is 6.", "6"), ("Answer is 5. But the answer is (B)", "B"),
    ("The answer is between 1 and 3, so the answer is 2.", "2"), ("The answer is 26. A check: the answer is correct.", "26"),
    ("The answer is 1/2, i.e. a half", "0.5"), ("The answer is right.", "right"), ("The answer is 5, I think.", "5"),
    ("The answer is 5, a prime number.", "5"), ("The answer is 5 to the best of my knowledge.", "5"), ("The answer is a + 2i.", "a+2i"),
 ("<solution>(1, 2)</solution>", "(1,2)"), ("<solution>2x + 3</solution>", "2x+3"),
    ("Of 13 pairs, <solution>5 apples and 3 oranges</solution>", "5 apples and 3 oranges"),
]  # fmt: skip
STATED_NOT = [
    ("The answer is 2x + 3.", "2"), ("The answer is (1, 2).", "1"), ("The answer is 3 and 5.", "3"), ("The answer is 10:30.", "10"),
    (r"The answer is $2\sqrt{3}$.", "2"), ("The answer is x = 5, y = 2.", "2"), ("The answer is x >= 5.", "5"),
    ("Answer is 5. But the answer is (B)", "5"), ("The answer is between 1 and 3, so the answer is 2.", "1"),
    ("At first I thought the answer is 5. But then I saw that the answer is 6.", "5"), ("<solution>2x + 3</solution>", "3"),
    ("The answer is 3 or 5.", "3"), ("The answer is rate + 5.", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("completion", "truth"), STATED)
def test_a_stated_answer_is_right_as_a_whole(completion, truth):
    assert final_answer("q", "Hm. " * 30 + completion, answer=truth) == 1  # too long to count as a whole


@pytest.mark.parametrize(("completion", "truth"), STATED_NOT)
def test_a_part_of_a_stated_answer_is_not_right(completion, truth):
    assert final_answer("q", completion, answer=truth) == 0


async def test_a_row_without_a_truth_has_no_right_answer_a_missing_column_is_named():
    assert await make_built_in("final_answer")("q", "1", {"answer": None}) == 0.0
    with pytest.raises(Rejection, match=r"answer, ground_truth; the row has the columns \['solution'\]"):
        await make_built_in("final_answer")("q", "1", {"solution": "1"})


LONG = [word * 20000 for word in ("\\boxed{", "answer is ", "<solution>", "\\frac{")]
LONG += [sign * 100000 for sign in ("{", "9", " ")] + ["1," * 40000, "1/" * 40000]
LONG += ["answer is" + "\n" * 60000, "1" + " " * 60000 + "/"]


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_no_completion_takes_long(text):
    start = time.process_time()
    final_answer("q", text, answer="26")
    assert time.process_time() - start < 5.0


@pytest.mark.parametrize(
    ("completion", "answer", "by_patterns", "by_algebra"),
    [
        ("Adding gives 3.", "1+2 is <<1+2=3>>3.\n#### 3", 1, 1),
        ("Adding gives 4.", "1+2 is <<1+2=3>>3.\n#### 3", 0, 0),
        (r"so \boxed{1 + x}", r"hence \boxed{x + 1}", 0, 1),
        (r"so $\frac{\sqrt{2}}{2}$.", r"\frac{1}{\sqrt{2}}", 0, 1),
        (r"\boxed{x}</think>", "x", 0, 0),
        ("", "3", 0, 0),
        ("3", None, 0, 0),
    ],
)
def test_formulas_are_compared_by_algebra(completion, answer, by_patterns, by_algebra):
    assert final_answer("", completion, answer=answer) == by_patterns
    assert math_verify("", completion, answer=answer) == by_algebra
