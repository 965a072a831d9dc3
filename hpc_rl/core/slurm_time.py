"""Slurm's grammar of time limits, as sbatch reads it and sinfo prints it."""

import re

from hpc_rl.core.errors import ConfigError

UNLIMITED = ("UNLIMITED", "INFINITE")
# M, M:S, H:M:S, D-H, D-H:M, D-H:M:S
PATTERN = r"[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}|UNLIMITED|INFINITE"


def to_seconds(text: str) -> int | None:
    """Return a time limit in seconds, None for an unlimited one. Raises ConfigError."""
    if text.upper() in UNLIMITED:
        return None
    if not re.fullmatch(PATTERN, text):
        raise ConfigError(
            f"{text!r} is not a time limit of Slurm: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S or UNLIMITED, "
            "in quotes where it is all digits or has colons."
        )
    days, has_days, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    # After days the clock begins with hours, else it does so only if it is complete.
    hours, minutes, seconds = ([*parts, 0, 0] if has_days or len(parts) == 3 else [0, *parts, 0])[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def to_text(seconds: int) -> str:
    """Return a time limit as `[D-]HH:MM:SS`."""
    days, rest = divmod(seconds, 86400)
    return (f"{days}-" if days else "") + f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
