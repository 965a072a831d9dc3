"""Slurm's grammar of time limits, as sbatch reads it and sinfo prints it."""

import re

from hpc_rl.errors import ConfigError

UNLIMITED = ("UNLIMITED", "INFINITE")
# M, M:S, H:M:S, D-H, D-H:M, D-H:M:S
_CLOCK = re.compile(r"([0-9]+)(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?")
_DAYS = re.compile(r"([0-9]+)-([0-9]{1,2})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?")
PATTERN = r"[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}|UNLIMITED|INFINITE"


def to_seconds(text: str) -> int | None:
    """Return a time limit in seconds, None for an unlimited one. Raises ConfigError."""
    if text.upper() in UNLIMITED:
        return None
    if match := _DAYS.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if match := _CLOCK.fullmatch(text):
        parts = [int(part) for part in match.groups() if part is not None]
        if len(parts) == 3:
            return (parts[0] * 60 + parts[1]) * 60 + parts[2]
        return parts[0] * 60 + (parts[1] if len(parts) == 2 else 0)
    raise ConfigError(
        f"{text!r} is not a time limit of Slurm: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S or UNLIMITED, "
        "in quotes where it is all digits or has colons."
    )


def to_text(seconds: int) -> str:
    """Return a time limit as `[D-]HH:MM:SS`."""
    days, rest = divmod(seconds, 86400)
    return (f"{days}-" if days else "") + f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
