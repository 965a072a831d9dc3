"""The engine on one rank: forward passes, updates, files.

Several ranks are in tests/integration/test_fsdp.py.
"""

import functools
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_rows import micro_batches_of, plain_logprobs, some_rows
from engine_weights import whole_weights
from exact_models import measure_error, widen
from patience import extend
from small_engines import assert_close, config_of, optimizer_of
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from transformers import AutoModelForCausalLM

from hpc_rl.config.options.training import FSDPEngineConfig, MicroBatchSpec
from hpc_rl.core import checked_file
from hpc_rl.core.errors import ConfigError, Damaged
from hpc_rl.engines.base import Sequences
from hpc_rl.engines.fsdp import engine as fsdp
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.engines.shared import model
from hpc_rl.engines.shared.offload import Offload
from hpc_rl.trainers.supervised import compute_sequence_loss


def engine_of(path: Path, layout=None, seed: int = 1, **changes):
    engine = FSDPEngine(config_of(path, **{"init_from_scratch": True, **changes}), seed=seed, layout=layout)
    engine.initialize(10)
    return engine


def train(engine, seed: int = 0, temperature: float = 1.0) -> dict[str, float]:
    return engine.train_batch(some_rows(seed=seed), compute_sequence_loss, 60.0, temperature)


def weights_of(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in whole_weights(engine).items()}


def assert_equal_weights(one: dict, other: dict, atol: float = 0.0) -> None:
    torch.testing.assert_close(one, other, atol=atol, rtol=0)  # it names what differs


@pytest.mark.parametrize("attn_impl", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("max_tokens", [None, 40])
def test_logprobs_equal_a_plain_forward_pass_of_each_row(model_dir, layout, attn_impl, max_tokens) -> None:
    spec = MicroBatchSpec(max_tokens_per_mb=max_tokens)
    engine = engine_of(model_dir, layout, attn_impl=attn_impl, mb_spec=spec)
    rows = some_rows(mask=False)
    for ids, got in zip(rows.ids, engine.logprobs(rows, temperature=0.8), strict=True):
        assert got.dtype == np.float32
        assert got[0] == 0
        with torch.no_grad():
            np.testing.assert_allclose(got[1:], plain_logprobs(engine, ids, 0.8).numpy(), atol=1e-5)


def test_logprobs_only_where_the_mask_asks(model_dir) -> None:
    engine = engine_of(model_dir)
    rows = some_rows()
    everywhere = engine.logprobs(Sequences(rows.ids, {}), 1.0)
    wanted = map(np.where, rows.columns["loss_mask"], everywhere, [0.0] * len(rows))
    assert_close(engine.logprobs(rows, 1.0), wanted, 1e-6)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_column_gives_each_token_its_temperature(model_dir, layout) -> None:
    engine, rows = engine_of(model_dir, layout, mb_spec=MicroBatchSpec(max_tokens_per_mb=40)), some_rows()
    own = [0.1 if i % 2 else 0.7 for i in range(len(rows))]
    column = [np.full(len(ids), value, np.float32) for ids, value in zip(rows.ids, own, strict=True)]
    given = Sequences(rows.ids, {**rows.columns, "temperature": column})
    for i, got in enumerate(engine.logprobs(given, 1.0)):
        np.testing.assert_allclose(got, engine.logprobs(rows, own[i])[i], atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_engine_has_the_log_probabilities_of_the_one_that_trains(model_dir, dtype) -> None:
    config = config_of(model_dir, init_from_scratch=True, dtype=dtype, gradient_checkpointing=True)
    frozen = FSDPEngine(config, frozen=True)
    frozen.initialize(0)
    assert {parameter.dtype for parameter in frozen.model.parameters()} == {getattr(torch, dtype)}
    assert not any(parameter.requires_grad for parameter in frozen.model.parameters())
    rows = some_rows()
    tolerance = 1e-6 if dtype == "float32" else 0.1  # beside a model in float32
    assert_close(frozen.logprobs(rows, 0.8), engine_of(model_dir).logprobs(rows, 0.8), tolerance)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("padded", {"mb_spec": MicroBatchSpec(n_mbs=3, granularity=3)}),
        ("packed", {"mb_spec": MicroBatchSpec(granularity=2, max_tokens_per_mb=45)}),
        ("padded", {"mb_spec": MicroBatchSpec(max_seqs_per_mb=2)}),
        ("packed", {"mb_spec": MicroBatchSpec(max_seqs_per_mb=2, max_tokens_per_mb=40)}),
        ("padded", {"gradient_checkpointing": True}),
    ],
)
def test_three_steps_do_not_depend_on_how_they_are_computed(model_dir, layout, changes) -> None:
    engines = [engine_of(model_dir), engine_of(model_dir, layout, **changes)]
    for seed in range(3):
        results = [train(engine, seed, temperature=0.9) for engine in engines]
        assert results[0] == pytest.approx(results[1], rel=1e-5)
    assert_equal_weights(*map(weights_of, engines), atol=1e-5)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_padding_to_the_maximum_changes_the_shapes_and_not_the_result(model_dir, layout) -> None:
    spec = MicroBatchSpec(max_tokens_per_mb=64)
    engines = [engine_of(model_dir, layout, mb_spec=spec, pad_to_maximum=pad) for pad in (False, True)]
    shapes: list[set] = [set(), set()]
    for engine, seen in zip(engines, shapes, strict=True):
        engine.model.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.add(inputs[0].numel()))
    rows = some_rows((9, 3, 12, 2))
    assert_close(*(engine.logprobs(rows, 1.0) for engine in engines), atol=1e-5)
    results = [engine.train_batch(rows, compute_sequence_loss, 60.0, 1.0) for engine in engines]
    assert results[0] == pytest.approx(results[1], rel=1e-4)
    assert max(shapes[0]) < min(shapes[1]) <= 64
    assert layout == "padded" or shapes[1] == {64}


