"""The doctor's visit to the nodes: one srun in this job or in a short one of its own, and what the nodes' words amount to."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_rl.doctor.facts import Facts
from hpc_rl.doctor.finding import Finding, fail, ok, warn
from hpc_rl.doctor.node import MAX_PEERS, Seen
from hpc_rl.errors import CannotWrite, SchedulerError
from hpc_rl.render import code_zip
from hpc_rl.schedulers.slurm import clean_environment
from hpc_rl.trial import read_json

PATIENCE_S = 90.0
SLOW_S = 5.0
FOLDER = ".hpc-rl-doctor-"


@dataclass(frozen=True)
class Report:
    """What one node left."""

    facts: Facts
    seen: Seen


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to ask Slurm for where there is no allocation yet.

    Args:
        num_nodes: How many nodes.
        options: Of srun: partition, account, GPUs, memory and the like.
        python: Interpreter of the jobs.
        server_python: Interpreter of SGLang.
        wait_s: Give up when the nodes have not come and reported by then.
    """

    num_nodes: int
    options: Sequence[str] = ()
    python: str = "python3"
    server_python: str = ""
    wait_s: float = 600.0


def visit(root: Path, request: Request) -> tuple[list[Report], str]:
    """Reports of the nodes, by rank, and srun's complaint where it had one. Raises CannotWrite, SchedulerError."""
    folder = root / f"{FOLDER}{secrets.token_hex(4)}"
    name, code = code_zip.build()
    try:
        folder.mkdir(parents=True, mode=0o700)
        (folder / "code").mkdir()
        (folder / "code" / name).write_bytes(code)
        (folder / "meet").mkdir()
    except OSError as error:
        raise CannotWrite(f"{folder} can't be written: {error.strerror or error}") from error
    try:
        return _visit(root, folder, folder / "code" / name, request)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


def _visit(root: Path, folder: Path, code: Path, request: Request) -> tuple[list[Report], str]:
    inside = "SLURM_JOB_ID" in os.environ
    num_nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) if inside else request.num_nodes
    program = [request.python, "-m", "hpc_rl.doctor.node", "--dir", str(folder / "meet"), "--root", str(root)]
    program += ["--count", str(num_nodes), "--patience_s", str(PATIENCE_S), "--python", request.python]
    program += ["--server_python", request.server_python] if request.server_python else []
    argv = [*srun(num_nodes, inside, request.options), *program]
    environ = {**clean_environment(os.environ), "PYTHONPATH": str(code)}
    if inside:  # srun must know the job, and nothing else of what surrounds it
        environ |= {name: os.environ[name] for name in ("SLURM_JOB_ID",) if name in os.environ}
    try:
        done = subprocess.run(
            argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=request.wait_s,
        )
        complaint = (
            ""
            if done.returncode == 0
            else " ".join(done.stderr.split())[-500:] or f"exit code {done.returncode}"
        )
    except FileNotFoundError as error:
        raise SchedulerError("srun is not on the PATH: --allocation needs Slurm.") from error
    except subprocess.TimeoutExpired:
        complaint = f"the nodes did not come and report within {request.wait_s:g} s; --wait_s grants more"
    return reports(folder / "meet"), complaint


def srun(num_nodes: int, inside: bool, options: Sequence[str]) -> list[str]:
    """The srun of the visit: one task on each node, beside whatever runs there where the allocation is ours already."""
    flags = [
        "--job-name=hpc-rl.doctor",
        f"--nodes={num_nodes}",
        f"--ntasks={num_nodes}",
        "--ntasks-per-node=1",
        "--export=ALL",
    ]
    flags += ["--kill-on-bad-exit=0", "--mpi=none"]
    return ["srun", *flags, "--overlap", "--mem=0"] if inside else ["srun", *flags, "--time=10", *options]


def reports(folder: Path) -> list[Report]:
    """What the nodes left, by rank; what is torn is left out."""
    found: dict[int, Report] = {}
    for path in folder.glob("result-*"):
        data: Any = read_json(path)
        try:
            report = Report(Facts.from_json(data["facts"]), Seen(**data["seen"]))
            found[report.seen.rank] = report
        except (TypeError, KeyError, ValueError):
            continue
    return [found[rank] for rank in sorted(found)]


# --- what the words of all nodes amount to -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nodes:
    """Everything that was reported."""

    reports: list[Report]
    num_nodes: int
    complaint: str = ""
    now: float = field(default_factory=time.time)

    def names(self, ranks: Sequence[int]) -> str:
        by_rank = {report.seen.rank: report.facts.node or report.facts.host for report in self.reports}
        return ", ".join(by_rank.get(rank, f"number {rank}") for rank in ranks)


def all_reported(nodes: Nodes) -> Finding:
    there = {report.seen.rank for report in nodes.reports}
    missing = sorted(set(range(nodes.num_nodes)) - there)
    if missing:
        said = f"; srun said: {nodes.complaint}" if nodes.complaint else ""
        fix = "can the nodes read cluster.fileroot and launcher.python? Try `srun -N1 ls FILEROOT`; exclude nodes that can't."
        return fail("nodes reported", f"{len(there)} of {nodes.num_nodes}{said}", fix)
    return ok("nodes reported", f"{nodes.num_nodes} of {nodes.num_nodes}: {nodes.names(sorted(there))}")


def all_see_each_other(nodes: Nodes) -> Finding:
    name, blind = "visible to all", [report.seen.rank for report in nodes.reports if report.seen.missing]
    if blind:
        fix = "cluster.fileroot must be one file system on all nodes; a node that mounts it otherwise is to be excluded."
        return fail(name, f"{nodes.names(blind)} did not see what every other node wrote", fix)
    return ok(name, "each node saw what every other node wrote")


