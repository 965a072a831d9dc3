"""Publication by differences against full publications by disk and by gloo, alternately in the same steps.

    python benchmarks/publish.py [--ranks 2 4] [--servers 1x1 4x1 4x2] [--rates 1e-6 3e-6] [--steps 5]
                                 [--size 0.5b|tiny] [--dir DIR] [--out benchmarks/results/publish.json]

Real are: the FSDP engine with random weights (published in bfloat16, masters in float32), AdamW, the disk
transport on every rank, the copy of the model in a folder per simulated node, and the backend of each server. There is no model pass: an update gets random gradients whose norm is 1. Adam's moments begin as they are after many
such updates (a new optimizer changes more values for some 20 updates), and eps is 1e-8, which changes more
values than the default 1e-5. Rank 0 calls the servers through pipes; there is no HTTP, and they generate
nothing meanwhile. A single server is the embedded engine, in its own process. Four servers are threads of
one process; in place of an engine, each reads every byte of the copy into a buffer of 64 MiB (the machine has
no memory for four engines). `4x2` means 4 servers on 2 nodes.

In each step, after one update, in rotating order:
  difference  the transport: `blocked_s` is its start(); the servers prepare, then load
  disk        a whole export, not fsynced, while training waits; each server loads it; nothing is verified
  gloo        rank 0 gathers the weights in buckets and broadcasts them to all servers while training waits;
              servers only receive: they do not load
  pass        a copy of the rank's float32 pieces to memory in bfloat16, before and after `difference`
`blocked_passes` is the ratio of the slowest ranks' seconds, `blocked_cpu_passes` of the main threads' CPU
seconds on all ranks. `server_blocked_s` is the time from the pause to the resume of a server. Medians over
the steps, with the range.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from run_record import describe_run, spread, write_record

from hpc_rl.config.options.inference import EmbeddedConfig
from hpc_rl.config.options.training import OptimizerConfig, TrainEngineConfig
from hpc_rl.core.node_copies import NodeCopies
from hpc_rl.core.trial import Trial
from hpc_rl.core.types import WeightVersion
from hpc_rl.engines.fsdp.engine import FSDPEngine
from hpc_rl.engines.shared import hf_io
from hpc_rl.engines.shared.mesh import Mesh
from hpc_rl.servers.embedded.backend import EmbeddedBackend
from hpc_rl.servers.node_backend import NodeBackend
from hpc_rl.weight_files.chain import VersionIndex
from hpc_rl.weight_files.model_copy import ModelCopy
from hpc_rl.weights.disk_transport import DiskTransport
from hpc_rl.weights.transport import Published, TransportContext

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 22,  # Qwen3-0.6B has 28
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
SMALL = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES = {
    "0.5b": QWEN3,
    "tiny": QWEN3 | SMALL | {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 8192},
}
BETAS = (0.9, 0.95)
SETTLE_STEPS = 3  # without a measurement, after a change of the learning rate
BUCKET_BYTES = 256 << 20
READ_BYTES = 64 << 20
UPDATE_VALUES = 100_000_000  # updated at once, over all ranks
EXPORT_BYTES = 256 << 20  # per file, so that an export needs less memory
POOL_VALUES = 16 << 20  # normal numbers, from which each update takes its gradients
LIMIT = timedelta(minutes=20)  # of a collective
NUM_SERVERS = 5  # one with the embedded engine; four that read, in one process


@dataclasses.dataclass(frozen=True)
class Options:
    folder: Path
    size: str
    num_ranks: int
    rates: list[float]
    cases: list[tuple[int, int]]  # servers, nodes
    steps: int

    @property
    def trial(self) -> Trial:
        return Trial(self.folder / "trial")

    def find_node(self, node: int) -> Path:
        return self.folder / f"node-{node}"

    def join(self, num_servers: int, member: int) -> dist.ProcessGroup:
        """Join the group of rank 0 (member 0) and the servers of a case."""
        store = dist.FileStore(str(self.folder / f"group-{num_servers}"), num_servers + 1)
        return dist.ProcessGroupGloo(store, member, num_servers + 1, LIMIT)


# servers


class Reader:
    """A backend that reads every byte of a checkpoint in place of an engine."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(READ_BYTES))

    async def request(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/update_weights_from_disk":
            await asyncio.to_thread(self.read, Path(body["model_path"]))
        return 200, {}

    async def prepare_changes(self, folder: Path) -> None:
        """Do nothing: the copy is read whole."""

    def read(self, folder: Path) -> None:
        for path in folder.glob("*.safetensors"):
            with path.open("rb", buffering=0) as file:
                while file.readinto(self.buffer):
                    pass


class Server:
    """A server, which rank 0 commands through a pipe."""

    def __init__(self, options: Options, number: int) -> None:
        self.options = options
        self.is_real = number == 0
        self.backend: Any = Reader()
        if self.is_real:
            self.backend = EmbeddedBackend(EmbeddedConfig(dtype="bfloat16"), scratch=True)
        self.member = (1 if self.is_real else number, 1 if self.is_real else NUM_SERVERS - 1)
        self.group: dist.ProcessGroup | None = None
        self.received = torch.zeros(0, dtype=torch.uint8)

    async def start(self) -> None:
        if self.is_real:
            await self.backend.start(str(self.options.folder / "architecture"), "")

    async def call(self, backend: Any, path: str, **body: Any) -> None:
        status, answer = await backend.request(path, body)
        assert status == 200, answer

    async def update(self, node: int, label: str) -> dict[str, float]:
        """As rank 0's Publisher does: prepare, pause, load, resume."""
        copy = ModelCopy(self.options.find_node(node), self.options.trial.weights)
        backend = NodeBackend(self.backend, copy, NodeCopies())
        begin = time.perf_counter()
        await self.call(backend, "/prepare_weights", weight_version=label)
        prepare_s = time.perf_counter() - begin
        load = self.call(backend, "/update_weights_from_disk", weight_version=label, flush_cache=False)
        return {"prepare_s": prepare_s, "blocked_s": await self.pause_for(load)}

    async def load(self, path: str) -> dict[str, float]:
        load = self.call(self.backend, "/update_weights_from_disk", model_path=path, flush_cache=False)
        return {"blocked_s": await self.pause_for(load)}

    async def receive(self) -> dict[str, float]:
        if self.group is None:
            at, total = self.member
            self.group = await asyncio.to_thread(self.options.join, total, at)
        return {"blocked_s": await self.pause_for(asyncio.to_thread(self.receive_buckets))}

    def receive_buckets(self) -> None:
        assert self.group is not None
        size = torch.zeros(1, dtype=torch.int64)
        while True:
            self.group.broadcast(size, 0).wait()
            if not (wanted := int(size)):
                return
            if len(self.received) < wanted:
                self.received = torch.zeros(wanted, dtype=torch.uint8)
            self.group.broadcast(self.received[:wanted], 0).wait()

    async def pause_for(self, work: Any) -> float:
        begin = time.perf_counter()
        await self.call(self.backend, "/pause_generation", mode="in_place")
        await work
        await self.call(self.backend, "/continue_generation")
        return time.perf_counter() - begin


def run_servers(options: Options, pipes: dict[int, Connection]) -> None:
    """Run servers by their numbers in this process."""

    async def serve(number: int, pipe: Connection) -> None:
        server = Server(options, number)
        await server.start()
        while command := await asyncio.to_thread(pipe.recv):
            pipe.send(await getattr(server, command[0])(*command[1:]))
        if server.is_real:
            await server.backend.stop()

    async def serve_all() -> None:
        await asyncio.gather(*(serve(number, pipe) for number, pipe in pipes.items()))

    torch.set_num_threads(1)
    asyncio.run(serve_all())


class Servers:
    """Rank 0's side of all servers, and the `publisher` of the transport."""

    def __init__(self, options: Options, pipes: list[Connection]) -> None:
        self.options, self.pipes = options, pipes
        self.groups: dict[int, dist.ProcessGroup] = {}
        self.answers: list[dict[str, float]] = []
        self.case = (1, 1)

    @property
    def active(self) -> list[Connection]:
        return self.pipes[:1] if self.case[0] == 1 else self.pipes[1:]

    def send(self, *command: Any) -> None:
        for pipe in self.active:
            pipe.send(command)

    def collect(self) -> list[dict[str, float]]:
        self.answers = [pipe.recv() for pipe in self.active]
        return self.answers

    def publish(
        self, version: WeightVersion, path: Path, num_bytes: int, stopping: threading.Event
    ) -> Published:
        for i, pipe in enumerate(self.active):
            pipe.send(("update", i % self.case[1], str(version)))
        pauses_s = {str(i): answer["blocked_s"] for i, answer in enumerate(self.collect())}
        return Published(list(pauses_s), pauses_s=pauses_s)

    def broadcast(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        num_servers = self.case[0]
        if num_servers not in self.groups:
            self.groups[num_servers] = self.options.join(num_servers, 0)
        parts = [tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket if tensor.numel()]
        flat = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)
        self.groups[num_servers].broadcast(torch.tensor([len(flat)]), 0).wait()
        if len(flat):
            self.groups[num_servers].broadcast(flat, 0).wait()

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)


