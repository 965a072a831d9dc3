"""One rank of the scenarios of test_megatron_engine.py: `python megatron_rank.py SCENARIO RANK NUM_RANKS FOLDER`."""

import faulthandler
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import gloo_ranks
import numpy as np
import plain_lora
import plain_objectives
import plain_training
import published_weights
import torch

from hpc_rl.config.options.megatron import MegatronConfig, MegatronDDPConfig
from hpc_rl.config.options.training import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.trial import load_json, write_json
from hpc_rl.engines.base import Sequences
from hpc_rl.engines.shared.mesh import Mesh
from hpc_rl.engines.shared.packing import balance
from hpc_rl.trainers.supervised import compute_sequence_loss

LENGTHS = (9, 3, 30, 1, 12, 2, 30, 17)
VOCABULARY = 37
TEMPERATURE = 0.9
WEIGHT = 80.0
NUM_STEPS = 10
SEED = 5
OPTIMIZER = OptimizerConfig(
    lr=1e-3, weight_decay=0.05, lr_scheduler_type="cosine", warmup_steps_proportion=0.2, gradient_clipping=1e3
)


def batch(step: int) -> Sequences:
    """Train batch `step`. Batch 2 has a single row, so data ranks above 0 have none."""
    rng = np.random.default_rng(step)
    lengths = LENGTHS[:1] if step == 2 else LENGTHS
    ids = [rng.integers(0, VOCABULARY, size=length).astype(np.int32) for length in lengths]
    return Sequences(ids, {"loss_mask": [np.arange(len(one)) >= 2 for one in ids]})


def share(rows: Sequences, mesh: Mesh) -> tuple[list[int], Sequences]:
    """The rows of a data rank, with their numbers."""
    mine = balance([len(ids) for ids in rows.ids], mesh.num_data_ranks)[mesh.data_rank]
    masks = rows.columns["loss_mask"]
    return mine, Sequences([rows.ids[row] for row in mine], {"loss_mask": [masks[row] for row in mine]})


def engine_of(folder: Path, layout: dict[str, Any], rank: int, num_ranks: int) -> Any:
    """An engine of a layout: {"kind": a model's folder, sizes of a mesh, "config": …, "megatron": …, "ddp": …}."""
    sizes = {
        key: layout[key]
        for key in ("tensor", "context", "pipeline", "experts", "expert_tensor")
        if key in layout
    }
    megatron = MegatronConfig(ddp=MegatronDDPConfig(**layout.get("ddp", {})), **layout.get("megatron", {}))
    options = {
        "attn_impl": "sdpa",
        "dtype": "float32",
        "gradient_checkpointing": False,
        "mb_spec": MicroBatchSpec(
            n_mbs=2, max_tokens_per_mb=layout.get("max_tokens"), granularity=layout.get("granularity", 1)
        ),
        **layout.get("config", {}),
    }
    optimizer = replace(OPTIMIZER, **layout.get("optimizer", {}))
    config = TrainEngineConfig(
        path=str(folder / layout["kind"]), optimizer=optimizer, megatron=megatron, **options
    )
    # here, for the test that imports this module must not have its PyTorch changed for Megatron on a CPU
    if layout.get("engine") == "fsdp":
        from hpc_rl.engines.fsdp.engine import FSDPEngine as Kind
    else:
        from hpc_rl.engines.megatron.engine import MegatronEngine as Kind
    return Kind(config, Mesh(rank, num_ranks, **sizes), seed=SEED, frozen=layout.get("frozen", False))