def seen_soon(nodes: Nodes) -> Finding:
    name = "visible soon"
    times = [report.seen.name_s for report in nodes.reports]
    if not times or any(one is None for one in times):
        return fail(
            name,
            "a new name did not show on every node",
            "directory caches: mount with a small acdirmax, or another file system.",
        )
    slowest = max(one for one in times if one is not None)
    if slowest > SLOW_S:
        return warn(
            name,
            f"a new name shows after up to {slowest:.1f} s",
            "directory caches (acdirmax): roles find each other slowly.",
        )
    return ok(name, f"a new name shows on all nodes, there and back, within {slowest:.2f} s")


def names_not_stale(nodes: Nodes) -> Finding:
    name, values = "absent names", [report.seen.stale_name_s for report in nodes.reports]
    worst = (
        None
        if any(one is None for one in values)
        else max((one for one in values if one is not None), default=0.0)
    )
    if worst is None or worst > 1.0:
        how_long = "more than 5 s" if worst is None else f"{worst:.1f} s"
        return warn(
            name,
            f"remembered as absent for {how_long}",
            "hpc-rl lists folders instead; tools that poll `exists` will wait.",
        )
    return ok(name, "seen as soon as they are listed")


def contents_not_stale(nodes: Nodes) -> Finding:
    name, values = "replaced files", [report.seen.stale_content_s for report in nodes.reports]
    if any(one is None for one in values):
        return fail(
            name, "a node went on reading the old content", "opens must be fresh: do not mount with `nocto`."
        )
    worst = max((one for one in values if one is not None), default=0.0)
    if worst > 1.0:
        return warn(
            name,
            f"read as the old one for {worst:.1f} s",
            "attribute caches (acregmax, nocto): make them small for fileroot.",
        )
    return ok(name, "read as the new one at once")


def one_winner(nodes: Nodes) -> Finding:
    name, wrong = "one winner", []
    for kind in ("open", "link", "mkdir"):
        winners = [report.seen.rank for report in nodes.reports if kind in report.seen.won]
        if len(winners) > 1:
            wrong.append(f"{kind} was won by {nodes.names(winners)}")
    if wrong:
        return fail(
            name, "; ".join(wrong), "this file system can't hold trials: two supervisors could both own one."
        )
    return ok(name, "of all nodes that create one name, by O_EXCL, link and mkdir")


def lock_scope(nodes: Nodes) -> Finding:
    got = [report.seen.rank for report in nodes.reports if report.seen.lock]
    if got:
        fix = "hpc-rl takes none there; keep HF_HOME, TRITON_CACHE_DIR and the like on a local disk of the node."
        return warn("lock scope", f"flock of one node does not keep out {nodes.names(got)}", fix)
    if all(report.seen.lock is None for report in nodes.reports):
        return ok("lock scope", "no locks on this file system, and none are needed")
    return ok("lock scope", "flock keeps other nodes out")


def clocks(nodes: Nodes) -> Finding:
    """By the file server's clock as the common measure."""
    if not nodes.reports:
        return fail("clocks", "not known", "see `nodes reported`.")
    skews = {report.seen.rank: report.seen.skew_s for report in nodes.reports}
    first, last = min(skews, key=lambda rank: skews[rank]), max(skews, key=lambda rank: skews[rank])
    apart = skews[last] - skews[first]
    if apart > 2.0:
        words = f"{nodes.names([first])} and {nodes.names([last])} are {apart:.1f} s apart"
        return warn(
            "clocks",
            words,
            "hpc-rl compares none, but logs and metrics are in order only with NTP on all nodes.",
        )
    return ok("clocks", f"at most {apart:.2f} s apart")


def zones(nodes: Nodes) -> Finding:
    found = sorted({report.facts.time_zone for report in nodes.reports})
    if len(found) > 1:
        return warn(
            "time zones",
            f"nodes differ: {', '.join(found)}",
            "set TZ in launcher.*_env_vars, or /etc/localtime alike.",
        )
    return ok("time zones", ", ".join(found))


def reachable(nodes: Nodes) -> Finding:
    broken = [
        (report.seen.rank, report.seen.unreachable) for report in nodes.reports if report.seen.unreachable
    ]
    if broken:
        rank, addresses = broken[0]
        fix = "a firewall between nodes, or an address of the wrong interface: open the port range, or fix the route to peers."
        return fail("network", f"{nodes.names([rank])} can't reach {', '.join(addresses[:3])}", fix)
    each = min(MAX_PEERS, max(0, nodes.num_nodes - 1))
    return ok(
        "network", f"each node reached {each} other{'s' if each != 1 else ''}" if each else "one node only"
    )


def alike(nodes: Nodes) -> Finding:
    """Nodes of one job should run one software."""
    found: dict[str, list[int]] = {}
    for report in nodes.reports:
        trainer = report.facts.trainer
        words = f"Python {report.facts.python}, torch {trainer.get('torch') or 'missing' if isinstance(trainer, dict) else 'unknown'}"
        found.setdefault(words, []).append(report.seen.rank)
    if len(found) > 1:
        words = "; ".join(f"{what} on {nodes.names(ranks)}" for what, ranks in found.items())
        return fail(
            "same software",
            words,
            "launcher.python must be one environment on the shared file system, or the same image.",
        )
    return ok("same software", next(iter(found), "not known"))


CHECKS = (
    all_reported, all_see_each_other, seen_soon, names_not_stale, contents_not_stale, one_winner, lock_scope, clocks, zones,
    reachable, alike,
)  # fmt: skip


def judge(nodes: Nodes) -> list[Finding]:
    """What the nodes tell together; nothing more where none came."""
    return [check(nodes) for check in (CHECKS if nodes.reports else CHECKS[:1])]
