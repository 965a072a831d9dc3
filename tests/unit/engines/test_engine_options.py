"""Options of a model in the trainer, from a file to what its engine does."""

import json
from pathlib import Path

import pytest
import torch
from engine_rows import micro_batches_of, plain_logprobs, some_rows
from engine_weights import whole_weights
from transformers import Trainer

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.engines.fsdp import engine as fsdp
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.engines.shared.optimizer import LossScale
from hpc_rl.trainers.supervised import compute_sequence_loss

WORDS = [
    *("experiment_name=e", "trial_name=t", "train_dataset.path=/d", "cluster.n_gpus_per_node=0"),
    *("model.init_from_scratch=true", "model.optimizer.warmup_steps_proportion=0"),
]


def section_of(path: Path, overrides: str = ""):
    words = [*WORDS, f"model.path={path}", *(f"model.{word}" for word in overrides.split())]
    return check(load([], words), files=False).config.model


def engine_of(path: Path, overrides: str = "") -> FSDPEngine:
    engine = FSDPEngine(section_of(path, overrides))
    engine.initialize(10)
    return engine


@pytest.fixture
def sharded(monkeypatch):
    """The classes of what `fully_shard` is called with, and the last precision; nothing is sharded."""
    seen: list = []

    def record(module, *, mp_policy, **_) -> None:
        seen.append((type(module).__name__, mp_policy))

    monkeypatch.setattr(fsdp, "fully_shard", record)
    yield seen
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


OPTIMIZER = (
    "optimizer.lr=0.03 optimizer.beta1=0.7 optimizer.beta2=0.8 optimizer.eps=1e-3 "
    "optimizer.weight_decay=0.3 optimizer.gradient_clipping=0.1"
)


def test_updates_equal_those_of_plain_torch(model_dir) -> None:
    engine, plain = engine_of(model_dir, OPTIMIZER), engine_of(model_dir)
    parameters = list(plain.model.parameters())
    adam = torch.optim.AdamW(parameters, lr=0.03, betas=(0.7, 0.8), eps=1e-3, weight_decay=0.3)
    for seed in range(3):
        rows = some_rows((9, 3, 12), seed)
        result = engine.train_batch(rows, compute_sequence_loss, 18.0, 1.0)
        scored = [plain_logprobs(plain, ids, 1.0)[1:] for ids in rows.ids]
        loss = -torch.cat(scored).sum() / 18
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        adam.step()
        adam.zero_grad()
        assert (result["loss"], result["grad_norm"], result["lr"]) == pytest.approx(
            (loss.item(), norm.item(), 0.03), rel=1e-3
        )
        assert norm > 0.2  # it is clipped
    for (name, ours), theirs in zip(engine.model.named_parameters(), parameters, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4, rtol=0), name


def test_norms_and_biases_are_decayed_unless_it_is_turned_off(model_dir) -> None:
    """The names that are not decayed are those of Hugging Face's Trainer."""
    rest, changes = "optimizer.lr=1e-9 optimizer.weight_decay=1e8", {}
    for value in ("true", "false"):
        engine = engine_of(model_dir, f"{rest} optimizer.decay_norms_and_biases={value}")
        before = {name: one.detach().clone() for name, one in engine.model.named_parameters()}
        engine.train_batch(some_rows((9, 3), 1), compute_sequence_loss, 8.0, 1.0)
        pairs = zip(before.items(), engine.model.parameters(), strict=True)
        changes[value] = {name for (name, old), new in pairs if old.any() and not torch.allclose(old, new)}
    hugging_face = {*Trainer.get_decay_parameter_names(None, engine.model)}
    assert changes["true"] - hugging_face  # norms
    assert changes["false"] == changes["true"] & hugging_face


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ("", [[9, 3, 1, 12, 2], [30]]),
        ("mb_spec.granularity=6", [[9, 3, 30, 1, 12, 2]]),
        ("mb_spec.n_mbs=3", 3),
        ("mb_spec.max_tokens_per_mb=40", 3),
        ("mb_spec.n_mbs=3 mb_spec.granularity=2", [[9, 3], [12, 2], [30, 1]]),
        ("mb_spec.n_mbs=3 mb_spec.granularity=4", [[9, 3, 30, 1], [12, 2]]),
    ],
)
def test_micro_batches(model_dir, overrides, wanted) -> None:
    found = micro_batches_of(engine_of(model_dir, overrides), some_rows((9, 3, 30, 1, 12, 2)))
    assert wanted in (found, len(found))
    assert "tokens" not in overrides or all(len(group) * max(group) <= 40 for group in found)


