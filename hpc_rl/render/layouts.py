"""What each layout asks of Slurm: one job, one job of two components, or two jobs. Pure; the templates only write it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_rl.config.sections.cluster import SlurmLauncherConfig
from hpc_rl.errors import ConfigError
from hpc_rl.plan.schema import Group, Plan
from hpc_rl.render import submitit_script
from hpc_rl.render.directives import Ask, Directives, directives, signal_lead_s

ELASTIC = ("max_running", "idle_s")  # of launcher.slurm.servers; the rest are sbatch's
PER_COMPONENT = (
    "partition",
    "account",
    "qos",
    "reservation",
)  # the name, the comment and mail are the whole job's


@dataclass(frozen=True)
class Asks:
    """Args:
    slurm: The section `launcher.slurm`.
    plan: What was planned.
    job_name: Name of the trial's job.
    tag: Unique word of the submission.
    workdir: Where the scripts start.
    jobs: Folder for the scripts' own words.
    avoid: Nodes that this submission avoids besides.
    """

    slurm: SlurmLauncherConfig
    plan: Plan
    job_name: str
    tag: str
    workdir: str
    jobs: Path
    avoid: tuple[str, ...] = ()

    @property
    def saves(self) -> bool:
        return self.plan.recover_mode != "disabled"

    def group(self, name: str) -> Group:
        return next(group for group in self.plan.groups if group.name == name)

    def directives(self, slurm: SlurmLauncherConfig, ask: Ask) -> Directives:
        """What sbatch is told of a part; the script itself names only what the section excludes, for bad nodes get well."""
        return directives(without(slurm, self.avoid), ask)

    def ask(self, group: Group, output: str, **more: Any) -> Ask:
        """A part of the trial as Slurm is asked for it."""
        units = [unit for unit in self.plan.units if set(unit.nodes) & set(group.nodes)]
        return Ask(
            n_nodes=len(group.nodes),
            cpus_per_node=group.cpus_per_node,
            mem_mb_per_node=group.mem_mb_per_node,
            n_gpus_per_node=self.plan.n_gpus_per_node if any(unit.gpus_per_task for unit in units) else 0,
            **{"job_name": self.job_name, "tag": self.tag, "workdir": self.workdir, **more},
            output=f"{str(self.jobs).replace('%', '%%')}/{output}",
        )


def servers_of(slurm: SlurmLauncherConfig) -> SlurmLauncherConfig:
    """The section as it holds for the nodes of the servers."""
    given = {
        name: value
        for name, value in vars(slurm.servers).items()
        if value is not None and name not in ELASTIC
    }
    if "gres" not in given and "gpu_type" in given:
        given["gres"] = None
    return replace(slurm, **given)


def without(slurm: SlurmLauncherConfig, nodes: Sequence[str]) -> SlurmLauncherConfig:
    """The section of a submission that avoids these nodes, too."""
    if not nodes:
        return slurm
    servers = slurm.servers
    if servers.exclude:
        servers = replace(servers, exclude=",".join([servers.exclude, *nodes]))
    return replace(
        slurm, exclude=",".join([*([slurm.exclude] if slurm.exclude else []), *nodes]), servers=servers
    )


def refuse_hooks(plan: Plan, events: Collection[str]) -> None:
    """Raises ConfigError for hooks that would not run where they say."""
    on_nodes = sorted({"pre_node", "post_node"} & set(events))
    if plan.layout == "hetjob" and on_nodes:
        raise ConfigError(
            f"launcher.hooks.{on_nodes[0]} can't be used with launcher.slurm.layout hetjob: one srun with a script on every node "
            "spans no components here. Use layout allocation or jobs, or leave the hook out."
        )


def trial_values(asks: Asks) -> dict[str, Any]:
    """Of trial.sbatch: the whole trial, or in layout jobs the part with the supervisor and the trainer."""
    slurm, plan = asks.slurm, asks.plan
    everything = Group(
        name="trial",
        nodes=list(range(plan.n_nodes)),
        cpus_per_node=plan.cpus_per_node,
        mem_mb_per_node=plan.mem_mb_per_node,
    )
    group = everything if plan.layout == "allocation" else asks.group("trial")
    ask = asks.ask(
        group,
        "%j.out",
        requeue=asks.saves and slurm.continue_by == "requeue",
        signal=f"B:USR1@{signal_lead_s(slurm.time)}" if asks.saves else "",
    )
    return {
        "n_nodes": plan.n_nodes if plan.layout == "hetjob" else ask.n_nodes,
        "job_name": asks.job_name,
        "layout": plan.layout,
        "backend": slurm.backend,
        "continue_by": slurm.continue_by,
        "exclude": slurm.exclude or "",
        "directives": asks.directives(slurm, ask),
        "component": _component(asks, ask) if plan.layout == "hetjob" else None,
    }


def submitit_values(asks: Asks) -> dict[str, Any]:
    """What submitit is told instead of the first lines of the script."""
    with_gpus = any(unit.gpus_per_task for unit in asks.plan.units)
    return submitit_script.parameters(asks.slurm, trial_values(asks)["directives"], with_gpus=with_gpus)


def _component(asks: Asks, first: Ask) -> Directives:
    """The second component: what it asks for itself, everything else is said once."""
    slurm = servers_of(asks.slurm)
    asked = asks.directives(
        slurm, replace(asks.ask(asks.group("servers"), "%j.out", requeue=first.requeue), signal="")
    )
    own = [(name, value) for name, value in asked.accounting if name in PER_COMPONENT]
    return replace(asked, accounting=own, output=[], policy=[], extra=[])


def server_values(asks: Asks) -> dict[str, Any]:
    """Of servers.sbatch: an array with one task for each server node."""
    slurm, group = servers_of(asks.slurm), asks.group("servers")
    throttle = f"%{slurm.servers.max_running}" if slurm.servers.max_running else ""
    name = f"{asks.job_name}.servers"
    ask = asks.ask(
        replace(group, nodes=group.nodes[:1]),
        "%A_%a.out",
        job_name=name,
        tag=f"{asks.tag}:servers",
        requeue=slurm.continue_by
        == "requeue",  # whatever the trial's mode is: a server holds nothing that could be lost
        signal=f"B:USR1@{signal_lead_s(slurm.time)}",
        more=[("array", f"0-{len(group.nodes) - 1}{throttle}")],
    )
    alone = replace(slurm, dependency=None)  # it is the trial that waits
    values = {
        "job_name": name,
        "layout": "jobs",
        "backend": "sbatch",
        "continue_by": slurm.continue_by,
        "exclude": slurm.exclude or "",
        "directives": asks.directives(alone, ask),
    }
    return values | {"mode": "auto", "start_mode": "auto", "attempts": "server_attempts"}
