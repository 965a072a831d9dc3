"""`hpc-rl doctor`: check this machine, Slurm, the directory of trials, and with --allocation the nodes."""

import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from hpc_rl.cli.options import CommandParser, Count, Namespace, Seconds, align_columns, print_result
from hpc_rl.cli.outcome import collect_sources
from hpc_rl.core.errors import HpcRlError
from hpc_rl.doctor import job_probe
from hpc_rl.doctor.filesystem import check_directory
from hpc_rl.doctor.finding import Finding, Requirements, Status, apply_checks, ok
from hpc_rl.doctor.machine import MACHINE_CHECKS
from hpc_rl.doctor.node import NodeReport
from hpc_rl.doctor.slurm_checks import check_capacity, check_slurm
from hpc_rl.schedulers import pick
from hpc_rl.trials.checklist import Verdict
from hpc_rl.trials.requirements import find_requirements, list_findings, make_srun_options

FAILED = 1  # exit code where a check failed
# Checks of limits that are lower on a login node than on the nodes of the trial.
OF_EACH_MACHINE = ("open files", "processes", "locked memory", "shared memory", "ports")
WHERE_WIDTH = 24  # of a column, in characters
EPILOG = """With --config (and options of the configuration) doctor checks the needs of that trial,
otherwise the needs of any trial. Inside a Slurm job, or with --allocation, one short step runs on the
nodes: they check each other's files, clocks and addresses. Exit code: 0 if nothing failed (warnings do not
count), otherwise 1."""


def main(args: Namespace) -> int:
    needs, options, verdict = find_requirements(
        collect_sources(args), args.fileroot, args.partition, args.nodes
    )
    is_inside = "SLURM_JOB_ID" in os.environ
    findings = check_here(needs, is_inside, verdict)
    down = any(one.check == "slurm controller" and one.status is Status.FAIL for one in findings)
    if (args.allocation or is_inside) and not down:
        findings += check_allocation(needs, make_srun_options(needs, options), args.wait_s)
    failed = any(finding.status is Status.FAIL for finding in findings)
    value = {"failed": failed, "findings": [asdict(finding) for finding in findings]}
    print_result(args.json, value, format_table(findings))
    return FAILED if failed else 0


def make_parser() -> CommandParser:
    about = "Check this machine, the cluster and the directory of the trials; each finding with its fix."
    made = CommandParser(about, EPILOG)
    fileroot = "the directory to examine (default: the configuration's, else ~/hpc-rl)"
    made.add_argument("--fileroot", metavar="DIR", help=fileroot)
    made.add_flag("--allocation", help="also visit nodes; outside of a Slurm job, start a short one for this")
    nodes = "how many (default: the configuration's, else 2)"
    made.add_argument("--nodes", type=Count, metavar="N", help=nodes)
    made.add_argument("--partition", help="of this partition (default: the configuration's, else Slurm's)")
    wait = "for the nodes to come and report (default: 600)"
    made.add_argument("--wait_s", type=Seconds, default=600.0, metavar="SECONDS", help=wait)
    made.add_json("every finding")
    made.add_config()
    return made


def check_here(needs: Requirements, is_inside: bool, verdict: Verdict | None = None) -> list[Finding]:
    """Check this machine, the directory of the trials and Slurm; what `submit` says of a trial counts."""
    # A login node needs neither the resources of a trial's node nor an address that nodes reach.
    is_login = needs.on_slurm and not is_inside
    own = replace(needs, cpus=0, gpus=0, mem_mb=0, num_nodes=1, is_login=True) if is_login else needs
    said = list_findings(verdict) if verdict else []
    findings = apply_checks(MACHINE_CHECKS, own)
    if is_login:  # a login node has other limits
        findings = [_soften_for_login_node(one) if one.check in OF_EACH_MACHINE else one for one in findings]
    findings += check_directory(Path(needs.fileroot), needs.on_slurm)
    if needs.on_slurm or pick("auto") == "slurm":
        has_capacity = verdict is not None and any(one.check == "capacity" for one in said)
        findings += check_slurm(needs, (lambda _: ok("")) if has_capacity else check_capacity)
    replaced = {finding.check for finding in said}
    host = socket.gethostname()
    both = [*said, *(finding for finding in findings if finding.check not in replaced)]
    return [replace(finding, where=host) for finding in both]


def _soften_for_login_node(finding: Finding) -> Finding:
    if finding.status is not Status.FAIL:
        return finding
    return replace(finding, status=Status.WARN, fix=f"the nodes may have more; if not, {finding.fix}")


def check_allocation(needs: Requirements, srun_options: list[str], wait_s: float) -> list[Finding]:
    """Check the nodes of an allocation, each and together."""
    try:
        result = job_probe.visit_nodes(needs, srun_options, wait_s)
    except HpcRlError as error:
        fix = "see `fileroot` and `slurm programs` above."
        return [Finding("nodes reported", Status.FAIL, str(error), fix, where="nodes")]
    together = [replace(finding, where="nodes") for finding in job_probe.check_nodes(result)]
    return [*together, *merge_nodes(result.reports)]


def merge_nodes(reports: Sequence[NodeReport]) -> list[Finding]:
    """Return the findings of every node, equal ones in one row."""
    grouped: dict[tuple[str, Status, str], tuple[Finding, list[str]]] = {}
    for report in reports:
        for finding in report.findings:
            key = (finding.check, finding.status, "" if finding.status is Status.OK else finding.found)
            grouped.setdefault(key, (finding, []))[1].append(report.node)
    order = {check: number for number, (check, *_) in reversed(list(enumerate(grouped)))}
    rows = sorted(grouped.values(), key=lambda row: order[row[0].check])
    return [replace(finding, where=",".join(names)) for finding, names in rows]


def format_table(findings: Sequence[Finding]) -> list[str]:
    """Return one line per finding, with the fix below where something has to be done."""
    lines = []
    starts = align_columns([[one.status, _shorten(one.where), one.check, ""] for one in findings])
    for finding, start in zip(findings, starts, strict=True):
        lines.append(start + finding.found)
        if finding.fix:
            lines.append(f"{'':<{len(start)}}-> {finding.fix}")
    counts = Counter(finding.status for finding in findings)
    totals = f"{counts[Status.OK]} ok, {counts[Status.WARN]} to look at, {counts[Status.FAIL]} failed"
    return [*lines, "", totals]


def _shorten(where: str) -> str:
    return where if len(where) <= WHERE_WIDTH else f"{where[: WHERE_WIDTH - 1]}…"
