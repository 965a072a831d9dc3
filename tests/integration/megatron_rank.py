"""One rank of the scenarios of test_megatron_engine.py: `python megatron_rank.py SCENARIO RANK NUM_RANKS FOLDER`."""

import faulthandler
import traceback
from pathlib import Path
from typing import Any

import gloo_ranks
import numpy as np
import torch

from hpc_rl.config.sections.megatron import MegatronConfig, MegatronDDPConfig
from hpc_rl.config.sections.training import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from hpc_rl.engines.base import Sequences
from hpc_rl.engines.mesh import Mesh
from hpc_rl.engines.packing import balance
from hpc_rl.trainers.supervised import sequence_loss
from hpc_rl.trial import read_json, write_json

LENGTHS = (9, 3, 30, 1, 12, 2, 30, 17)
VOCABULARY = 37
TEMPERATURE = 0.9
WEIGHT = 80.0
NUM_STEPS = 10
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
        "mb_spec": MicroBatchSpec(n_mbs=2),
        **layout.get("config", {}),
    }
    config = TrainEngineConfig(
        path=str(folder / layout["kind"]), optimizer=OPTIMIZER, megatron=megatron, **options
    )
    # here, for the test that imports this module must not have its PyTorch changed for Megatron on a CPU
    if layout.get("engine") == "fsdp":
        from hpc_rl.engines.fsdp import FSDPEngine as Kind
    else:
        from hpc_rl.engines.megatron.megatron_engine import MegatronEngine as Kind
    return Kind(config, Mesh(rank, num_ranks, **sizes), seed=5, frozen=layout.get("frozen", False))


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
        steps.append(engine.train_batch(mine, sequence_loss, WEIGHT, TEMPERATURE))
        if step == 0:
            engine.save(out)
    engine.export(out / "trained")
    return {
        "rows": numbers,
        "logprobs": [[float(x) for x in one] for one in logprobs],
        "steps": steps,
    }


def scenario_layouts(folder: Path, rank: int, num_ranks: int) -> None:
    """Measure each layout that `layouts-N.json` names."""
    faulthandler.dump_traceback_later(170, exit=True)
    for layout in read_json(folder / f"layouts-{num_ranks}.json"):
        try:
            found = measure(folder, layout, rank, num_ranks)
        except Exception:
            found = {"error": traceback.format_exc()}
        write_json(folder / f"{layout['name']}-{num_ranks}-{rank}.json", found)
        if "error" in found:
            raise SystemExit(found["error"])  # the other ranks may wait for this one


if __name__ == "__main__":
    torch.set_num_threads(1)
    gloo_ranks.main({name: one for name, one in globals().items() if name.startswith("scenario_")})
