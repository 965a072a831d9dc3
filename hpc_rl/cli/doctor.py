"""`hpc-rl doctor`: check this machine, Slurm, the directory of trials, and with --allocation the nodes."""

import os
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from hpc_rl.cli.options import CommandParser, Count, Namespace, Seconds, columns, print_result
from hpc_rl.config.load.load import load
from hpc_rl.config.options.cluster import SlurmLauncherConfig
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.rules.slurm_rules import DERIVED
from hpc_rl.core.errors import ConfigError, HpcRlError
from hpc_rl.doctor import job_probe
from hpc_rl.doctor.filesystem import check_directory
from hpc_rl.doctor.finding import Finding, Requirements, Status, ok, run_checks
from hpc_rl.doctor.machine import MACHINE_CHECKS
from hpc_rl.doctor.node import NodeReport
from hpc_rl.doctor.slurm_checks import check_capacity, check_slurm
from hpc_rl.plan.schema import Group
from hpc_rl.render.slurm_options import directives
from hpc_rl.schedulers import pick
from hpc_rl.trials.checklist import CHECKS, FIX, Planned, Verdict, judge
from hpc_rl.trials.refusal import WRONG, CheckState

FAILED = 1  # exit code where a check failed
# Checks of what a login node has less of than the nodes that run the trial.
OF_EACH_MACHINE = ("open files", "processes", "locked memory", "shared memory", "ports")
WHERE_WIDTH = 24  # of a column, in characters
ANY_TRIAL = ["experiment_name=any", "trial_name=any", "actor.path=any", "train_dataset.path=any"]
EPILOG = """With --config (and options of the configuration) what that trial asks for is checked; without,
what any trial needs. Within a Slurm job, or with --allocation, one short step visits the nodes: they check
each other's files, clocks and addresses. Exit code: 0 where nothing failed (warnings do not count), 1
where something did."""


def run(args: Namespace) -> int:
    needs, options, verdict = requirements_of(args)
    is_inside = "SLURM_JOB_ID" in os.environ
    findings = check_here(needs, is_inside, verdict)
    down = any(one.check == "slurm controller" and one.status is Status.FAIL for one in findings)
    if (args.allocation or is_inside) and not down:
        findings += check_allocation(needs, options, args.wait_s)
    failed = any(finding.status is Status.FAIL for finding in findings)
    value = {"failed": failed, "findings": [asdict(finding) for finding in findings]}
    print_result(args.json, value, table(findings))
    return FAILED if failed else 0


def parser() -> CommandParser:
    about = "Check this machine, the cluster and the directory of the trials; each finding with its fix."
    made = CommandParser(about, EPILOG)
    fileroot = "the directory to examine (default: the configuration's, else ~/hpc-rl)"
    made.add_argument("--fileroot", metavar="DIR", help=fileroot)
    made.add_flag("--allocation", help="also visit nodes, by a short job of its own where this is none")
    nodes = "how many (default: the configuration's, else 2)"
    made.add_argument("--nodes", type=Count, metavar="N", help=nodes)
    made.add_argument("--partition", help="of which partition (default: the configuration's, else Slurm's)")
    wait = "for the nodes to come and report (default: 600)"
    made.add_argument("--wait_s", type=Seconds, default=600.0, metavar="SECONDS", help=wait)
    made.add_json("every finding")
    made.add_config()
    return made


def requirements_of(
    args: Namespace,
) -> tuple[Requirements, SlurmLauncherConfig, Verdict | None]:
    """Return what a machine must have, options of the job, and what `submit` would say of the trial, if any.

    Raises ConfigError for options that can't be used.
    """
    if args.overrides and not args.config:
        first = args.overrides[0]
        raise ConfigError(
            f"doctor has no option {first}; `hpc-rl doctor --help` lists them. Options of a configuration "
            "need the configuration as well: hpc-rl doctor --config FILE …"
        )
    typed = list(args.overrides if args.config else ANY_TRIAL)
    typed += [f"launcher.slurm.partition={args.partition}"] if args.partition else []
    loaded = load(args.config, typed, presets=args.preset, cluster=args.cluster, environ=os.environ)
    config, options = loaded.config, loaded.config.launcher.slurm
    on_slurm = pick(config.launcher.type) == "slurm"
    needs = Requirements(
        on_slurm=on_slurm,
        num_nodes=2 if on_slurm else 1,
        fileroot=config.cluster.fileroot,
        python=sys.executable,
        partition=options.partition or "",
        interface=config.cluster.interface,
        local_dir=config.cluster.local_dir,
    )
    verdict = judge(loaded) if args.config else None
    if verdict and verdict.planned:
        needs = _with_plan(needs, verdict.planned)
    if args.nodes == 0:
        raise ConfigError("--nodes must be at least 1.")
    needs = replace(
        needs,
        num_nodes=args.nodes or needs.num_nodes,
        fileroot=os.path.abspath(os.path.expanduser(args.fileroot or needs.fileroot)),
    )
    return needs, replace(options, partition=needs.partition or None), verdict


def _with_plan(needs: Requirements, planned: Planned) -> Requirements:
    plan, launcher = planned.plan, planned.loaded.config.launcher
    mpi = next((unit.mpi for unit in plan.units if unit.mpi), None)
    config, sandbox = planned.loaded.config, ""
    if isinstance(config, GRPOConfig) and "code_tests" in config.rollout.reward_functions:
        sandbox = config.rollout.sandbox
    return replace(
        needs,
        sandbox=sandbox,
        num_nodes=plan.n_nodes,
        cpus=plan.cpus_per_node,
        gpus=plan.n_gpus_per_node if any(unit.gpus_per_task for unit in plan.units) else 0,
        mem_mb=plan.mem_mb_per_node,
        python=plan.python,
        server_python=launcher.inference_server_python or plan.python,
        modules=tuple(launcher.modules),
        servers=tuple(pool.backend for pool in plan.pools),
        megatron="megatron" in plan.allocation,
        mpi=mpi is not None,
        mpiexec=mpi.mpiexec if mpi else "",
    )


