"""A check of collectives before training: whether ranks exchange and sum numbers correctly, and how fast.

All ranks send to some other ranks and receive as much at the same time; then they compute a sum over all
ranks. Reports go through the store of the process group, a separate connection, so they arrive even if the
checked links hang.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from hpc_rl.core.errors import NodeFailed, RoleFailed

NUMBERS = {"cuda": 1 << 21, "cpu": 1 << 17}  # int64 values in one message
TIMES = 3  # repetitions of a message; the fastest counts
LIMIT_S = 120.0  # for one exchange; the first one opens the connections
LAST_LOOK_S = 3.0  # for the other ranks to read the judgement
SLOW = 4.0  # a node is slow if its fastest link is this many times slower than the median node's
MIN_NODES = 3  # needed to detect a slow node
GB = 1e9
MAX_QUOTE = 300  # characters of an error


@dataclass
class Link:
    """A transfer that a rank received from another rank."""

    sender: int
    seconds: float = 0.0
    wrong: bool = False  # other numbers than were sent, or none in time


@dataclass
class RankReport:
    """The measurements of one rank."""

    links: list[Link] = field(default_factory=list)
    sum_s: float = 0.0
    sum_wrong: bool = False
    error: str = ""  # from PyTorch


@dataclass
class Judgement:
    """The conclusion from the reports of all ranks: bad and slow nodes with the reason, and a summary."""

    bad: dict[str, str]
    slow: dict[str, str]
    summary: str


def check(store: dist.Store, device: torch.device | str, node: str) -> Judgement:
    """Check the default process group; `node` is the name of this rank's node. Collective, takes seconds.

    Raises NodeFailed on every rank if some nodes produce wrong numbers or time out, RoleFailed if all do.
    """
    device = torch.device(device)
    store = dist.PrefixStore("check of the collectives", store)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    store.set(f"node {rank}", node)
    names = [f"node {other}" for other in range(num_ranks)]
    store.wait(names, timedelta(seconds=LIMIT_S))
    nodes = [name.decode() for name in store.multi_get(names)]
    store.set(f"report {rank}", json.dumps(asdict(_make_report(device, nodes))))
    if rank == 0:
        store.set(
            "judgement", json.dumps(asdict(judge(nodes, _collect(store, num_ranks), _count_bytes(device))))
        )
    store.wait(["judgement"], timedelta(seconds=4 * LIMIT_S))
    found = Judgement(**json.loads(store.get("judgement")))
    seen = store.add("seen", 1)
    end = time.monotonic() + LAST_LOOK_S
    while rank == 0 and seen < num_ranks and time.monotonic() < end:  # the store ends with rank 0
        time.sleep(0.01)
        seen = store.add("seen", 0)
    if found.bad:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in found.bad.items())
        message = f"the test of the trainer's network (collectives) fails: {reasons}{found.summary}"
        if len(found.bad) == len(set(nodes)):
            raise RoleFailed(
                f"{message}. No node differs from the others: look at the network and NCCL's log."
            )
        raise NodeFailed(message, list(found.bad))
    return found


def list_shifts(nodes: Sequence[str]) -> list[int]:
    """Return how far ahead each rank sends: to the next one, to the next node, and half way around."""
    return sorted({1, Counter(nodes)[nodes[0]], len(nodes) // 2} - {0, len(nodes)})


def _make_report(device: torch.device, nodes: Sequence[str]) -> RankReport:
    rank, num_ranks, report = dist.get_rank(), len(nodes), RankReport()
    numbers = torch.arange(NUMBERS[device.type], device=device)
    for shift in list_shifts(nodes):
        to, sender = (rank + shift) % num_ranks, (rank - shift) % num_ranks
        link = Link(sender, float("inf"))
        report.links.append(link)
        own, theirs = make_numbers(numbers, rank), torch.empty_like(numbers)
        for _ in range(TIMES):
            pair = [dist.P2POp(dist.isend, own, to), dist.P2POp(dist.irecv, theirs, sender)]
            try:
                seconds = _measure_seconds(dist.batch_isend_irecv(pair), device)
            except RuntimeError as error:
                link.seconds, link.wrong, report.error = 0.0, True, str(error)
                return report
            link.seconds = min(link.seconds, seconds)
        link.wrong = not torch.equal(theirs, numbers * (sender + 1))
    total = num_ranks * (num_ranks + 1) // 2
    for _ in range(TIMES):
        own = make_numbers(numbers, rank)
        try:
            seconds = _measure_seconds([dist.all_reduce(own, async_op=True)], device)
        except RuntimeError as error:
            report.sum_wrong, report.error = True, str(error)
            return report
        report.sum_wrong |= not torch.equal(own, numbers * total)
        report.sum_s = min(report.sum_s or float("inf"), seconds)
    return report


def make_numbers(numbers: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the numbers that a rank sends."""
    return numbers * (rank + 1)


