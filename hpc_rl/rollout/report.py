"""The rollout role's reports: counters on request, and a file in its attempt for `hpc-rl status`."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc_rl.core.trial import write_json
from hpc_rl.core.types import WeightVersion
from hpc_rl.rollout.difficulty import count_by_difficulty
from hpc_rl.rollout.service import RolloutService

logger = logging.getLogger(__name__)

EVERY_S = 5.0
AT_LEAST_S = 30.0  # even without a change, as a heartbeat


def collect_counters(service: RolloutService) -> dict[str, Any]:
    """Return the counters of `GET /status`."""
    sequencer, log = service.sequencer, service.sequencer.log
    version, seals = sequencer.version, log.seals.values()
    return {
        "version": None if version is None else str(WeightVersion(log.lineage, version)),
        "running": len(sequencer.running),
        "ready": len(log.ready),
        # the two counters that atroposlib's environments know
        "current_step": version or 0,
        "queue_size": len(log.ready),
        "issued": sequencer.next_index,
        "sealed": log.top,
        "trimmed": log.trimmed,
        "accepted": sequencer.accepted,
        "consumed": log.consumed,
        "rejected": dict(log.rejections),
        "staleness": {str(age): count for age, count in sorted(log.staleness.items())},
        "older_lineage": sum(seal.counters.get("older_lineage", 0) for seal in seals),
        "bytes_per_step": sum(seal.num_bytes for seal in seals) / len(seals) if seals else 0.0,
        "ledger_bytes": service.ledger.count_bytes(),
        "segment": service.ledger.segment,
        "holding": service.clock.holding,
        "evaluating": service.evaluations.running,
        "worker_restarts": service.executor.restarts,
    }


def describe_progress(service: RolloutService) -> dict[str, Any]:
    """Return the report for `hpc-rl status`."""
    names = ("running", "ready", "sealed", "accepted", "rejected", "evaluating")
    waits_for = service.sequencer.explain_wait(service.claims())
    return {
        **{name: value for name, value in collect_counters(service).items() if name in names},
        "rejected_in_a_row": service.sequencer.rejected_in_a_row,
        "last_reason": service.faults.last_reason,
        "last_error": service.faults.last_error,
        "issued_again": service.issued_again,
        "difficulty": count_by_difficulty(service.sequencer.log.rates.values()),
        "oldest_running_s": service.clock.oldest_running_s,
        "quiet_s": service.clock.quiet_s,
        "takes_groups": service.sequencer.rules.batch_sequences is not None,
        "environments": service.environments(),
        "trainer_s": service.trainer_s,
        "waits_for": waits_for.to_json() if waits_for else None,
        "endpoints": service.executor.endpoints,
        "blocked": service.executor.blocked,
    }


async def keep_reporting(
    path: Path,
    status: Callable[[], dict[str, Any]],
    slow: Callable[[], dict[str, Any]] = dict,
    every_s: float = EVERY_S,
) -> None:
    """Write `status()` and, from a thread, `slow()` to the file after each change; never returns.

    A failing file system costs a log line.
    """
    last: dict[str, Any] = {}
    written_at = float("-inf")
    try:
        while True:
            try:
                now = {**status(), **await asyncio.to_thread(slow)}
                if now != last or time.monotonic() - written_at >= AT_LEAST_S:
                    last, written_at = now, time.monotonic()
                    await asyncio.to_thread(write_json, path, {"time": time.time(), **now})
            except OSError as error:
                logger.warning(
                    "the rollout role can't write its report, so `hpc-rl status` shows an older one: %s",
                    error,
                )
            await asyncio.sleep(every_s)
    finally:
        # at any end of the role: the last state; its workers end with it, and block nothing
        with contextlib.suppress(OSError):
            write_json(path, {"time": time.time(), **status(), "blocked": {}})