def check_here(needs: Requirements, is_inside: bool, verdict: Verdict | None = None) -> list[Finding]:
    """Check this machine, the directory of the trials and Slurm; what `submit` says of a trial counts."""
    # A login node need not have what the trial asks of a node, nor an address that nodes reach.
    is_login = needs.on_slurm and not is_inside
    own = replace(needs, cpus=0, gpus=0, mem_mb=0, num_nodes=1, is_login=True) if is_login else needs
    said = findings_of(verdict) if verdict else []
    findings = run_checks(MACHINE_CHECKS, own)
    if is_login:  # which has limits of its own
        findings = [_as_of_login_node(one) if one.check in OF_EACH_MACHINE else one for one in findings]
    findings += check_directory(Path(needs.fileroot), needs.on_slurm)
    if needs.on_slurm or pick("auto") == "slurm":
        has_capacity = verdict is not None and any(one.check == "capacity" for one in said)
        findings += check_slurm(needs, (lambda _: ok("")) if has_capacity else check_capacity)
    replaced = {finding.check for finding in said}
    host = socket.gethostname()
    both = [*said, *(finding for finding in findings if finding.check not in replaced)]
    return [replace(finding, where=host) for finding in both]


def _as_of_login_node(finding: Finding) -> Finding:
    if finding.status is not Status.FAIL:
        return finding
    return replace(finding, status=Status.WARN, fix=f"the nodes may have more; if not, {finding.fix}")


def findings_of(verdict: Verdict) -> list[Finding]:
    """Return what `submit` says of a trial: refusals, notes and warnings of the checks, and the capacity."""
    fixes = {check.name: check.fix for check in CHECKS}
    found = []
    for one in verdict.results:
        if one.state in WRONG or one.state is CheckState.NOTE:
            status = Status.FAIL if one.state in WRONG else Status.WARN
            found.append(Finding(one.name, status, one.text, fixes.get(one.name, FIX)))
        elif one.name == "capacity" and one.state is CheckState.OK:
            found.append(Finding(one.name, Status.OK, one.detail))
    told = {one.found for one in found}
    warnings = [note for note in verdict.notes if note.startswith("WARNING") and note not in told]
    found += [Finding("configuration", Status.WARN, note, FIX) for note in warnings]
    return list(dict.fromkeys(found))


def check_allocation(needs: Requirements, options: SlurmLauncherConfig, wait_s: float) -> list[Finding]:
    """Check the nodes of an allocation, each and together."""
    try:
        result = job_probe.visit(needs, srun_options(needs, options), wait_s)
    except HpcRlError as error:
        fix = "see `fileroot` and `slurm programs` above."
        return [Finding("nodes reported", Status.FAIL, str(error), fix, where="nodes")]
    together = [replace(finding, where="nodes") for finding in job_probe.check_nodes(result)]
    return [*together, *each_node(result.reports)]


def srun_options(needs: Requirements, options: SlurmLauncherConfig) -> list[str]:
    """Return the options of a short job that asks for what the trial asks for."""
    if not needs.mem_mb and options.mem == DERIVED:
        options = replace(options, mem=None)  # nothing was planned
    nodes = Group(
        name="trial",
        nodes=list(range(needs.num_nodes)),
        cpus_per_node=max(1, needs.cpus),
        mem_mb_per_node=needs.mem_mb,
    )
    ours = ("nodes", "ntasks-per-node", "time")
    resources = directives(options, nodes, needs.gpus)["resources"]
    machines = [(name, value) for name, value in resources if value is not None and name not in ours]
    names = {name: getattr(options, name) for name in ("partition", "account", "qos", "reservation")}
    account = [(name, value) for name, value in names.items() if value is not None]
    return [f"--{name}={value}" if value != "" else f"--{name}" for name, value in (*machines, *account)]


def each_node(reports: Sequence[NodeReport]) -> list[Finding]:
    """Return the findings of every node, equal ones in one row."""
    grouped: dict[tuple[str, Status, str], tuple[Finding, list[str]]] = {}
    for report in reports:
        for finding in report.findings:
            key = (finding.check, finding.status, "" if finding.status is Status.OK else finding.found)
            grouped.setdefault(key, (finding, []))[1].append(report.node)
    order = {check: number for number, (check, *_) in reversed(list(enumerate(grouped)))}
    rows = sorted(grouped.values(), key=lambda row: order[row[0].check])
    return [replace(finding, where=",".join(names)) for finding, names in rows]


def table(findings: Sequence[Finding]) -> list[str]:
    """Return one line per finding, with the fix below where something has to be done."""
    lines = []
    starts = columns([[one.status, _shortened(one.where), one.check, ""] for one in findings])
    for finding, start in zip(findings, starts, strict=True):
        lines.append(start + finding.found)
        if finding.fix:
            lines.append(f"{'':<{len(start)}}-> {finding.fix}")
    counts = Counter(finding.status for finding in findings)
    totals = f"{counts[Status.OK]} ok, {counts[Status.WARN]} to look at, {counts[Status.FAIL]} failed"
    return [*lines, "", totals]


def _shortened(where: str) -> str:
    return where if len(where) <= WHERE_WIDTH else f"{where[: WHERE_WIDTH - 1]}…"
