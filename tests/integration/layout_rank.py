"""One gloo rank of test_fsdp_layouts.py."""

import traceback
from pathlib import Path

import gloo_ranks
import plain_lora
import plain_objectives
import plain_training
import published_weights

from hpc_rl.config.options.training import FSDPEngineConfig, MicroBatchSpec
from hpc_rl.core.allocation import parse
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.engines.shared.mesh import Mesh

# case -> (architecture, allocation, layout of micro-batches, options)
CASES = {
    2: {
        "d2": ("qwen2", "fsdp:d2", "padded", {}),
        "copies": ("qwen2", "fsdp:d2", "packed", {"fsdp": FSDPEngineConfig(replicate_size=2)}),
        "t2": ("qwen2", "fsdp:t2", "padded", {}),
        "t2_packed": ("tied", "fsdp:t2", "packed", {"gradient_checkpointing": True}),
        "t2_heads": ("qwen3", "fsdp:t2", "packed", {"fsdp": FSDPEngineConfig(reshard_after_forward=False)}),
        "c2": ("llama", "fsdp:c2", None, {"mb_spec": MicroBatchSpec(n_mbs=2)}),
        "c2_heads": ("qwen3", "fsdp:c2", None, {"gradient_checkpointing": True}),
        "c2_compiled": (
            "qwen3",
            "fsdp:c2",
            None,
            {"gradient_checkpointing": True, "enable_torch_compile": True},
        ),
    },
    4: {
        "d2t2": ("qwen3", "fsdp:d2t2", "packed", {}),
        "copies_t2": ("tied", "fsdp:d2t2", "padded", {"fsdp": FSDPEngineConfig(replicate_size=2)}),
        "c2t2": ("qwen2", "fsdp:c2t2", None, {}),
        "c4": ("qwen3", "fsdp:c4", None, {}),  # more ranks than key-value heads
        "d2c2": ("tied", "fsdp:d2c2", None, {}),
    },
}


# case -> (architecture, allocation, options)
ADAPTERS = {
    "d2": ("qwen2", "fsdp:d2", {}),
    "t2": ("qwen3", "fsdp:t2", {"gradient_checkpointing": True}),
    "c2": ("qwen3", "fsdp:c2", {}),
}


def scenario_train(folder: Path, rank: int, num_ranks: int) -> None:
    for name, (architecture, allocation, layout, options) in CASES[num_ranks].items():
        mesh = Mesh.of(parse(allocation).train, rank, num_ranks)
        config = plain_training.config_of(folder / architecture, **options)
        engine = FSDPEngine(config, mesh, layout=layout)
        engine.initialize(plain_training.NUM_STEPS)
        try:
            plain_training.train(engine, folder / name)
            published_weights.check(engine, folder / name)
        except Exception:
            print(name, flush=True)
            traceback.print_exc()
            raise
    for name, (architecture, allocation, options) in (ADAPTERS if num_ranks == 2 else {}).items():
        mesh = Mesh.of(parse(allocation).train, rank, num_ranks)
        adapter = {**plain_lora.OPTIONS, "lora_path": str(folder / f"{architecture}-adapter"), **options}
        engine = FSDPEngine(plain_training.config_of(folder / architecture, **adapter), mesh)
        engine.initialize(plain_lora.NUM_STEPS)
        plain_lora.train(engine, folder / f"adapter-{name}")


# of a critic, of DPO and of a teacher's likely tokens; the micro-batches hold whole pairs
KINDS = ("critic", "dpo", "top")
OBJECTIVES = {f"{kind} {mesh}": (kind, mesh) for kind in KINDS for mesh in ("d2", "t2", "c2")}


def scenario_objectives(folder: Path, rank: int, num_ranks: int) -> None:
    for name, (kind, mesh) in OBJECTIVES.items():
        found = plain_objectives.train(objective_engine(folder, kind, f"fsdp:{mesh}", rank), kind)
        plain_objectives.write(folder / name, rank, found)


def objective_engine(folder: Path, kind: str, allocation: str, rank: int) -> FSDPEngine:
    options = {"is_critic": True} if kind == "critic" else {"mb_spec": MicroBatchSpec(granularity=2, n_mbs=2)}
    config = plain_training.config_of(folder / ("critic" if kind == "critic" else "qwen3"), **options)
    train = parse(allocation).train
    config.optimizer.gradient_clipping = 1e3
    engine = FSDPEngine(config, Mesh.of(train, rank, train.num_units), name=kind)
    engine.initialize(plain_objectives.NUM_STEPS)
    return engine


if __name__ == "__main__":
    gloo_ranks.main({"scenario_train": scenario_train, "scenario_objectives": scenario_objectives})
