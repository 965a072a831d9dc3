"""One gloo rank of test_grpo_formulas.py: every scenario on every engine of two ranks."""

import traceback
from pathlib import Path
from typing import Any

import gloo_ranks
import grpo_scenarios as scenarios

from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.engines.base import Engine
from hpc_rl.engines.shared.mesh import Mesh

# name -> (kind, sizes of the mesh, layout of FSDP's micro-batches)
ENGINES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "fsdp d2 padded": ("fsdp", {}, {"layout": "padded"}),
    "fsdp d2 packed": ("fsdp", {}, {"layout": "packed"}),
    "megatron t2": ("megatron", {"tensor": 2}, {}),
    "megatron p2": ("megatron", {"pipeline": 2}, {}),
}


def find_folder(folder: Path, engine: str, scenario: str) -> Path:
    return folder / engine / scenario


def make_engine(engine: str, rank: int, num_ranks: int) -> scenarios.MakeEngine:
    kind, sizes, options = ENGINES[engine]
    # here, for the test that imports this module must not have its PyTorch changed for Megatron on a CPU
    if kind == "fsdp":
        from hpc_rl.engines.fsdp.engine import FSDPEngine as Kind
    else:
        from hpc_rl.engines.megatron.engine import MegatronEngine as Kind

    def make(config: TrainEngineConfig, name: str, frozen: bool) -> Engine:
        made: Any = Kind(config, Mesh(rank, num_ranks, **sizes), name=name, frozen=frozen, **options)
        return made

    return make


def scenario_train(folder: Path, rank: int, num_ranks: int) -> None:
    for engine in ENGINES:
        for name in scenarios.SCENARIOS:
            out = find_folder(folder, engine, name)
            try:
                training = scenarios.Training(folder, name, make_engine(engine, rank, num_ranks))
                found, resumed = training.run(out)
            except Exception:
                print(engine, name, flush=True)
                traceback.print_exc()
                raise
            if rank == 0:
                scenarios.store(found, out / "found.safetensors")
                scenarios.store(resumed, out / "resumed.safetensors")


if __name__ == "__main__":
    gloo_ranks.main({"scenario_train": scenario_train})
