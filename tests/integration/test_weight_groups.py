"""Weights over process groups: a trainer's transport, and embedded servers in other processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gloo_ranks
import pytest
import torch
from conformance import PROMPT, check_logprobs, make_model
from patience import extend
from transformers import AutoModelForCausalLM

from hpc_rl.core.trial import Trial
from hpc_rl.core.types import Turn, WeightVersion
from hpc_rl.engines.base import PublishedPiece
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.servers.client import GenerateRequest, HttpServerClient, open_session
from hpc_rl.servers.weight_group import make_body
from hpc_rl.weights import collective_transport, process_groups
from hpc_rl.weights.collective_transport import CollectiveTransport
from hpc_rl.weights.process_groups import ProcessGroups
from hpc_rl.weights.publish import Publisher
from hpc_rl.weights.transport import Published, TransportContext

ROOT = Path(__file__).resolve().parents[2]
REPLICA = Path(__file__).with_name("receiving_replica.py")


class Engine:
    """A trainer's model: its pieces, and its files."""

    device = torch.device("cpu")

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def list_published_pieces(self) -> list[PublishedPiece]:
        return [PublishedPiece.of_whole(name, one.data) for name, one in self.model.named_parameters()]

    def write_model_files(self, folder: Path, tokenizer: Path | None = None) -> None:
        self.model.config.save_pretrained(folder)

    def change(self) -> None:
        for parameter in self.model.parameters():
            parameter.data.mul_(1.01)


