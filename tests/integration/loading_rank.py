"""One rank of the scenarios of test_loading.py: `python loading_rank.py SCENARIO RANK NUM_RANKS FOLDER`."""

import time
from pathlib import Path
from typing import Any

import gloo_ranks
import torch
from engine_weights import whole_weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hpc_rl.config.options.training import OptimizerConfig, TrainEngineConfig
from hpc_rl.core.trial import load_json, write_json
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.engines.shared.mesh import Mesh

SEED = 5


def engine_of(path: Path, rank: int, num_ranks: int, frozen: bool = False, **changes: Any) -> FSDPEngine:
    options = {"attn_impl": "sdpa", "dtype": "float32", "gradient_checkpointing": False, **changes}
    config = TrainEngineConfig(path=str(path), optimizer=OptimizerConfig(), **options)
    engine = FSDPEngine(config, Mesh(rank, num_ranks), seed=SEED, frozen=frozen)
    engine.initialize(4)
    return engine


def plain(path: Path, is_critic: bool = False, init_from_scratch: bool = False) -> Any:
    """The model as transformers makes it."""
    kind = AutoModelForSequenceClassification if is_critic else AutoModelForCausalLM
    labels = {"num_labels": 1} if is_critic else {}
    torch.manual_seed(SEED)
    if init_from_scratch:
        return kind.from_config(AutoConfig.from_pretrained(path, **labels), dtype=torch.float32)
    return kind.from_pretrained(path, dtype=torch.float32, **labels)


def differences(engine: FSDPEngine, want: Any) -> list[str]:
    """Names of tensors that are not, bit for bit, those of a plain model. Collective."""
    dtype = getattr(torch, engine.config.dtype)
    tensors = {name: tensor.detach().to(dtype) for name, tensor in want.named_parameters()}
    buffers = dict(want.named_buffers())
    ours = dict(engine.model.hf.named_buffers())
    odd = [name for name in buffers.keys() | ours.keys() if not torch.equal(buffers[name], ours[name])]
    got = whole_weights(engine)
    if engine.mesh.rank == 0:
        odd += list(tensors.keys() ^ got.keys())
        odd += [name for name in tensors.keys() & got.keys() if not torch.equal(tensors[name], got[name])]
    tied = (engine.model.hf.get_output_embeddings(), engine.model.hf.get_input_embeddings())
    if (
        want.config.tie_word_embeddings
        and not engine.config.is_critic
        and tied[0].weight is not tied[1].weight
    ):
        odd.append("tied weights are apart")
    return odd


def scenario_equal(folder: Path, rank: int, num_ranks: int) -> None:
    """Load each checkpoint of the folder in several ways, and compare it with transformers'."""
    variants: dict[str, dict[str, Any]] = {
        "trained": {},
        "frozen": {"frozen": True},
        "frozen in bfloat16": {"frozen": True, "dtype": "bfloat16"},
        "from scratch": {"init_from_scratch": True},
        "reward model": {"is_critic": True},
        "reward model from scratch": {"is_critic": True, "init_from_scratch": True},
    }
    odd = {}
    for path in sorted(folder.glob("model-*")):
        for name, changes in variants.items():
            made = {key: changes[key] for key in ("is_critic", "init_from_scratch") if key in changes}
            engine = engine_of(path, rank, num_ranks, **changes)
            odd[f"{path.name} {name}"] = differences(engine, plain(path, **made))
    write_json(folder / f"equal-{num_ranks}-{rank}.json", odd)


def memory_bytes(name: str) -> int:
    """VmRSS or VmHWM of this process. ru_maxrss would not do: it begins with that of the parent process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def scenario_memory(folder: Path, rank: int, num_ranks: int) -> None:
    """Load a large checkpoint, and report the peak beyond what the process had before."""
    before = memory_bytes("VmRSS")
    start = time.monotonic()
    engine = engine_of(folder / "large", rank, num_ranks, frozen=True)
    took_s = time.monotonic() - start
    block = engine.model.hf.model.layers[0]
    share = sum(shard.local.numel() for shard in engine.shards) * 4
    answer = {
        "peak_bytes": memory_bytes("VmHWM") - before,
        "share_bytes": share,
        "block_bytes": sum(parameter.numel() for parameter in block.parameters()) * 4,
        "took_s": took_s,
        "before_bytes": before,
    }
    write_json(folder / f"memory-{rank}.json", answer)
    if rank == 0:
        first = load_json(folder / "sums.json")
        name = "model.layers.0.mlp.up_proj.weight"
        mine = next(shard.local for shard in engine.shards if shard.name == name)
        assert float(mine.sum(dtype=torch.float64)) == first[str(num_ranks)]


if __name__ == "__main__":
    gloo_ranks.main({name: one for name, one in globals().items() if name.startswith("scenario_")})
