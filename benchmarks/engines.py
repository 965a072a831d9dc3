"""The training step of the engines in tokens/s. The loss alone: loss_memory.py.

    python benchmarks/engines.py [--pairs 5] [--device cpu] [--compiled] [--out benchmarks/results/engines.json]

Step: one update over rows of uneven lengths, from one checkpoint, by each engine of core.backends.TRAIN_BACKENDS
(fsdp in both layouts, with `--compiled` also compiled) and by plain transformers: padded micro-batches of the
same rows with an attention mask, cross entropy of whole logits, AdamW. All report the same loss at the first
step, else the run ends. Tokens are those of the rows, without padding.

Sides run in turn within a round, in a new order each time; a ratio is taken within a round and the median over
rounds counts. On a CPU one thread and CPU seconds.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from run_record import describe_run, spread, write_record

from hpc_rl.config.options.training import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from hpc_rl.engines import ENGINES
from hpc_rl.engines.base import Sequences
from hpc_rl.engines.shared.micro_batches import cut
from hpc_rl.trainers.supervised import compute_sequence_loss

LR, BETAS, EPS = 1e-4, (0.9, 0.95), 1e-5
SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {
        "model": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 4096},
        "heads": (8, 4, 32),
        "rows": 16,
        "lengths": (64, 512),
        "tokens_per_mb": 2048,
    },
    "cuda": {  # Qwen2.5-0.5B
        "model": {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "vocab_size": 151_936,
        },
        "heads": (14, 2, 64),
        "rows": 64,
        "lengths": (256, 4096),
        "tokens_per_mb": 32_768,
    },
    "tiny": {  # for the test of this file
        "model": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64},
        "heads": (4, 2, 8),
        "rows": 4,
        "lengths": (3, 12),
        "tokens_per_mb": 24,
    },
}


# -- the training step


def write_model(folder: Path, shape: dict[str, Any]) -> None:
    """Write a random checkpoint that all sides start from."""
    from transformers import AutoConfig, AutoModelForCausalLM

    heads, kv_heads, head_dim = shape["heads"]
    options = {"model_type": "qwen3", **shape["model"]}
    config = AutoConfig.for_model(
        **options,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def batches(shape: dict[str, Any], seed: int) -> Sequences:
    rng = np.random.default_rng(seed)
    low, high = shape["lengths"]
    ids = [
        rng.integers(0, shape["model"]["vocab_size"], size=length).astype(np.int32)
        for length in rng.integers(low, high + 1, size=shape["rows"])
    ]
    return Sequences(ids, {"loss_mask": [np.arange(len(one)) >= 1 for one in ids]})


def num_targets(rows: Sequences) -> float:
    return float(sum(mask.sum() for mask in rows.columns["loss_mask"]))


def config_of(folder: Path, shape: dict[str, Any], device: str, **changes: Any) -> TrainEngineConfig:
    options: dict[str, Any] = {
        "attn_impl": "sdpa",
        "dtype": "float32" if device == "cpu" else "bfloat16",
        "gradient_checkpointing": False,
        "mb_spec": MicroBatchSpec(max_tokens_per_mb=shape["tokens_per_mb"]),
        "optimizer": OptimizerConfig(
            lr=LR, weight_decay=0.0, warmup_steps_proportion=0.0, beta1=BETAS[0], beta2=BETAS[1], eps=EPS
        ),
        "disable_dropout": True,
    }
    return TrainEngineConfig(path=str(folder), **{**options, **changes})


class EngineSide:
    def __init__(
        self,
        backend: str,
        folder: Path,
        shape: dict[str, Any],
        device: str,
        compiled: bool = False,
        **more: Any,
    ) -> None:
        config = config_of(folder, shape, device, enable_torch_compile=compiled)
        self.engine = resolve_name(ENGINES[backend])(config, device=device, **more)
        self.engine.initialize(1000)

    def step(self, rows: Sequences) -> float:
        return self.engine.train_batch(rows, compute_sequence_loss, num_targets(rows), 1.0)["loss"]


class Plain:
    """What one would write with transformers and PyTorch alone."""

    def __init__(self, folder: Path, shape: dict[str, Any], device: str) -> None:
        from transformers import AutoModelForCausalLM

        self.shape, self.device = shape, device
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.model = model.to(device).train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0
        )

    def step(self, rows: Sequences) -> float:
        groups = cut(rows, "padded", MicroBatchSpec(max_tokens_per_mb=self.shape["tokens_per_mb"]))
        total, weight = 0.0, num_targets(rows)
        for group in groups:
            ids = [torch.from_numpy(rows.ids[row]).long() for row in group]
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(self.device)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
            mask = mask.to(self.device)
            with torch.autocast(self.device, torch.bfloat16, enabled=self.device != "cpu"):
                logits = self.model(input_ids=padded, attention_mask=mask, use_cache=False).logits
            labels = padded.masked_fill(mask == 0, -100)[:, 1:].flatten()
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels, reduction="sum") / weight
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def sides_of(
    folder: Path, shape: dict[str, Any], device: str, compiled: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what can run here, and why the rest can't."""
    makers: dict[str, Callable[[], Any]] = {
        "fsdp packed": lambda: EngineSide("fsdp", folder, shape, device, layout="packed"),
        "fsdp padded": lambda: EngineSide("fsdp", folder, shape, device, layout="padded"),
        "fsdp compiled": lambda: EngineSide("fsdp", folder, shape, device, compiled=True, layout="padded"),
        "megatron": lambda: EngineSide("megatron", folder, shape, device),
        "plain": lambda: Plain(folder, shape, device),
    }
    if not compiled:
        del makers["fsdp compiled"]
    sides, missing = {}, {}
    for name, make in makers.items():
        try:
            sides[name] = make()
        except ImportError as error:
            missing[name] = str(error)
    return sides, missing


