"""`hpc-rl doctor`: checks this machine, the cluster and the directory of the trials; with --allocation the nodes of a job too."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from hpc_rl.cli.options import (
    ArgumentParser,
    Count,
    Namespace,
    Seconds,
    add_config,
    add_json,
    new_parser,
    print_json,
)
from hpc_rl.cli.submit import plan_of
from hpc_rl.config.loading.load import Loaded, load
from hpc_rl.config.rules.check import check
from hpc_rl.config.rules.slurm_rules import DERIVED
from hpc_rl.config.sections.cluster import SlurmLauncherConfig
from hpc_rl.doctor import checks, job_probe, slurm_facts
from hpc_rl.doctor.facts import gather
from hpc_rl.doctor.finding import Finding, Status, Wanted, fail
from hpc_rl.doctor.job_probe import Nodes, Report, Request
from hpc_rl.errors import ConfigError, HpcRlError
from hpc_rl.render.directives import Ask, resources
from hpc_rl.render.roots import template_root
from hpc_rl.schedulers import pick

FAILED = 1  # exit code where a check failed
ANY_TRIAL = ["experiment_name=any", "trial_name=any", "actor.path=any", "train_dataset.path=any"]
EPILOG = """With --config (and options of the configuration behind it) what that trial asks for is checked; without, what
any trial needs. Within a Slurm job, or with --allocation, one short step visits the nodes: they see each other's files,
clocks and addresses. Exit code: 0 where nothing failed (warnings do not count), 1 where something did."""


def run(args: Namespace) -> int:
    wanted, options, findings = wanted_of(args)
    inside = "SLURM_JOB_ID" in os.environ
    findings += look_here(wanted, inside)
    if args.allocation or inside:
        findings += look_at_nodes(wanted, options, args.wait_s)
    failed = any(finding.status is Status.FAIL for finding in findings)
    if args.json:
        print_json({"failed": failed, "findings": [asdict(finding) for finding in findings]})
    else:
        print("\n".join(table(findings)))
    return FAILED if failed else 0


def parser() -> ArgumentParser:
    made = new_parser(
        "Check this machine, the cluster and the directory of the trials; each finding with its fix.",
        EPILOG,
    )
    made.add_argument(
        "--fileroot",
        metavar="DIR",
        help="the directory to examine (default: the configuration's, else ~/hpc-rl)",
    )
    made.add_argument(
        "--allocation",
        action="store_true",
        help="also visit nodes, by a short job of its own where this is none",
    )
    made.add_argument(
        "--nodes", type=Count, metavar="N", help="how many (default: the configuration's, else 2)"
    )
    made.add_argument("--partition", help="of which partition (default: the configuration's, else Slurm's)")
    made.add_argument(
        "--wait_s",
        type=Seconds,
        default=600.0,
        metavar="SECONDS",
        help="for the nodes to come and report (default: 600)",
    )
    add_json(made, "every finding")
    add_config(made)
    return made


def wanted_of(args: Namespace) -> tuple[Wanted, SlurmLauncherConfig, list[Finding]]:
    """Return what is asked of a machine and of Slurm, and what is wrong with the files of the configuration. Raises ConfigError."""
    if args.overrides and not args.config:
        raise ConfigError(
            f"{args.overrides[0]!r}: options of a configuration need one: --config FILE. Allowed without: see --help."
        )
    findings: list[Finding] = []
    if args.config:
        loaded = load(args.config, args.overrides, presets=args.preset, cluster=args.cluster)
        wanted, options = _of_config(loaded)
        try:
            check(loaded)
        except ConfigError as error:
            findings = [fail("configuration", str(error), "correct the option, or stage the file.")]
    else:
        profile = load([], ANY_TRIAL, presets=args.preset, cluster=args.cluster).config
        on_slurm = pick(profile.launcher.type) == "slurm"
        options = profile.launcher.slurm
        wanted = Wanted(
            on_slurm=on_slurm,
            num_nodes=2 if on_slurm else 1,
            fileroot=profile.cluster.fileroot,
            python=sys.executable,
            partition=options.partition or "",
        )
    if args.nodes == 0:
        raise ConfigError("--nodes 0: allowed: 1 or more.")
    wanted = replace(
        wanted,
        num_nodes=args.nodes or wanted.num_nodes,
        fileroot=os.path.abspath(os.path.expanduser(args.fileroot or wanted.fileroot)),
        partition=args.partition or wanted.partition,
    )
    return wanted, replace(options, partition=wanted.partition or None), findings


def _of_config(loaded: Loaded) -> tuple[Wanted, SlurmLauncherConfig]:
    planned = plan_of(loaded, files=False)
    config, plan = planned.loaded.config, planned.plan
    with_gpus = any(unit.gpus_per_task for unit in plan.units)
    python = plan.python
    wanted = Wanted(
        on_slurm=pick(config.launcher.type) == "slurm",
        num_nodes=plan.n_nodes,
        cpus=plan.cpus_per_node,
        gpus=plan.n_gpus_per_node if with_gpus else 0,
        mem_mb=plan.mem_mb_per_node,
        fileroot=str(config.cluster.fileroot),
        python=python,
        server_python=config.launcher.inference_server_python or python,
        sglang=plan.server_backend == "sglang",
        megatron="megatron" in plan.allocation,
        partition=config.launcher.slurm.partition or "",
    )
    return wanted, config.launcher.slurm


def look_here(wanted: Wanted, inside: bool) -> list[Finding]:
    """What this machine and the scheduler tell. A login node need not have what the trial asks of a node."""
    facts = gather(Path(wanted.fileroot), wanted.python, wanted.server_python)
    facts.templates = (template_root() / "sbatch").is_dir()
    own = replace(wanted, cpus=0, gpus=0, mem_mb=0) if wanted.on_slurm and not inside else wanted
    findings = checks.judge(facts, own, (*checks.HERE_ONLY, *checks.MACHINE, *checks.DIRECTORY))
    if wanted.on_slurm or pick("auto") == "slurm":
        findings += slurm_facts.judge(slurm_facts.ask(dict(os.environ)), wanted)
    return [replace(finding, where=facts.host) for finding in findings]


def look_at_nodes(wanted: Wanted, options: SlurmLauncherConfig, wait_s: float) -> list[Finding]:
    """What the nodes of an allocation tell, each and together."""
    request = Request(
        num_nodes=wanted.num_nodes,
        options=srun_options(wanted, options),
        python=wanted.python or sys.executable,
        server_python=wanted.server_python,
        wait_s=wait_s,
    )
    try:
        reports, complaint = job_probe.visit(Path(wanted.fileroot), request)
    except HpcRlError as error:
        return [
            replace(
                fail("nodes reported", str(error), "see `fileroot` and `slurm programs` above."),
                where="nodes",
            )
        ]
    num_nodes = (
        int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) if "SLURM_JOB_ID" in os.environ else wanted.num_nodes
    )
    together = job_probe.judge(Nodes(reports, num_nodes, complaint))
    return [*(replace(finding, where="nodes") for finding in together), *each_node(reports, wanted)]


def srun_options(wanted: Wanted, options: SlurmLauncherConfig) -> list[str]:
    """The options of a short job that asks for what the trial asks for."""
    if not wanted.mem_mb and options.mem == DERIVED:
        options = replace(options, mem=None)  # nothing was planned
    asked = Ask(
        n_nodes=wanted.num_nodes, cpus_per_node=max(1, wanted.cpus), mem_mb_per_node=wanted.mem_mb, n_gpus_per_node=wanted.gpus,
        job_name="", tag="", workdir="", output="", requeue=False,
    )  # fmt: skip
    ours = ("nodes", "ntasks-per-node", "time")
    machines = [(name, value) for name, value in resources(options, asked) if name not in ours]
    names = {name: getattr(options, name) for name in ("partition", "account", "qos", "reservation")}
    account = [(name, value) for name, value in names.items() if value is not None]
    return [f"--{name}={value}" if value != "" else f"--{name}" for name, value in (*machines, *account)]


def each_node(reports: Sequence[Report], wanted: Wanted) -> list[Finding]:
    """The findings of every node; those that are alike in one row."""
    grouped: dict[tuple[str, Status, str], tuple[Finding, list[str]]] = {}
    for report in reports:
        for finding in checks.judge(report.facts, wanted, checks.MACHINE):
            alike = (finding.check, finding.status, "" if finding.status is Status.OK else finding.found)
            grouped.setdefault(alike, (finding, []))[1].append(report.facts.node or report.facts.host)
    order = {check: number for number, (check, *_) in reversed(list(enumerate(grouped)))}
    rows = sorted(grouped.values(), key=lambda row: order[row[0].check])
    return [replace(finding, where=",".join(names)) for finding, names in rows]


def table(findings: Sequence[Finding]) -> list[str]:
    """One row each; below what is not well, its fix."""
    where_width = min(24, max(len(finding.where) for finding in findings))
    check_width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        where = finding.where if len(finding.where) <= where_width else f"{finding.where[: where_width - 1]}…"
        lines.append(
            f"{finding.status:<4}  {where:<{where_width}}  {finding.check:<{check_width}}  {finding.found}"
        )
        if finding.fix and finding.status is not Status.OK:
            lines.append(f"{'':<{4 + 2 + where_width + 2 + check_width}}  -> {finding.fix}")
    counts = {status: sum(finding.status is status for finding in findings) for status in Status}
    return [
        *lines,
        "",
        f"{counts[Status.OK]} ok, {counts[Status.WARN]} to look at, {counts[Status.FAIL]} failed",
    ]
