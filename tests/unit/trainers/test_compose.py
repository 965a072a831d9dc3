"""What the engines of a trial are given."""

import json
import threading

import numpy as np
import pytest
import torch

from hpc_rl.config.load.load import load
from hpc_rl.config.rules.check import check
from hpc_rl.core.allocation import Train
from hpc_rl.core.trial import Trial
from hpc_rl.engines.base import Sequences
from hpc_rl.trainers.compose import _make_engine
from hpc_rl.trainers.ranks import Ranks
from hpc_rl.trainers.start import TrainerContext
from tests.unit.engines.conftest import TINY


@pytest.mark.parametrize("pinned", [True, False])
def test_inputs_come_from_pinned_memory_on_demand(tmp_path, monkeypatch, pinned):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    words = ["experiment_name=e", "trial_name=t", "train_dataset.path=/d", "cluster.n_gpus_per_node=1"]
    words += [f"model.path={tmp_path}", "model.init_from_scratch=true", "model.dtype=float32"]
    config = check(load([], [*words, f"train_dataset.pin_memory={pinned}".lower()]), files=False).config
    trial, took = Trial(tmp_path / "trial"), []
    start = TrainerContext(
        trial=trial, attempt=trial.attempt("1.0"), incarnation=0, config=config, tokens={}, names=None,
        train=Train("fsdp"), device="cpu", ranks=Ranks(), stopping=threading.Event(),
    )  # fmt: skip
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: took.append(tensor) or tensor)
    engine = _make_engine(start, config.model)
    engine.initialize(1)
    rows = Sequences([np.array([1, 2, 3], np.int32)], {"loss_mask": [np.array([False, True, True])]})
    engine.logprobs(rows, 1.0)
    assert bool(took) == pinned
