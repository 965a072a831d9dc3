"""How numbers, times, commands and foreign text are written for users."""

import itertools
import os
import shlex
import shutil
import sys
import time
from pathlib import Path

from hpc_rl.core.log import escape_controls


def format_duration(seconds: float) -> str:
    """Return `42 s`, `3 min 5 s`, `2 h 7 min` or `3 d 4 h`."""
    try:
        whole = max(0, round(seconds))
    except (OverflowError, ValueError):  # infinite, or not a number
        return "an unknown time"
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    for (size, name), (smaller, smaller_name) in itertools.pairwise(units):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {name} {rest} {smaller_name}" if rest else f"{whole // size} {name}"
    return f"{whole} s"


def format_time(when: float) -> str:
    """Return local time, with the date unless it is today's."""
    try:
        local = time.localtime(when)
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"
    today = time.localtime()[:3] == local[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M", local)


def format_rate(steps_per_second: float) -> str:
    """Return steps per second, minute or hour, whichever is the first above 1."""
    for factor, unit in ((1, "s"), (60, "min")):
        if steps_per_second * factor >= 1:
            return f"{steps_per_second * factor:.1f} steps/{unit}"
    return f"{steps_per_second * 3600:.1f} steps/h"


def format_number(value: float | None) -> str:
    """Return four significant digits, without an exponent where that reads well; `nan` for None."""
    if value is None:  # JSON has no NaN
        return "nan"
    if value == 0 or abs(value) < 1e-3 or abs(value) >= 1e5:
        return f"{value:.4g}"
    return f"{value:.4f}".rstrip("0").rstrip(".")


def format_exit(code: int | None, reason: str) -> str:
    """Return why a process exited: its recorded reason, else its exit code."""
    if reason:
        return reason
    if code is None:
        return "no reason recorded"
    if code < 0 or 128 < code < 160:
        return f"killed by signal {-code if code < 0 else code - 128}"
    return f"exit code {code}"


def format_size(size_bytes: int) -> str:
    """Return megabytes or gigabytes for people."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"


def flatten_line(text: str) -> str:
    """Return `text` printable and on one line."""
    return escape_controls(" ".join(text.split("\n")))


def find_program_name(program: str = "hpc-rl") -> str:
    """Return what to type for a program of this environment: its name where PATH has it, else a path."""
    ours = Path(sys.executable).with_name(program)
    found = shutil.which(program)
    if (found and os.path.realpath(found) == os.path.realpath(ours)) or not ours.exists():
        return program
    return quote_path(ours)


def quote_path(path: Path) -> str:
    """Return a path quoted for a shell, relative if it is below the working directory."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