def measure(folder: Path, layout: dict[str, Any], rank: int, num_ranks: int) -> dict[str, Any]:
    """Log-probabilities, ten updates, state after the first, export before and after all."""
    out = folder / f"{layout['name']}-{num_ranks}"
    out.mkdir(exist_ok=True)
    engine = engine_of(folder, layout, rank, num_ranks)
    engine.initialize(NUM_STEPS)
    engine.export(out / "untrained")
    numbers, mine = share(batch(0), engine.mesh)
    logprobs = engine.logprobs(mine, TEMPERATURE)
    steps = []
    for step in range(NUM_STEPS):
        _, mine = share(batch(step), engine.mesh)
        steps.append(engine.train_batch(mine, compute_sequence_loss, WEIGHT, TEMPERATURE))
        if step == 0:
            engine.save(out)
    engine.export(out / "trained")
    published_weights.check(engine, out)
    return {
        "rows": numbers,
        "logprobs": [[float(x) for x in one] for one in logprobs],
        "steps": steps,
    }


def move(folder: Path, layout: dict[str, Any], saved: str, rank: int, num_ranks: int) -> dict[str, Any]:
    """Load the state that another layout saved after its first update, and make two more."""
    engine = engine_of(folder, layout, rank, num_ranks)
    engine.initialize(NUM_STEPS, empty=True)
    engine.load(folder / f"{saved}-{num_ranks}", num_ranks)
    steps = []
    for step in (1, 2):
        _, mine = share(batch(step), engine.mesh)
        steps.append(engine.train_batch(mine, compute_sequence_loss, WEIGHT, TEMPERATURE))
    return {"steps": steps, "counters": engine.counters()}


def whole(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for bucket in engine.weights(2000) for name, tensor in bucket}


def broken_on_the_last_data_rank(engine: Any) -> dict[str, Any]:
    """An update whose loss is not a number on one data rank."""
    mesh = engine.mesh

    def loss(seen):
        factor = float("nan") if mesh.data_rank == mesh.num_data_ranks - 1 else 1.0
        return seen.logprobs_T.sum() * factor, {"num_tokens": seen.columns_T["loss_mask"].sum()}

    before = whole(engine)
    _, mine = share(batch(0), mesh)
    result = engine.train_batch(mine, loss, WEIGHT, TEMPERATURE)
    after = whole(engine)
    same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    again = engine.train_batch(mine, compute_sequence_loss, WEIGHT, TEMPERATURE)
    return {
        "update_successful": result["update_successful"],
        "unchanged": same,
        "next": again["update_successful"],
    }


def refused(engine: Any) -> str:
    """What a row that is too long for one data rank raises on this rank."""
    _, mine = share(batch(0), engine.mesh)
    if engine.mesh.data_rank == 0:
        mine.ids[0] = np.zeros(500, dtype=np.int32)
        mine.columns["loss_mask"][0] = np.ones(500, dtype=bool)
    try:
        engine.logprobs(mine, 1.0)
    except ValueError as error:
        return str(error)
    return ""


def other(folder: Path, layout: dict[str, Any], rank: int, num_ranks: int) -> dict[str, Any]:
    """Numbers of a model that is made in another way: a reward model, a reference, from scratch, in bfloat16."""
    engine = engine_of(folder, layout, rank, num_ranks)
    engine.initialize(NUM_STEPS)
    engine.export(folder / f"{layout['name']}-{num_ranks}")
    numbers, mine = share(batch(0), engine.mesh)
    logprobs = engine.logprobs(mine, TEMPERATURE)
    found: dict[str, Any] = {"rows": numbers, "logprobs": [[float(x) for x in one] for one in logprobs]}
    if not engine.frozen:
        _, mine = share(batch(0), engine.mesh)
        found["step"] = engine.train_batch(mine, compute_sequence_loss, WEIGHT, TEMPERATURE)
        found["broken"] = broken_on_the_last_data_rank(engine)
    if engine.config.mb_spec.max_tokens_per_mb:
        found["refused"] = refused(engine)
    return found


def objective(folder: Path, layout: dict[str, Any], rank: int, num_ranks: int) -> dict[str, Any]:
    """What an objective of plain_objectives trains, with its options."""
    engine = engine_of(folder, layout, rank, num_ranks)
    engine.initialize(plain_objectives.NUM_STEPS)
    return plain_objectives.train(engine, layout["objective"])


