"""The fsdp engine on one GPU, at the sizes of Qwen2.5: loading, attention, precision, memory, speed."""

import json
import resource
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_rl.config.options.training import (
    FSDPEngineConfig,
    MicroBatchSpec,
    OptimizerConfig,
    TrainEngineConfig,
)
from hpc_rl.core.allocation import Train
from hpc_rl.engines.base import Sequences
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.engines.shared import attention
from hpc_rl.engines.shared.logprobs import token_logprobs
from hpc_rl.plan.memory import CUDA_BYTES, ModelShape, RankLoad, estimate_rank_memory
from hpc_rl.trainers.supervised import compute_sequence_loss

pytestmark = pytest.mark.timeout(300)
COMMON = {"model_type": "qwen2", "max_position_embeddings": 32768, "tie_word_embeddings": True}
SHAPES = {
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}
KERNELS = {  # attn_impl -> what it imports, and its name in engines/shared/attention.py
    "sdpa": ("torch", "torch"),
    "flash_attention_2": ("flash_attn", "fa2"),
    "flash_attention_3": ("flash_attn_interface", "fa3"),
}
INSTALLED = [name for name, (module, _) in KERNELS.items() if find_spec(module)]
# operations per second in bfloat16, dense: NVIDIA's data sheets
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
MFU_GOAL = 0.5


def on(device: str, name: str) -> dict:
    """The shape, or on a CPU a tiny one."""
    return {**COMMON, **SHAPES[name if device == "cuda" else "tiny"]}


