"""Which tests share a process where several run at once: all with a Slurm, all with a SGLang, else those of a file."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
STARTED_ONCE = ("slurm", "sglang")
SPREAD = ("unit", "golden")  # short, and nothing is started for them


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        kind, *rest = item.path.relative_to(HERE).parts
        if kind not in SPREAD:
            item.add_marker(pytest.mark.xdist_group(kind if kind in STARTED_ONCE else "/".join([kind, *rest])))
