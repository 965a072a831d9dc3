"""Judge from one `sinfo` whether a request can ever run on a cluster: which limits forbid it, what would fit.

Pure. The start time is not judged: busy, drained and powered-down nodes count as usable. Accounts and QoS
are left to Slurm.
"""

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from hpc_rl.core import slurm_time
from hpc_rl.core.errors import ConfigError
from hpc_rl.schedulers.hostlist import expand

SINFO = ["sinfo", "-h", "-a", "-N", "-o", "%P|%a|%l|%s|%N|%c|%m|%f|%G|%Z"]
# Two threads per core are usual; if the nodes have fewer, steps still fit.
UNKNOWN_THREADS_PER_CORE = 2


@dataclass(frozen=True)
class Node:
    """One node in one partition. Memory in MB; GPUs by type, "" for untyped GPUs."""

    partition: str
    name: str
    cpus: int
    mem_mb: int
    gpus: dict[str, int] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    max_time_s: int | None = None
    max_nodes: int | None = None
    is_default: bool = False
    is_up: bool = True
    threads_per_core: int = 1


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """The request of one job; None for resources that it does not request."""

    n_nodes: int
    cpus: int | None = None
    mem_mb: int | None = None
    gpus: int | None = None
    gpu_type: str | None = None
    time_s: int | None = None
    partition: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    qos: str | None = None
    cpus_from: tuple[str, ...] = ()  # options that the number comes from
    mem_from: tuple[str, ...] = ()


@dataclass(frozen=True)
class CapacityLimit:
    """A limit against a request."""

    limit: str
    message: str  # the limit and the request
    nearest: str = ""  # the remedy, as options of the command line; empty if nothing helps
    certain: bool = True  # nothing lifts it; a QoS may lift an uncertain limit


def parse_sinfo(text: str) -> list[Node]:
    """Parse the output of SINFO; skip lines in an unknown format."""
    nodes = []
    for line in text.splitlines():
        fields = [part.strip() for part in line.split("|")]
        if len(fields) != 10:
            continue
        partition, available, limit, sizes, name, cpus, mem, features, gres, threads = fields
        num_cpus, num_mb, most = re.match(r"\d+", cpus), re.match(r"\d+", mem), sizes.rpartition("-")[2]
        if not num_cpus or not num_mb:
            continue
        nodes.append(
            Node(
                partition=partition.rstrip("*"),
                name=name,
                cpus=int(num_cpus[0]),
                mem_mb=int(num_mb[0]),
                gpus=_parse_gpus(gres),
                features=frozenset(features.split(",")) - {"(null)", ""},
                max_time_s=_time_s(limit),
                max_nodes=int(most) if most.isdigit() else None,
                is_default=partition.endswith("*"),
                is_up=available == "up",
                threads_per_core=int(threads) if threads.isdigit() else UNKNOWN_THREADS_PER_CORE,
            )
        )
    return nodes


def judge(request: JobRequest, nodes: Sequence[Node]) -> list[CapacityLimit]:
    """Return the limits against a request; empty if it can run in one of its partitions."""
    known = list(dict.fromkeys(node.partition for node in nodes))
    wanted = _select_partitions(request, nodes)
    if not wanted:
        message = f"this cluster has no default partition; it has {', '.join(sorted(known))}."
        return [CapacityLimit("partition", message, "--partition NAME")]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        message = (
            f"there is no partition {unknown[0]!r} with nodes; this cluster has {', '.join(sorted(known))}."
        )
        near = difflib.get_close_matches(unknown[0], known, n=1) or _find_takers(request, known, nodes)
        return [CapacityLimit("partition", message, f"--partition {near[0]}" if near else "")]
    found = [_check_partition(request, name, nodes) for name in wanted]
    best = min(found, key=lambda limits: sum(limit.certain for limit in limits))
    if not any(limit.certain for limit in best):
        return best
    elsewhere = _find_takers(request, [name for name in known if name not in wanted], nodes)
    if not elsewhere:
        return best
    message = f"the same request fits partition {elsewhere[0]}."
    return [*best, CapacityLimit("partition", message, f"--partition {elsewhere[0]}", False)]


