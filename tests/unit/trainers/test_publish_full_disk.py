"""Publishing on a full disk: the recipe waits for room, loses no step, and gives way to a stop."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from hpc_rl.core.trial import Trial, load_json
from hpc_rl.core.types import WeightVersion
from hpc_rl.engines.shared import hf_io
from hpc_rl.trainers import exports
from hpc_rl.trainers.grpo_recipe import GRPO
from hpc_rl.trainers.ranks import Ranks
from hpc_rl.weights.publish import DiskTransport


class Engine:
    """Its writer finds no room `full` times."""

    full = 0

    def export(self, folder: Path, tokenizer: Path | None = None, durable: bool = True) -> None:
        (folder / "model.safetensors").write_bytes(b"x")
        self.full -= 1
        if self.full >= 0:
            raise OSError(28, "No space left on device")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setattr("hpc_rl.core.files.PAUSE_S", (0.001, 0.001))
    trial, engine, stopping, published = Trial(tmp_path / "trial"), Engine(), threading.Event(), []
    trial.make_dirs()
    waited = []
    writer = exports.WeightWriter(engine, Ranks(), stopping, tmp_path, lambda: waited.append(1))
    publisher = SimpleNamespace(
        publish=lambda *what: published.append(what) or SimpleNamespace(acknowledged=["s"])
    )
    transport = DiskTransport(trial, publisher)
    stats = SimpleNamespace(value=lambda *_: None)
    run = SimpleNamespace(
        trial=trial, ranks=Ranks(), writer=writer, engine=engine, stopping=stopping, step=0, stats=stats,
        version=lambda step: WeightVersion(0, step),
    )  # fmt: skip
    publish = lambda step: GRPO.publish(SimpleNamespace(run=run, transport=transport), step)  # noqa: E731
    seen = {"published": published, "trial": trial, "waited": waited}
    return SimpleNamespace(publish=publish, engine=engine, stopping=stopping, **seen)


def test_it_waits_for_room_and_goes_on(recipe, caplog):
    recipe.engine.full = 3
    recipe.publish(1)
    assert [str(version) for version, *_ in recipe.published] == ["0.1"]
    assert load_json(recipe.trial.current_weights)["label"] == "0.1"
    assert caplog.text.count("DISK FULL: weights 0.1 can't be written") == 1
    assert "wrote weights 0.1" in caplog.text
    assert len(recipe.waited) == 3  # whoever watches sees that it is alive
    assert not [path for path in recipe.trial.weights.iterdir() if path.name.startswith(".")]


def test_told_to_stop_meanwhile_it_returns_without_having_published(recipe):
    recipe.engine.full = 10**9
    threading.Timer(0.05, recipe.stopping.set).start()
    recipe.publish(1)
    assert recipe.published == [] and not list(recipe.trial.weights.iterdir())


def test_what_else_is_wrong_with_the_disk_is_raised(recipe, monkeypatch):
    def broken(*_args: object, **_more: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Engine, "export", broken)
    with pytest.raises(OSError, match="Input/output"):
        recipe.publish(1)


def test_a_full_disk_reported_by_safetensors_is_an_os_error(tmp_path, monkeypatch):
    def full(*_args: object, **_more: object) -> None:  # its words for a write to a full tmpfs
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(hf_io, "save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        writer = hf_io.CheckpointWriter(tmp_path)
        writer.add("w", torch.zeros(2))
        writer.finish("{}", [], durable=False)
    assert caught.value.errno == 28
