"""One rank of the scenarios of test_fsdp.py: `python fsdp_rank.py SCENARIO RANK NUM_RANKS FOLDER`."""

import threading
from pathlib import Path
from types import SimpleNamespace

import gloo_ranks
import numpy as np
import torch

from hpc_rl.checkpoint import generation
from hpc_rl.checkpoint.generation import Manifest
from hpc_rl.checkpoint.retention import RetentionPolicy
from hpc_rl.config.options.dataset import DatasetConfig
from hpc_rl.config.options.operations import RecoverConfig
from hpc_rl.config.options.training import (
    FSDPEngineConfig,
    MicroBatchSpec,
    OptimizerConfig,
    TrainEngineConfig,
)
from hpc_rl.core.allocation import Train
from hpc_rl.core.errors import Stale
from hpc_rl.core.trial import Trial, write_json
from hpc_rl.engines.base import Sequences
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.engines.shared import state
from hpc_rl.engines.shared.mesh import Mesh
from hpc_rl.engines.shared.packing import balance
from hpc_rl.trainers import ranks as ranks_module
from hpc_rl.trainers.ranks import Ranks
from hpc_rl.trainers.saving import Saving
from hpc_rl.trainers.start import TrainerContext, begin, load_state
from hpc_rl.trainers.supervised import compute_sequence_loss

LENGTHS = (9, 3, 30, 1, 12, 2, 30, 17)
WEIGHT = 80.0


def engine_of(folder: Path, rank: int, num_ranks: int, **changes):
    options = {
        "init_from_scratch": True,
        "attn_impl": "sdpa",
        "dtype": "float32",
        "gradient_checkpointing": False,
    }
    optimizer = OptimizerConfig(
        lr=1e-2, weight_decay=0.01, lr_scheduler_type="cosine", warmup_steps_proportion=0.2
    )
    config = TrainEngineConfig(path=str(folder / "model"), optimizer=optimizer, **{**options, **changes})
    engine = FSDPEngine(config, Mesh(rank, num_ranks))
    engine.initialize(10)
    return engine


def share(step: int, rank: int, num_ranks: int) -> Sequences:
    """This rank's rows of train batch `step`. Batch 2 has a single row, so ranks above 0 have none."""
    rng = np.random.default_rng(step)
    ids = [
        rng.integers(0, 32, size=length).astype(np.int32)
        for length in (LENGTHS[:1] if step == 2 else LENGTHS)
    ]
    mine = balance([len(x) for x in ids], num_ranks)[rank]
    return Sequences(
        [ids[row] for row in mine], {"loss_mask": [np.arange(len(ids[row])) >= 2 for row in mine]}
    )


def train(engine, steps) -> list[dict[str, float]]:
    return [
        engine.train_batch(
            share(step, engine.mesh.rank, engine.mesh.num_ranks), compute_sequence_loss, WEIGHT, 0.9
        )
        for step in steps
    ]


def broken_on_the_last_rank(engine):
    def loss(batch):
        factor = float("nan") if engine.mesh.rank == engine.mesh.num_ranks - 1 else 1.0
        return batch.logprobs_T.sum() * factor, {"num_tokens": batch.columns_T["loss_mask"].sum()}

    return loss


def from_rank0(rank: int) -> list[str]:
    """What each rank makes of bytes (in several chunks), of none, and of an error."""
    ranks_module.CHUNK_BYTES = 1000
    ranks = Ranks()
    body = bytes(range(256)) * 10
    out = []
    for made in (body, b"", None):
        got = ranks.bytes_from_rank0(lambda made=made: made if rank == 0 else b"only rank 0 is asked")
        out.append("as made" if got == made else repr(got))

    def stale() -> bytes:
        raise Stale("lineage 1 asks")

    try:
        ranks.bytes_from_rank0(stale)
    except Stale as error:
        out.append(str(error))
    return out


