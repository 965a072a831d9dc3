"""Clients without a token, or with requests that make no sense, against the services of a trial that trains:
whatever they send, nothing ends, nothing is let in, and the trainer makes its steps.
"""

import asyncio
import contextlib
import os
import resource
import shutil
import socket
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from kill_anything import READY, Killed, Trials, make_workplace
from patience import extend
from probes import Probe, answer_to, probes

from hpc_rl.core.trial import load_json
from hpc_rl.name_resolve import keys, open_names

pytestmark = pytest.mark.timeout(300)
AT_ONCE = 8
PATIENCE_S = 60.0
FILES = 1024


class Target:
    """A trial whose services are attacked, by name."""

    def __init__(self, one: Killed) -> None:
        self.one, self.trial = one, one.trial
        self.tokens = one.trial.load_tokens()
        names = open_names(one.trial)
        self.leases = {
            "rollout": lambda: names.list_leases(keys.ROLLOUT)[keys.ROLLOUT],
            "server": lambda: names.list_leases(keys.server("rollout", 0))[keys.server("rollout", 0)],
        }
        self.urls = {name: lease().value["url"] for name, lease in self.leases.items()}
        self.pids = {name: lease().value["pid"] for name, lease in self.leases.items()}

    def health(self) -> dict[str, int]:
        """The status that each service answers to GET /health."""
        found = {}
        for name, url in self.urls.items():
            asked = urllib.request.Request(
                f"{url}/health", headers={"Authorization": f"Bearer {self.tokens['data']}"}
            )
            with urllib.request.urlopen(asked, timeout=extend(30)) as response:
                found[name] = response.status
        return found

    def check_unharmed(self) -> None:
        """The same processes answer, train on, and nothing of ours was a fault of theirs."""
        enough = self.one.num_rows() + 2
        self.one.until(lambda: self.one.num_rows() >= enough or self.one.over, 120)
        assert not self.one.over
        assert self.health() == {"rollout": 200, "server": 200}
        assert {name: lease().value["pid"] for name, lease in self.leases.items()} == self.pids
        for path in self.trial.attempts.glob("*/logs/*.log"):
            assert "Traceback" not in path.read_text(errors="replace"), path


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Iterator[Target]:
    trials = Trials(make_workplace(tmp_path_factory.mktemp("toy")), "hostile")
    options = {**READY, "allocation_mode": "embedded:d1+fsdp:d1", "environments.own_prompts": True}
    one = trials.start(options, total_steps=100_000)
    one.until(lambda: one.num_rows() or one.over)
    yield Target(one)
    trials.end_all()


async def ask_all(target: Target) -> tuple[Counter, list[str]]:
    """All probes, a few at once: how often each status came, and what should not have come."""
    counts: Counter = Counter()
    wrong: list[str] = []
    room = asyncio.Semaphore(AT_ONCE)

    async def ask(probe: Probe) -> None:
        async with room:
            try:
                status = await answer_to(target.urls[probe.service], probe, extend(PATIENCE_S))
            except TimeoutError:
                status = 0
        counts[probe.service, status] += 1
        allowed = (status is None and probe.hangs_up) or (status is not None and 200 <= status < 500)
        if probe.refused:
            allowed = status is not None and 400 <= status < 500
        if not allowed:
            wrong.append(f"{probe.service}: {probe.name}: {'no answer' if status == 0 else status}")

    await asyncio.gather(*map(ask, probes(target.tokens)))
    return counts, wrong


def test_no_request_is_let_in_or_is_a_fault_of_ours(target):
    before = load_json(target.trial.current_weights)
    counts, wrong = asyncio.run(ask_all(target))
    print(sum(counts.values()), "probes:", counts)
    assert sum(counts.values()) > 800
    assert not wrong, f"{len(wrong)} of {sum(counts.values())}:\n" + "\n".join(wrong[:80])
    target.check_unharmed()
    assert load_json(target.trial.current_weights) != before


def flood(url: str, idle: int, slow: int, stack: contextlib.ExitStack) -> list[socket.socket]:
    """Open connections: idle ones send nothing, slow ones begin a request."""
    where, made = urlsplit(url), []
    for number in range(idle + slow):
        sock = stack.enter_context(socket.socket())
        sock.settimeout(extend(10))
        with contextlib.suppress(OSError):
            sock.connect((where.hostname, where.port))
            if number >= idle:
                sock.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nX-Slow: ")
            made.append(sock)
    return made


def test_a_flood_of_connections_takes_no_files_from_a_role(target):
    for pid in target.pids.values():
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (FILES, FILES))
    with contextlib.ExitStack() as stack:
        opened = {name: len(flood(url, 1100, 500, stack)) for name, url in target.urls.items()}
        assert min(opened.values()) > 1500, opened
        assert target.health() == {"rollout": 200, "server": 200}
        target.check_unharmed()
        for pid in target.pids.values():
            assert len(os.listdir(f"/proc/{pid}/fd")) < FILES / 2


def remove(folder: Path) -> None:
    """Remove a folder at once: what writes into it may make it again meanwhile."""
    gone = folder.with_name(f"{folder.name}.gone")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def test_removed_names_and_weights_are_made_again(target):
    one, trial = target.one, target.trial
    remove(trial.names)
    enough = one.num_rows() + 2
    one.until(
        lambda: (one.num_rows() >= enough and len(list(trial.names.rglob("*.epoch-*"))) >= 3) or one.over, 90
    )
    remove(trial.weights)
    enough = one.num_rows() + 2
    one.until(lambda: (one.num_rows() >= enough and trial.current_weights.exists()) or one.over)
    assert not one.over
    for path in trial.attempts.glob("*/logs/*.log"):
        lines = path.read_text(errors="replace").splitlines()
        repeated = Counter(line[20:] for line in lines if "WARNING" in line or "ERROR" in line)
        assert not [line for line, count in repeated.most_common(3) if count > 40], repeated.most_common(3)
