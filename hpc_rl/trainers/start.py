"""The start of a trainer incarnation: rank 0 decides, records and prepares the state to continue from."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.decide import Decision, Situation
from hpc_rl.checkpoint.lineage import create_lineage, withdraw
from hpc_rl.checkpoint.start_facts import decide_start
from hpc_rl.config.options.experiment import Config
from hpc_rl.config.options.operations import RecoverConfig
from hpc_rl.core.allocation import Train
from hpc_rl.core.checked_file import FileRecord
from hpc_rl.core.errors import (
    ConfigError,
    Damaged,
    ExitCode,
    GivenUp,
    HpcRlError,
    NothingToResume,
    RoleFailed,
)
from hpc_rl.core.net import LOOPBACK
from hpc_rl.core.node_copies import NodeCopies
from hpc_rl.core.records import JobRecord, load_lineages
from hpc_rl.core.trial import Attempt, Trial
from hpc_rl.datasets.rows import check_same_rows
from hpc_rl.engines.base import Engine
from hpc_rl.engines.shared.state import has_state
from hpc_rl.name_resolve.shared_fs import NameResolve
from hpc_rl.rollout.batch_log.ledger import LedgerDamaged
from hpc_rl.rollout.batch_log.replay import check_replay
from hpc_rl.trainers import exports
from hpc_rl.trainers.ranks import Ranks
from hpc_rl.weights import disk

logger = logging.getLogger(__name__)
REFUSALS: dict[int, type[HpcRlError]] = {
    ExitCode.BAD_CONFIG: ConfigError,
    ExitCode.NOTHING_TO_RESUME: NothingToResume,
}


@dataclass(kw_only=True)
class TrainerContext:
    """The inputs of a trainer incarnation. Every rank has one."""

    trial: Trial
    attempt: Attempt
    incarnation: int
    config: Config  # in force
    tokens: dict[str, str]
    names: NameResolve
    train: Train  # the engine and its mesh, from the allocation
    device: str  # of this rank
    ranks: Ranks
    stopping: threading.Event  # set when this process must stop
    copies: NodeCopies = field(default_factory=NodeCopies)
    address: str = LOOPBACK  # of this host, for the trial's processes
    is_one_node: bool = True  # all ranks run on one node
    shares_gpus: bool = False  # with the servers
    data: dict[str, Any] = field(default_factory=dict)  # fingerprint of the training rows; {} if not taken


def begin(start: TrainerContext) -> dict[str, Any]:
    """Decide on the state to load, set aside unwanted generations, and open the next lineage. Rank 0 only.

    Returns {"lineage", "step", "manifest"}; the manifest is None for a fresh start. Raises ConfigError,
    NothingToResume or GivenUp, with the reason, if no start is possible.
    """
    trial, attempt, recover = start.trial, start.attempt, start.config.recover
    first_mode, wanted, new_batches = find_first_start(trial, attempt, recover)
    asked = Situation(recover.mode, first_mode, retries=recover.retries, wanted=wanted)
    decision, unwanted = decide_start(trial, attempt, start.incarnation, asked)
    logger.info("%s", decision.reason)
    if decision.action in ("refuse", "end"):
        raise REFUSALS.get(decision.exit_code, GivenUp)(decision.reason)
    manifest = _load_manifest(trial, decision)
    if manifest is not None:
        when = f"checkpoint {manifest['step']} was made"
        check_same_rows(start.config.train_dataset.path, manifest["data"], start.data, when)
    if decision.set_aside:
        try:
            check_replay(trial.rollout, decision.step or 0)
        except LedgerDamaged as error:
            raise GivenUp(
                f"the trial can't continue from checkpoint {decision.step}, and nothing was changed: {error}"
            ) from error
    for found in unwanted:  # before the new lineage, so the decision is the same after a kill here
        generation.move_aside(found.path, found.problem, asked=bool(decision.set_aside))
    generation.clear_leftovers(trial)
    disk.clear_leftovers(trial)
    exports.repair(trial.exports)
    record = create_lineage(trial, attempt, start.incarnation, decision, new_batches)
    return {"lineage": record.lineage, "step": record.from_step, "manifest": manifest}


def load_state(start: TrainerContext, begun: dict[str, Any], engines: Sequence[Engine]) -> dict[str, Any]:
    """Load the generation that `begin` chose; if it is damaged, set it aside and choose again. Collective.

    Returns the loaded state, in the form of `begin`. If the start is fresh after a damaged generation was
    partly loaded, initializes the engines again. `engines` has the policy first; a generation without the
    state of another model, as of an import, leaves that model as it is before training.
    """
    while begun["manifest"] is not None:
        manifest, folder = begun["manifest"], start.trial.generation(begun["step"])
        files = {file["name"]: FileRecord(**file) for file in manifest["files"]}
        problem = ""
        try:
            for engine in engines:
                if engine is engines[0] or has_state(engine.name, files):
                    engine.load(folder, manifest["num_ranks"], files)
                else:
                    engine.initialize(engine.num_train_steps)
                    form = "checkpoint %d has no state of model %s, which starts from its initial weights"
                    logger.info(form, begun["step"], engine.name)
            _check_counters(engines, manifest)
        except Damaged as error:
            problem = str(error)
            logger.error("checkpoint %d can't be loaded, so an older one is used: %s", begun["step"], problem)
        if not start.ranks.any(bool(problem)):
            return begun
        problem = problem or "another rank read a damaged file; its log names the file"
        lineage = begun["lineage"]
        begun = start.ranks.from_rank0(partial(_walk_back, start, lineage, folder, problem))
        if begun["manifest"] is None:
            for engine in engines:
                engine.initialize(engine.num_train_steps)
    return begun


def _walk_back(start: TrainerContext, lineage: int, folder: Path, problem: str) -> dict[str, Any]:
    # the lineage has produced no version yet, so it can be removed
    generation.move_aside(folder, problem)
    withdraw(start.trial, lineage)
    return begin(start)


def list_counters(engines: Sequence[Engine]) -> dict[str, Any]:
    """Return the counters of all trained models; names of all but the first begin with the model's name."""
    first, *others = engines
    named = {f"{one.name}_{name}": value for one in others for name, value in one.counters().items()}
    return {**first.counters(), **named}


def _check_counters(engines: Sequence[Engine], manifest: dict[str, Any]) -> None:
    """Raise RoleFailed if a schedule or an optimizer is not at the position in the manifest."""
    expected = manifest.get("counters") or {}
    found = list_counters(engines)
    for name in sorted(name for name in expected if name in found and expected[name] != found[name]):
        raise RoleFailed(
            f"checkpoint {manifest['step']} has {name} {expected[name]}, but {found.get(name)} was loaded"
        )


def find_first_start(trial: Trial, attempt: Attempt, recover: RecoverConfig) -> tuple[str, int | None, bool]:
    """Return the mode of the submission's first start, the step of its `--from`, and whether batches are new.

    The mode is `resume` after `hpc-rl recover`. Later starts of a submission replay the first start's
    batches.
    """
    job = JobRecord.read(trial.job(attempt.job_id)) or JobRecord(job_id=attempt.job_id)
    is_first = all(record.submission != attempt.job_id for record in load_lineages(trial))
    return job.start_mode or recover.mode, job.from_step, job.new_batches and is_first


def _load_manifest(trial: Trial, decision: Decision) -> dict[str, Any] | None:
    if decision.action == "fresh":
        return None
    found = generation.check(trial.generation(decision.step or 0))
    if found.manifest is None:
        raise RoleFailed(f"checkpoint {decision.step} can't be used: {found.problem}")
    return found.manifest.to_json()
