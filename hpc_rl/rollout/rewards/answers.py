"""The reward `final_answer`: whether the last answer in a completion is the row's, compared by value.

Numbers are exact fractions, read by patterns: a computer algebra system (math-verify) needs a time limit,
because a completion may hold 9^9^9, and built-in rewards run without one. Other answers are compared as text.
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
    # a remark about an answer, so probably not an answer
    r"(?P<remark>(?:not|correct|right|consistent|reasonable|verified|confirmed|derived|obtained)\b)?",
    re.IGNORECASE,
)
_REASON = re.compile(r",?\s(?:because|since|so|which|where|i\.e|e\.g|that is)\b|[.;]\s|[.;]$")
_TAG = re.compile(r"</[A-Za-z]{1,10}>|<br\s?/?>|<\|\w{1,20}\|>")
_EQUAL = re.compile(r"(?<![<>!≤≥])=")
_LIST = re.compile(r",(?![0-9]{3})|;|\b(?:and|or)\b")
# of prose, not of a formula; in scripts without blanks every letter is a word
_WORD = re.compile(
    r"(?<![\w\\])(?!(?:and|or|a?(?:sin|cos|tan)h?|arc(?:sin|cos|tan)|cot|sec|csc|log|exp|sqrt|max|min|mod|det|lim"
    r"|gcd|lcm)\b)(?:[^\W\d_]{3,}|(?:is|it|as|we|so|in|of|by|if|at|on|he|an|be|no|my)\b|[ai]\s(?=[a-z]{3}))"
    rf"|[{WITHOUT_BLANKS}]",
    re.IGNORECASE,
)
_LOOSE_END = re.compile(r"(?:[^\w()\[\]{}%°!'$€£]|\b(?:and|or|to)$|[(\[{]$)+$")
_REMARK = re.compile(r"\s\([^()]*\)$")
_OPTION = re.compile(r"\(?(?P<letter>[A-Z])[).:]\s*(?P<text>.+)")
_LATEX = [  # applied in this order
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
    """A number and its suffix: `%`, a unit, or nothing."""

    value: Fraction
    unit: str = ""

    def agrees(self, other: "Quantity") -> bool:
        """Return whether both mean the same; one may have left out its unit or percent sign."""
        if self.value == other.value:
            return self.unit == other.unit or not (self.unit and other.unit)
        one, percent = (self, other) if other.unit == "%" else (other, self)
        return percent.unit == "%" and not one.unit and one.value == percent.value / 100


def final_answer(prompt: Any, completion: str, **columns: Any) -> float:
    """1 if the last answer in the completion, or a short one as a whole, is the row's; else 0.

    The row's answer is its `answer` or `ground_truth`; if that is null, every completion gets 0.
    """
    if not columns.keys() & set(TRUTH_COLUMNS):
        raise TypeError(f"the reward final_answer needs one of the columns {', '.join(TRUTH_COLUMNS)}")
    truth = find_truth(columns)
    if truth is None:
        return 0.0
    whole = completion if len(completion) <= MAX_PLAIN_CHARS else ""
    return float(any(is_same(answer, truth) for answer in [*find_answers(completion), whole]))


def find_truth(columns: Mapping[str, Any]) -> str | None:
    """Return the right answer of a row, if any: the text after the last box or `####`, else all of it."""
    for name in TRUTH_COLUMNS:
        text = str(columns[name]).strip() if columns.get(name) is not None else ""
        if text:
            return find_boxed(text) or text.rpartition("####")[2].strip()
    return None


def find_answers(completion: str) -> list[str]:
    """Return a completion's final answer, in each form that it can be read in, the shortest first.

    The final answer is in the last box. Without a box it follows the last `the answer is`, inside the last
    <solution> if the completion has one. Otherwise it is the whole text if short, or the last number in
    prose. Text before `</think>` does not count.
    """
    text = completion.rpartition("</think>")[2][-MAX_SEARCHED_CHARS:]
    if (box := find_boxed(text)) is not None:
        return [box]
    if "</solution>" in text:
        text = text.rpartition("</solution>")[0].rpartition("<solution>")[2]
    text = strip_markup(_TAG.sub("", text), keep_lines=True)
    if phrases := list(_PHRASE.finditer(text)):
        last = [phrase for phrase in phrases if not phrase["remark"]] or phrases
        begin = last[-1].start("remark") if last[-1]["remark"] else last[-1].end()
        return _list_readings(text[begin:].partition("\n")[0][:MAX_SAID_CHARS])
    is_short = len(text) <= MAX_PLAIN_CHARS
    if is_short and not _WORD.search(text):
        return _list_readings(text)
    numbers = [] if parse_quantity(text) else [match[0] for match in _VALUES.finditer(text)]
    return [*numbers[-1:], *([text] if is_short else [])]


def _list_readings(line: str) -> list[str]:
    """Return the possible meanings of a line with an answer: `2*13 = 26` also 26, `(B) 12` also B and 12."""
    statement = _REASON.split(line, maxsplit=1)[0].strip()
    sides = _EQUAL.split(statement)
    is_list = any(_LIST.search(side) for side in sides[1:-1])  # x = 5, y = 2
    value = statement if is_list else sides[-1].strip()
    readings = [statement if parse_quantity(statement) else _find_formula(value), statement, line.strip()]
    if option := _OPTION.fullmatch(value):
        readings += [option["letter"], _find_formula(option["text"])]
    if "≈" in value:
        readings += [_find_formula(side) for side in value.split("≈")]
    same = re.split(r",?\s+or\s+", value)  # 1/2 or 0.5
    if len(same) > 1 and all(is_same(one, same[0]) for one in same):
        readings.append(same[0])
    return readings


def _find_formula(text: str) -> str:
    """Return a text's first whole formula or number, without words around it; else the text."""
    if parse_quantity(text):
        return text.strip()
    pieces = [piece for piece in _WORD.split(text) if any(sign.isdecimal() for sign in piece)]
    piece = _LOOSE_END.sub("", pieces[0]).lstrip(" .,;:!?") if pieces else text.strip()
    if any(piece.count(one) != piece.count(other) for one, other in ("()", "[]")):
        piece = piece.strip("()[] ")
    if re.match(r"[+*/^<>]|-\s", piece):  # the rest of `rate + 5`
        return text.strip()
    before = _REMARK.sub("", piece)
    return before if parse_quantity(before) else piece