def forward_passes(engine: FSDPEngine) -> int:
    """How often an update computes the first layer."""
    calls: list = []
    engine.model.blocks()[0].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    engine.train_batch(some_rows(), compute_sequence_loss, 60.0, 1.0)
    return len(calls)


def test_activations_are_computed_again_in_the_backward_pass(model_dir) -> None:
    num_micro_batches = len(micro_batches_of(engine_of(model_dir), some_rows()))
    assert forward_passes(engine_of(model_dir)) == 2 * num_micro_batches
    assert forward_passes(engine_of(model_dir, "gradient_checkpointing=false")) == num_micro_batches


def test_attention_and_first_values(model_dir, tmp_path) -> None:
    engine = engine_of(model_dir, "attn_impl=eager")
    assert engine.model.hf.config._attn_implementation == "eager"
    engine.export(tmp_path / "out")
    again = engine_of(tmp_path / "out", "init_from_scratch=false")
    drawn = {**whole_weights(engine)}
    assert all(torch.equal(tensor, drawn[name]) for name, tensor in whole_weights(again).items())


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_type_of_compute_of_sums_over_ranks_and_of_exports(model_dir, sharded, tmp_path, name) -> None:
    engine = engine_of(model_dir, f"dtype=float16 grad_reduce_dtype={name}")
    assert {(one.param_dtype, one.reduce_dtype) for _, one in sharded} == {
        (torch.float16, getattr(torch, name))
    }
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}
    engine.export(tmp_path / "out")
    assert {tensor.dtype for tensor in whole_weights(engine).values()} == {torch.float16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float16"


def test_layers_are_sharded_by_class_name(model_dir, sharded) -> None:
    layers = "fsdp.wrap_policy.transformer_layer_cls_to_wrap=[Qwen3MLP]"
    for overrides, name in (("", "Qwen3DecoderLayer"), (layers, "Qwen3MLP")):
        sharded.clear()
        engine_of(model_dir, f"dtype=bfloat16 {overrides}")
        assert [kind for kind, _ in sharded] == [name, name, "LanguageModel"]


def test_updates_in_cpu_memory_are_those_of_copies(model_dir) -> None:
    section = section_of(model_dir)
    for offload in (False, True):
        section.optimizer.offload = offload  # refused without GPUs
        engine = FSDPEngine(section)
        engine.initialize(10)
        optimizer = engine.optimizer
        own = {shard.local.data_ptr() for shard in engine.shards}
        copied = {tensor.data_ptr() for tensor in optimizer.updated.values()}
        assert own.isdisjoint(copied) == offload


def test_the_loss_scale_by_hand(model_dir) -> None:
    names = ("initial_loss_scale=64", "min_loss_scale=16", "loss_scale_window=2", "hysteresis=3")
    section = section_of(model_dir, " ".join(["dtype=float16", *(f"optimizer.{name}" for name in names)]))
    scale, values = LossScale(section.optimizer, active=True), []
    for overflow in (True, True, True, True, True, False, False, True, True, True):
        scale.update(overflow)
        values.append(scale.value)
    # the third overflow in a row halves, then each does; after two good updates three are tolerated again
    assert values == [64, 64, 32, 16, 16, 16, 32, 32, 32, 16]
