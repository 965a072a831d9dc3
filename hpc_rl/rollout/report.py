"""What the rollout role leaves of itself in its attempt every few seconds, for `hpc-rl status`, which asks no service."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc_rl.trial import write_json

logger = logging.getLogger(__name__)

EVERY_S = 5.0
AT_LEAST_S = 30.0  # also without a change, as a sign of life


async def keep_reporting(
    path: Path,
    status: Callable[[], dict[str, Any]],
    slow: Callable[[], dict[str, Any]] = dict,
    every_s: float = EVERY_S,
) -> None:
    """Write `status()`, and what `slow()` finds in a thread, to the file again and again, where it has changed.

    Returns never. A failing file system costs a log line.
    """
    try:
        await _keep_writing(path, status, slow, every_s)
    finally:
        with contextlib.suppress(OSError):  # whatever ends the role: what it last knew
            write_json(path, {"time": time.time(), **status()})


async def _keep_writing(
    path: Path, status: Callable[[], dict[str, Any]], slow: Callable[[], dict[str, Any]], every_s: float
) -> None:
    last: dict[str, Any] = {}
    written_at = float("-inf")
    while True:
        try:
            now = {**status(), **await asyncio.to_thread(slow)}
            if now != last or time.monotonic() - written_at >= AT_LEAST_S:
                last, written_at = now, time.monotonic()
                await asyncio.to_thread(write_json, path, {"time": time.time(), **now})
        except OSError as error:
            logger.warning("the report for status can't be written: %s", error)
        await asyncio.sleep(every_s)
