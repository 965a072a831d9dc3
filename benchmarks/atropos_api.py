"""Groups per second through the rollout API, accepted and batched, against atroposlib's `run-api`.

    python benchmarks/atropos_api.py --peer .venv-atropos/bin/python [--pairs 5] [--environments 1 16 64]

Both servers are processes of their own on this machine, started afresh for each run and taking turns. Each
environment is a connection that sends its groups one after the other, the next when the last is answered,
and polls `/status-env` ten times a second, as environments of atroposlib do. A trainer takes batches all the
time. The clock runs from the first group until the trainer has the last batch. Both get the same bytes.

Ours does more: a group is on disk (fsync) before it is answered, its tokens are looked up in the gateway's
log, which has all of them, and batches are sealed. The peer keeps all in memory. CPU seconds are the server's.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
from aiohttp import web
from run_record import describe_run, spread, write_record

from hpc_rl.atropos.api import AtroposApi, TrialFacts
from hpc_rl.atropos.intake import SequenceLimits
from hpc_rl.atropos.routes import make_routes
from hpc_rl.core.types import Turn
from hpc_rl.datasets.curriculum import Curriculum
from hpc_rl.gateway.gateway_log import GatewayLog
from hpc_rl.rollout.outside import OutsideGroups
from hpc_rl.rollout.routes import make_application, make_rollout_routes
from hpc_rl.rollout.sequencer import Rules, Sequencer
from hpc_rl.rollout.service import RolloutService

POLL_S = 0.1
GROUPS_PER_BATCH = 8
TOKENS = {"control": "control-token", "data": "data-token"}


@dataclass(frozen=True)
class Shape:
    """The groups that are sent."""

    group_size: int = 8
    prompt_tokens: int = 64
    new_tokens: int = 192

    @property
    def batch_size(self) -> int:
        return GROUPS_PER_BATCH * self.group_size


@dataclass(frozen=True)
class Measured:
    """One run of one server."""

    groups_per_s: float
    cpu_ms_per_group: float
    answer_ms: float  # median


class NoWorkers:
    """In place of the executor: no prompt is ever issued."""

    restarts = 0

    def run(self, frame: dict[str, Any]) -> None:
        raise AssertionError("there are no prompts")

    def cancel(self, ticket: int) -> None:
        pass


# the two servers


async def serve_ours(folder: Path, port: int, shape: Shape) -> None:
    """Serve a rollout service that environments feed, until this process is ended."""
    rules = Rules(
        batch_size=GROUPS_PER_BATCH, max_concurrent=1, eta=10**6,
        batch_sequences=shape.batch_size, n_samples=shape.group_size, own_prompts=False,
    )  # fmt: skip
    prompts = Curriculum(None, None, 0)  # type: ignore[arg-type]
    service = RolloutService(folder / "rollout", Sequencer(rules), prompts, {}, lambda: (0, []), NoWorkers())  # type: ignore[arg-type]
    log = GatewayLog(folder / "gateway")
    facts = TrialFacts(SequenceLimits(150_000, 4096), "", None, "", 100, 10**6)
    api = AtroposApi(OutsideGroups(service), log.match, facts, max_queued_batches=10**6)
    runner = web.AppRunner(
        make_application([*make_routes(api), *make_rollout_routes(service)], TOKENS), access_log=None
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await service.run()


@contextlib.asynccontextmanager
async def server(
    side: str, peer: Path, folder: Path, shape: Shape
) -> AsyncIterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a server; yield its URL and its process."""
    port = random.randrange(20000, 30000)
    if side == "ours":
        argv = [sys.executable, __file__, "--serve", str(folder), "--port", str(port)]
        argv += ["--shape", json.dumps(asdict(shape))]
    else:
        argv = [str(peer), "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}" + (f"/t/{TOKENS['data']}" if side == "ours" else "")
    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(600):
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(url + "/") as response:
                        if response.status == 200:
                            break
                assert process.poll() is None, f"{side} ended with code {process.returncode}"
                await asyncio.sleep(0.1)
        yield url, process
    finally:
        process.terminate()
        process.wait(30)


def cpu_s(process: subprocess.Popen[bytes]) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# the load


def make_groups(shape: Shape, num: int, log: GatewayLog | None) -> list[dict[str, Any]]:
    """Return groups of made-up tokens; the gateway's log gets their completions."""
    chance = np.random.default_rng(0)
    groups = []
    for _ in range(num):
        prompt = chance.integers(0, 150_000, shape.prompt_tokens).tolist()
        made = chance.integers(0, 150_000, (shape.group_size, shape.new_tokens)).tolist()
        logprobs = (-chance.random((shape.group_size, shape.new_tokens))).tolist()
        if log is not None:
            whole = [("0.0", 0, shape.new_tokens)]
            turns = [Turn(ids, lp, whole, "stop") for ids, lp in zip(made, logprobs, strict=True)]
            asyncio.run(log.append(prompt, turns, 1.0))
        groups.append(
            {
                "tokens": [prompt + ids for ids in made],
                "masks": [[-100] * shape.prompt_tokens + ids for ids in made],
                "scores": chance.random(shape.group_size).tolist(),
                "inference_logprobs": [[1.0] * shape.prompt_tokens + row for row in logprobs],
            }
        )
    return groups


class Trainer:
    """Takes batches, and counts them."""

    def __init__(self, side: str, url: str, shape: Shape) -> None:
        self.side, self.url, self.shape = side, url.partition("/t/")[0], shape
        self.num_batches = 0
        self.session = aiohttp.ClientSession()

    async def start(self) -> None:
        """Let environments register: a trainer of Atropos registers, and asks for a batch."""
        if self.side == "peer":
            facts = dict.fromkeys(("wandb_group", "wandb_project", "checkpoint_dir"), "")
            body = {**facts, "batch_size": self.shape.batch_size, "max_token_len": 4096}
            body |= {"save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 10**6}
            async with self.session.post(self.url + "/register", json=body) as response:
                assert response.status == 200, await response.text()
        assert await self.take(wait_s=0) == 0

    async def take(self, wait_s: float) -> int:
        """Return how many batches came."""
        if self.side == "peer":
            async with self.session.get(self.url + "/batch") as response:
                # reading the JSON is the trainer's own time: only whether there is a batch counts here
                came = int(not (await response.read()).startswith(b'{"batch":null'))
            if not came:
                await asyncio.sleep(min(wait_s, 0.01))
            return came
        query = {"step": self.num_batches + 1, "lineage": 0, "wait_s": wait_s}
        headers = {"Authorization": f"Bearer {TOKENS['control']}"}
        async with self.session.get(self.url + "/batch", params=query, headers=headers) as response:
            assert response.status in (200, 204), await response.text()
            await response.read()
            return int(response.status == 200)

    async def run(self, num_batches: int) -> None:
        while self.num_batches < num_batches:
            self.num_batches += await self.take(wait_s=1.0)


class Connection:
    """One kept-alive connection that costs next to nothing: what is measured is the server."""

    def __init__(self, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._path, self._reader, self._writer = path, reader, writer

    @classmethod
    async def to(cls, url: str) -> "Connection":
        parts = urlsplit(url)
        return cls(parts.path, *await asyncio.open_connection(parts.hostname, parts.port))

    def request(self, method: str, path: str, body: dict[str, Any]) -> bytes:
        data = json.dumps(body).encode()
        head = f"{method} {self._path}{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    async def ask(self, request: bytes) -> bytes:
        """Send a request; return the body of the answer, which must have status 200."""
        self._writer.write(request)
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        return await self._reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r")[0]))


async def environment(
    url: str, number: int, shape: Shape, groups: list[dict[str, Any]], start: Any
) -> list[float]:
    """Send groups one after the other; return the seconds that each answer took."""
    connection, polls = [await Connection.to(url) for _ in range(2)]
    async with aiohttp.ClientSession() as session:
        asked = {"desired_name": f"e{number}", "weight": 1.0, "group_size": shape.group_size}
        asked |= {"max_token_length": 4096, "min_batch_allocation": None}
        async with session.post(url + "/register-env", json=asked) as response:
            env_id = (await response.json())["env_id"]
    requests = [connection.request("POST", "/scored_data", {**group, "env_id": env_id}) for group in groups]
    status = polls.request("GET", "/status-env", {"env_id": env_id})
    await start.wait()

    async def poll() -> None:
        while True:
            await polls.ask(status)
            await asyncio.sleep(POLL_S)

    polling, times = asyncio.create_task(poll()), []
    for request in requests:
        begun = time.perf_counter()
        assert b"received" in await connection.ask(request)
        times.append(time.perf_counter() - begun)
    polling.cancel()
    return times


async def run_once(
    side: str, peer: Path, shape: Shape, groups: list[dict[str, Any]], num: int, logged: Path
) -> Measured:
    """Return what one fresh server does with all groups from `num` environments."""
    with tempfile.TemporaryDirectory(dir=logged.parent) as name:
        folder = Path(name)
        (folder / "gateway").symlink_to(logged)
        async with server(side, peer, folder, shape) as (url, process):
            trainer, start = Trainer(side, url, shape), asyncio.Event()
            await trainer.start()
            shares = [groups[i::num] for i in range(num)]
            tasks = [asyncio.create_task(environment(url, i, shape, shares[i], start)) for i in range(num)]
            await asyncio.sleep(1.0)
            cpu, begun = cpu_s(process), time.perf_counter()
            start.set()
            await trainer.run(len(groups) // GROUPS_PER_BATCH)
            took_s, used_s = time.perf_counter() - begun, cpu_s(process) - cpu
            times = [one for task in tasks for one in await task]
            await trainer.session.close()
    return Measured(len(groups) / took_s, 1e3 * used_s / len(groups), 1e3 * statistics.median(times))


def compare(
    shape: Shape, args: argparse.Namespace, num: int, groups: list[dict[str, Any]], logged: Path
) -> dict[str, Any]:
    pairs = []
    for number in range(args.pairs):
        sides = ("ours", "peer") if number % 2 else ("peer", "ours")
        pairs.append(
            {side: asyncio.run(run_once(side, args.peer, shape, groups, num, logged)) for side in sides}
        )
    faster = [pair["ours"].groups_per_s / pair["peer"].groups_per_s for pair in pairs]
    cheaper = [pair["peer"].cpu_ms_per_group / pair["ours"].cpu_ms_per_group for pair in pairs]
    result: dict[str, Any] = {
        "environments": num,
        "ratio_groups_per_s": spread(faster),
        "ratio_cpu": spread(cheaper),
    }
    for side in ("ours", "peer"):
        rows = [asdict(pair[side]) for pair in pairs]
        result[side] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    print(
        f"{num:3} environments: {result['ratio_groups_per_s']['median']:.1f} x the peer's groups/s "
        f"({min(faster):.1f} to {max(faster):.1f}), {result['ratio_cpu']['median']:.1f} x by CPU; ours "
        f"{result['ours']['groups_per_s']:.0f}/s, peer {result['peer']['groups_per_s']:.0f}/s",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", type=Path, default=Path(".venv-atropos/bin/python"), help="has atroposlib")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--environments", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "atropos_api.json")
    parser.add_argument("--shape", type=json.loads, default=asdict(Shape()), help="of the groups, as JSON")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    shape = Shape(**args.shape)
    if args.serve:
        asyncio.run(serve_ours(args.serve, args.port, shape))
        return
    about = describe_run("aiohttp")
    with tempfile.TemporaryDirectory() as name:
        logged = Path(name) / "gateway"
        log = GatewayLog(logged)
        groups = make_groups(shape, args.groups, log)
        log.close()
        results = [compare(shape, args, num, groups, logged) for num in args.environments]
    record = {
        "pairs": args.pairs,
        "groups": args.groups,
        "shape": asdict(shape),
        "results": results,
    }
    about["versions"]["peer"] = peer_version(args.peer)
    write_record(args.out, {**about, **record})


def peer_version(python: Path) -> str:
    code = "from importlib.metadata import version; print('atroposlib', version('atroposlib'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
