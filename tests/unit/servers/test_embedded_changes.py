"""The embedded engine takes the changes of a published version in place of the whole model."""

import logging
from dataclasses import replace

import pytest
import torch
from conformance import copy_with_changes, make_model
from version_history import publish_model

from hpc_rl.config.options.inference import EmbeddedConfig
from hpc_rl.core.node_copies import NodeCopies
from hpc_rl.core.types import WeightVersion
from hpc_rl.servers.embedded import changes as changes_module
from hpc_rl.servers.embedded.backend import EmbeddedBackend
from hpc_rl.servers.embedded.changes import load_changes
from hpc_rl.servers.embedded.model import Model
from hpc_rl.servers.node_backend import NodeBackend
from hpc_rl.weight_files.model_copy import ModelCopy

FIRST, SECOND = WeightVersion(0, 1), WeightVersion(0, 2)


@pytest.fixture
async def site(tmp_path):
    """A backend that serves version 0.1; `versions/` also has version 0.2, `after/` its model."""
    make_model(tmp_path / "before", 0)
    copy_with_changes(tmp_path / "before", tmp_path / "after", 1)
    copy = ModelCopy(tmp_path / "copy", tmp_path / "versions")
    publish_model(copy.versions, FIRST, None, None, tmp_path / "before")
    publish_model(copy.versions, SECOND, FIRST, tmp_path / "before", tmp_path / "after")
    embedded = EmbeddedBackend(EmbeddedConfig(dtype="float32"))
    backend = NodeBackend(embedded, copy, NodeCopies())
    await backend.start(str(tmp_path / "before"), str(FIRST))
    yield backend
    await backend.stop()


async def update(site, prepare=True, version=SECOND):
    body = {"model_path": "", "weight_version": str(version)}
    if prepare:
        assert (await site.request("/prepare_weights", body))[0] == 200
    assert (await site.request("/update_weights_from_disk", body))[0] == 200
    return site.backend.engine


@pytest.mark.parametrize("prepare", [True, False])
async def test_changes_give_the_weights_of_a_whole_load(site, tmp_path, caplog, prepare):
    caplog.set_level(logging.INFO)
    engine = await update(site, prepare)
    assert engine.version == str(SECOND)
    assert engine.model.compute_checksums() == Model(str(tmp_path / "after"), "float32").compute_checksums()
    assert ("from changes since 0.1" in caplog.text) == prepare


async def test_weights_that_may_be_a_mixture_are_loaded_whole(site, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert (await site.request("/begin_weight_update", {}))[0] == 200
    engine = site.backend.engine
    engine.model.write(
        {"model.norm.weight": torch.zeros(64)}
    )  # a bucket of a version that was never complete
    await update(site)
    assert engine.model.compute_checksums() == Model(str(tmp_path / "after"), "float32").compute_checksums()
    assert "from changes since" not in caplog.text


async def test_changes_of_another_base_are_loaded_whole(site, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    site.backend.engine.version = "0.0"
    await update(site)
    assert "from changes since" not in caplog.text


async def test_all_values_of_a_small_model_replace_its_weights(site, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    make_model(tmp_path / "other", 3)
    publish_model(site.copy.versions, WeightVersion(0, 3), None, None, tmp_path / "other")
    engine = await update(site, version=WeightVersion(0, 3))
    assert "from its published values" in caplog.text
    assert engine.model.compute_checksums() == Model(str(tmp_path / "other"), "float32").compute_checksums()


def test_values_that_are_not_all_are_not_applied_as_a_version(tmp_path):
    make_model(tmp_path / "model", 0)
    publish_model(tmp_path / "versions", FIRST, None, None, tmp_path / "model")
    changes = load_changes(tmp_path / "versions" / str(FIRST), torch.float32)
    make_model(tmp_path / "other", 1)
    model = Model(str(tmp_path / "other"), "float32")
    checksums = model.compute_checksums()
    assert not model.apply(replace(changes, parts=changes.parts[1:]))
    assert model.compute_checksums() == checksums
    assert model.apply(changes)
    assert model.compute_checksums() == Model(str(tmp_path / "model"), "float32").compute_checksums()


def test_all_values_of_a_large_model_and_a_damaged_version_have_no_changes(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(changes_module, "MAX_WHOLE_BYTES", 1000)
    for seed in (0, 1):
        make_model(tmp_path / f"model-{seed}", seed)
    copy_with_changes(tmp_path / "model-0", tmp_path / "after", 1)
    versions = tmp_path / "versions"
    publish_model(versions, FIRST, None, None, tmp_path / "model-0")
    publish_model(versions, SECOND, FIRST, tmp_path / "model-0", tmp_path / "after")
    assert load_changes(versions / str(FIRST), torch.float32) is None
    assert load_changes(versions / str(SECOND), torch.float32) is not None
    file = versions / str(SECOND) / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert load_changes(versions / str(SECOND), torch.float32) is None
    assert "so it loads all values" in caplog.text
    assert load_changes(versions / "0.9", torch.float32) is None


def test_changes_of_another_model_are_not_applied(tmp_path):
    make_model(tmp_path / "before", 0)
    copy_with_changes(tmp_path / "before", tmp_path / "after", 1)
    publish_model(tmp_path / "versions", FIRST, None, None, tmp_path / "before")
    publish_model(tmp_path / "versions", SECOND, FIRST, tmp_path / "before", tmp_path / "after")
    changes = load_changes(tmp_path / "versions" / str(SECOND), torch.float32)
    model = Model(str(tmp_path / "before"), "float32")
    checksums = model.compute_checksums()
    model.module.model.norm.weight = torch.nn.Parameter(torch.ones(63), requires_grad=False)
    assert not model.apply(changes)
    checksums.pop("model.norm.weight")
    assert checksums.items() <= model.compute_checksums().items()
