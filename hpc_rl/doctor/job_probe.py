"""The doctor's visit to the nodes: one srun, in this job or a short one, and checks across all nodes."""

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpc_rl.core.errors import CannotWrite, SchedulerError
from hpc_rl.core.trial import load_json, write_json
from hpc_rl.doctor.finding import Finding, Requirements, Verdict, fail, make_finding, ok, warn
from hpc_rl.doctor.node import MAX_PEERS, MEET, NEEDS, STALE_NAME_S, NodeReport
from hpc_rl.render import code_zip
from hpc_rl.schedulers.slurm import clean_environment

SLOW_S = 5.0
STALE_S = 1.0
NEVER = float("inf")
MAX_CLOCK_SKEW_S = 2.0
FOLDER = ".hpc-rl-doctor-"
TRACEBACK = "Traceback (most recent call last):"  # as Python begins one
MAX_CHARS = 500  # of srun's error


@dataclass(frozen=True)
class VisitResult:
    """What the nodes reported, by rank, and srun's error where it had one."""

    reports: list[NodeReport]
    num_nodes: int
    complaint: str = ""

    def join_names(self, ranks: Sequence[int]) -> str:
        by_rank = {report.seen.rank: report.node for report in self.reports}
        return ", ".join(by_rank.get(rank, f"number {rank}") for rank in ranks)


def visit_nodes(needs: Requirements, options: Sequence[str], wait_s: float) -> VisitResult:
    """Visit the nodes of this job, or of a new short job. Raises CannotWrite, SchedulerError.

    Args:
        needs: Requirements on the nodes, and their number.
        options: Of srun where a job is needed: partition, account, GPUs, memory and the like.
        wait_s: Time for the nodes to be allocated and to report.
    """
    folder = Path(needs.fileroot) / f"{FOLDER}{secrets.token_hex(4)}"

    job_id = os.environ.get("SLURM_JOB_ID")
    num_nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) if job_id else needs.num_nodes
    name, code = code_zip.build()
    try:
        folder.mkdir(parents=True, mode=0o700)
        (folder / MEET).mkdir()
        (folder / name).write_bytes(code)
        write_json(folder / NEEDS, asdict(replace(needs, num_nodes=num_nodes)))
    except OSError as error:
        raise CannotWrite(f"{folder} can't be written: {error.strerror or error}") from error
    program = [needs.python, "-m", "hpc_rl.doctor.node", "--dir", str(folder)]
    environ = {**clean_environment(os.environ), "PYTHONPATH": str(folder / name)}
    if job_id:  # srun must know the job, and no other variable of it
        environ["SLURM_JOB_ID"] = job_id
    try:
        complaint = _call_srun(
            [*make_srun_command(num_nodes, bool(job_id), options), *program], environ, wait_s
        )
        return VisitResult(load_reports(folder / MEET), num_nodes, complaint)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _call_srun(argv: list[str], environ: dict[str, str], wait_s: float) -> str:
    """Run the nodes' program; return srun's error."""
    try:
        done = subprocess.run(
            argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=wait_s
        )
    except FileNotFoundError as error:
        raise SchedulerError(
            "--allocation needs Slurm, but srun is not on the PATH: run this on a login node."
        ) from error
    except subprocess.TimeoutExpired:
        return f"the nodes did not report within {wait_s:g} s; allow more by --wait_s"
    if done.returncode == 0:
        return ""
    return find_error(done.stderr) or f"exit code {done.returncode}"


def find_error(stderr: str) -> str:
    """Return the error in what srun and the nodes' programs printed, in one line.

    Of a traceback that is its last line; how srun says that the tasks failed adds nothing to it.
    """
    lines = stderr.splitlines()
    if TRACEBACK in lines:
        frames = lines[lines.index(TRACEBACK) + 1 :]
        raised = next((line for line in frames if line and not line[0].isspace()), "")
        if raised:
            return f"the program on a node failed: {raised}"[:MAX_CHARS]
    # Equal lines of several nodes are given once.
    return " ".join(" ".join(dict.fromkeys(lines)).split())[-MAX_CHARS:]


def make_srun_command(num_nodes: int, is_inside: bool, options: Sequence[str]) -> list[str]:
    """Return the srun of the visit: one task per node, in parallel to other steps of this job."""
    flags = ["--job-name=hpc-rl.doctor", f"--nodes={num_nodes}", f"--ntasks={num_nodes}"]
    flags += ["--ntasks-per-node=1", "--export=ALL", "--kill-on-bad-exit=0", "--mpi=none"]
    return ["srun", *flags, "--overlap", "--mem=0"] if is_inside else ["srun", *flags, "--time=10", *options]


def load_reports(folder: Path) -> list[NodeReport]:
    """Return the reports of the nodes, by rank, without incomplete files."""
    found = []
    for path in folder.glob("result-*"):
        with contextlib.suppress(TypeError, KeyError, ValueError):
            found.append(NodeReport.from_json(load_json(path)))
    return sorted(found, key=lambda report: report.seen.rank)


def check_nodes_reported(result: VisitResult) -> Verdict:
    there = {report.seen.rank for report in result.reports}
    found = f"{len(there)} of {result.num_nodes}"
    if len(there) < result.num_nodes:
        found += f"; srun: {result.complaint}" if result.complaint else ""
        fix = "exclude nodes that can't read cluster.fileroot and launcher.python (`srun -N1 ls FILEROOT`)."
        return fail(found, fix)
    return ok(f"{found}: {result.join_names(sorted(there))}")


