"""Packed rows: each architecture against the padded layout, and what an attention call does in a layer."""

import json

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_rl.config.options.training import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from hpc_rl.engines.base import Sequences
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.engines.shared import attention
from hpc_rl.engines.shared.micro_batches import cut
from hpc_rl.trainers.supervised import compute_sequence_loss

LENGTHS = (9, 3, 17, 1, 12, 2, 17)
TINY = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def engine_of(tmp_path, layout: attention.Layout, architecture=None, max_tokens=None, **changes):
    content = {"model_type": "qwen3", **TINY, **(architecture or {})}
    (tmp_path / "config.json").write_text(json.dumps(content))
    options = {"attn_impl": "sdpa", "dtype": "float32", "gradient_checkpointing": False, **changes}
    config = TrainEngineConfig(
        path=str(tmp_path),
        init_from_scratch=True,
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps_proportion=0.0),
        mb_spec=MicroBatchSpec(max_tokens_per_mb=max_tokens),
        **options,
    )
    engine = FSDPEngine(config, layout=layout)
    engine.initialize(10)
    return engine


def some_rows() -> Sequences:
    rng = np.random.default_rng(0)
    ids = [rng.integers(2, 32, size=length).astype(np.int32) for length in LENGTHS]
    return Sequences(ids, {"loss_mask": [np.arange(len(x)) >= 2 for x in ids]})


def assert_equal_training(one, other) -> None:
    """The same log-probabilities, loss and gradient; and a row's do not depend on what it is packed with."""
    assert (one.layout, other.layout) == ("padded", "packed")
    assert other.model.hf.config._attn_implementation == "packed_rows"
    rows = some_rows()
    for want, got in zip(one.logprobs(rows, 0.9), other.logprobs(rows, 0.9), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
    trained = [engine.train_batch(rows, compute_sequence_loss, 50.0, 0.9) for engine in (one, other)]
    for name in ("loss", "grad_norm"):
        assert trained[1][name] == pytest.approx(trained[0][name], rel=1e-4)


@pytest.mark.parametrize("model_type", attention.STANDARD)
def test_packed_rows_give_what_padded_rows_give(tmp_path, model_type) -> None:
    one, other = (engine_of(tmp_path, layout, {"model_type": model_type}) for layout in ("padded", "packed"))
    assert_equal_training(one, other)


def test_a_sliding_window_is_seen_in_packed_rows(tmp_path) -> None:
    model = {"model_type": "mistral", "sliding_window": 5}
    one, other = (engine_of(tmp_path, layout, model) for layout in ("padded", "packed"))
    assert_equal_training(one, other)
    whole = engine_of(tmp_path, "packed", model | {"sliding_window": None}).logprobs(some_rows(), 0.9)
    near = other.logprobs(some_rows(), 0.9)
    assert np.abs(whole[2] - near[2]).max() > 0.01  # else the windows above would prove nothing


class Waits(TorchDispatchMode):
    """Counts what reads values of tensors: a GPU would have to finish first."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.in_layer = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.in_layer and any(name in str(func) for name in self.READS):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))

    def watch(self, layers, monkeypatch) -> None:
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: setattr(self, "in_layer", True))
            layer.register_forward_hook(lambda *_: setattr(self, "in_layer", False), always_call=True)
        for name in ("tolist", "numpy", "cpu"):  # they copy, or read memory without an operator
            monkeypatch.setattr(torch.Tensor, name, self._counting(name, getattr(torch.Tensor, name)))

    def _counting(self, name, whole):
        def counted(*args, **kwargs):
            if self.in_layer:
                self.found.append(name)
            return whole(*args, **kwargs)

        return counted


# in bfloat16 the layers are sharded by FSDP2, and keyword arguments go through it
@pytest.mark.parametrize(("dtype", "checkpointing"), [("float32", False), ("bfloat16", True)])
def test_a_layer_makes_one_attention_call_and_never_waits(
    tmp_path, monkeypatch, dtype, checkpointing
) -> None:
    engine = engine_of(tmp_path, "packed", max_tokens=30, dtype=dtype, gradient_checkpointing=checkpointing)
    calls: list[tuple] = []
    one_call = attention.attend_packed

    def counted(query, key, value, rows, *more):
        calls.append(rows.lengths)
        return one_call(query, key, value, rows, *more)

    monkeypatch.setattr(attention, "attend_packed", counted)
    waits = Waits()
    waits.watch(engine.model.trunk().layers, monkeypatch)
    rows, num_layers = some_rows(), TINY["num_hidden_layers"]
    with waits:
        engine.logprobs(rows, 1.0)
        in_forward = len(calls)
        engine.train_batch(rows, compute_sequence_loss, 50.0, 1.0)
    groups = cut(rows, "packed", engine.config.mb_spec)
    assert len(groups) > 1
    assert in_forward == num_layers * len(groups)
    assert len(calls) - in_forward == num_layers * len(groups) * (2 if checkpointing else 1)
    # the last token of a row is no input
    assert sorted(set(calls)) == sorted(
        tuple(LENGTHS[row] - 1 for row in group if LENGTHS[row] > 1) for group in groups
    )
    assert waits.found == []

    def look(_module, _inputs, out) -> None:
        out.sum().item()
        out.tolist()

    engine.model.trunk().layers[0].mlp.register_forward_hook(look)
    with waits:
        engine.logprobs(rows, 1.0)
    assert {"aten._local_scalar_dense.default", "tolist"} <= set(waits.found)
