"""Slurm as the login node sees it: its programs, its version, whether it answers, the partition that is wanted."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, field

from hpc_rl.doctor.finding import Finding, Wanted, fail, ok, warn
from hpc_rl.schedulers.slurm import clean_environment

PROGRAMS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
OLDEST = (20, 11)  # --overlap
CALL_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Partition:
    """One line of sinfo, of all nodes of a partition that are alike."""

    name: str
    default: bool
    up: bool
    time_limit: str
    num_nodes: int
    cpus: int
    mem_mb: int
    gres: str

    @property
    def gpus(self) -> int:
        return sum(int(number) for number in re.findall(r"gpu(?::[^:,(]+)?:(\d+)", self.gres))


@dataclass
class Cluster:
    """What Slurm's commands said.

    Args:
        missing: Programs that are not on the PATH.
        version: Of the client.
        error: Why the controller did not answer.
        controllers: Lines of `scontrol ping`.
        partitions: Of sinfo.
        accounting: Why sacct does not answer; empty where it does.
    """

    missing: list[str] = field(default_factory=list)
    version: str = ""
    error: str = ""
    controllers: list[str] = field(default_factory=list)
    partitions: list[Partition] = field(default_factory=list)
    accounting: str = ""


def ask(environ: dict[str, str]) -> Cluster:
    """Four short calls, once. Never raises for what it finds."""
    cluster = Cluster(
        missing=[name for name in PROGRAMS if shutil.which(name, path=environ.get("PATH")) is None]
    )
    if "sinfo" in cluster.missing or "scontrol" in cluster.missing:
        return cluster
    code, said = _call(["sinfo", "--version"], environ)
    cluster.version = said.split()[-1] if code == 0 and said.split() else ""
    code, said = _call(["scontrol", "ping"], environ)
    cluster.controllers = said.splitlines()
    code, said = _call(["sinfo", "-h", "-e", "-o", "%P|%a|%l|%D|%c|%m|%G"], environ)
    cluster.error = "" if code == 0 else " ".join(said.split())[-300:]
    cluster.partitions = (
        [found for line in said.splitlines() if (found := _partition(line))] if code == 0 else []
    )
    code, said = _call(["sacct", "-n", "-X", "-S", "now", "-o", "JobID"], environ)
    cluster.accounting = "" if code == 0 else " ".join(said.split())[-200:] or "no answer"
    return cluster


def _call(argv: list[str], environ: dict[str, str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CALL_TIMEOUT_S,
            env=clean_environment(environ),
        )
    except subprocess.TimeoutExpired:
        return 1, f"{argv[0]} gave no answer within {CALL_TIMEOUT_S:g} s"
    except OSError as error:
        return 1, f"{argv[0]}: {error.strerror or error}"
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr or done.stdout


def _partition(line: str) -> Partition | None:
    fields = line.split("|")
    if len(fields) != 7 or not fields[3].isdigit():
        return None
    name, state, limit, nodes, cpus, mem, gres = fields
    num_nodes, num_cpus, mem_mb = (int(re.sub(r"\D.*", "", text) or 0) for text in (nodes, cpus, mem))
    return Partition(
        name.rstrip("*"), name.endswith("*"), state == "up", limit, num_nodes, num_cpus, mem_mb, gres
    )


def programs(cluster: Cluster, wanted: Wanted) -> Finding:
    name = "slurm programs"
    if not cluster.missing:
        return ok(name, "sbatch, srun and the others are on the PATH")
    if wanted.on_slurm or len(cluster.missing) < len(PROGRAMS):
        return fail(
            name,
            f"not on the PATH: {', '.join(cluster.missing)}",
            "load Slurm's module, or go to a login node of the cluster.",
        )
    return ok(name, "none on the PATH: trials run on this machine")


def version(cluster: Cluster, wanted: Wanted) -> Finding:
    name, numbers = "slurm version", tuple(map(int, re.findall(r"\d+", cluster.version)[:2]))
    if not numbers:
        return fail(name, "not known", "`sinfo --version` must print it.")
    if numbers < OLDEST:
        return fail(name, cluster.version, "20.11 or newer is needed: steps overlap only since then.")
    if numbers < (22, 5):
        return warn(name, cluster.version, "22.05 is the oldest that the tests ran on.")
    return ok(name, cluster.version)


def controller(cluster: Cluster, wanted: Wanted) -> Finding:
    name = "slurm controller"
    if cluster.error:
        return fail(name, cluster.error, "is SLURM_CONF right, and munge running? Else the admins know.")
    down = [line for line in cluster.controllers if "DOWN" in line]
    if down:
        return warn(name, "; ".join(down), "a backup answers; the admins should know.")
    return ok(name, "; ".join(cluster.controllers) or "answers")


def accounting(cluster: Cluster, wanted: Wanted) -> Finding:
    if cluster.accounting:
        fix = "trials work without it; why a job of long ago ended is then told by its own files alone."
        return warn("slurm accounting", cluster.accounting, fix)
    return ok("slurm accounting", "sacct answers")


def partition(cluster: Cluster, wanted: Wanted) -> Finding:
    name, names = "partition", sorted({one.name for one in cluster.partitions})
    mine = [
        one
        for one in cluster.partitions
        if (one.name == wanted.partition if wanted.partition else one.default)
    ]
    if not mine and wanted.partition:
        return fail(
            name,
            f"{wanted.partition} is not known",
            f"launcher.slurm.partition: one of {', '.join(names) or 'none'}.",
        )
    if not mine:
        return warn(
            name,
            "there is no default one",
            f"set launcher.slurm.partition: one of {', '.join(names) or 'none'}.",
        )
    if not any(one.up for one in mine):
        return fail(
            name, f"{mine[0].name} is down", f"choose another: {', '.join(names)}; or wait for the admins."
        )
    return ok(
        name, f"{mine[0].name}: {sum(one.num_nodes for one in mine)} nodes, time limit {mine[0].time_limit}"
    )


def nodes(cluster: Cluster, wanted: Wanted) -> Finding:
    """Whether so many nodes with so much exist at all; `render --check` says more."""
    mine = [
        one
        for one in cluster.partitions
        if (one.name == wanted.partition if wanted.partition else one.default)
    ]
    fitting = sum(
        one.num_nodes
        for one in mine
        if one.cpus >= wanted.cpus and one.mem_mb >= wanted.mem_mb and one.gpus >= wanted.gpus
    )
    each = f"{wanted.cpus} CPUs, {wanted.gpus} GPUs and {wanted.mem_mb} MB"
    found = f"{fitting} with {each}, {wanted.num_nodes} wanted"
    if mine and fitting < wanted.num_nodes:
        best = max(mine, key=lambda one: (one.gpus, one.mem_mb, one.cpus))
        has = f"its largest have {best.cpus} CPUs, {best.gpus} GPUs and {best.mem_mb} MB"
        return fail(
            "nodes",
            found,
            f"{has}: lower cluster.n_nodes, n_gpus_per_node or launcher.*, or name another partition.",
        )
    return ok("nodes", found)


CHECKS = (programs, version, controller, accounting, partition, nodes)


def judge(cluster: Cluster, wanted: Wanted) -> list[Finding]:
    """The findings about Slurm; one only, where there is none."""
    first = programs(cluster, wanted)
    if "sinfo" in cluster.missing or "scontrol" in cluster.missing:
        return [first]
    return [first, *(check(cluster, wanted) for check in CHECKS[1:])]