def model_of(folder: Path, shape: dict, with_weights: bool = False) -> Path:
    """A folder with config.json; with weights in bfloat16 if they are asked for."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    if with_weights:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def engine_of(folder: Path, device: str, frozen: bool = False, layout=None, **changes) -> FSDPEngine:
    options = {"init_from_scratch": True, "attn_impl": "sdpa", "optimizer": OptimizerConfig(lr=1e-5)}
    config = TrainEngineConfig(path=str(folder), **{**options, **changes})
    engine = FSDPEngine(config, device=device, frozen=frozen, layout=layout)
    engine.initialize(100)
    return engine


def rows_of(shape: dict, lengths) -> Sequences:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, shape["vocab_size"], size=length).astype(np.int32) for length in lengths]
    return Sequences(ids, {"loss_mask": [np.arange(len(one)) >= 1 for one in ids]})


def uneven(device: str) -> Sequences:
    lengths = (17, 900, 4000, 1, 2500, 333, 2048, 640) if device == "cuda" else (3, 17, 40, 1, 25)
    return rows_of(on(device, "0.5B"), lengths)


def differences(one: list[np.ndarray], other: list[np.ndarray]) -> np.ndarray:
    return np.abs(np.concatenate(one) - np.concatenate(other))


def logprobs(engine: FSDPEngine, device: str) -> list[np.ndarray]:
    return engine.logprobs(uneven(device), 1.0)


def test_weights_come_straight_from_the_files_to_the_gpu(tmp_path, device, keep) -> None:
    shape = on(device, "1.5B")
    folder = model_of(tmp_path / "model", shape, with_weights=True)
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    digest = {name: float(tensor.double().sum()) for name, tensor in wanted.items()}
    num_params = sum(tensor.numel() for name, tensor in wanted.items() if name != "lm_head.weight")
    del wanted
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    engine = engine_of(folder, device, frozen=True, dtype="float32", init_from_scratch=False)
    took = time.perf_counter() - begin
    names = dict(engine.model.hf.named_parameters())
    for name, parameter in names.items():
        assert float(parameter.double().sum()) == pytest.approx(digest[name], rel=1e-9, abs=1e-9), name
    if device == "cuda":
        assert torch.cuda.memory_allocated() == pytest.approx(4 * num_params, rel=0.05)
        # the peak was that of transformers above; loading by pieces does not raise it
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss <= resident * 1.02
    keep("loading", {"parameters": num_params, "s": took, "gb_per_s": 2 * num_params / 1e9 / took})


def test_an_offloaded_engine_leaves_the_gpu_and_goes_on(tmp_path, device, keep) -> None:
    engine = engine_of(model_of(tmp_path / "model", on(device, "0.5B")), device)
    engine.train_batch(uneven(device), compute_sequence_loss, 60.0, 1.0)
    before = logprobs(engine, device)
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    times = []
    for move in (engine.offload, engine.reload):
        begin = time.perf_counter()
        move()
        times.append(time.perf_counter() - begin)
        if device == "cuda" and move == engine.offload:
            assert torch.cuda.memory_allocated() < 0.05 * held
    assert not differences(before, logprobs(engine, device)).any()
    engine.train_batch(uneven(device), compute_sequence_loss, 60.0, 1.0)
    keep("offload", {"bytes": held, "offload_s": times[0], "reload_s": times[1]})


@pytest.mark.parametrize("attn_impl", INSTALLED)
def test_packed_rows_are_as_near_to_float32_as_padded_ones(tmp_path, device, keep, attn_impl) -> None:
    folder = model_of(tmp_path / "model", on(device, "0.5B"))
    exact = logprobs(engine_of(folder, device, frozen=True, dtype="float32", layout="padded"), device)
    padded = engine_of(folder, device, frozen=True, layout="padded")
    packed = engine_of(folder, device, frozen=True, layout="packed", attn_impl=attn_impl)
    expected = KERNELS[attn_impl][1] if device == "cuda" else "rows"
    assert packed.model.hf.config._attn_implementation == f"packed_{expected}"
    ours, theirs = logprobs(packed, device), logprobs(padded, device)
    error, usual = differences(ours, exact), differences(theirs, exact)
    assert error.mean() <= 1.2 * usual.mean() + 1e-6
    assert error.max() <= 2 * usual.max() + 1e-6
    numbers = {"mean_error": error.mean(), "of_padded_sdpa": usual.mean(), "max_error": error.max()}
    keep(f"packed {expected}", {name: float(value) for name, value in numbers.items()})


def inputs(device: str, heads: int, tokens: int) -> torch.Tensor:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return torch.randn(1, heads, tokens, 64, device=device, dtype=dtype)


def packed_rows(device: str, lengths: tuple[int, ...]) -> attention.PackedRows:
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    return attention.PackedRows(ends, max(lengths), lengths)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("attn_impl", INSTALLED)
def test_kernels_compute_what_one_call_per_row_computes(device, attn_impl, window) -> None:
    """Of whole rows, and as context ranks have them: the last tokens of rows against all before."""
    torch.manual_seed(0)
    kernel = KERNELS[attn_impl][1] if device == "cuda" else "rows"
    lengths, last = (700, 1, 130, 300), (350, 1, 30, 150)
    rows, some = packed_rows(device, lengths), packed_rows(device, last)
    key, value = (inputs(device, 2, sum(lengths)) for _ in range(2))
    for queries in (rows, some):
        query = inputs(device, 8, sum(queries.lengths))
        out = [
            attention.attend_packed(query, key, value, queries, 0.2, window, kernel=one, seen=rows)
            for one in (kernel, "rows")
        ]
        torch.testing.assert_close(*out, atol=2e-2, rtol=2e-2)


def test_log_probabilities_in_bfloat16_are_near_those_in_float32(device, keep) -> None:
    torch.manual_seed(0)
    tokens, vocabulary, width = (4096, 151_936, 1024) if device == "cuda" else (64, 512, 64)
    hidden, head = (torch.randn(rows, width, device=device) for rows in (tokens, vocabulary))
    hidden, head = hidden.bfloat16(), (head * 2 * width**-0.5).bfloat16()
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    exact, _ = token_logprobs(hidden.float(), head.float(), targets)
    rough, _ = token_logprobs(hidden.requires_grad_(), head.requires_grad_(), targets)
    rough.sum().backward()
    assert torch.isfinite(head.grad).all()
    error = (exact - rough.detach()).abs()
    # on a GPU the product of the head is not rounded
    assert error.max() < (1e-3 if device == "cuda" else 0.1)
    keep("head", {"max_error": float(error.max())})


def test_no_layer_waits_for_the_gpu(tmp_path, device) -> None:
    folder = model_of(tmp_path / "model", on(device, "0.5B"))
    engine = engine_of(folder, device, gradient_checkpointing=True)
    engine.train_batch(uneven(device), compute_sequence_loss, 1000.0, 1.0)  # what is made once may wait
    if device == "cpu":  # there is nothing to wait for: tests/integration/test_packed_rows.py counts
        return
    for layer in engine.model.trunk().layers:
        layer.register_forward_pre_hook(lambda *_: torch.cuda.set_sync_debug_mode("error"))
        layer.register_forward_hook(lambda *_: torch.cuda.set_sync_debug_mode("default"), always_call=True)
    engine.logprobs(uneven(device), 1.0)
    engine.train_batch(uneven(device), compute_sequence_loss, 1000.0, 1.0)


def test_training_on_packed_rows_gives_the_gradient_of_padded_ones(tmp_path, device, keep) -> None:
    folder, norms = model_of(tmp_path / "model", on(device, "0.5B")), {}
    for layout in ("padded", "packed"):
        engine = engine_of(folder, device, layout=layout)
        result = engine.train_batch(uneven(device), compute_sequence_loss, 1000.0, 1.0)
        norms[layout] = result["grad_norm"]
        del engine
    assert norms["packed"] == pytest.approx(norms["padded"], rel=0.02)
    keep("gradient norms", norms)


def test_bfloat16_stays_near_float32(tmp_path, device, keep) -> None:
    folder = model_of(tmp_path / "model", on(device, "0.5B"))
    exact = logprobs(engine_of(folder, device, frozen=True, dtype="float32"), device)
    rough = logprobs(engine_of(folder, device, frozen=True, dtype="bfloat16"), device)
    drift = differences(exact, rough)
    assert drift.mean() < 0.02
    keep("bfloat16 drift", {"mean": float(drift.mean()), "max": float(drift.max())})


# what is planned for a rank on a GPU, and what it takes
MEMORY = {
    "recomputed": {"gradient_checkpointing": True},
    "kept": {"gradient_checkpointing": False},
    "offloaded": {"gradient_checkpointing": True, "fsdp": FSDPEngineConfig(offload_activations=True)},
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_as_planned(tmp_path, device, keep, name) -> None:
    shape = on(device, "0.5B")
    tokens = 8192 if device == "cuda" else 64
    more = {**MEMORY[name], "mb_spec": MicroBatchSpec(max_tokens_per_mb=tokens)}
    engine = engine_of(model_of(tmp_path / "model", shape), device, **more)
    for _ in range(2):  # moments and gradients are there at the second one
        engine.train_batch(rows_of(shape, [tokens // 2] * 4), compute_sequence_loss, 1000.0, 1.0)
    load = RankLoad(
        shape=ModelShape.of(shape),
        engine=engine.config,
        mesh=Train("fsdp", d=1),
        on_gpu=True,
        tokens=tokens,
        longest=tokens // 2,
    )
    planned = estimate_rank_memory(load).device_bytes - CUDA_BYTES
    assert planned > 0
    if device == "cuda":
        taken = torch.cuda.max_memory_allocated()
        keep(f"memory {name}", {"planned_gb": planned / 1e9, "measured_gb": taken / 1e9})
        assert taken == pytest.approx(planned, rel=0.15)


@pytest.mark.parametrize(("size", "tokens"), [("0.5B", 16384), ("1.5B", 8192)])
def test_speed_of_the_training_step(tmp_path, device, keep, size, tokens) -> None:
    """Records the share of the GPU's peak that the model's own operations reach."""
    shape = on(device, size)
    tokens = tokens if device == "cuda" else 128
    engine = engine_of(
        model_of(tmp_path / "model", shape),
        device,
        gradient_checkpointing=False,
        mb_spec=MicroBatchSpec(max_tokens_per_mb=tokens),
    )
    length = tokens // 4
    rows = rows_of(shape, [length] * 16)
    num_steps, first = 3, engine.train_batch(rows, compute_sequence_loss, 1000.0, 1.0)
    finish = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    finish()
    begin = time.perf_counter()
    for _ in range(num_steps):
        last = engine.train_batch(rows, compute_sequence_loss, 1000.0, 1.0)
    finish()
    rate = num_steps * 16 * length / (time.perf_counter() - begin)
    assert last["loss"] < first["loss"]  # it trained
    known = ModelShape.of(shape)
    matrices = known.num_layers * known.layer_params + known.table_params  # a tied one counts as the head
    # forwards and backwards; half of the square of attention
    per_token = 6 * matrices + 6 * known.num_layers * known.query_width * length
    peak = next((value for name, value in PEAK_FLOPS.items() if name in gpu_name(device)), None)
    keep(
        f"training step {size}",
        {
            "tokens_per_s": rate,
            "tokens_per_micro_batch": tokens,
            "mfu": rate * per_token / peak if peak else None,
            "mfu_goal": MFU_GOAL,
        },
    )


def gpu_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else ""
