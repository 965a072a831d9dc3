"""The doctor's visit to the nodes: one srun, in this job or a short one, and checks across all nodes."""

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpc_rl.doctor.finding import Finding, Requirements, fail, ok, warn
from hpc_rl.doctor.node import MAX_PEERS, NodeReport
from hpc_rl.errors import CannotWrite, SchedulerError
from hpc_rl.render import code_zip
from hpc_rl.schedulers.slurm import clean_environment
from hpc_rl.trial import read_json, write_json

SLOW_S = 5.0
STALE_S = 1.0
MAX_CLOCK_SKEW_S = 2.0
FOLDER = ".hpc-rl-doctor-"


@dataclass(frozen=True)
class VisitResult:
    """What the nodes reported, by rank, and srun's error where it had one."""

    reports: list[NodeReport]
    num_nodes: int
    complaint: str = ""

    def names(self, ranks: Sequence[int]) -> str:
        by_rank = {report.seen.rank: report.node for report in self.reports}
        return ", ".join(by_rank.get(rank, f"number {rank}") for rank in ranks)


def visit(needs: Requirements, options: Sequence[str], wait_s: float) -> VisitResult:
    """Visit the nodes of this job, or of a short job of its own. Raises CannotWrite, SchedulerError.

    Args:
        needs: What is asked of the nodes, and how many.
        options: Of srun where a job is needed: partition, account, GPUs, memory and the like.
        wait_s: Time for the nodes to be allocated and to report.
    """
    folder = Path(needs.fileroot) / f"{FOLDER}{secrets.token_hex(4)}"
    is_inside = "SLURM_JOB_ID" in os.environ
    num_nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) if is_inside else needs.num_nodes
    name, code = code_zip.build()
    try:
        folder.mkdir(parents=True, mode=0o700)
        (folder / "meet").mkdir()
        (folder / name).write_bytes(code)
        write_json(folder / "needs.json", asdict(replace(needs, num_nodes=num_nodes)))
    except OSError as error:
        raise CannotWrite(f"{folder} can't be written: {error.strerror or error}") from error
    program = [needs.python, "-m", "hpc_rl.doctor.node", "--dir", str(folder / "meet")]
    program += ["--needs", str(folder / "needs.json"), "--count", str(num_nodes)]
    environ = {**clean_environment(os.environ), "PYTHONPATH": str(folder / name)}
    if is_inside:  # srun must know the job, and nothing else of what surrounds it
        environ["SLURM_JOB_ID"] = os.environ["SLURM_JOB_ID"]
    try:
        complaint = _run([*srun(num_nodes, is_inside, options), *program], environ, wait_s)
        return VisitResult(read_reports(folder / "meet"), num_nodes, complaint)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


def _run(argv: list[str], environ: dict[str, str], wait_s: float) -> str:
    """Run the nodes' program; return srun's error."""
    try:
        done = subprocess.run(
            argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=wait_s
        )
    except FileNotFoundError as error:
        raise SchedulerError("srun is not on the PATH: --allocation needs Slurm.") from error
    except subprocess.TimeoutExpired:
        return f"the nodes did not report within {wait_s:g} s; allow more by --wait_s"
    if done.returncode == 0:
        return ""
    return " ".join(done.stderr.split())[-500:] or f"exit code {done.returncode}"


def srun(num_nodes: int, is_inside: bool, options: Sequence[str]) -> list[str]:
    """Return the srun of the visit: one task per node, beside the other steps of this job if any."""
    flags = ["--job-name=hpc-rl.doctor", f"--nodes={num_nodes}", f"--ntasks={num_nodes}"]
    flags += ["--ntasks-per-node=1", "--export=ALL", "--kill-on-bad-exit=0", "--mpi=none"]
    return ["srun", *flags, "--overlap", "--mem=0"] if is_inside else ["srun", *flags, "--time=10", *options]


def read_reports(folder: Path) -> list[NodeReport]:
    """Return what the nodes reported, by rank, without incomplete files."""
    found: dict[int, NodeReport] = {}
    for path in folder.glob("result-*"):
        try:
            report = NodeReport.from_json(read_json(path))
            found[report.seen.rank] = report
        except (TypeError, KeyError, ValueError):
            continue
    return [found[rank] for rank in sorted(found)]


# --- checks across all nodes


def check_reported(result: VisitResult) -> Finding:
    there = {report.seen.rank for report in result.reports}
    found = f"{len(there)} of {result.num_nodes}"
    if len(there) < result.num_nodes:
        found += f"; srun: {result.complaint}" if result.complaint else ""
        fix = "exclude nodes that can't read cluster.fileroot and launcher.python (`srun -N1 ls FILEROOT`)."
        return fail("nodes reported", found, fix)
    return ok("nodes reported", f"{found}: {result.names(sorted(there))}")


def check_visible_to_all(result: VisitResult) -> Finding:
    blind = [report.seen.rank for report in result.reports if report.seen.missing]
    if blind:
        fix = "cluster.fileroot must be one file system on all nodes; exclude nodes that mount another one."
        return fail("visible to all", f"{result.names(blind)} did not see what every other node wrote", fix)
    return ok("visible to all", "each node saw what every other node wrote")


