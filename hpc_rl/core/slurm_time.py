"""Slurm's time limits, as sbatch parses and sinfo prints them."""

import re

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal

UNLIMITED = ("UNLIMITED", "INFINITE")
# M, M:S, H:M:S, D-H, D-H:M, D-H:M:S
PATTERN = r"[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}|UNLIMITED|INFINITE"


def parse_time_limit(text: str) -> int | None:
    """Return a time limit in seconds, None for unlimited. Raises ConfigError."""
    if text.upper() in UNLIMITED:
        return None
    if not re.fullmatch(PATTERN, text):
        use = "use minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S or UNLIMITED, and put quotes around it"
        why = "is not a time limit of Slurm"
        raise ConfigError(
            Refusal(option="launcher.slurm.time", value=repr(text), kind=Kind.VALUE, why=why, use=use)
        )
    days, has_days, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    # After days the clock begins with hours, otherwise only if it has three parts.
    hours, minutes, seconds = ([*parts, 0, 0] if has_days or len(parts) == 3 else [0, *parts, 0])[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def format_time_limit(seconds: int) -> str:
    """Return a time limit as `[D-]HH:MM:SS`."""
    days, rest = divmod(seconds, 86400)
    return (f"{days}-" if days else "") + f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
