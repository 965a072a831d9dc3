"""Numbers, time spans and commands as people read them."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import sys
import time
from pathlib import Path


def format_duration(seconds: float) -> str:
    """`42 s`, `3 min 5 s`, `2 h 7 min`, `3 d 4 h`."""
    whole = max(0, round(seconds))
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    for (size, name), (smaller, smaller_name) in itertools.pairwise(units):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {name} {rest} {smaller_name}" if rest else f"{whole // size} {name}"
    return f"{whole} s"


def format_time(when: float) -> str:
    """Local time; with the date where it is not today's."""
    local = time.localtime(when)
    today = time.localtime()[:3] == local[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M", local)


def format_rate(steps_per_second: float) -> str:
    """Steps per second, minute or hour, whichever reads best."""
    for factor, unit in ((1, "s"), (60, "min")):
        if steps_per_second * factor >= 1:
            return f"{steps_per_second * factor:.1f} steps/{unit}"
    return f"{steps_per_second * 3600:.1f} steps/h"


def format_number(value: float | None) -> str:
    """Four digits that count, without an exponent where that reads well; `nan` for what JSON has no word for."""
    if value is None:
        return "nan"
    return (
        f"{value:.4g}"
        if value == 0 or abs(value) < 1e-3 or abs(value) >= 1e5
        else f"{value:.4f}".rstrip("0").rstrip(".")
    )


def exit_text(code: int | None, reason: str) -> str:
    """Why a process ended: its recorded reason, else its exit code."""
    if reason:
        return reason
    if code is None:
        return "no word of why"
    return (
        f"killed by signal {-code if code < 0 else code - 128}"
        if code < 0 or 128 < code < 160
        else f"exit code {code}"
    )


def program_name(program: str = "hpc-rl") -> str:
    """What to type, from here, for a program of this environment: its name where the PATH has it, else a path."""
    ours = Path(sys.executable).with_name(program)
    found = shutil.which(program)
    if (found and os.path.realpath(found) == os.path.realpath(ours)) or not ours.exists():
        return program
    return shell_path(ours)


def shell_path(path: Path) -> str:
    """A path as a person would type it: relative where it lies below the working directory, quoted for a shell."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
