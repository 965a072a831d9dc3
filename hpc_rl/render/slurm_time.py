"""Slurm's time grammar, for the one number that render derives from it: how early the warning signal comes."""

from __future__ import annotations

import re

from hpc_rl.errors import ConfigError

_FORMS = re.compile(
    r"(?:(?P<days>\d+)-(?P<dh>\d+)(?::(?P<dm>\d+))?(?::(?P<ds>\d+))?|(?P<a>\d+)(?::(?P<b>\d+))?(?::(?P<c>\d+))?)"
)
UNLIMITED = ("UNLIMITED", "INFINITE")


def seconds(text: str) -> int | None:
    """`M`, `M:S`, `H:M:S`, `D-H`, `D-H:M`, `D-H:M:S`; None for UNLIMITED. Raises ConfigError."""
    if text.upper() in UNLIMITED:
        return None
    match = _FORMS.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"launcher.slurm.time: {text!r} is no time limit; allowed: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S or UNLIMITED "
            "(in quotes: YAML reads 1:30 as a number)."
        )
    part = {key: int(value) for key, value in match.groupdict().items() if value is not None}
    if "days" in part:
        return part["days"] * 86400 + part["dh"] * 3600 + part.get("dm", 0) * 60 + part.get("ds", 0)
    if "c" in part:
        return part["a"] * 3600 + part["b"] * 60 + part["c"]
    return part["a"] * 60 + part.get("b", 0)


def signal_lead_s(time_limit: str | None) -> int:
    """How long before the end of the job the batch script is told, in seconds.

    Slurm may be a minute early and acts every half minute; the rest is for a training step and a save. A short job must not be
    told at its start.
    """
    limit_s = seconds(time_limit) if time_limit else None
    return 180 if not time_limit else 300 if limit_s is None else max(1, min(300, limit_s // 5))