def refusal(folder: Path, layout: dict[str, Any]) -> str:
    """What the constructor says of a model or a mesh that can't be; no other rank is asked."""
    num_ranks = layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("experts", 1)
    try:
        engine_of(folder, layout, 0, num_ranks)
    except ConfigError as error:
        return str(error)
    return ""


def train_adapter(folder: Path, layout: dict[str, Any], rank: int, num_ranks: int) -> dict[str, Any]:
    """Train as peft does, and as the FSDP engine does with the state that this one saved."""
    from hpc_rl.engines.megatron.engine import MegatronEngine

    path = folder / f"lora-{layout['kind']}"
    options = {**plain_lora.OPTIONS, "lora_path": f"{path}-adapter", **layout.get("config", {})}
    options["megatron"] = MegatronConfig(**layout.get("megatron", {}))
    sizes = {key: layout[key] for key in ("tensor", "pipeline", "experts") if key in layout}
    engine = MegatronEngine(plain_training.config_of(path, **options), Mesh(rank, num_ranks, **sizes))
    engine.initialize(plain_lora.NUM_STEPS)
    plain_lora.train(engine, folder / layout["name"])
    return {}


def scenario_layouts(folder: Path, rank: int, num_ranks: int) -> None:
    """Measure each layout that `layouts-N.json` names; load states in others; other kinds of models."""
    faulthandler.dump_traceback_later(290, exit=True)
    plan = load_json(folder / f"layouts-{num_ranks}.json")
    known = {layout["name"]: layout for layout in plan["layouts"]}
    said = {name: refusal(folder, layout) for name, layout in plan["refusals"].items()}
    write_json(folder / f"refusals-{num_ranks}-{rank}.json", said)
    jobs = {
        name: lambda layout=layout: measure(folder, layout, rank, num_ranks) for name, layout in known.items()
    }
    for saved, name in plan["moves"]:
        jobs[f"{saved} {name}"] = lambda saved=saved, name=name: move(
            folder, known[name], saved, rank, num_ranks
        )
    for layout in plan["others"]:
        jobs[layout["name"]] = lambda layout=layout: other(folder, layout, rank, num_ranks)
    for layout in plan["objectives"]:
        jobs[layout["name"]] = lambda layout=layout: objective(folder, layout, rank, num_ranks)
    for layout in plan["adapters"]:
        jobs[layout["name"]] = lambda layout=layout: train_adapter(folder, layout, rank, num_ranks)
    for name, job in jobs.items():
        try:
            found = job()
        except Exception:
            found = {"error": traceback.format_exc()}
        write_json(folder / f"{name}-{num_ranks}-{rank}.json", found)
        if "error" in found:
            raise SystemExit(f"{name}: {found['error']}")  # the other ranks may wait for this one


def scenario_memory(folder: Path, rank: int, num_ranks: int) -> None:
    """Load a large checkpoint, and report the peak beyond what the process had before."""
    from loading_rank import memory_bytes

    layout = {"kind": "large", "tensor": 2, "pipeline": num_ranks // 2, "frozen": True}
    engine = engine_of(folder, layout, rank, num_ranks)
    before = memory_bytes("VmRSS")
    engine.initialize(1)
    values = [one.value for one in engine.parameters]
    block = [one for name, one in engine.chunks[0].named_parameters() if name.startswith("decoder.layers.0.")]
    answer = {
        "peak_bytes": memory_bytes("VmHWM") - before,
        "share_bytes": sum(one.numel() for one in values) * 4,
        "block_bytes": sum(one.numel() for one in block) * 4 * 2,  # of both tensor ranks
        "before_bytes": before,
    }
    write_json(folder / f"memory-{rank}.json", answer)
    if rank == 0:
        pieces = (piece for one in engine.parameters for piece in one.pieces())
        mine = next(piece.local for piece in pieces if piece.name == "model.layers.0.mlp.up_proj.weight")
        assert float(mine.sum(dtype=torch.float64)) == load_json(folder / "sums.json")["2"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    gloo_ranks.main({name: one for name, one in globals().items() if name.startswith("scenario_")})
