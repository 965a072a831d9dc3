"""The teaching in a teacher's completion, and whether it gives the answer away."""

import re

from hpc_rl.rollout.rewards.answers import WITHOUT_BLANKS, find_quantities, parse_quantity, strip_markup

_TEACHING = re.compile(
    r"<teaching>(?P<teaching>(?:(?!<teaching>).)*?)(?P<end></teaching>)?(?(end)|\Z)",
    re.DOTALL | re.IGNORECASE,
)
_OPTION = re.compile(r"[(\[]?([A-Za-z])[)\].:]*")
_TOKEN = re.compile(r"[^\W\d_]+|[0-9]+|\S")
# not inside a longer word or number
_BEFORE, _AFTER = rf"(?<![^\W{WITHOUT_BLANKS}])", rf"(?![^\W{WITHOUT_BLANKS}])"
_AFTER_A = r"is|was|must|seems|fits|holds|works|matches|remains|follows|because|since|as|and|or|if|here"
_AFTER_I = r"is|follows|because|since"


def find_teaching(completion: str) -> str:
    """Return the content of the last closed <teaching>, else of a last unclosed one, else the completion."""
    matches = list(_TEACHING.finditer(completion))
    matches = [match for match in matches if match["end"]] or matches
    return (matches[-1]["teaching"] if matches else completion).strip()


def has_leaked(truth: str, teaching: str, question: str, approach: str) -> bool:
    """Return whether the right answer occurs in the teaching, but neither in question nor approach."""
    return (
        contains_answer(truth, teaching)
        and not contains_answer(truth, question)
        and not contains_answer(truth, approach)
    )


def contains_answer(answer: str, text: str) -> bool:
    r"""Return whether a text contains an answer: a number by its value, other answers as whole words.

    26 occurs in 26.0, $26, 26 cm and \boxed{26}, but not in 126, 2.6 or 52/2; 1/2 occurs in 0.5 and 50%.
    Blanks count only between words: 3x+1 occurs in 3x + 1.
    """
    number = parse_quantity(answer)
    if number is None:
        answer = strip_markup(answer).replace("$", "").strip(" .,;:!?\"'")
        option = _OPTION.fullmatch(answer)
        text = strip_markup(text, keep_lines=option is not None).replace("$", "")
        return contains_option(option[1], text) if option else _contains_text(answer, text)
    text = strip_markup(text)
    literals = list(find_quantities(text, with_ratios=False))
    if number.value.denominator > 1:  # a ratio that makes a whole number is a calculation
        literals += find_quantities(text, with_ratios=True)
    return any(literal.agrees(number) for literal in literals)


def contains_option(letter: str, text: str) -> bool:
    """Return whether a text names an option by its letter.

    A capital counts by itself, but A and I only if they are not words: `A is right`, not `A pen`. A small
    letter counts if it is marked: `(b)`, `b)`, `b.`, `"b"`, `option b`; after `answer is` or `choose`, if no
    other word follows it.
    """
    small, capital = letter.lower(), letter.upper()
    follows = _AFTER_I if small == "i" else _AFTER_A
    alone = rf"{_AFTER}(?!['’]|-\w)"
    no_article = rf"{alone}(?![ ]+(?!(?:{follows})\b)\w)"
    either = f"[{small}{capital}]"
    says = r"\b(?:answer(?:\s+(?:is|was|must be|should be|would be))?|choose|pick|select)\s*[:=]?\s+"
    forms = [
        rf"{_BEFORE}(?<!\w-)(?<!['’]){capital}{no_article if small in 'ai' else alone}",
        rf"{_BEFORE}[(\[]\s?{either}\s?[)\]]",
        rf"(?:(?<=\s)|^){either}\)",
        rf"{_BEFORE}(?<!\.){either}\.(?!\w)",
        rf"[\"'‘“]{either}[\"'’”]",
        rf"\b(?i:options?|choices?|letter)\s+{either}{_AFTER}",
        rf"(?i:{says}){either}{no_article}",
    ]
    return any(re.search(form, text, re.MULTILINE) for form in forms)


def _contains_text(answer: str, text: str) -> bool:
    if answer[:1] in ("(", "[") and answer[-1:] in (")", "]"):
        answer = answer[1:-1].strip()
    if not answer:
        return False
    pattern = _make_pattern(answer)
    if len(answer) == 1:
        pattern = rf"(?<!\w){pattern}(?!\w)"
    elif answer[0].isalnum():
        pattern = rf"{_BEFORE}(?<![0-9][.,])(?<![0-9],\s){pattern}"
    if answer[-1].isalnum():
        pattern += rf"{_AFTER}(?!\.[0-9])"
    if answer[-1].isdecimal():  # not a part of a longer list
        pattern += r"(?!,\s?[0-9]|,?\s(?:and|or)\s[0-9])"
    return re.search(pattern, text, re.IGNORECASE) is not None


def _make_pattern(answer: str) -> str:
    """Return the pattern of an answer; blanks count only between words."""
    if "\\" in answer:  # LaTeX
        return r"\s*".join(map(re.escape, "".join(answer.split())))
    pattern, end, last = "", 0, ""
    for token in _TOKEN.finditer(answer):
        is_blank = token.start() > end and last.isalnum() and token[0].isalnum()
        pattern += (r"\s+" if is_blank else r"\s*" if last else "") + re.escape(token[0])
        end, last = token.end(), token[0]
    return pattern
