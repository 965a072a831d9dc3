"""The reward `final_answer`: whether the last answer in a completion is the row's, compared by value.

Numbers are exact fractions, read by patterns: a computer algebra system (math-verify) needs a time limit,
for a completion may hold 9^9^9, and built-in rewards run without one. What is not a number is compared as
text.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from hpc_rl.config.options.teacher import TRUTH_COLUMNS

MAX_PLAIN_CHARS = 100  # of a completion that is an answer as a whole
MAX_NUMBER_CHARS = 200
MAX_EXPONENT = 400
MAX_SEARCHED_CHARS = 20_000  # of a completion, from its end
MAX_SAID_CHARS = 500  # after `the answer is`

WITHOUT_BLANKS = r"\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # scripts, in a class of letters

_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_LITERAL = (
    rf"(?P<number>{_NUMBER})"
    r"(?:\s?\*\s?10\^(?P<tens>[-+]?[0-9]+)|[eE](?P<e>[-+]?[0-9]+)(?!\w)|\^(?P<power>[0-9]+))?"
    r"(?![0-9]|\.[0-9]|\s?\^)"
)
_RATIO = rf"(?:(?P<whole>[0-9]+)\s+)?(?P<over>{_NUMBER})\s?/\s?(?P<under>{_NUMBER})"
_SIGN = r"(?P<sign>(?<![\w)\]}])[-+](?=[\s$€£]?[0-9.]))?[$€£]?"
# not a part of a word, a version, a power or a longer number
_ALONE = r"(?<![A-Za-z_0-9^])(?<![0-9]\.)"
_LITERALS = re.compile(rf"{_SIGN}{_ALONE}{_LITERAL}\s?(?P<unit>%?)")
_VALUES = re.compile(rf"{_SIGN}{_ALONE}(?:{_RATIO}|{_LITERAL})\s?(?P<unit>%?)")
_QUANTITY = re.compile(
    rf"(?:[A-Za-z]\w{{0,2}}\s?[=:≈]|[=≈])?\s?{_SIGN}\s?(?:{_RATIO}|{_LITERAL})"
    r"\s?(?P<unit>[A-Za-z°%$€£][A-Za-z°%$€£ ./^*-]*[23]?)?"
)
_PHRASE = re.compile(
    r"(?:####|answer\s{0,3}(?:is|was|equals|:|=))\s{0,9}:?\s{0,9}(?=\S)"
    # said of an answer, so rather no answer
    r"(?P<remark>(?:not|correct|right|consistent|reasonable|verified|confirmed|derived|obtained)\b)?",
    re.IGNORECASE,
)
_REASON = re.compile(r",?\s(?:because|since|so|which|where|i\.e|e\.g|that is)\b|[.;]\s|[.;]$")
_TAG = re.compile(r"</[A-Za-z]{1,10}>|<br\s?/?>|<\|\w{1,20}\|>")
_EQUAL = re.compile(r"(?<![<>!≤≥])=")
_LIST = re.compile(r",(?![0-9]{3})|;|\b(?:and|or)\b")
# of prose, not of a formula; of scripts without blanks every letter is one
_WORD = re.compile(
    r"(?<![\w\\])(?!(?:and|or|a?(?:sin|cos|tan)h?|arc(?:sin|cos|tan)|cot|sec|csc|log|exp|sqrt|max|min|mod|det|lim"
    r"|gcd|lcm)\b)(?:[^\W\d_]{3,}|(?:is|it|as|we|so|in|of|by|if|at|on|he|an|be|no|my)\b|[ai]\s(?=[a-z]{3}))"
    rf"|[{WITHOUT_BLANKS}]",
    re.IGNORECASE,
)
_LOOSE_END = re.compile(r"(?:[^\w()\[\]{}%°!'$€£]|\b(?:and|or|to)$|[(\[{]$)+$")
_REMARK = re.compile(r"\s\([^()]*\)$")
_OPTION = re.compile(r"\(?(?P<letter>[A-Z])[).:]\s*(?P<text>.+)")
_LATEX = [  # one after the other
    (re.compile(r"\\(?:(?:left|right|displaystyle)(?![a-z])|[!:;()\[\]])|\*\*|`|(?<!\\)\$(?![0-9.])"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(?<=[0-9])\\,(?=[0-9])"), ""),
    (re.compile(r"\\[, ]|~|\\quad|\u00a0|\u202f"), " "),
    (
        re.compile(r"\\(?:boxed|fbox|text|textbf|textit|mathrm|mathbf|mbox|operatorname)\s?\{([^{}]*)\}"),
        r" \1 ",
    ),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\frac\s?([0-9])\s?([0-9])"), r" \1/\2"),
    (re.compile(r"\\frac\s?\{\s?-\s?([^{}]*)\}\s?\{([^{}]*)\}"), r" -\1/\2"),
    (re.compile(r"\\frac\s?\{([^{}]*)\}\s?\{([^{}]*)\}"), r" \1/\2"),
    (re.compile(r"\\(?:times|cdot)|×|·"), "*"),
    (re.compile(r"\^\s?\{([^{}]*)\}"), r"^\1"),
    (re.compile(r"\^?\\(?:circ|degree)"), "°"),
    (re.compile(r"\\([%$#&])"), r"\1"),
    (re.compile(r"[−–]"), "-"),
    (re.compile(r"\s+"), " "),
]


@dataclass(frozen=True)
class Quantity:
    """A number and what follows it: `%`, a unit, or nothing."""

    value: Fraction
    unit: str = ""

    def agrees(self, other: "Quantity") -> bool:
        """Return whether both mean the same; one without a unit or percent sign may have left it out."""
        if self.value == other.value:
            return self.unit == other.unit or not (self.unit and other.unit)
        one, percent = (self, other) if other.unit == "%" else (other, self)
        return percent.unit == "%" and not one.unit and one.value == percent.value / 100


def final_answer(prompt: Any, completion: str, **columns: Any) -> float:
    """1 if the last answer in the completion, or a short one as a whole, is the row's; else 0.

    The row's is its `answer` or `ground_truth`; where that is null, every answer has 0.
    """
    if not columns.keys() & set(TRUTH_COLUMNS):
        raise TypeError(f"final_answer needs one of the columns {', '.join(TRUTH_COLUMNS)}")
    truth = truth_of(columns)
    if truth is None:
        return 0.0
    whole = completion if len(completion) <= MAX_PLAIN_CHARS else ""
    return float(any(is_same(answer, truth) for answer in [*answers_in(completion), whole]))


def truth_of(columns: Mapping[str, Any]) -> str | None:
    """Return the right answer of a row, None where it has none: after the last box or `####`, if any."""
    for name in TRUTH_COLUMNS:
        text = str(columns[name]).strip() if columns.get(name) is not None else ""
        if text:
            return boxed(text) or text.rpartition("####")[2].strip()
    return None


def answers_in(completion: str) -> list[str]:
    """Return the answer that a completion ends with, in each form that it can be read in, the shortest first.

    The last box; else, in the last <solution> where there is one, what follows the last `the answer is`; else
    the whole text if it is short, or the last number in prose. What is before `</think>` does not count.
    """
    text = completion.rpartition("</think>")[2][-MAX_SEARCHED_CHARS:]
    if (box := boxed(text)) is not None:
        return [box]
    if "</solution>" in text:
        text = text.rpartition("</solution>")[0].rpartition("<solution>")[2]
    text = plain(_TAG.sub("", text), keep_lines=True)
    if phrases := list(_PHRASE.finditer(text)):
        last = [phrase for phrase in phrases if not phrase["remark"]] or phrases
        begin = last[-1].start("remark") if last[-1]["remark"] else last[-1].end()
        return _readings(text[begin:].partition("\n")[0][:MAX_SAID_CHARS])
    is_short = len(text) <= MAX_PLAIN_CHARS
    if is_short and not _WORD.search(text):
        return _readings(text)
    numbers = [] if quantity(text) else [found[0] for found in _VALUES.finditer(text)]
    return [*numbers[-1:], *([text] if is_short else [])]


def _readings(line: str) -> list[str]:
    """Return what a line that states an answer can mean: `2*13 = 26` also 26, `(B) 12` also B and 12."""
    said = _REASON.split(line, maxsplit=1)[0].strip()
    sides = _EQUAL.split(said)
    is_list = any(_LIST.search(side) for side in sides[1:-1])  # x = 5, y = 2
    value = said if is_list else sides[-1].strip()
    readings = [said if quantity(said) else _formula(value), said, line.strip()]
    if option := _OPTION.fullmatch(value):
        readings += [option["letter"], _formula(option["text"])]
    if "≈" in value:
        readings += [_formula(side) for side in value.split("≈")]
    same = re.split(r",?\s+or\s+", value)  # 1/2 or 0.5
    if len(same) > 1 and all(is_same(one, same[0]) for one in same):
        readings.append(same[0])
    return readings


def _formula(text: str) -> str:
    """Return the first formula or number of a text as a whole, without words around it; else the text."""
    if quantity(text):
        return text.strip()
    pieces = [piece for piece in _WORD.split(text) if any(sign.isdecimal() for sign in piece)]
    piece = _LOOSE_END.sub("", pieces[0]).lstrip(" .,;:!?") if pieces else text.strip()
    if any(piece.count(one) != piece.count(other) for one, other in ("()", "[]")):
        piece = piece.strip("()[] ")
    if re.match(r"[+*/^<>]|-\s", piece):  # the rest of `rate + 5`
        return text.strip()
    before = _REMARK.sub("", piece)
    return before if quantity(before) else piece


def boxed(text: str) -> str | None:
    r"""Return what is in the last `\boxed{…}` whose braces are closed, None without one."""
    last: str | None = None
    open_braces: list[tuple[bool, int]] = []  # whether it is a box's, and where its content begins
    for mark in re.finditer(r"(\\f?box(?:ed)?\s?\{)|\\.|[{}]", text, re.DOTALL):
        if mark[0] == "}" and open_braces:
            is_box, begin = open_braces.pop()
            last = text[begin : mark.start()].strip() if is_box else last
        elif mark[0].endswith("{") and mark[0] != "\\{":
            open_braces.append((bool(mark[1]), mark.end()))
    return last


def is_same(answer: str, truth: str) -> bool:
    """Return whether two answers are equal: as numbers if both are, else as text."""
    left, right = quantity(answer), quantity(truth)
    if left and right:
        return left.agrees(right)
    return _letters(answer) == _letters(truth)


def quantity(text: str) -> Quantity | None:
    r"""Return the number that a text is: 0.5, 1/2, 1 1/2, 1,000, 5%, 3 cm, \frac{1}{2}, 2*10^3, x = 7."""
    text = plain(text).strip(" .,;:!?")
    found = _QUANTITY.fullmatch(text) if len(text) <= MAX_NUMBER_CHARS else None
    value = found and _value(found)
    if found is None or value is None:
        return None
    unit = (found["unit"] or "").strip(" .$€£").casefold()
    if unit == "percent":
        unit = "%"
    # several words are rather a sentence; `s` and `ms` are no plurals
    return Quantity(value, "" if " " in unit else unit.removesuffix("s") if len(unit) > 3 else unit)


def quantities(text: str, with_ratios: bool) -> Iterator[Quantity]:
    """Yield the numbers in a plain text: each by itself, or `a/b` as one."""
    for found in (_VALUES if with_ratios else _LITERALS).finditer(text):
        value = _value(found)
        if value is not None:
            yield Quantity(value, found["unit"])


def plain(text: str, keep_lines: bool = False) -> str:
    """Return a text without LaTeX's commands and Markdown's marks, as far as numbers and words need it."""
    if keep_lines:
        return "\n".join(plain(line) for line in text.strip().splitlines())
    for pattern, instead in _LATEX:
        text = pattern.sub(instead, text)
    return text.strip()


def _value(found: re.Match[str]) -> Fraction | None:
    """Return the number of a match, None for one too long to compute with, or divided by zero."""
    if found.end() - found.start() > MAX_NUMBER_CHARS:
        return None
    parts = found.groupdict()
    sign = -1 if parts["sign"] == "-" else 1
    if parts.get("over"):
        over, under = (Fraction(parts[name].replace(",", "")) for name in ("over", "under"))
        return sign * (int(parts["whole"] or 0) + over / under) if under else None
    number = Fraction(parts["number"].replace(",", ""))
    tens, power = int(parts["tens"] or parts["e"] or 0), int(parts["power"] or 1)
    if max(abs(tens), power) > MAX_EXPONENT:
        return None
    return sign * number**power * Fraction(10) ** tens


def _letters(text: str) -> str:
    # a `$` before a number is left by `plain`: dollars, or LaTeX's
    return "".join(plain(text).replace("$", "").split()).strip(".,;:!?\"'()[]").casefold()