# ranks


class Subject:
    """The trained model on one rank, with the three ways to publish it."""

    def __init__(self, options: Options, rank: int, servers: Servers | None) -> None:
        self.options, self.rank, self.servers = options, rank, servers
        optimizer = OptimizerConfig(
            lr=options.rates[0],
            beta1=BETAS[0],
            beta2=BETAS[1],
            eps=1e-8,
            warmup_steps_proportion=0.0,
        )
        config = TrainEngineConfig(
            path=str(options.folder / "architecture"),
            init_from_scratch=True,
            attn_impl="sdpa",
            dtype="bfloat16",
            gradient_checkpointing=False,
            optimizer=optimizer,
        )
        self.engine = FSDPEngine(config, Mesh(rank, options.num_ranks))
        self.engine.initialize(10**6)
        self.random = torch.Generator().manual_seed(rank)
        self.normals = torch.randn(POOL_VALUES, generator=self.random)
        num_values = sum(shard.parameter.numel() for shard in self.engine.shards)
        self.deviation = num_values**-0.5  # the norm of all gradients is 1, so they are not clipped
        self.fill_moments()
        self.transport = DiskTransport(
            TransportContext(
                trial=options.trial,
                engine=self.engine,
                publisher=servers,
                stopping=threading.Event(),
                tokenizer=options.folder / "architecture",
            )
        )
        pieces = self.engine.list_published_pieces() or []
        self.pieces = [piece for piece in pieces if piece.local.numel()]
        self.step = 0

    def fill_moments(self) -> None:
        """Draw Adam's moments as they are after many updates with random gradients."""
        factor = ((1 - BETAS[0]) / (1 + BETAS[0])) ** 0.5
        for first, second in self.engine.optimizer.moments.values():
            self.draw(first, self.deviation * factor)
            second.fill_(self.deviation**2)
        self.engine.optimizer.restore_num_steps(1000)

    def draw(self, target: torch.Tensor, deviation: float) -> None:
        """Fill a tensor with normal numbers: parts of the pool from random places, which is faster."""
        for part in target.view(-1).split(POOL_VALUES // 2):
            start = int(torch.randint(POOL_VALUES // 2, (1,), generator=self.random))
            torch.mul(self.normals[start : start + len(part)], deviation, out=part)

    def update(self) -> None:
        """Update every parameter once with random gradients, some parameters at a time (for memory)."""
        shards = list(self.engine.shards)
        while shards:
            num_values = 0
            while shards and num_values < UPDATE_VALUES:
                shard = shards.pop()
                shard.parameter.grad = torch.empty_like(shard.parameter)
                gradient = shard.gradient()
                assert gradient is not None
                self.draw(gradient, self.deviation)
                num_values += shard.parameter.numel()
            self.engine._update({"loss": torch.zeros(())})
        self.step += 1

    def difference(self) -> dict[str, Any]:
        version = WeightVersion(0, self.step)
        begin, cpu = time.perf_counter(), time.thread_time()
        self.transport.start(version)
        row = {"blocked_s": time.perf_counter() - begin, "cpu_s": time.thread_time() - cpu}
        published = self.transport.settle(wait=True)
        row["servers_have_it_s"] = time.perf_counter() - begin
        if self.servers:
            assert published is not None
            index = VersionIndex.read(self.options.trial.published(str(version)))
            row |= {"num_bytes": published.num_bytes, "density": published.density}
            row |= {"complete_s": published.write_s, "is_whole": index is None or index.base is None}
            row["servers"] = self.servers.answers
        return row

    def disk(self) -> dict[str, Any]:
        folder = self.options.folder / "export"
        begin = time.perf_counter()
        self.engine.export(folder)
        row: dict[str, Any] = {"blocked_s": time.perf_counter() - begin}
        if self.servers:
            self.servers.send("load", str(folder))
            row |= {"servers": self.servers.collect(), "complete_s": row["blocked_s"]}
            row["servers_have_it_s"] = time.perf_counter() - begin
            row["num_bytes"] = sum(path.stat().st_size for path in folder.iterdir())
            shutil.rmtree(folder)
        return row

    def gloo(self) -> dict[str, Any]:
        begin = time.perf_counter()
        if self.servers:
            self.servers.send("receive")
        num_bytes = 0
        for bucket in self.engine.weights(BUCKET_BYTES):
            if self.servers and bucket:
                num_bytes += sum(tensor.nbytes for _, tensor in bucket)
                self.servers.broadcast(bucket)
        row: dict[str, Any] = {"num_bytes": num_bytes}
        if self.servers:
            self.servers.broadcast([])
            row["servers"] = self.servers.collect()
        row["blocked_s"] = row["servers_have_it_s"] = time.perf_counter() - begin
        return row

    def copy(self) -> dict[str, float]:
        targets = []
        # the transport's older copy: nothing reads it between two publications
        for buffer in self.transport._snapshot._buffers[1:]:
            sizes = [piece.local.numel() * piece.dtype.itemsize for piece in self.pieces]
            parts = zip(self.pieces, buffer.split(sizes), strict=True)
            targets = [(piece.local.detach(), part.view(piece.dtype)) for piece, part in parts]
        begin, cpu = time.perf_counter(), time.thread_time()
        for source, target in targets:
            target.view(source.shape).copy_(source)
        return {"blocked_s": time.perf_counter() - begin, "cpu_s": time.thread_time() - cpu}

    def measure(self, number: int) -> dict[str, list[dict[str, Any]]]:
        """Publish in all ways; return the records of all ranks per way."""
        order = ["difference", "disk", "gloo"]
        order = order[number % 3 :] + order[: number % 3]
        at = order.index("difference")
        order[at : at + 1] = ["pass before", "difference", "pass after"]
        rows: dict[str, list[dict[str, Any]]] = {}
        for name in order:
            dist.barrier()
            row = self.copy() if name.startswith("pass") else getattr(self, name)()
            ranks: list[Any] = [None] * self.options.num_ranks
            dist.all_gather_object(ranks, row)
            rows[name] = ranks
        return rows


def run_rank(options: Options, rank: int, pipes: list[Connection], results: Connection | None) -> None:
    torch.set_num_threads(1)
    hf_io.MAX_FILE_BYTES = EXPORT_BYTES
    store = f"file://{options.folder}/ranks"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=options.num_ranks, timeout=LIMIT)
    servers = Servers(options, pipes) if rank == 0 else None
    subject = Subject(options, rank, servers)
    for rate in options.rates:
        subject.engine.optimizer.config.lr = rate
        for _ in range(SETTLE_STEPS):
            subject.update()
        for case in options.cases:
            if servers:
                servers.case = case
            rows = []
            for number in range(options.steps + 1):
                subject.update()
                rows.append(subject.measure(number))
            if results:
                results.send(summarize(options, subject, rate, case, rows[1:]))
    if servers and results:
        servers.stop()
        results.send(None)
    dist.barrier()
    dist.destroy_process_group()


# results

Steps = list[dict[str, list[dict[str, Any]]]]  # per step and way, the record of each rank


def find_slowest(step: dict[str, list[dict[str, Any]]], way: str) -> float:
    return max(row["blocked_s"] for row in step[way])


def sum_cpu(step: dict[str, list[dict[str, Any]]], way: str) -> float:
    return sum(row["cpu_s"] for row in step[way])


def summarize(
    options: Options, subject: Subject, rate: float, case: tuple[int, int], steps: Steps
) -> dict[str, Any]:
    whole_bytes = statistics.median(step["gloo"][0]["num_bytes"] for step in steps)
    result: dict[str, Any] = {
        "ranks": options.num_ranks,
        "rate": rate,
        "servers": case[0],
        "nodes": case[1],
        "engine": "embedded" if case[0] == 1 else "reader",
        "parameters": sum(shard.parameter.numel() for shard in subject.engine.shards),
        "whole_bytes": whole_bytes,
    }
    for way in ("difference", "disk", "gloo"):
        firsts = [step[way][0] for step in steps]  # of rank 0
        one = {"blocked_s": spread([find_slowest(step, way) for step in steps])}
        for key in ("complete_s", "servers_have_it_s", "num_bytes", "density"):
            if key in firsts[0]:
                one[key] = spread([row[key] for row in firsts])
        for key in firsts[0]["servers"][0]:
            one[f"server_{key}"] = spread([answer[key] for row in firsts for answer in row["servers"]])
        one["share_of_bytes"] = spread([row["num_bytes"] / whole_bytes for row in firsts])
        result[way] = one
    passes = ("pass before", "pass after")
    result["pass_s"] = spread([find_slowest(step, way) for step in steps for way in passes])
    ratios, cpu_ratios = [], []
    for step in steps:
        ratios.append(2 * find_slowest(step, "difference") / sum(find_slowest(step, way) for way in passes))
        cpu_ratios.append(2 * sum_cpu(step, "difference") / sum(sum_cpu(step, way) for way in passes))
    result["blocked_passes"], result["blocked_cpu_passes"] = spread(ratios), spread(cpu_ratios)
    result["whole_versions"] = sum(step["difference"][0]["is_whole"] for step in steps)
    result["peak_memory_rank_0_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result["load_1m"] = os.getloadavg()[0]
    return result


def describe(case: dict[str, Any]) -> str:
    ours = case["difference"]
    return (
        f"{case['ranks']} ranks, {case['rate']:g}, {case['servers']} servers on {case['nodes']}: "
        f"{100 * ours['density']['median']:.2f} % of values, {100 * ours['share_of_bytes']['median']:.2f} % of bytes; "
        f"blocked {case['blocked_passes']['median']:.2f} passes ({case['blocked_cpu_passes']['median']:.2f} by CPU), "
        + ", ".join(
            f"{way} {case[way]['blocked_s']['median']:.3f} s, servers {case[way]['server_blocked_s']['median']:.3f} s,"
            f" at {case[way]['servers_have_it_s']['median']:.2f} s"
            for way in ("difference", "disk", "gloo")
        )
    )


def measure(options: Options) -> Iterator[dict[str, Any]]:
    """Start the processes of one number of ranks; yield the results of its cases."""
    architecture = options.folder / "architecture"
    architecture.mkdir(parents=True)
    (architecture / "config.json").write_text(json.dumps(SIZES[options.size]))
    options.trial.make_dirs()
    context: Any = mp.get_context("spawn")
    with contextlib.ExitStack() as stack:

        def start(work: Callable[..., None], *args: Any) -> Any:
            process = context.Process(target=work, args=(options, *args), daemon=True)
            process.start()
            stack.callback(process.kill)
            return process

        pipes = [context.Pipe() for _ in range(NUM_SERVERS)]
        ends = {number: far for number, (_, far) in enumerate(pipes)}
        processes = [start(run_servers, {0: ends.pop(0)}), start(run_servers, ends)]
        here, there = context.Pipe()
        ours = [near for near, _ in pipes]
        for rank in range(options.num_ranks):
            processes.append(start(run_rank, rank, *((ours, there) if rank == 0 else ([], None))))
        while True:
            while not here.poll(1):
                if failed := [one for one in processes if one.exitcode]:
                    raise RuntimeError(f"process {failed[0].pid} has failed with {failed[0].exitcode}")
            if (case := here.recv()) is None:
                break
            print(describe(case), flush=True)
            yield case
        for process in processes:
            process.join()


def parse_case(text: str) -> tuple[int, int]:
    servers, _, nodes = text.partition("x")
    case = int(servers), int(nodes)
    if case[0] not in (1, NUM_SERVERS - 1) or not 1 <= case[1] <= case[0]:
        raise argparse.ArgumentTypeError(f"{text}: 1 or {NUM_SERVERS - 1} servers, on at most as many nodes")
    return case


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="0.5b", help="of the model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 3e-6], help="learning rates")
    parser.add_argument("--servers", type=parse_case, nargs="+", default=[(1, 1), (4, 1), (4, 2)])
    parser.add_argument("--steps", type=int, default=5, help="measured, per case")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="for all files")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    about = describe_run("torch", "transformers", "numpy", "xxhash")
    cases: list[dict[str, Any]] = []
    for num_ranks in args.ranks:
        with tempfile.TemporaryDirectory(dir=args.dir, prefix="publish-benchmark-") as folder:
            options = Options(Path(folder), args.size, num_ranks, args.rates, args.servers, args.steps)
            for case in measure(options):
                cases.append(case)
                write(args, {**about, "cases": cases})


def write(args: argparse.Namespace, found: dict[str, Any]) -> None:
    adam = {"betas": BETAS, "eps": 1e-8, "gradients": "normal, new ones in each update"}
    if args.out:
        write_record(args.out, {"size": args.size, "steps": args.steps, "adam": adam, **found})


if __name__ == "__main__":
    main()
