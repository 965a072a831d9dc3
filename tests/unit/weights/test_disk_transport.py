"""The disk transport on one rank: versions that servers can rebuild, a full disk, stops, errors."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from patience import extend
from version_history import read_model

from hpc_rl.core.errors import RoleFailed
from hpc_rl.core.trial import Trial, load_json
from hpc_rl.core.types import WeightVersion
from hpc_rl.engines.base import PublishedPiece
from hpc_rl.weight_files import rank_file
from hpc_rl.weight_files.chain import VersionIndex, load_chain
from hpc_rl.weight_files.model_copy import ModelCopy, build_model
from hpc_rl.weights import disk_transport
from hpc_rl.weights.disk_transport import DiskTransport
from hpc_rl.weights.transport import Published, TransportContext


class Engine:
    """A model of two tensors, with float32 masters that are published in bfloat16."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.master = torch.randn(40, 50, generator=generator)
        self.norm = torch.ones(50)

    def list_published_pieces(self) -> list[PublishedPiece]:
        half = self.master[:20], self.master[20:]
        parts = [PublishedPiece("w", half[i], (20 * i, 0), (40, 50), torch.bfloat16) for i in (0, 1)]
        return [*parts, PublishedPiece.of_whole("norm", self.norm)]

    def write_model_files(self, folder: Path, tokenizer: Path | None = None) -> None:
        (folder / "config.json").write_text("{}")

    def step(self, share: float) -> None:
        """Change a share of the published values by more than the rounding."""
        self.master[torch.rand(40, 50) < share] *= 1.5

    def read(self) -> dict[str, bytes]:
        tensors = {"w": self.master.to(torch.bfloat16), "norm": self.norm}
        return {name: one.view(torch.uint8).numpy().tobytes() for name, one in tensors.items()}


class Servers:
    """Acknowledges every version, or answers with what a test sets."""

    def __init__(self) -> None:
        self.published: list[str] = []
        self.answers: list[Published | Exception] = []
        self.gate = threading.Event()
        self.gate.set()

    def publish(self, version, path, num_bytes, stopping):
        self.gate.wait()
        self.published.append(str(version))
        answer = self.answers.pop(0) if self.answers else Published(["s"])
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr("hpc_rl.core.files.PAUSE_S", (0.001, 0.001))
    monkeypatch.setattr(disk_transport, "ROUND_S", 0.02)
    trial, engine, servers = Trial(tmp_path / "trial"), Engine(), Servers()
    trial.make_dirs()
    stopping, waited = threading.Event(), []
    transport = DiskTransport(
        TransportContext(
            trial=trial,
            engine=engine,
            publisher=servers,
            stopping=stopping,
            tokenizer=tmp_path,
            on_wait=lambda: waited.append(1),
        )
    )

    def publish(step: int) -> Published | None:
        transport.start(WeightVersion(0, step))
        return transport.settle(wait=True)

    return SimpleNamespace(
        trial=trial, engine=engine, servers=servers, stopping=stopping, waited=waited,
        transport=transport, publish=publish, target=tmp_path / "model",
    )  # fmt: skip


def rebuild(site, step: int) -> dict[str, bytes]:
    site.target.mkdir(exist_ok=True)
    build_model(site.target, site.trial.weights, load_chain(site.trial.weights, WeightVersion(0, step)))
    return read_model(site.target)


def get_base(site, step: int) -> str | None:
    index = VersionIndex.read(site.trial.published(f"0.{step}"))
    return index.base and str(index.base)


def test_a_difference_is_small_and_gives_the_same_bytes(site):
    first = site.publish(1)
    assert (first.density, get_base(site, 1)) == (1.0, None)
    site.engine.step(0.01)
    second = site.publish(2)
    assert 0.002 < second.density < 0.02 and get_base(site, 2) == "0.1"
    assert second.num_bytes < first.num_bytes
    assert rebuild(site, 2) == site.engine.read()
    assert load_json(site.trial.current_weights)["label"] == "0.2"
    assert second.to_metrics()["publish_servers"] == 1


def test_many_changes_are_published_as_all_values(site):
    site.publish(1)
    site.engine.step(0.9)
    assert site.publish(2).density == 1.0 and get_base(site, 2) is None
    assert rebuild(site, 2) == site.engine.read()