def _measure_seconds(works: Sequence[dist.Work | None], device: torch.device) -> float:
    """Wait for all works; return the seconds. Raises RuntimeError after LIMIT_S, or if one fails."""
    start, limit = time.perf_counter(), timedelta(seconds=LIMIT_S)
    pending = [work for work in works if work is not None]
    if device.type == "cpu":  # gloo does the work while it is waited for
        for work in pending:
            work.wait(limit)
        return time.perf_counter() - start
    while not all(work.is_completed() for work in pending):  # NCCL's `wait` does not wait
        if time.perf_counter() - start > LIMIT_S:
            raise RuntimeError(f"the ranks did not finish a collective operation within {LIMIT_S:g} s")
    for work in pending:
        work.wait()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _collect(store: dist.Store, num_ranks: int) -> list[RankReport | None]:
    """Return the reports of all ranks, None for ranks that hang."""
    reports: list[RankReport | None] = []
    end = time.monotonic() + 2 * LIMIT_S
    for rank in range(num_ranks):
        left_s = max(0.1, end - time.monotonic())
        try:
            store.wait([f"report {rank}"], timedelta(seconds=left_s))
        except dist.DistStoreError:
            reports.append(None)
            continue
        data = json.loads(store.get(f"report {rank}"))
        reports.append(RankReport(**data | {"links": [Link(**link) for link in data["links"]]}))
    return reports


def judge(nodes: Sequence[str], reports: Sequence[RankReport | None], num_bytes: int) -> Judgement:
    """Judge the nodes by the reports of all ranks. Pure. `num_bytes` is the size of a message."""
    silent = {nodes[rank]: "a rank gave no answer" for rank, one in enumerate(reports) if one is None}
    known = [(rank, report) for rank, report in enumerate(reports) if report is not None]
    links = [(nodes[link.sender], nodes[rank], link) for rank, report in known for link in report.links]
    broken = Counter(frozenset((one, other)) for one, other, link in links if link.wrong)
    bad = silent or {
        node: f"{number} of its links bring wrong numbers, or none within {LIMIT_S:g} s"
        for node, number in _find_blamed(broken).items()
    }
    wrong_sums = sorted({nodes[rank] for rank, report in known if report.sum_wrong})
    if not bad and wrong_sums:
        bad = dict.fromkeys(wrong_sums, "the sum over all ranks is wrong here, or comes too late")
    if bad:
        error = next((report.error for _, report in known if report.error), "")
        return Judgement(bad, {}, f" ({error.strip().splitlines()[0][:MAX_QUOTE]})" if error else "")
    speeds = {(one, other): 0.0 for one, other, _ in links}
    for one, other, link in links:
        speeds[one, other] = max(speeds[one, other], num_bytes / max(link.seconds, 1e-9) / GB)
    slow = dict(_find_slow(speeds))
    sum_s = max(report.sum_s for _, report in known)
    (one, other), least = min(speeds.items(), key=lambda item: item[1])
    summary = (
        f"a sum of {num_bytes / 1e6:.1f} MB over {len(nodes)} ranks takes {sum_s * 1000:.1f} ms; "
        f"links have {statistics.median(speeds.values()):.2f} GB/s, "
        f"the slowest ({one} to {other}) {least:.2f} GB/s"
    )
    return Judgement({}, slow, summary)


def _find_blamed(broken: Counter[frozenset[str]]) -> Counter[str]:
    """Return the nodes with the most broken links: one node, or both ends of a single broken link."""
    count = Counter(node for link, number in broken.items() for node in link for _ in range(number))
    most = max(count.values(), default=0)
    return Counter({node: number for node, number in count.items() if number == most})


def _find_slow(speeds: dict[tuple[str, str], float]) -> Iterator[tuple[str, str]]:
    """Yield nodes whose fastest link is slow compared with the fastest links of other nodes."""
    for inside in (True, False):
        same = {link: speed for link, speed in speeds.items() if (link[0] == link[1]) == inside}
        fastest: dict[str, float] = {}
        for link, speed in same.items():
            for node in link:
                fastest[node] = max(fastest.get(node, 0.0), speed)
        if len(fastest) < MIN_NODES:
            continue
        usual = statistics.median(fastest.values())
        for node, speed in fastest.items():
            if speed * SLOW < usual:
                where = "between its GPUs" if inside else "to other nodes"
                yield node, f"{speed:.2f} GB/s {where}, where {usual:.2f} GB/s are usual"


def _count_bytes(device: torch.device) -> int:
    return NUMBERS[device.type] * 8
