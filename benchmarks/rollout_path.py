"""What the way from a prompt to a train batch costs: on the wire, and in the quickstart. Compares checkouts.

    python benchmarks/rollout_path.py wire [--trees now=. before=../before] [--out benchmarks/results/rollout_wire.json]
    python benchmarks/rollout_path.py quickstart [--trees …] [--pairs 5] [--out benchmarks/results/rollout_path.json]

`wire` puts a relay between a router and a server with the embedded engine. It counts requests to generate,
HTTP requests (with the one that opens a channel), and bytes for groups of 8 samples of one prompt, with
completions of 6 and of 256 tokens.

`quickstart` runs `hpc-rl quickstart` of each checkout in turn. It measures the wall seconds of the command;
the mean of `wait_s + publish_s` and of `step_s` over the steps 20 to 340; and the CPU seconds of each role of
the GRPO trial. Nothing else should run on the machine.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from run_record import describe_commit, describe_run, spread, write_record

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = 8
LENGTHS = (6, 256)  # of completions, in tokens
FIRST_STEP, LAST_STEP = 20, 340
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Relay:
    """Passes bytes between a client and a server, and counts them."""

    def __init__(self, port: int) -> None:
        self.port, self.requests, self.bytes = port, 0, Counter[str]()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        above, below = await asyncio.open_connection("127.0.0.1", self.port)
        await asyncio.gather(self._pass("sent", reader, below), self._pass("received", above, writer))

    async def _pass(self, name: str, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                self.bytes[name] += len(data)
                if name == "sent":
                    self.requests += data.count(b" HTTP/1.1\r\n")
                target.write(data)
                await target.drain()
        target.close()


async def count(folder: Path, num_groups: int) -> dict[str, Any]:
    """Return the counts for groups from a server in this process."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from conformance import make_model

    from hpc_rl.config.options.inference import EmbeddedConfig
    from hpc_rl.core.net import bind
    from hpc_rl.name_resolve import keys
    from hpc_rl.name_resolve.shared_fs import NameResolve
    from hpc_rl.servers.embedded.backend import EmbeddedBackend
    from hpc_rl.servers.proxy import Proxy
    from hpc_rl.servers.router import Router

    make_model(folder / "model", 0)
    backend = EmbeddedBackend(EmbeddedConfig())
    await backend.start(str(folder / "model"), "0.1")
    num_requests = 0
    generate = backend.generate

    async def count_generations(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_requests
        num_requests += 1
        return await generate(*args, **kwargs)

    backend.generate = count_generations  # type: ignore[method-assign]
    proxy = Proxy(backend, {"control": "c", "data": "d"})
    proxy.version, proxy.lifecycle = "0.1", "serving"
    sock = bind("127.0.0.1")
    await proxy.serve(sock)
    relay = Relay(sock.getsockname()[1])
    names = NameResolve(folder / "names")
    value = {"url": await relay.start(), "version": "0.1", "state": "serving"}
    names.lease(keys.server("rollout", 0), value, 600.0)
    found = {}
    async with Router(names, "d") as router:
        for length in LENGTHS:
            relay.requests, num_requests, relay.bytes, cpu_s = 0, 0, Counter(), time.process_time()
            await asyncio.gather(*(router.generate_many(make_group(n, length)) for n in range(num_groups)))
            num_tokens = num_groups * SAMPLES * length
            found[f"{length} tokens"] = {
                "requests_per_group": num_requests / num_groups,
                "http_requests_per_group": relay.requests / num_groups,
                "bytes_sent_per_group": relay.bytes["sent"] / num_groups,
                "bytes_received_per_token": relay.bytes["received"] / num_tokens,
                "bytes_per_token": relay.bytes.total() / num_tokens,
                "cpu_ms_per_group_with_generation": 1000 * (time.process_time() - cpu_s) / num_groups,
            }
    print(json.dumps(found), flush=True)
    os._exit(0)  # the engine and the relay still run


def make_group(number: int, length: int) -> list[Any]:
    from hpc_rl.servers.client import GenerateRequest

    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop_token_ids": [1], "ignore_eos": True}
    sampling |= {"max_new_tokens": length, "min_new_tokens": 0}
    prompt = [4 + number % 7, 13, 5, 13, 6, 14]
    return [
        GenerateRequest(prompt, {**sampling, "sampling_seed": number * SAMPLES + n}, f"{number:028d}{n:04d}")
        for n in range(SAMPLES)
    ]


def run_wire(trees: dict[str, Path], num_groups: int) -> dict[str, Any]:
    found = {}
    for name, tree in trees.items():
        with tempfile.TemporaryDirectory() as folder:
            argv = [sys.executable, __file__, "count", folder, str(num_groups)]
            env = os.environ | {"PYTHONPATH": str(tree)}
            done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=True)
            found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_quickstart(tree: Path, seed: int) -> dict[str, Any]:
    """Run the quickstart of a checkout once."""
    with tempfile.TemporaryDirectory(prefix="hpcrl-path-") as folder:
        env = os.environ | {"PYTHONPATH": str(tree), "XDG_STATE_HOME": f"{folder}/state"}
        argv = [sys.executable, "-m", "hpc_rl.cli", "quickstart", "--dir", folder, "--seed", str(seed)]
        begun, cpu_s = time.monotonic(), Counter[str]()
        command = subprocess.Popen(argv, env=env, cwd=folder, stdout=subprocess.DEVNULL)
        seen: dict[str, float] = {}
        while command.poll() is None:
            time.sleep(0.5)
            for name, seconds in sample_cpu_s(Path(folder)).items():
                seen[name] = max(seen.get(name, 0.0), seconds)  # a worker may have ended
        wall_s = time.monotonic() - begun
        if command.returncode:
            raise SystemExit(f"the quickstart of {tree} ended with {command.returncode}")
        (metrics,) = Path(folder).glob("runs/*/quickstart/grpo-*/attempts/*/metrics.0.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row for row in rows if "step_s" in row and FIRST_STEP <= row["step"] <= LAST_STEP]
    for name, seconds in seen.items():
        cpu_s[name.partition("-")[0]] += seconds
    return {
        "wall_s": wall_s,
        "wait_and_publish_ms": 1000 * statistics.fmean(row["wait_s"] + row["publish_s"] for row in rows),
        "step_ms": 1000 * statistics.fmean(row["step_s"] for row in rows),
        "cpu_s": {name: round(seconds, 2) for name, seconds in sorted(cpu_s.items())},
    }


def sample_cpu_s(folder: Path) -> dict[str, float]:
    """Return the CPU seconds of each living process of the GRPO trial; a rollout role has its workers'."""
    found = {}
    records = folder.glob("runs/*/quickstart/grpo-*/attempts/*/processes/*-rank*.json")
    for record in records:
        if record.name.startswith("client-"):  # another record of the same process
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            pid = json.loads(record.read_text())["pid"]
            workers = list_children(pid) if record.name.startswith("rollout-") else []
            found[record.stem] = sum(map(read_cpu_s, [pid, *workers]))
    return found


def read_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def list_children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def run_quickstart(trees: dict[str, Path], pairs: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    loads = []
    for pair in range(pairs):
        for name, tree in trees.items():
            loads.append(os.getloadavg()[0])
            runs[name].append(measure_quickstart(tree, 1 + pair))
            print(name, json.dumps(runs[name][-1]), file=sys.stderr, flush=True)
    first, *others = trees
    found: dict[str, Any] = {"runs": runs, "load": loads, "falls_to": {}}
    for measure in ("wall_s", "wait_and_publish_ms", "step_ms"):
        for other in others:
            ratios = [
                now[measure] / then[measure] for now, then in zip(runs[first], runs[other], strict=True)
            ]
            found["falls_to"].setdefault(other, {})[measure] = spread(ratios)
    return found


def main() -> None:
    if sys.argv[1:2] == ["count"]:
        asyncio.run(count(Path(sys.argv[2]), int(sys.argv[3])))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("wire", "quickstart"))
    parser.add_argument("--trees", nargs="+", default=[f"now={ROOT}"], metavar="NAME=PATH")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    trees = {name: Path(path).resolve() for name, _, path in (one.partition("=") for one in args.trees)}
    about = describe_run()
    if args.what == "wire":
        found = run_wire(trees, args.groups)
    else:
        found = run_quickstart(trees, args.pairs)
    result = {
        **about,
        "commits": {name: describe_commit(tree) for name, tree in trees.items()},
        **found,
    }
    print(json.dumps(result, indent=2))
    if args.out:
        write_record(args.out, result)


if __name__ == "__main__":
    main()