def test_training_goes_on_while_servers_are_updated(site):
    site.servers.gate.clear()
    site.transport.start(WeightVersion(0, 1))
    expected = site.engine.read()
    site.engine.step(0.9)
    assert site.transport.settle(wait=False) is None
    site.servers.gate.set()
    assert site.transport.settle(wait=True).acknowledged == ["s"]
    assert rebuild(site, 1) == expected
    assert site.transport.settle(wait=True) is None  # nothing is in flight


def test_a_chain_ends_when_its_differences_have_three_times_the_size_of_the_model(site):
    site.publish(1)
    chains = []  # bytes of the differences of each ended chain
    stored: list[int] = []
    for step in range(2, 22):
        site.engine.step(0.3)
        site.publish(step)
        assert rebuild(site, step) == site.engine.read()
        index = load_chain(site.trial.weights, WeightVersion(0, step))[-1]
        if index.base is None:
            chains.append(stored)
            stored = []
        else:
            stored.append(index.stored_bytes)
    limit = 3 * index.whole_bytes
    assert len(chains) >= 2
    assert all(sum(chain[:-1]) <= limit < sum(chain) for chain in chains)


def test_damage_that_no_server_can_mend_publishes_the_same_version_again(site, caplog):
    site.publish(1)
    site.engine.step(0.01)
    site.servers.answers = [Published(failed={"s": "damaged"}, needs_whole=True)]
    assert site.publish(2).acknowledged == ["s"]
    assert site.servers.published == ["0.1", "0.2", "0.2"] and get_base(site, 2) is None
    assert "weights 0.2 are published again, with all values" in caplog.text
    assert rebuild(site, 2) == site.engine.read()


def test_after_damage_on_one_of_two_servers_the_next_version_has_all_values(site):
    site.publish(1)
    site.engine.step(0.01)
    site.servers.answers = [Published(["s"], {"t": "damaged"}, needs_whole=True)]
    site.publish(2)
    site.engine.step(0.01)
    site.publish(3)
    assert (get_base(site, 2), get_base(site, 3)) == ("0.1", None)


def fail_writes(monkeypatch, number: int, errno: int = 28) -> None:
    real, left = rank_file.write, [number]

    def write(path, rank, stored, cancel=None):
        left[0] -= 1
        if left[0] >= 0:
            path.write_bytes(b"half")
            raise OSError(errno, "No space left on device" if errno == 28 else "Input/output error")
        return real(path, rank, stored, cancel)

    monkeypatch.setattr(rank_file, "write", write)


def test_on_a_full_disk_it_waits_for_room_and_goes_on(site, monkeypatch, caplog):
    fail_writes(monkeypatch, 200)
    site.publish(1)
    assert site.servers.published == ["0.1"] and rebuild(site, 1) == site.engine.read()
    assert caplog.text.count("DISK FULL: weights 0.1 can't be written") == 1
    assert "weights 0.1 is written" in caplog.text
    assert site.waited  # so the supervisor sees that the trainer is alive
    assert not [path for path in site.trial.weights.iterdir() if path.name.startswith(".")]


def test_a_stop_during_a_full_disk_publishes_nothing(site, monkeypatch):
    fail_writes(monkeypatch, 10**9)
    threading.Timer(0.05, site.stopping.set).start()
    assert site.publish(1) is None
    assert site.servers.published == [] and not list(site.trial.weights.iterdir())


def test_any_other_error_is_raised_by_settle(site, monkeypatch):
    fail_writes(monkeypatch, 10**9, errno=5)
    site.transport.start(WeightVersion(0, 1))
    with pytest.raises(OSError, match="Input/output"):
        site.transport.settle(wait=True)


def test_a_failure_of_all_servers_is_raised_without_waiting(site):
    site.servers.answers = [RoleFailed("no generation server loaded weights 0.1")]
    site.transport.start(WeightVersion(0, 1))
    deadline = time.monotonic() + extend(10)
    with pytest.raises(RoleFailed, match="no generation server"):
        while time.monotonic() < deadline:
            site.transport.settle(wait=False)


def test_a_copy_on_a_node_follows(site, tmp_path):
    copy = ModelCopy(tmp_path / "copy", site.trial.weights)
    for step in range(1, 6):
        site.publish(step)
        assert copy.bring_to(WeightVersion(0, step)) > 0
        assert read_model(copy.model) == site.engine.read()
        site.engine.step(0.02)