def test_optimizer_in_cpu_memory_gives_the_same_bits_after_a_restart(model_dir, tmp_path) -> None:
    engines = [engine_of(model_dir, optimizer=optimizer_of(offload=offload)) for offload in (False, True)]
    for engine in engines:
        train(engine)
    engines[1].save(tmp_path)
    engines[1] = engine_of(model_dir, seed=9, optimizer=optimizer_of(offload=True))
    engines[1].load(tmp_path, 1)
    for engine in engines:
        train(engine, 1)
    assert_equal_weights(*map(weights_of, engines))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_micro_batch_has_at_most_so_many_sequences(model_dir, layout) -> None:
    engine = engine_of(model_dir, layout, mb_spec=MicroBatchSpec(max_seqs_per_mb=3))
    found = micro_batches_of(engine, some_rows((9, 3, 30, 1, 12, 2, 30)))
    assert max(map(len, found)) == 3 and len(found) == 3


@pytest.mark.parametrize("limit", [{"n_mbs": 3}, {"max_seqs_per_mb": 2}, {"max_seqs_per_mb": 3}])
def test_neighbours_stay_together(model_dir, limit) -> None:
    engine = engine_of(model_dir, mb_spec=MicroBatchSpec(granularity=2, **limit))
    found = micro_batches_of(engine, some_rows((9, 3, 30, 1, 12, 2)))
    assert found == [[9, 3], [12, 2], [30, 1]]
    odd = some_rows((9, 3, 30, 1, 12))  # the last one has no neighbour
    assert [12] in micro_batches_of(engine, odd)


def test_float16_scales_the_loss_and_goes_on_after_overflows(model_dir, tmp_path) -> None:
    optimizer = optimizer_of(initial_loss_scale=2.0**40, hysteresis=1, loss_scale_window=2)
    engine, plain = engine_of(model_dir, dtype="float16", optimizer=optimizer), engine_of(model_dir)
    try:
        results = [train(engine) for _ in range(40)]
        worked = [bool(result["update_successful"]) for result in results]
        first = worked.index(True)
        assert first > 3 and sum(worked) > 10
        want = train(plain)
        assert results[first]["grad_norm"] == pytest.approx(want["grad_norm"], rel=0.02)
        assert results[-1]["loss"] < results[0]["loss"]
        engine.save(tmp_path)
        again = engine_of(model_dir, dtype="float16", optimizer=optimizer)
        again.load(tmp_path, 1)
        assert again.scale.state() == engine.scale.state() != again.scale.config.initial_loss_scale
    finally:
        torch.distributed.destroy_process_group()


def test_layers_to_shard_that_the_model_does_not_have(model_dir) -> None:
    engine = engine_of(model_dir)
    with pytest.raises(ConfigError, match=r"has no module of class Qwen9Layer; it has .*Qwen3DecoderLayer"):
        engine.model.blocks(["Qwen9Layer"])


