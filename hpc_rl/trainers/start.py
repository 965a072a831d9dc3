"""Start: from which state an incarnation of the trainer goes on, decided, recorded and made ready by rank 0."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.decide import Decision
from hpc_rl.checkpoint.lineage import decide_start, next_lineage, submission_of
from hpc_rl.config.root import Config
from hpc_rl.config.service import RecoverConfig
from hpc_rl.errors import ConfigError, ExitCode, GivenUp, HpcRlError, NothingToResume, RoleFailed
from hpc_rl.name_resolve.base import NameResolve
from hpc_rl.trainers.ranks import Ranks
from hpc_rl.trial import Attempt, Trial, read_json
from hpc_rl.weights import disk

logger = logging.getLogger(__name__)
REFUSALS: dict[int, type[HpcRlError]] = {ExitCode.BAD_CONFIG: ConfigError, ExitCode.NOTHING_TO_RESUME: NothingToResume}


@dataclass(frozen=True)
class Start:
    """Which incarnation this is, and what it was given."""

    trial: Trial
    attempt: Attempt
    incarnation: int
    config: Config
    tokens: dict[str, str]
    names: NameResolve
    device: str
    ranks: Ranks
    stopping: threading.Event


def begin(start: Start) -> dict[str, Any]:
    """Decide, set aside what must not be loaded, and open the next lineage. Rank 0 only.

    Returns {"lineage", "step", "manifest"}; the manifest is None for a fresh start. Raises ConfigError, NothingToResume or
    GivenUp, with the reason, where nothing may start.
    """
    trial, attempt, recover = start.trial, start.attempt, start.config.recover
    first_mode, wanted = first_start(trial, attempt, recover)
    decision, unwanted = decide_start(trial, attempt, start.incarnation, recover.mode, first_mode, recover.retries, wanted)
    logger.info("%s", decision.reason)
    if decision.action in ("refuse", "end"):
        raise REFUSALS.get(decision.exit_code, GivenUp)(decision.reason)
    for found in unwanted:  # before the lineage: a kill in between finds the same first start again
        generation.set_aside(found.path, found.problem)
    generation.clear_leftovers(trial)
    disk.clear_leftovers(trial)
    record = next_lineage(trial, attempt, start.incarnation, decision)
    return {"lineage": record.lineage, "step": record.from_step, "manifest": _manifest(trial, decision)}


def first_start(trial: Trial, attempt: Attempt, recover: RecoverConfig) -> tuple[str, int | None]:
    """Mode of the submission's first start, `resume` where `hpc-rl recover` submitted it, and the step of its `--from`."""
    job = read_json(trial.job(submission_of(attempt.id))) or {}
    step = job.get("from_step")
    return str(job.get("start_mode") or recover.mode), step if isinstance(step, int) else None


def _manifest(trial: Trial, decision: Decision) -> dict[str, Any] | None:
    if decision.action == "fresh":
        return None
    found = generation.check(trial.generation(decision.step or 0))
    if found.manifest is None:
        raise RoleFailed(f"generation {decision.step} {found.problem}")
    return found.manifest.to_json()