class Site:
    """A trial with a trainer in this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(collective_transport, "BUCKET_BYTES", 64 << 10)
        self.folder, self.trial = folder, Trial(folder / "trial")
        self.trial.make_dirs()
        self.trial.make_secret()
        self.tokens = self.trial.load_tokens()
        make_model(folder / "model", 0)
        self.engine = Engine(folder / "model")
        self.names = open_names(self.trial)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.publisher = Publisher(self.trial, self.names, self.tokens, setup_timeout_s=extend(60))
        self.publisher.watch_s = 0.05
        self.publisher.process_groups = ProcessGroups("127.0.0.1", torch.device("cpu"))
        self.transport = CollectiveTransport(
            TransportContext(
                trial=self.trial,
                engine=self.engine,
                publisher=self.publisher,
                stopping=threading.Event(),
                tokenizer=folder / "model",
            )
        )
        self.saved: dict[str, Path] = {}

    def start(self, index: int, *stall: str | Path) -> None:
        paths = [ROOT, ROOT / "tests" / "helpers"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(map(str, paths))}
        arguments = [self.trial.dir, str(index), self.folder / "model", *stall]
        self.processes[index] = subprocess.Popen(
            [sys.executable, REPLICA, *arguments],
            env=environment,
        )

    def lease(self, index: int) -> dict[str, Any]:
        seen = self.names.list_leases(keys.servers("rollout")).get(keys.server("rollout", index))
        return seen.value if seen and seen.alive else {}

    def wait(self, condition: Callable[[], Any], timeout_s: float = 90) -> None:
        deadline = time.monotonic() + extend(timeout_s)
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait_until_joined(self, *indices: int) -> None:
        assert self.publisher.process_groups is not None
        members = self.publisher.process_groups._members
        self.wait(lambda: members.keys() == {keys.server("rollout", index) for index in indices})

    def wait_until_serving(self, index: int, label: str) -> None:
        wanted = {"version": label, "state": "serving"}
        self.wait(lambda: wanted.items() <= self.lease(index).items())

    def begin(self, step: int) -> None:
        self.engine.change()
        version = WeightVersion(0, step)
        self.saved[str(version)] = self.folder / f"saved-{version}"
        self.engine.model.save_pretrained(self.saved[str(version)])
        self.transport.start(version)

    def publish(self, step: int) -> Published:
        self.begin(step)
        published = self.transport.settle(wait=True)
        assert published is not None
        return published

    def check_server(self, index: int, label: str) -> None:
        """The server generates with exactly these weights."""

        async def generate() -> Turn:
            async with open_session() as session:
                client = HttpServerClient(session, self.lease(index)["url"], self.tokens["data"])
                sampling = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
                request = GenerateRequest(PROMPT, sampling, uuid.uuid4().hex, label)
                return (await client.generate_many([request]))[0]

        turn = asyncio.run(generate())
        assert turn.versions == [(label, 0, 12)]
        check_logprobs(turn, self.saved, 1.0)

    def close(self) -> None:
        self.transport.close()
        self.publisher.close()
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
def site(tmp_path, monkeypatch):
    made = Site(tmp_path, monkeypatch)
    yield made
    made.close()


def name(index: int) -> str:
    return keys.server("rollout", index)


def test_servers_join_and_leave_while_others_receive(site):
    for index in (0, 1):
        site.start(index)
    site.wait(lambda: all(site.lease(index).get("state") == "waiting" for index in (0, 1)))
    site.wait_until_joined(0, 1)
    first = site.publish(1)
    assert (sorted(first.acknowledged), first.num_received) == ([name(0), name(1)], 2)
    assert len(site.transport._buckets.buckets) > 3
    for index in (0, 1):
        site.check_server(index, "0.1")
    site.start(2)  # late: it loads the newest version from files, and joins then
    site.wait_until_serving(2, "0.1")
    site.check_server(2, "0.1")
    site.wait_until_joined(0, 1, 2)
    assert site.publish(2).num_received == 3
    site.check_server(2, "0.2")
    site.processes[0].terminate()  # leaves
    site.wait_until_joined(1, 2)
    third = site.publish(3)
    assert (third.num_received, sorted(third.acknowledged)) == (2, [name(1), name(2)])
    for index in (1, 2):
        site.check_server(index, "0.3")


def test_a_server_that_is_killed_in_the_middle_of_a_bucket(site):
    site.start(0)
    site.start(1, "2", site.folder / "stalled")
    site.wait_until_joined(0, 1)
    site.begin(1)
    site.wait((site.folder / "stalled").exists)
    assert site.transport.settle(wait=False) is None
    site.processes[1].kill()
    published = site.transport.settle(wait=True)
    assert (published.acknowledged, published.num_received) == ([name(0)], 1)
    assert name(1) in published.failed
    site.check_server(0, "0.1")
    site.processes[1].wait()
    site.start(1)  # its next start has another epoch
    site.wait_until_serving(1, "0.1")
    site.wait_until_joined(0, 1)
    assert site.publish(2).num_received == 2
    site.check_server(1, "0.2")


def test_a_server_that_hangs_loads_from_files(site, monkeypatch):
    monkeypatch.setattr(process_groups, "BUCKET_S", extend(2.0))
    site.start(0)
    site.start(1, "2", site.folder / "stalled")
    site.wait_until_joined(0, 1)
    site.publisher.update_timeout_s = extend(1.0)
    published = site.publish(1)
    assert (published.acknowledged, published.num_received) == ([name(0)], 1)
    site.check_server(0, "0.1")
    assert site.publish(2).acknowledged == [name(0)]


def test_a_group_that_breaks_does_not_mix_weights(site):
    """The server has the first buckets when its group breaks: it loads the version from files at once."""
    site.start(0)
    site.wait_until_joined(0)
    assert site.publish(1).num_received == 1
    source_load = collective_transport.BucketGather.load

    def load(self, index):
        flat = source_load(self, index)
        if index == 3:
            site.publisher.process_groups._members[name(0)].group.close()
        return flat

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_transport.BucketGather, "load", load)
        published = site.publish(2)
    assert (published.acknowledged, published.num_received) == ([name(0)], 0)
    site.check_server(0, "0.2")


async def _stop_in_the_middle(site: Site) -> None:
    """Send the first bucket, and nothing more: as a trainer that has died."""
    async with open_session() as session:
        client = HttpServerClient(
            session, site.lease(0)["url"], site.tokens["data"], site.tokens["control"], extend(60)
        )
        member = site.publisher.process_groups._members[name(0)]
        await client.pause()
        await client.begin_update("0.2")
        site.transport._snapshot.take()
        source = site.transport._buckets
        source.parts = [values for _, values in site.transport._snapshot.list_parts()]
        body = make_body(source.buckets[0], member.group.name, "0.2", False, False)
        work = member.group.broadcast(source.load(0))
        await client.receive_bucket(body)
        work.wait()
        with contextlib.suppress(Exception):
            await client.resume()
        assert (await client.health())["state"] == "paused"  # it does not serve the mixture


def test_a_server_whose_trainer_dies_restores_itself(site):
    site.start(0)
    site.wait_until_joined(0)
    site.publish(1)
    site.engine.change()
    asyncio.run(_stop_in_the_middle(site))
    site.processes[0].send_signal(signal.SIGUSR1)
    site.check_server(0, "0.1")  # waits until the server has loaded it again and resumed


def test_ranks_of_the_trainer_gather_their_parts(tmp_path):
    gloo_ranks.run(Path(__file__).with_name("gather_rank.py"), "gather", 3, tmp_path)
    assert json.loads((tmp_path / "done.json").read_text()) == {"buckets": 3}