@pytest.mark.parametrize("disable_dropout", [False, True])
def test_dropout_is_in_training_unless_it_is_disabled(model_dir, tmp_path, disable_dropout) -> None:
    config = json.loads((model_dir / "config.json").read_text()) | {"attention_dropout": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = engine_of(tmp_path, disable_dropout=disable_dropout)
    engine.model.train()
    with torch.no_grad():
        one, other = (plain_logprobs(engine, some_rows().ids[2], 1.0) for _ in range(2))
    assert torch.equal(one, other) == disable_dropout


@pytest.fixture
def placements(monkeypatch):
    """What FSDP is told of where parameters live, one entry for each call; it is really called."""
    told = []

    def recorded(module, *, offload_policy, **options):
        told.append(offload_policy)
        return fully_shard(module, offload_policy=offload_policy, **options)

    monkeypatch.setattr(fsdp, "fully_shard", recorded)
    yield told
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs_of_layers_wait_in_cpu_memory_for_the_backward_pass(model_dir, monkeypatch, dtype) -> None:
    copies: list[tuple[str, torch.Size]] = []

    def counted(name, copy, given):
        copies.append((name, given.shape if name == "copy_to_cpu" else given[1].shape))
        return copy(given)

    for name in ("copy_to_cpu", "copy_from_cpu"):
        monkeypatch.setattr(model, name, functools.partial(counted, name, getattr(model, name)))
    plain = engine_of(model_dir, "packed", dtype=dtype, gradient_checkpointing=True)
    trained = [train(plain)]
    assert copies == []
    offload = FSDPEngineConfig(offload_activations=True)
    engine = engine_of(model_dir, "packed", dtype=dtype, gradient_checkpointing=True, fsdp=offload)
    engine.logprobs(some_rows(), 1.0)
    assert copies == []  # without a backward pass there is nothing to keep
    trained.append(train(engine))
    assert trained[0] == trained[1]
    assert_equal_weights(*map(weights_of, (plain, engine)))
    num_tokens = sum(len(ids) - 1 for ids in some_rows().ids)
    # one micro-batch, two layers: their inputs, and nothing else
    layer = torch.Size([1, num_tokens, 32])
    assert copies == [("copy_to_cpu", layer)] * 2 + [("copy_from_cpu", layer)] * 2


IN_CPU_MEMORY = FSDPEngineConfig(offload_params=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_in_cpu_memory_train_and_restart_alike(model_dir, tmp_path, placements, dtype) -> None:
    plain = engine_of(model_dir, dtype=dtype)
    placements.clear()
    engine = engine_of(model_dir, dtype=dtype, fsdp=IN_CPU_MEMORY)
    assert len(placements) == 3  # two layers and the rest
    assert all(isinstance(one, CPUOffloadPolicy) and not one.pin_memory for one in placements)
    for one in (plain, engine):
        one.logprobs(some_rows(), 1.0)
    for seed in range(2):
        results = [train(one, seed) for one in (plain, engine)]
        assert results[0] == pytest.approx(results[1], rel=1e-5)
    assert_equal_weights(*map(weights_of, (plain, engine)), atol=1e-5)
    (tmp_path / "state").mkdir()
    engine.save(tmp_path / "state")
    engine.export(tmp_path / "out")
    exported = engine_of(tmp_path / "out", init_from_scratch=False)
    assert_equal_weights(weights_of(exported), {k: v.float() for k, v in weights_of(engine).items()})
    places = ({"fsdp": IN_CPU_MEMORY}, {})
    goes_on, moved = (engine_of(model_dir, dtype=dtype, seed=9, **place) for place in places)
    for one in (goes_on, moved):
        one.load(tmp_path / "state", 1)
        assert_equal_weights(*map(weights_of, (engine, one)))
    for one in (engine, goes_on):
        train(one, 2)
    assert_equal_weights(*map(weights_of, (engine, goes_on)))


def test_a_frozen_model_in_cpu_memory_scores_alike(model_dir, placements, monkeypatch) -> None:
    rows = some_rows()
    plain = engine_of(model_dir).logprobs(rows, 1.0)
    monkeypatch.setattr(model.LanguageModel, "to", None)  # the parameters must not go to the GPU
    config = config_of(model_dir, init_from_scratch=True, fsdp=IN_CPU_MEMORY, optimizer=None)
    frozen = FSDPEngine(config, frozen=True)
    frozen.initialize(0)
    assert len(placements) == 3 and all(isinstance(one, CPUOffloadPolicy) for one in placements)
    for _ in range(2):
        assert_close(frozen.logprobs(rows, 1.0), plain, 1e-6)
        assert {parameter.device.type for parameter in frozen.model.parameters()} == {"cpu"}


def test_same_inputs_give_the_same_bits(model_dir) -> None:
    engines = [engine_of(model_dir), engine_of(model_dir)]
    results = [[train(engine, seed) for seed in range(3)] for engine in engines]
    assert results[0] == results[1]
    assert_equal_weights(*map(weights_of, engines))


def test_update_without_a_finite_gradient_is_skipped(model_dir) -> None:
    engine = engine_of(model_dir)
    before = weights_of(engine)
    result = engine.train_batch(
        some_rows(), lambda batch: (batch.logprobs_T.sum() * float("inf"), {}), 1.0, 1.0
    )
    assert result["update_successful"] == 0.0
    assert_equal_weights(before, weights_of(engine))
    assert train(engine)["update_successful"] == 1.0


def test_no_rows_are_refused(model_dir) -> None:
    with pytest.raises(ValueError, match="no rows"):
        engine_of(model_dir).train_batch(Sequences([], {"loss_mask": []}), compute_sequence_loss, 1.0, 1.0)


def test_export_is_a_checkpoint_that_transformers_and_the_engine_read(model_dir, tmp_path) -> None:
    engine = engine_of(model_dir)
    train(engine)
    engine.export(tmp_path / "out", tokenizer=model_dir)
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    written, source = (json.loads((one / "config.json").read_text()) for one in (tmp_path / "out", model_dir))
    assert written == source
    tokens = torch.arange(20)[None]
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="sdpa")
    read = reloaded.state_dict()
    assert_equal_weights({name: read[name] for name in weights_of(engine)}, weights_of(engine))
    # the engine's own layers round differently, but not more
    exact = widen(reloaded)(tokens).logits
    own, theirs = (one(tokens).logits for one in (engine.model.hf.eval(), reloaded))
    assert measure_error(own, exact) <= 2 * measure_error(theirs, exact) < 1e-5
    again = engine_of(tmp_path / "out", init_from_scratch=False)
    assert_equal_weights(weights_of(engine), weights_of(again))


def test_bfloat16_keeps_float32_weights_and_exports_bfloat16(model_dir, tmp_path) -> None:
    engine = engine_of(model_dir, dtype="bfloat16")
    plain = engine_of(model_dir)
    try:
        want, got = plain.logprobs(some_rows(), 1.0), engine.logprobs(some_rows(), 1.0)
        np.testing.assert_allclose(np.concatenate(got), np.concatenate(want), atol=0.3)
        assert train(engine)["update_successful"] == 1.0
        assert {shard.local.dtype for shard in engine.shards} == {torch.float32}
        engine.export(tmp_path / "out")
        assert {tensor.dtype for tensor in whole_weights(engine).values()} == {torch.bfloat16}
        assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    finally:
        torch.distributed.destroy_process_group()


def test_large_exports_are_cut_into_indexed_files(model_dir, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("hpc_rl.engines.shared.hf_io.MAX_FILE_BYTES", 20_000)
    engine = engine_of(model_dir)
    engine.export(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    assert_equal_weights(weights_of(engine), weights_of(engine_of(tmp_path / "out", init_from_scratch=False)))


def test_state_continues_bit_for_bit(model_dir, tmp_path) -> None:
    engine = engine_of(model_dir)
    train(engine)
    records = engine.save(tmp_path)
    torch_draw = torch.rand(3)
    other = engine_of(model_dir, seed=5)
    other.load(tmp_path, saved_num_ranks=1)
    assert records == [checked_file.record(tmp_path / "actor-rank-00000.safetensors")]
    assert torch.equal(torch.rand(3), torch_draw)
    assert train(engine, 1) == train(other, 1)
    assert_equal_weights(weights_of(engine), weights_of(other))


def test_state_that_is_missing_torn_or_foreign_is_refused(model_dir, tmp_path) -> None:
    engine = engine_of(model_dir)
    with pytest.raises(Damaged, match=r"actor-rank-00000\.safetensors is missing"):
        engine.load(tmp_path, 1)
    engine.save(tmp_path)
    with pytest.raises(Damaged, match="is rank 0 of 1 in format 3, expected rank 0 of 2"):
        engine.load(tmp_path, 2)
    architecture = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**architecture, "intermediate_size": 40}))
    with pytest.raises(ValueError, match=r"belongs to another model: .*mlp"):
        engine_of(model_dir).load(tmp_path, 1)
    file = tmp_path / "actor-rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(Damaged, match=r"actor-rank-00000\.safetensors has 5000 bytes"):
        engine.load(tmp_path, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_impl": "flash_attention_2"}, "needs a GPU, .*use attn_impl sdpa"),
        ({"path": "/nowhere"}, "'/nowhere' is not a directory with a Hugging Face checkpoint"),
    ],
)
def test_what_can_not_hold_is_refused(model_dir, changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        FSDPEngine(config_of(**{"path": model_dir, **changes}))


def test_a_model_of_images_is_refused_with_the_reason_of_submission(model_dir) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vision_config": {}}))
    with pytest.raises(ConfigError, match="has vision_config"):
        FSDPEngine(config_of(model_dir))


def test_publishing_a_small_model_takes_milliseconds(model_dir, tmp_path) -> None:
    engine = engine_of(model_dir)
    took = []
    for _ in range(5):
        start = time.process_time()
        engine.export(tmp_path / "out")
        took.append(time.process_time() - start)
    assert min(took) < extend(0.05)


@pytest.mark.parametrize(
    ("name", "words"),
    [("flash_attention_2", "FlashAttention2.* set attn_impl sdpa"), ("nonsense", "is not supported")],
)
def test_an_attention_that_is_not_there_is_a_bad_configuration(model_dir, name, words):
    with pytest.raises(ConfigError, match=rf"can't build the model .* \(attn_impl '{name}'\): .*{words}"):
        model.build(config_of(model_dir, init_from_scratch=True, attn_impl=name), 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # in bfloat16 FSDP divides the model
def test_training_goes_on_after_its_memory_was_given_away(model_dir, dtype):
    whole, moved = engine_of(model_dir, dtype=dtype), engine_of(model_dir, dtype=dtype)
    offload = Offload(torch.device("cpu"))
    for step in range(3):
        assert train(moved, step) == train(whole, step)
        storages = [tensor.untyped_storage() for tensor in moved.list_tensors()]
        size = sum({one.data_ptr(): one.nbytes() for one in storages}.values())
        shards = sum(shard.local.nbytes for shard in moved.shards)
        assert size >= 3 * shards  # parameters and both moments
        offload.move_out(moved.list_tensors())
        assert not any(one.nbytes() for one in storages)
        offload.move_back()
        assert_equal_weights(weights_of(moved), weights_of(whole))


def test_a_float32_head_computes_logits_from_unrounded_weights(model_dir, monkeypatch) -> None:
    heads: list[tuple[torch.Tensor, torch.Tensor]] = []
    real = model.token_logprobs

    def recorded(hidden, head, *rest, **more):
        heads.append((hidden.detach().clone(), head.detach().clone()))
        return real(hidden, head, *rest, **more)

    monkeypatch.setattr(model, "token_logprobs", recorded)
    options = {"dtype": "bfloat16", "fsdp": FSDPEngineConfig(float32_head=True)}
    whole = engine_of(model_dir).model.hf.get_output_embeddings().weight.detach()
    assert not torch.equal(whole, whole.bfloat16().float())
    engine = engine_of(model_dir, **options)
    widths: list[torch.dtype] = []
    layer = engine.model.hf.model.layers[0]
    layer.self_attn.o_proj.register_forward_hook(lambda module, *_: widths.append(module.weight.dtype))
    logprobs = engine.logprobs(some_rows(), 1.0)
    frozen = FSDPEngine(config_of(model_dir, init_from_scratch=True, **options), frozen=True)
    frozen.initialize(0)
    assert_close(frozen.logprobs(some_rows(), 1.0), logprobs, 1e-6)
    assert len(heads) >= 2
    for hidden, head in heads:
        assert hidden.dtype == head.dtype == torch.float32
        torch.testing.assert_close(head, whole, atol=0, rtol=0)  # not rounded
    assert set(widths) == {torch.bfloat16}  # the layers compute in the type of the option
    assert train(engine)["update_successful"] == 1
    assert {tensor.dtype for tensor in weights_of(engine).values()} == {torch.bfloat16}