def limit_threads(nodes: Sequence[Node], most: int | None) -> list[Node]:
    """Return the nodes as seen by a job with at most this many threads per core; None: all threads."""
    used = [min(node.threads_per_core, most or node.threads_per_core) for node in nodes]
    return [
        replace(node, cpus=node.cpus // node.threads_per_core * threads, threads_per_core=threads)
        for node, threads in zip(nodes, used, strict=True)
    ]


def find_threads_per_core(request: JobRequest, nodes: Sequence[Node]) -> int:
    """Return the largest number of threads per core on the nodes that a request may get."""
    wanted = _select_partitions(request, nodes)
    found = [node.threads_per_core for node in nodes if node.partition in wanted]
    return max(found, default=UNKNOWN_THREADS_PER_CORE)


def _select_partitions(request: JobRequest, nodes: Sequence[Node]) -> list[str]:
    if request.partition:
        return request.partition.split(",")
    return list(dict.fromkeys(node.partition for node in nodes if node.is_default))


def _find_takers(request: JobRequest, partitions: list[str], nodes: Sequence[Node]) -> list[str]:
    return [name for name in partitions if not _check_partition(request, name, nodes)]


def _check_partition(request: JobRequest, name: str, nodes: Sequence[Node]) -> list[CapacityLimit]:
    found = [node for node in nodes if node.partition == name]
    own = found[0]
    is_certain = request.qos is None
    limits = []
    if not own.is_up:
        message = f"partition {name} is not up: its jobs wait."
        limits.append(CapacityLimit("partition", message, certain=False))
    if request.time_s is not None and own.max_time_s is not None and request.time_s > own.max_time_s:
        most = slurm_time.format_time_limit(own.max_time_s)
        asked = slurm_time.format_time_limit(request.time_s)
        message = f"partition {name} has a time limit of {most}; {asked} was requested."
        limits.append(CapacityLimit("time", message, f"--time {most}", is_certain))
    if own.max_nodes is not None and request.n_nodes > own.max_nodes:
        message = f"partition {name} allows {own.max_nodes} nodes per job; {request.n_nodes} were requested."
        limits.append(CapacityLimit("nodes", message, f"--n_nodes {own.max_nodes}", is_certain))
    usable, refused = _select_eligible(request, found)
    return [*limits, *(refused or _check_sizes(request, name, usable))]


def _select_eligible(request: JobRequest, nodes: list[Node]) -> tuple[list[Node], list[CapacityLimit]]:
    """Return the nodes with the requested names and features, and a limit if they are too few."""
    name, n_nodes = nodes[0].partition, request.n_nodes
    if request.nodelist:
        missing = sorted(set(expand(request.nodelist)) - {node.name for node in nodes})
        if missing:
            message = f"partition {name} has no node {missing[0]}, which launcher.slurm.nodelist names."
            return nodes, [CapacityLimit("nodelist", message, "launcher.slurm.nodelist=null")]
    excluded = set(expand(request.exclude or ""))
    left = [node for node in nodes if node.name not in excluded]
    if len(left) < n_nodes <= len(nodes):
        message = (
            f"launcher.slurm.exclude leaves {len(left)} of the {len(nodes)} nodes of partition {name}; "
            f"{n_nodes} were requested."
        )
        nearest = _suggest_fewer_nodes(left, "launcher.slurm.exclude=null")
        return left, [CapacityLimit("exclude", message, nearest)]
    nodes = left
    if request.constraint and re.fullmatch(r"[\w.:=-]+([&|][\w.:=-]+)*", request.constraint):
        left = [node for node in nodes if _has(node.features, request.constraint)]
    if len(left) < n_nodes <= len(nodes):
        known = ", ".join(sorted(set().union(*(node.features for node in nodes)))) or "none"
        message = (
            f"{len(left)} of {len(nodes)} nodes of partition {name} have the features "
            f"{request.constraint!r}; {n_nodes} were requested; the partition's features: {known}."
        )
        nearest = _suggest_fewer_nodes(left, "launcher.slurm.constraint=null")
        return left, [CapacityLimit("constraint", message, nearest)]
    return left, []


def _suggest_fewer_nodes(left: list[Node], otherwise: str) -> str:
    return f"--n_nodes {len(left)}" if left else otherwise


def _has(features: frozenset[str], constraint: str) -> bool:
    """Return whether a node has the features `a&b|c`, evaluated from left to right as in Slurm."""
    first, *rest = re.split(r"([&|])", constraint)
    result = first in features
    for operator, feature in zip(rest[::2], rest[1::2], strict=True):
        result = (result and feature in features) if operator == "&" else (result or feature in features)
    return result


@dataclass(frozen=True)
class _Dimension:
    """A countable resource of a node: the requested number, and how to request less."""

    limit: str
    wanted: int | None  # None if not requested
    has: Callable[[Node], int]
    unit: str
    change: str

    def has_enough(self, node: Node) -> bool:
        return self.has(node) >= (self.wanted or 0)


def _make_dimensions(request: JobRequest) -> list[_Dimension]:
    def count_gpus(node: Node) -> int:
        return node.gpus.get(request.gpu_type, 0) if request.gpu_type else sum(node.gpus.values())

    kind = f"{request.gpu_type} GPUs" if request.gpu_type else "GPUs"
    cpus_unit = f"CPUs per node{_describe_origin(request.cpus_from)}"
    mem_unit = f"MB of memory per node{_describe_origin(request.mem_from)}"
    return [
        _Dimension("gpus", request.gpus, count_gpus, f"{kind} per node", "cluster.n_gpus_per_node={}"),
        _Dimension("cpus", request.cpus, attrgetter("cpus"), cpus_unit, "at most {} CPUs per node"),
        _Dimension("memory", request.mem_mb, attrgetter("mem_mb"), mem_unit, "at most {} MB per node"),
    ]


def _describe_origin(options: Sequence[str]) -> str:
    """Return the options of a number in parentheses, the section only once."""
    names = [*options[:1], *(name.rpartition(".")[2] for name in options[1:])]
    return f" (from {', '.join(names)})" if names else ""


def _check_sizes(request: JobRequest, name: str, nodes: list[Node]) -> list[CapacityLimit]:
    """Return the limits from resources that too few nodes have."""
    n_nodes = request.n_nodes
    if len(nodes) < n_nodes:
        message = f"partition {name} has {len(nodes)} nodes; {n_nodes} were requested."
        return [CapacityLimit("nodes", message, _suggest_fewer_nodes(nodes, ""))]
    dimensions = _make_dimensions(request)
    limits = []
    for one in dimensions:
        enough = sum(map(one.has_enough, nodes))
        if enough >= n_nodes:
            continue
        most = sorted(map(one.has, nodes), reverse=True)[n_nodes - 1]
        message = (
            f"{enough} of {len(nodes)} nodes of partition {name} have {one.wanted} {one.unit}; "
            f"the most on {n_nodes} node(s) is {most}."
        )
        ways = [f"--n_nodes {enough}"] if enough else []
        ways += [one.change.format(most)] if most else []
        limits.append(CapacityLimit(one.limit, message, " or ".join(ways)))
    fitting = [node for node in nodes if all(one.has_enough(node) for one in dimensions)]
    if not limits and len(fitting) < n_nodes:
        message = (
            f"{len(fitting)} of {len(nodes)} nodes of partition {name} have enough GPUs, CPUs and memory; "
            f"{n_nodes} were requested."
        )
        limits.append(CapacityLimit("nodes", message, _suggest_fewer_nodes(fitting, "")))
    return limits


def _parse_gpus(gres: str) -> dict[str, int]:
    """Return the GPUs by type: `gpu:a100:8(S:0-1),nvme:2` -> {"a100": 8}."""
    found: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        words = part.split(":")
        if words[0] == "gpu":
            count = words[-1] if len(words) > 1 and words[-1].isdigit() else "1"
            kind = words[1] if len(words) > 1 and not words[1].isdigit() else ""
            found[kind] = found.get(kind, 0) + int(count)
    return found


def _time_s(text: str) -> int | None:
    try:
        return slurm_time.parse_time_limit(text)
    except ConfigError:  # n/a
        return None
