"""What a teacher says: the teaching in its completion, and whether that hands over the answer."""

import re

from hpc_rl.rollout.rewards.answers import plain, quantities, quantity

_TEACHING = re.compile(r"<teaching>(?P<teaching>(?:(?!<teaching>).)*?)(?:</teaching>|\Z)", re.DOTALL)


def teaching_in(completion: str) -> str:
    """Return what the last <teaching> holds, also where it is cut off, or else the whole completion."""
    found = list(_TEACHING.finditer(completion))
    return (found[-1]["teaching"] if found else completion).strip()


def leaks(truth: str, teaching: str, question: str, approach: str) -> bool:
    """Return whether the right answer occurs in the teaching, but neither in question nor approach."""
    return occurs(truth, teaching) and not occurs(truth, question) and not occurs(truth, approach)


def occurs(answer: str, text: str) -> bool:
    r"""Return whether an answer is written in a text: a number by its value, else as whole words.

    26 occurs in 26.0, $26, 26 cm and \boxed{26}, but not in 126, 2.6 or 52/2; 1/2 occurs in 0.5 and 50%.
    """
    text, number = plain(text), quantity(answer)
    if number is None:
        return _occurs_as_text(plain(answer).strip(" .,;:!?()"), text)
    literals = list(quantities(text, with_ratios=False))
    if number.value.denominator > 1:  # a ratio that makes a whole number is a calculation
        literals += quantities(text, with_ratios=True)
    return any(found.agrees(number) for found in literals)


def _occurs_as_text(answer: str, text: str) -> bool:
    if not answer:
        return False
    # blanks mean nothing in LaTeX
    words = [*"".join(answer.split())] if "\\" in answer else answer.split()
    pattern = (r"\s*" if "\\" in answer else r"\s+").join(map(re.escape, words))
    before, after = (r"(?<!\w)" if answer[0].isalnum() else "", r"(?!\w)" if answer[-1].isalnum() else "")
    # the name of a choice is a capital letter; A and I are words too
    is_choice = len(answer) == 1
    word = after + (r"(?!\s[a-z])" if is_choice else "")
    return re.search(before + pattern + word, text, re.NOFLAG if is_choice else re.IGNORECASE) is not None
