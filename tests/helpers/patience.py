"""Limits of time in tests. They only guard, are written for a usual idle machine, and are extended on others.

The speed of the machine is measured once per session of pytest, by a loop and by the start of a Python that
imports a large module. Both are compared with assumed times of a usual machine, LOOP_S and START_S.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

VARIABLE = "HPC_RL_TEST_SLOWNESS"
NUM_LOOPS = 4_000_000
LOOP_S = 0.25
START_S = 0.15
MOST = 6.0
# four processes run tests at a time, on two cores that others may share
BESIDE_OTHERS = 3.0
LONGEST_PAUSE_S = 2.0


def measure_slowness() -> float:
    """Return how many times slower this machine is than a usual one, from 1 to 6."""
    begun = time.perf_counter()
    sum(number * number for number in range(NUM_LOOPS))
    looped = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import asyncio, numpy"], check=True)
    started = time.perf_counter()
    return min(max((looped - begun) / LOOP_S, (started - looped) / START_S, 1.0), MOST)


def set_slowness() -> None:
    """Measure it, for this process and for those that it starts."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{measure_slowness():.2f}"


def extend(limit_s: float) -> float:
    """Return a limit for this machine, in seconds."""
    return limit_s * BESIDE_OTHERS * float(os.environ.get(VARIABLE, "1"))


def look(condition: Callable[[], Any], pause_s: float = 0.02) -> Any:
    """Return what a condition gives; where that is false, pause first.

    A look takes at most a fifth of the time, because whoever is waited for needs the core.
    """
    begun = time.monotonic()
    found = condition()
    if not found:
        time.sleep(min(max(pause_s, 4 * (time.monotonic() - begun)), LONGEST_PAUSE_S))
    return found


async def until(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    """Wait in an event loop until a condition holds. Raises TimeoutError."""
    async with asyncio.timeout(extend(limit_s)):
        while not condition():
            await asyncio.sleep(0.02)


def wait_until(
    condition: Callable[[], object], limit_s: float = 60.0, said: Callable[[], object] = str
) -> None:
    """Wait until a condition holds. Raises AssertionError with what is `said` where that takes too long."""
    deadline = time.monotonic() + extend(limit_s)
    while not look(condition):
        assert time.monotonic() < deadline, said()