def seconds(device: str) -> float:
    """CPU seconds, or on a GPU the time when it has done what it was given."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measure_step(shape: dict[str, Any], device: str, pairs: int, compiled: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="engines-benchmark-") as folder:
        write_model(Path(folder), shape)
        sides, missing = sides_of(Path(folder), shape, device, compiled)
        first = {name: side.step(batches(shape, 0)) for name, side in sides.items()}  # and warms up
        close = 1e-4 if device == "cpu" else 2e-2
        if max(first.values()) - min(first.values()) > close:
            raise SystemExit(f"the sides do not compute the same: {first}")
        took: dict[str, list[float]] = {name: [] for name in sides}
        tokens = []
        for number in range(pairs):
            rows = batches(shape, 1 + number)
            tokens.append(sum(map(len, rows.ids)))
            names = list(sides)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                begin = seconds(device)
                sides[name].step(rows)
                took[name].append(seconds(device) - begin)
    found: dict[str, Any] = {}
    for name, times in took.items():
        rates = [count / one for count, one in zip(tokens, times, strict=True)]
        ratios = [plain / one for plain, one in zip(took["plain"], times, strict=True)]
        found[name] = {
            "tokens_per_s": spread(rates),
            "ratio_to_plain": spread(ratios),
            "first_loss": first[name],
        }
        print("step", name, found[name], flush=True)
    return {"shape": shape, "sides": found, "missing": missing}


# -- all


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5, help="rounds; each has one run of every side")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=tuple(SHAPES), help="sizes; by default those of the device")
    parser.add_argument("--compiled", action="store_true", help="also fsdp with enable_torch_compile")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    size = args.size or args.device
    torch.set_num_threads(1)
    result = {
        **describe_run("torch", "transformers", "megatron-core"),
        "pairs": args.pairs,
        "device": args.device,
        "gpu": torch.cuda.get_device_name() if args.device == "cuda" else None,
        "step": measure_step(SHAPES[size], args.device, args.pairs, args.compiled),
    }
    if args.out:
        write_record(args.out, result)


if __name__ == "__main__":
    main()