def check_visible_to_all(result: VisitResult) -> Verdict:
    blind = [report.seen.rank for report in result.reports if report.seen.missing]
    if blind:
        fix = "cluster.fileroot must be one file system on all nodes; exclude nodes that mount another one."
        return fail(f"{result.join_names(blind)} did not see what every other node wrote", fix)
    return ok("each node saw what every other node wrote")


def check_visible_soon(result: VisitResult) -> Verdict:
    slowest = _find_worst(report.seen.name_s for report in result.reports)
    if slowest == NEVER:
        fix = "directory caches: mount with a small acdirmax, or use another file system."
        return fail("a new name did not show on every node", fix)
    if slowest > SLOW_S:
        fix = "directory caches (acdirmax): roles find each other slowly."
        return warn(f"a new name shows after up to {slowest:.1f} s", fix)
    return ok(f"a new name shows on all nodes, there and back, within {slowest:.2f} s")


def check_absent_names(result: VisitResult) -> Verdict:
    worst = _find_worst(report.seen.stale_name_s for report in result.reports)
    if worst > STALE_S:
        found = f"more than {STALE_NAME_S:g} s" if worst == NEVER else f"{worst:.1f} s"
        fix = "hpc-rl lists folders instead; tools that poll `exists` will wait."
        return warn(f"a new file looks absent for {found} after a failed look-up", fix)
    return ok("a new file is found as soon as it is listed")


def check_replaced_files(result: VisitResult) -> Verdict:
    worst = _find_worst(report.seen.stale_content_s for report in result.reports)
    if worst == NEVER:
        return fail(
            "a node kept reading the old content", "each open must read new data: do not mount with `nocto`."
        )
    if worst > STALE_S:
        fix = "attribute caches (acregmax, nocto): make them small for fileroot."
        return warn(f"a node reads the old content for {worst:.1f} s", fix)
    return ok("each node reads the new content immediately")


def check_one_winner(result: VisitResult) -> Verdict:
    wrong = []
    for kind in ("open", "link", "mkdir"):
        winners = [report.seen.rank for report in result.reports if kind in report.seen.won]
        if len(winners) > 1:
            wrong.append(f"{kind} was won by {result.join_names(winners)}")
    if wrong:
        fix = "this file system can't hold trials: two supervisors could both own one."
        return fail("; ".join(wrong), fix)
    return ok("if all nodes create one name, only one succeeds (O_EXCL, link, mkdir)")


def check_lock_scope(result: VisitResult) -> Verdict:
    got = [report.seen.rank for report in result.reports if report.seen.lock]
    if got:
        fix = "hpc-rl takes none there; keep HF_HOME, TRITON_CACHE_DIR and the like on a local disk."
        return warn(f"flock of one node does not keep out {result.join_names(got)}", fix)
    if all(report.seen.lock is None for report in result.reports):
        return ok("no locks on this file system, and none are needed")
    return ok("flock keeps other nodes out")


def check_clocks(result: VisitResult) -> Verdict:
    # The file server's clock is the common measure.
    by_skew = sorted((report.seen.skew_s, report.seen.rank) for report in result.reports)
    (least, first), (most, last) = by_skew[0], by_skew[-1]
    if most - least > MAX_CLOCK_SKEW_S:
        found = f"{result.join_names([first])} and {result.join_names([last])} are {most - least:.1f} s apart"
        return warn(
            found, "hpc-rl does not compare clocks, but logs are in order only with NTP on all nodes."
        )
    return ok(f"at most {most - least:.2f} s apart")


def check_network(result: VisitResult) -> Verdict:
    broken = [report.seen for report in result.reports if report.seen.unreachable]
    if broken:
        found = f"{result.join_names([broken[0].rank])} can't reach {', '.join(broken[0].unreachable[:3])}"
        causes = "a firewall between nodes, or the wrong interface"
        return fail(found, f"{causes}: open the port range, or set cluster.interface.")
    each = min(MAX_PEERS, result.num_nodes - 1)
    if each < 1:
        return ok("one node only")
    return ok(f"each node reached {each} other{'s' if each > 1 else ''}")


def check_same_software(result: VisitResult) -> Verdict:
    ranks: dict[str, list[int]] = {}
    for report in result.reports:
        ranks.setdefault(report.software, []).append(report.seen.rank)
    if len(ranks) > 1:
        found = "; ".join(f"{what} on {result.join_names(where)}" for what, where in ranks.items())
        fix = "launcher.python must be one environment on the shared file system, or the same image."
        return fail(found, fix)
    return ok(next(iter(ranks)))


def _find_worst(values: Iterable[float | None]) -> float:
    return max(NEVER if value is None else value for value in values)


NODE_CHECKS = (
    check_nodes_reported, check_visible_to_all, check_visible_soon, check_absent_names, check_replaced_files,
    check_one_winner, check_lock_scope, check_clocks, check_network, check_same_software,
)  # fmt: skip


def check_nodes(result: VisitResult) -> list[Finding]:
    """Return the findings across all nodes; only the first where no node reported."""
    return [make_finding(check, result) for check in (NODE_CHECKS if result.reports else NODE_CHECKS[:1])]
