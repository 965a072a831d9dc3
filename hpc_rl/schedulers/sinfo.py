"""Whether a request can ever run on a cluster, from one `sinfo`: which limit stands against it, and the nearest that would fit.

Pure. It says nothing of when: busy, drained and powered-down nodes count as nodes. Accounts and QoS are Slurm's to judge.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hpc_rl import slurm_time
from hpc_rl.errors import ConfigError
from hpc_rl.schedulers.hostlist import expand

SINFO = ["sinfo", "-h", "-a", "-N", "-o", "%P|%a|%l|%s|%N|%c|%m|%f|%G|%Z"]
# Rounding up for two threads per core never leaves a step without its place on the usual machines.
UNKNOWN_THREADS_PER_CORE = 2


@dataclass(frozen=True)
class Node:
    """One node in one partition, as sinfo shows it. Memory in MB; GPUs by type, "" where it has none."""

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
    """What one job asks for. None: nothing is asked of Slurm about it, so nothing stands against it."""

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
    cpus_from: str = ""  # the options that the number comes from, in words
    mem_from: str = ""


@dataclass(frozen=True)
class CapacityLimit:
    """A limit against a request. `nearest` is what to change, as options of the command line; empty where nothing helps.

    What is not `certain` may be lifted by a QoS: that is told, not refused.
    """

    limit: str
    message: str
    nearest: str = ""
    certain: bool = True


def read_sinfo(text: str) -> list[Node]:
    """Nodes from the output of SINFO; a line that is not understood is left out."""
    nodes = []
    for line in text.splitlines():
        fields = [part.strip() for part in line.split("|")]
        if len(fields) != 10 or not re.match(r"\d+", fields[5]) or not re.match(r"\d+", fields[6]):
            continue
        partition, available, limit, sizes, name, cpus, mem, features, gres, threads = fields
        nodes.append(
            Node(
                partition=partition.rstrip("*"),
                name=name,
                cpus=int(re.sub(r"\D.*", "", cpus)),
                mem_mb=int(re.sub(r"\D.*", "", mem)),
                gpus=_gpus(gres),
                features=frozenset(features.split(",")) - {"(null)", ""},
                max_time_s=_time_s(limit),
                max_nodes=int(most) if (most := sizes.rpartition("-")[2]).isdigit() else None,
                is_default=partition.endswith("*"),
                is_up=available == "up",
                threads_per_core=int(threads) if threads.isdigit() else UNKNOWN_THREADS_PER_CORE,
            )
        )
    return nodes


def judge(request: JobRequest, nodes: Sequence[Node]) -> list[CapacityLimit]:
    """The limits that stand against a request; empty where it can run. With several partitions, one that takes it is enough."""
    known = list(dict.fromkeys(node.partition for node in nodes))
    wanted = _partitions_of(request, nodes)
    if not wanted:
        return [
            CapacityLimit(
                "partition",
                f"this cluster has no default partition; it has {', '.join(sorted(known))}.",
                "--partition NAME",
            )
        ]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        near = (
            difflib.get_close_matches(unknown[0], known, n=1)
            or [name for name in known if _takes(request, name, nodes)][:1]
        )
        words = (
            f"there is no partition {unknown[0]!r} with nodes; this cluster has {', '.join(sorted(known))}."
        )
        return [CapacityLimit("partition", words, f"--partition {near[0]}" if near else "")]
    verdicts = [_in_partition(request, name, nodes) for name in wanted]
    best = min(verdicts, key=lambda findings: sum(finding.certain for finding in findings))
    if not any(finding.certain for finding in best):
        return best
    elsewhere = [name for name in known if name not in wanted and _takes(request, name, nodes)]
    if elsewhere:
        best = [
            *best,
            CapacityLimit(
                "partition",
                f"as it is, partition {elsewhere[0]} would take it.",
                f"--partition {elsewhere[0]}",
                False,
            ),
        ]
    return best


def threads_per_core(request: JobRequest, nodes: Sequence[Node]) -> int:
    """Return the threads of a core on the nodes that may be given to a request; the largest number where they differ."""
    wanted = _partitions_of(request, nodes)
    found = [node.threads_per_core for node in nodes if node.partition in wanted]
    return max(found, default=UNKNOWN_THREADS_PER_CORE)


def _partitions_of(request: JobRequest, nodes: Sequence[Node]) -> list[str]:
    if request.partition:
        return request.partition.split(",")
    return list(dict.fromkeys(node.partition for node in nodes if node.is_default))


def _takes(request: JobRequest, partition: str, nodes: Sequence[Node]) -> bool:
    return not _in_partition(request, partition, nodes)


def _in_partition(request: JobRequest, name: str, nodes: Sequence[Node]) -> list[CapacityLimit]:
    found = [node for node in nodes if node.partition == name]
    limits = found[0]
    lifted = request.qos is not None
    findings = []
    if not limits.is_up:
        findings.append(
            CapacityLimit("partition", f"partition {name} is not up: its jobs wait.", certain=False)
        )
    if request.time_s is not None and limits.max_time_s is not None and request.time_s > limits.max_time_s:
        most = slurm_time.to_text(limits.max_time_s)
        words = f"partition {name} ends every job after {most}, and {slurm_time.to_text(request.time_s)} is asked for."
        findings.append(CapacityLimit("time", words, f"--time {most}", not lifted))
    if limits.max_nodes is not None and request.n_nodes > limits.max_nodes:
        words = f"partition {name} gives a job at most {limits.max_nodes} nodes, and {request.n_nodes} are asked for."
        findings.append(CapacityLimit("nodes", words, f"--n_nodes {limits.max_nodes}", not lifted))
    usable, refused = _eligible(request, found)
    return [*findings, *refused] if refused else [*findings, *_sizes(request, name, usable)]


def _eligible(request: JobRequest, nodes: list[Node]) -> tuple[list[Node], list[CapacityLimit]]:
    """Nodes that names and features leave over."""
    name, n_nodes = nodes[0].partition, request.n_nodes
    if request.nodelist:
        missing = sorted(set(expand(request.nodelist)) - {node.name for node in nodes})
        if missing:
            words = f"partition {name} has no node {missing[0]}, which launcher.slurm.nodelist asks for."
            return nodes, [CapacityLimit("nodelist", words, "launcher.slurm.nodelist=null")]
    if request.exclude:
        excluded = set(expand(request.exclude))
        left = [node for node in nodes if node.name not in excluded]
        if len(left) < n_nodes <= len(nodes):
            words = f"launcher.slurm.exclude leaves {len(left)} of partition {name}'s {len(nodes)} nodes; {n_nodes} are asked for."
            return left, [
                CapacityLimit(
                    "exclude", words, f"--n_nodes {len(left)}" if left else "launcher.slurm.exclude=null"
                )
            ]
        nodes = left
    if request.constraint and re.fullmatch(r"[\w.:=-]+([&|][\w.:=-]+)*", request.constraint):
        left = [node for node in nodes if _has(node.features, request.constraint)]
        if len(left) < n_nodes <= len(nodes):
            known = ", ".join(sorted(set().union(*(node.features for node in nodes)))) or "none"
            words = (
                f"{len(left)} of {len(nodes)} nodes of partition {name} have the features {request.constraint!r}, and {n_nodes} "
                f"are asked for; its features: {known}."
            )
            return left, [
                CapacityLimit(
                    "constraint",
                    words,
                    f"--n_nodes {len(left)}" if left else "launcher.slurm.constraint=null",
                )
            ]
        nodes = left
    return nodes, []


def _has(features: frozenset[str], constraint: str) -> bool:
    """`a&b|c` as Slurm reads it: from left to right."""
    verdict, words = True, re.split(r"([&|])", constraint)
    for operator, word in zip(["&", *words[1::2]], words[::2], strict=True):
        verdict = (verdict and word in features) if operator == "&" else (verdict or word in features)
    return verdict


def _sizes(request: JobRequest, name: str, nodes: list[Node]) -> list[CapacityLimit]:
    """What no node has, or too few nodes have."""
    n_nodes = request.n_nodes
    if len(nodes) < n_nodes:
        words = f"partition {name} has {len(nodes)} nodes, and {n_nodes} are asked for."
        return [CapacityLimit("nodes", words, f"--n_nodes {len(nodes)}" if nodes else "")]
    cpus_from, mem_from = (
        f" (from {words})" if words else "" for words in (request.cpus_from, request.mem_from)
    )
    kind = f"{request.gpu_type} GPUs" if request.gpu_type else "GPUs"
    dimensions: list[tuple[str, int | None, Callable[[Node], int], str, str]] = [
        (
            "gpus",
            request.gpus,
            lambda node: _gpu_count(node, request.gpu_type),
            f"{kind} per node",
            "cluster.n_gpus_per_node={}",
        ),
        (
            "cpus",
            request.cpus,
            lambda node: node.cpus,
            f"CPUs per node{cpus_from}",
            "at most {} CPUs per node",
        ),
        (
            "memory",
            request.mem_mb,
            lambda node: node.mem_mb,
            f"MB of memory per node{mem_from}",
            "at most {} MB per node",
        ),
    ]
    findings = []
    for limit, wanted, has, unit, change in dimensions:
        if wanted is None or sum(has(node) >= wanted for node in nodes) >= n_nodes:
            continue
        most = sorted((has(node) for node in nodes), reverse=True)[n_nodes - 1]
        enough = sum(has(node) >= wanted for node in nodes)
        there = (
            f"{enough} of {len(nodes)} nodes of partition {name} have"
            if enough
            else f"no node of partition {name} has"
        )
        words = f"{there} {wanted} {unit}; on {n_nodes} node{'s' if n_nodes > 1 else ''} the most is {most}."
        ways = [f"--n_nodes {enough}"] if enough else []
        findings.append(
            CapacityLimit(limit, words, " or ".join([*ways, change.format(most)] if most else ways))
        )
    fitting = sum(
        all(wanted is None or has(node) >= wanted for _, wanted, has, _, _ in dimensions) for node in nodes
    )
    if not findings and fitting < n_nodes:
        words = f"{fitting} of {len(nodes)} nodes of partition {name} have all that is asked for at once, and {n_nodes} are needed."
        findings.append(CapacityLimit("nodes", words, f"--n_nodes {fitting}" if fitting else ""))
    return findings


def _gpu_count(node: Node, kind: str | None) -> int:
    return sum(node.gpus.values()) if kind is None else node.gpus.get(kind, 0)


def _gpus(gres: str) -> dict[str, int]:
    """`gpu:a100:8(S:0-1),nvme:2` -> {"a100": 8}."""
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
        return slurm_time.to_seconds(text)
    except ConfigError:  # n/a
        return None
