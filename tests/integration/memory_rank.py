"""One rank of test_memory_estimate.py: measures what the engine really takes."""

import ctypes
import gc
import json
from pathlib import Path
from pkgutil import resolve_name

import gloo_ranks
import numpy as np
import torch

from hpc_rl.config.options.training import MicroBatchSpec, TrainEngineConfig
from hpc_rl.core.allocation import parse
from hpc_rl.core.trial import load_json, write_json
from hpc_rl.engines import ENGINES
from hpc_rl.engines.base import Engine, Sequences
from hpc_rl.engines.shared.mesh import Mesh

NUM_ROWS = 4  # two of them in a micro-batch: the second one meets the gradients of the first


def resident_bytes(name: str) -> int:
    """Return VmRSS (now) or VmHWM (the most since `forget_peak`) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def settle() -> None:
    """Give back what is free, so that only what is in use is resident."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def engine_of(folder: Path, case: dict, rank: int, num_ranks: int) -> Engine:
    config = TrainEngineConfig(
        path=str(folder),
        init_from_scratch=True,
        attn_impl="sdpa",
        dtype=case["dtype"],
        gradient_checkpointing=case["checkpointing"],
        use_lora=case["use_lora"],
        mb_spec=MicroBatchSpec(max_tokens_per_mb=case["tokens"]),
    )
    train = parse(case["mesh"]).train
    kind = resolve_name(ENGINES[train.backend])
    engine = kind(config, Mesh.of(train, rank, num_ranks))
    engine.initialize(10)
    return engine


def loss(batch):
    return -batch.logprobs_T.sum(), {}


def rows_of(case: dict) -> Sequences:
    rng = np.random.default_rng(1)
    length = case["tokens"] // 2
    return Sequences([rng.integers(0, case["vocab"], length).astype(np.int32) for _ in range(NUM_ROWS)], {})


def peak_of(action) -> int:
    """Return the most that this process had during an action."""
    settle()
    forget_peak()
    action()
    return resident_bytes("VmHWM")


def measured(folder: Path, case: dict, rank: int, num_ranks: int) -> dict[str, int]:
    settle()
    before = resident_bytes("VmRSS")
    engine = engine_of(folder, case, rank, num_ranks)
    rows = rows_of(case)
    train = peak_of(lambda: engine.train_batch(rows, loss, 100.0, 1.0)) - before
    if not case["saves"]:
        return {"train": train}
    settle()
    standing = resident_bytes("VmRSS")
    publish = peak_of(lambda: engine.export(folder / f"export-{rank}")) - standing
    snapshot = peak_of(lambda: engine.snapshot(copied=True)) - standing
    return {"train": train, "publish": publish, "snapshot": snapshot}


def scenario_measure(folder: Path, rank: int, num_ranks: int) -> None:
    cases = load_json(folder / "cases.json")
    # libraries are loaded, and their code is read, before anything is measured
    for case in cases["warm_up"]:
        measured(folder / case["model"], case, rank, num_ranks)
    found = {
        name: measured(folder / case["model"], case, rank, num_ranks) for name, case in cases["cases"].items()
    }
    write_json(folder / f"measured-{rank}.json", found)
    torch.distributed.barrier()
    print(json.dumps(found))


if __name__ == "__main__":
    gloo_ranks.main(globals())