def check_visible_soon(result: VisitResult) -> Finding:
    slowest = _worst(report.seen.name_s for report in result.reports)
    if slowest is None:
        fix = "directory caches: mount with a small acdirmax, or use another file system."
        return fail("visible soon", "a new name did not show on every node", fix)
    if slowest > SLOW_S:
        fix = "directory caches (acdirmax): roles find each other slowly."
        return warn("visible soon", f"a new name shows after up to {slowest:.1f} s", fix)
    return ok("visible soon", f"a new name shows on all nodes, there and back, within {slowest:.2f} s")


def check_absent_names(result: VisitResult) -> Finding:
    worst = _worst(report.seen.stale_name_s for report in result.reports)
    if worst is None or worst > STALE_S:
        found = "more than 5 s" if worst is None else f"{worst:.1f} s"
        fix = "hpc-rl lists folders instead; tools that poll `exists` will wait."
        return warn("absent names", f"remembered as absent for {found}", fix)
    return ok("absent names", "seen as soon as they are listed")


def check_replaced_files(result: VisitResult) -> Finding:
    worst = _worst(report.seen.stale_content_s for report in result.reports)
    if worst is None:
        fix = "opens must be fresh: do not mount with `nocto`."
        return fail("replaced files", "a node kept reading the old content", fix)
    if worst > STALE_S:
        fix = "attribute caches (acregmax, nocto): make them small for fileroot."
        return warn("replaced files", f"read as the old one for {worst:.1f} s", fix)
    return ok("replaced files", "read as the new one at once")


def check_one_winner(result: VisitResult) -> Finding:
    wrong = []
    for kind in ("open", "link", "mkdir"):
        winners = [report.seen.rank for report in result.reports if kind in report.seen.won]
        if len(winners) > 1:
            wrong.append(f"{kind} was won by {result.names(winners)}")
    if wrong:
        fix = "this file system can't hold trials: two supervisors could both own one."
        return fail("one winner", "; ".join(wrong), fix)
    return ok("one winner", "of all nodes that create one name, by O_EXCL, link and mkdir")


def check_lock_scope(result: VisitResult) -> Finding:
    got = [report.seen.rank for report in result.reports if report.seen.lock]
    if got:
        fix = "hpc-rl takes none there; keep HF_HOME, TRITON_CACHE_DIR and the like on a local disk."
        return warn("lock scope", f"flock of one node does not keep out {result.names(got)}", fix)
    if all(report.seen.lock is None for report in result.reports):
        return ok("lock scope", "no locks on this file system, and none are needed")
    return ok("lock scope", "flock keeps other nodes out")


def check_clocks(result: VisitResult) -> Finding:
    # The file server's clock is the common measure.
    skews = {report.seen.rank: report.seen.skew_s for report in result.reports}
    first = min(skews, key=lambda rank: skews[rank])
    last = max(skews, key=lambda rank: skews[rank])
    apart = skews[last] - skews[first]
    if apart > MAX_CLOCK_SKEW_S:
        found = f"{result.names([first])} and {result.names([last])} are {apart:.1f} s apart"
        return warn(
            "clocks", found, "hpc-rl compares none, but logs are in order only with NTP on all nodes."
        )
    return ok("clocks", f"at most {apart:.2f} s apart")


def check_network(result: VisitResult) -> Finding:
    broken = [report.seen for report in result.reports if report.seen.unreachable]
    if broken:
        found = f"{result.names([broken[0].rank])} can't reach {', '.join(broken[0].unreachable[:3])}"
        fix = (
            "a firewall between nodes, or the wrong interface: open the port range, or set cluster.interface."
        )
        return fail("network", found, fix)
    each = min(MAX_PEERS, max(0, result.num_nodes - 1))
    if not each:
        return ok("network", "one node only")
    return ok("network", f"each node reached {each} other{'s' if each > 1 else ''}")


def check_same_software(result: VisitResult) -> Finding:
    ranks: dict[str, list[int]] = {}
    for report in result.reports:
        ranks.setdefault(report.software, []).append(report.seen.rank)
    if len(ranks) > 1:
        found = "; ".join(f"{what} on {result.names(where)}" for what, where in ranks.items())
        fix = "launcher.python must be one environment on the shared file system, or the same image."
        return fail("same software", found, fix)
    return ok("same software", next(iter(ranks)))


def _worst(values: Iterable[float | None]) -> float | None:
    """Return the largest value, None where one is None."""
    known = list(values)
    present = [value for value in known if value is not None]
    return max(present, default=0.0) if len(present) == len(known) else None


NODE_CHECKS: tuple[Callable[[VisitResult], Finding], ...] = (
    check_reported, check_visible_to_all, check_visible_soon, check_absent_names, check_replaced_files,
    check_one_winner, check_lock_scope, check_clocks, check_network, check_same_software,
)  # fmt: skip


def check_nodes(result: VisitResult) -> list[Finding]:
    """Return the findings across all nodes; only the first where no node reported."""
    return [check(result) for check in (NODE_CHECKS if result.reports else NODE_CHECKS[:1])]
