"""Dotted access to a configuration."""

from __future__ import annotations

import dataclasses
from typing import Any


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT: Any = _Absent()


def value_of(config: Any, name: str) -> Any:
    """The value of a dotted option; ABSENT where a section is missing or null."""
    for part in name.split("."):
        config = getattr(config, part, ABSENT)
    return config


def replaced(section: Any, path: list[str], value: Any) -> Any:
    """The same configuration with one option changed."""
    if len(path) > 1:
        value = replaced(getattr(section, path[0]), path[1:], value)
    return dataclasses.replace(section, **{path[0]: value})