def find_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}` with closed braces, None without one."""
    last: str | None = None
    open_braces: list[tuple[bool, int]] = []  # whether it is a box's, and the start of its content
    for mark in re.finditer(r"(\\f?box(?:ed)?\s?\{)|\\.|[{}]", text, re.DOTALL):
        if mark[0] == "}" and open_braces:
            is_box, begin = open_braces.pop()
            last = text[begin : mark.start()].strip() if is_box else last
        elif mark[0].endswith("{") and mark[0] != "\\{":
            open_braces.append((bool(mark[1]), mark.end()))
    return last


def is_same(answer: str, truth: str) -> bool:
    """Return whether two answers are equal: as numbers if both are, else as text."""
    left, right = parse_quantity(answer), parse_quantity(truth)
    if left and right:
        return left.agrees(right)
    return _normalize(answer) == _normalize(truth)


def parse_quantity(text: str) -> Quantity | None:
    r"""Return the number that a text states: 0.5, 1/2, 1 1/2, 1,000, 5%, 3 cm, \frac{1}{2}, 2*10^3, x = 7."""
    text = strip_markup(text).strip(" .,;:!?")
    match = _QUANTITY.fullmatch(text) if len(text) <= MAX_NUMBER_CHARS else None
    value = match and _compute_value(match)
    if match is None or value is None:
        return None
    unit = (match["unit"] or "").strip(" .$€£").casefold()
    if unit == "percent":
        unit = "%"
    # several words are probably a sentence; `s` and `ms` are not plurals
    return Quantity(value, "" if " " in unit else unit.removesuffix("s") if len(unit) > 3 else unit)


def find_quantities(text: str, with_ratios: bool) -> Iterator[Quantity]:
    """Yield the numbers in a plain text: each by itself, or `a/b` as one."""
    for match in (_VALUES if with_ratios else _LITERALS).finditer(text):
        value = _compute_value(match)
        if value is not None:
            yield Quantity(value, match["unit"])


def strip_markup(text: str, keep_lines: bool = False) -> str:
    """Return a text without LaTeX's commands and Markdown's marks, as far as numbers and words need it."""
    if keep_lines:
        return "\n".join(strip_markup(line) for line in text.strip().splitlines())
    for pattern, instead in _LATEX:
        text = pattern.sub(instead, text)
    return text.strip()


def _compute_value(found: re.Match[str]) -> Fraction | None:
    """Return the number of a match; None if it is too long to compute with, or divided by zero."""
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


def _normalize(text: str) -> str:
    # `strip_markup` leaves a `$` before a number: dollars, or LaTeX's
    return "".join(strip_markup(text).replace("$", "").split()).strip(".,;:!?\"'()[]").casefold()
