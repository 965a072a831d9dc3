"""A model that ends in one number: it scores at each row's last token, and its export is what transformers
loads.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_weights import whole_weights
from small_engines import config_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hpc_rl.config.options.training import MicroBatchSpec
from hpc_rl.engines.base import Sequences
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.trainers.supervised import compute_pair_loss


def engine_of(path: Path, layout=None, seed: int = 1, **changes):
    spec = MicroBatchSpec(granularity=2, max_tokens_per_mb=40)
    changes = {"init_from_scratch": True, "mb_spec": spec, "is_critic": True, **changes}
    engine = FSDPEngine(config_of(path, **changes), seed=seed, layout=layout)
    engine.initialize(10)
    return engine


def pairs(lengths=(9, 3, 12, 12, 1, 2)) -> Sequences:
    rng = np.random.default_rng(0)
    ids = [rng.integers(2, 32, size=length).astype(np.int32) for length in lengths]
    return Sequences(ids, {"loss_mask": [np.arange(len(row)) == len(row) - 1 for row in ids]})


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_an_export_scores_in_transformers_as_the_engine_does(model_dir, tmp_path, layout) -> None:
    engine, rows = engine_of(model_dir, layout), pairs()
    first = engine.train_batch(rows, compute_pair_loss, 3.0, 1.0)
    assert first["grad_norm"] > 0
    for _ in range(5):
        last = engine.train_batch(rows, compute_pair_loss, 3.0, 1.0)
    assert last["loss"] < first["loss"] and last["num_correct"] == 3
    engine.export(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"}
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for ids, scores in zip(rows.ids, engine.logprobs(rows, 1.0), strict=True):
        assert not scores[:-1].any()
        with torch.no_grad():
            want = loaded(input_ids=torch.from_numpy(ids).long()[None]).logits.item()
        assert scores[-1] == pytest.approx(want, abs=1e-4)


def test_layouts_and_micro_batches_do_not_matter(model_dir) -> None:
    whole = MicroBatchSpec(granularity=2)
    engines = [
        *(engine_of(model_dir, one) for one in ("padded", "packed")),
        engine_of(model_dir, mb_spec=whole),
    ]
    results = [engine.train_batch(pairs(), compute_pair_loss, 3.0, 1.0) for engine in engines]
    for other in results[1:]:
        assert results[0] == pytest.approx(other, rel=1e-4)


def test_it_starts_from_a_language_model_with_a_head_that_the_seed_draws(model_dir, tmp_path) -> None:
    language = AutoModelForCausalLM.from_config(engine_of(model_dir).model.hf.config, dtype=torch.float32)
    language.save_pretrained(tmp_path / "lm")
    heads = [whole_weights(engine_of(tmp_path / "lm", seed=s, init_from_scratch=False)) for s in (1, 1, 2)]
    trunk = language.model
    torch.testing.assert_close(heads[0]["model.norm.weight"], trunk.norm.weight.detach())
    torch.testing.assert_close(heads[0]["model.embed_tokens.weight"], trunk.embed_tokens.weight.detach())
    assert torch.equal(heads[0]["score.weight"], heads[1]["score.weight"])
    assert not torch.equal(heads[0]["score.weight"], heads[2]["score.weight"])
    assert "lm_head.weight" not in heads[0]