def scenario_train(folder: Path, rank: int, num_ranks: int) -> None:
    """Three steps in several variants, a skipped update, a refusal, and a saved state; what rank 0 alone
    fetches.
    """
    out = {"from_rank0": from_rank0(rank)}
    variants = {
        "plain": {},
        "three": {"mb_spec": MicroBatchSpec(n_mbs=3)},
        "recompute": {"gradient_checkpointing": True},
        "in_cpu_memory": {"fsdp": FSDPEngineConfig(offload_params=True)},
        "again": {},
    }
    for name, changes in variants.items():
        engine = engine_of(folder, rank, num_ranks, **changes)
        first = engine.logprobs(share(0, rank, num_ranks), 0.9)
        out[name] = {"results": train(engine, range(3)), "logprob_sum": float(sum(x.sum() for x in first))}
        engine.export(folder / f"{num_ranks}-{name}")
    before = [shard.local.clone() for shard in engine.shards]
    skipped = engine.train_batch(share(0, rank, num_ranks), broken_on_the_last_rank(engine), WEIGHT, 1.0)
    unchanged = all(torch.equal(old, shard.local) for old, shard in zip(before, engine.shards, strict=True))
    out["skipped"] = {"update_successful": skipped["update_successful"], "unchanged": unchanged}
    out["refused"] = []
    engine.config.mb_spec.max_tokens_per_mb = 25  # rows of 30 are on some ranks only
    try:
        train(engine, [0])
    except ValueError as error:
        out["refused"].append(str(error))
    half = engine_of(folder, rank, num_ranks, dtype="bfloat16")
    out["bfloat16"] = train(half, range(3))
    saved = engine_of(folder, rank, num_ranks)
    train(saved, range(2))
    (folder / f"state-{num_ranks}").mkdir(exist_ok=True)
    saved.save(folder / f"state-{num_ranks}")
    write_json(folder / f"train-{num_ranks}-{rank}.json", out)


def scenario_resume(folder: Path, rank: int, num_ranks: int) -> None:
    """Load the state of 1 rank, go on for two steps."""
    engine = engine_of(folder, rank, num_ranks)
    engine.load(folder / "moved-1", saved_num_ranks=1)
    engine.export(folder / f"loaded-{num_ranks}")
    write_json(folder / f"resume-{num_ranks}-{rank}.json", train(engine, range(2, 4)))
    engine.export(folder / f"resumed-{num_ranks}")


def scenario_walk_back(folder: Path, rank: int, num_ranks: int) -> None:
    """Start from the newest of two generations, of which a file that only the last rank reads is damaged: all
    take the other.
    """
    engine, trial = engine_of(folder, rank, num_ranks), Trial(folder / "trial")
    ranks = Ranks()
    if rank == 0:
        trial.make_dirs()
        trial.attempt("7.0").make_dirs()
    ranks.any(False)  # a barrier
    saving = Saving(trial, "7.0", 0, [engine], ranks, RetentionPolicy(9))
    sums = {}
    for step in (1, 2):
        train(engine, [step - 1])
        sums[step] = [float(shard.local.sum()) for shard in engine.shards]
        who = {
            "attempt": "7.0",
            "incarnation": 0,
            "submission": "7",
            "version": f"0.{step}",
            "config_hash": "",
            "num_ranks": num_ranks,
        }
        counters = engine.counters()
        saving.start(
            step,
            lambda step=step, who=who, counters=counters: Manifest(
                step=step, lineage=0, counters=counters, **who
            ),
            copied=False,
        )
        assert saving.settle(wait=True) is not None, saving.problem
    path = trial.generation(2) / state.make_file_name(num_ranks - 1)
    if rank == 0:
        content = bytearray(path.read_bytes())
        content[-9] ^= 1  # of the last tensor: rank 0 does not read it
        path.write_bytes(content)
    generation.LIGHT_BYTES = 0  # so that it is not found before the load
    fresh = engine_of(folder, rank, num_ranks)
    config = SimpleNamespace(recover=RecoverConfig(mode="auto"), train_dataset=DatasetConfig(path="unread"))
    given = TrainerContext(
        trial=trial,
        attempt=trial.attempt("7.0"),
        incarnation=1,
        config=config,  # type: ignore[arg-type]
        tokens={},
        names=None,  # type: ignore[arg-type]
        train=Train("fsdp"),
        device="cpu",
        ranks=ranks,
        stopping=threading.Event(),
    )
    begun = load_state(given, ranks.from_rank0(lambda: begin(given)), [fresh])
    same = [float(shard.local.sum()) for shard in fresh.shards] == sums[1]
    write_json(
        folder / f"walk_back-{rank}.json",
        {"step": begun["step"], "same": same, "updates": fresh.counters()["updates"]},
    )


if __name__ == "__main__":
    gloo_ranks.main({name: one for name, one in globals().items() if name.startswith("scenario_")})
