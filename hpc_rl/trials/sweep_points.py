"""The points of a sweep: the options of each trial, from words such as `lr=1e-6,3e-6 seed=1..4`. Pure."""

import itertools
import math
import re
import shlex
from collections.abc import Mapping, Sequence

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.sweep import SweepTrial
from hpc_rl.core.trial import check_name

Point = dict[str, str]  # option -> value, as typed
MAX_TRIALS = 1000  # Slurm's usual limit of a job array is 1001
MAX_NAME = 60  # characters of a name made of options; longer ones are numbered
FIXED = ("experiment_name", "trial_name", "cluster.fileroot", "launcher.type", "callbacks")  # in all trials
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_UNFIT = re.compile(r"[^A-Za-z0-9._+=@-]+")


def split_options(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the words that all trials share, and the values of each option that varies.

    `a.b=1,2` varies, and so does `seed=1..4`, both ends included. A word that begins with `-`, a list in
    brackets, a mapping in braces and a quoted value are shared. Raises ConfigError for an option that varies
    twice.
    """
    shared: list[str] = []
    varied: dict[str, list[str]] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            shared += [word] if equals else [word, *itertools.islice(rest, 1)]
            continue
        values = list_values(value) if equals and not word.startswith("~") else []
        if len(values) < 2:
            shared.append(word)
            continue
        if name in varied:
            raise ConfigError(f"{word}: {name} has values already; give all of them in one list.")
        varied[name] = values
    return shared, varied


def list_values(text: str) -> list[str]:
    """Return the values in `1e-6,3e-6` or `1..4`; a single value for other texts.

    Raises ConfigError for a range of more values than a sweep may have trials.
    """
    if text[:1] in ("[", "{", "'", '"'):
        return [text]
    found: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2])) if match else (0, -1)
        _limit(last - first + 1)
        found += [str(number) for number in range(first, last + 1)] or [part]
    return found


def make_grid(varied: Mapping[str, Sequence[str]]) -> list[Point]:
    """Return every combination; the last option changes fastest. Raises ConfigError for too many."""
    _limit(math.prod(map(len, varied.values())))
    return [
        dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values()) if varied
    ]


def pair_values(varied: Mapping[str, Sequence[str]]) -> list[Point]:
    """Return the first values together, then the second ones, and so on.

    Raises ConfigError if the options have different numbers of values.
    """
    counts = {name: len(values) for name, values in varied.items()}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} has {count}" for name, count in counts.items())
        raise ConfigError(f"--zip needs the same number of values for each option: {told}.")
    return [dict(zip(varied, values, strict=True)) for values in zip(*varied.values(), strict=True)]


def parse_list(text: str, name: str) -> list[Point]:
    """Return the point of each line, `a.b=1 c=2`; `#` begins a comment. Raises ConfigError."""
    points = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ConfigError(f"{name}:{number}: {line!r} can't be split into options: {error}") from error
        for word in words:
            if "=" not in word or word.startswith(("-", "=", "~")):
                raise ConfigError(f"{name}:{number}: {word!r} is not an option: write a.b=VALUE.")
        if words:
            points.append({key: value for key, _, value in (word.partition("=") for word in words)})
    return points


def name_trials(sweep: str, points: Sequence[Point]) -> list[SweepTrial]:
    """Return the trials of a sweep with their names: the sweep's, and the options that vary.

    Options are shortened to their last parts; if that is too long, or not unique, the trials are numbered.
    Raises ConfigError for too few or too many trials, for two equal ones, and for options that can't vary.
    """
    check_name("name of the sweep", sweep)
    if not points:
        raise ConfigError(
            "nothing varies in this sweep: give an option several values, as lr=1e-6,3e-6 or seed=1..4."
        )
    _limit(len(points))
    if wrong := [name for name in FIXED if any(name in point for point in points)]:
        raise ConfigError(f"{wrong[0]} can't vary in a sweep: all its trials share one value.")
    seen: dict[tuple[tuple[str, str], ...], Point] = {}
    for point in points:
        key = tuple(sorted(point.items()))
        if key in seen:
            told = " ".join(f"{name}={value}" for name, value in point.items())
            raise ConfigError(f"two trials of the sweep are the same: {told}.")
        seen[key] = point
    names = [f"{sweep}-{_format_point(point)}" for point in points]
    if len(set(names)) < len(names) or max(map(len, names)) > MAX_NAME:
        digits = len(str(len(points)))
        names = [f"{sweep}-{number:0{digits}}" for number in range(1, len(points) + 1)]
    for name in names:
        check_name("trial_name", name)
    return [SweepTrial(name=name, options=point) for name, point in zip(names, points, strict=True)]


def _limit(num_trials: int) -> None:
    if num_trials > MAX_TRIALS:
        raise ConfigError(f"the sweep has {num_trials} trials; allowed are {MAX_TRIALS}: make it smaller.")


def _format_point(point: Point) -> str:
    parts = (f"{name.rpartition('.')[2]}{value.rpartition('/')[2]}" for name, value in point.items())
    return "-".join(_UNFIT.sub("_", part) for part in parts)
