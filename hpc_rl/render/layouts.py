"""What each layout asks of Slurm: one job, one job of two components, two jobs; and submitit's part. Pure."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_rl import slurm_time
from hpc_rl.config.sections.cluster import SlurmLauncherConfig
from hpc_rl.errors import ConfigError
from hpc_rl.plan.schema import Group, Plan
from hpc_rl.render.directives import Directives, SbatchRequest, directives, of_component, signal_lead_s

ELASTIC = ("max_running", "idle_s")  # of launcher.slurm.servers; the rest are sbatch's


@dataclass(frozen=True)
class SbatchRequests:
    """The jobs of a trial as Slurm is asked for them."""

    slurm: SlurmLauncherConfig
    plan: Plan
    job_name: str  # of the trial's job
    tag: str  # unique word of the submission
    workdir: str  # where the scripts start
    jobs: Path  # folder for the output of the scripts
    avoid: tuple[str, ...] = ()  # nodes that this submission avoids in addition to those of the section

    def trial(self) -> dict[str, Any]:
        """Return the values of trial.sbatch: the whole trial, or in layout jobs the part with the trainer."""
        slurm, plan = self.slurm, self.plan
        whole = Group(
            name="trial",
            nodes=list(range(plan.n_nodes)),
            cpus_per_node=plan.cpus_per_node,
            mem_mb_per_node=plan.mem_mb_per_node,
        )
        saves = plan.recover_mode != "disabled"
        request = self._request(
            whole if plan.layout == "allocation" else self._group("trial"),
            "%j.out",
            requeue=saves and slurm.continue_by == "requeue",
            signal=f"B:USR1@{signal_lead_s(slurm.time)}" if saves else "",
        )
        component = None
        if plan.layout == "hetjob":
            servers = self._request(self._group("servers"), "%j.out")
            component = of_component(self._directives(servers_of(slurm), servers))
        return {
            "n_nodes": plan.n_nodes if plan.layout == "hetjob" else request.n_nodes,
            "job_name": self.job_name,
            "layout": plan.layout,
            "backend": slurm.backend,
            "continue_by": slurm.continue_by,
            "exclude": slurm.exclude or "",
            "directives": self._directives(slurm, request),
            "component": component,
        }

    def servers(self) -> dict[str, Any]:
        """Return the values of servers.sbatch: an array with one task for each server node."""
        slurm, group = servers_of(self.slurm), self._group("servers")
        throttle = f"%{slurm.servers.max_running}" if slurm.servers.max_running else ""
        name = f"{self.job_name}.servers"
        request = self._request(
            replace(group, nodes=group.nodes[:1]),
            "%A_%a.out",
            job_name=name,
            tag=f"{self.tag}:servers",
            # Whatever the trial's mode is: a server holds nothing that could be lost.
            requeue=slurm.continue_by == "requeue",
            signal=f"B:USR1@{signal_lead_s(slurm.time)}",
            array=f"0-{len(group.nodes) - 1}{throttle}",
        )
        return {
            "n_nodes": 1,
            "job_name": name,
            "layout": "jobs",
            "backend": "sbatch",
            "continue_by": slurm.continue_by,
            "exclude": slurm.exclude or "",
            # It is the trial that waits for other jobs.
            "directives": self._directives(replace(slurm, dependency=None), request),
            "mode": "auto",
            "start_mode": "auto",
            "attempts": "server_attempts",
        }

    def submitit(self) -> str:
        """Return the parameters of submitit's executor, as JSON. Raises ConfigError."""
        with_gpus = any(unit.gpus_per_task for unit in self.plan.units)
        return submitit_parameters(self.slurm, self.trial()["directives"], with_gpus=with_gpus)

    def _group(self, name: str) -> Group:
        return next(group for group in self.plan.groups if group.name == name)

    def _directives(self, slurm: SlurmLauncherConfig, request: SbatchRequest) -> Directives:
        # The script itself names only what the section excludes, because bad nodes may recover.
        return directives(without(slurm, self.avoid), request)

    def _request(self, group: Group, output: str, **more: Any) -> SbatchRequest:
        units = [unit for unit in self.plan.units if set(unit.nodes) & set(group.nodes)]
        return SbatchRequest(
            n_nodes=len(group.nodes),
            cpus_per_node=group.cpus_per_node,
            mem_mb_per_node=group.mem_mb_per_node,
            n_gpus_per_node=self.plan.n_gpus_per_node if any(unit.gpus_per_task for unit in units) else 0,
            output=f"{str(self.jobs).replace('%', '%%')}/{output}",
            **{"job_name": self.job_name, "tag": self.tag, "workdir": self.workdir, **more},
        )


def servers_of(slurm: SlurmLauncherConfig) -> SlurmLauncherConfig:
    """Return the section as it holds for the nodes of the servers."""
    own = vars(slurm.servers).items()
    given = {name: value for name, value in own if value is not None and name not in ELASTIC}
    if "gres" not in given and "gpu_type" in given:
        given["gres"] = None
    return replace(slurm, **given)


def without(slurm: SlurmLauncherConfig, nodes: Sequence[str]) -> SlurmLauncherConfig:
    """Return the section of a submission that avoids these nodes, too."""
    if not nodes:
        return slurm
    servers = slurm.servers
    if servers.exclude:
        servers = replace(servers, exclude=",".join([servers.exclude, *nodes]))
    exclude = ",".join([*([slurm.exclude] if slurm.exclude else []), *nodes])
    return replace(slurm, exclude=exclude, servers=servers)


def refuse_hooks(plan: Plan, events: Collection[str]) -> None:
    """Raise ConfigError for hooks that would not run where they are meant to."""
    on_nodes = sorted({"pre_node", "post_node"} & set(events))
    if plan.layout == "hetjob" and on_nodes:
        raise ConfigError(
            f"launcher.hooks.{on_nodes[0]} can't be used with launcher.slurm.layout hetjob: one srun with a "
            "script on every node spans no components here. Use layout allocation or jobs, or omit the hook."
        )


# -- submitit

UNLIMITED_MIN = 365 * 24 * 60
# submitit runs its callable as a step, which must leave the job to the steps of the roles.
STEP = "--overlap --relative=0 --nodes=1 --ntasks=1 --cpus-per-task=1 --mem=0 --export=ALL"


def submitit_parameters(slurm: SlurmLauncherConfig, asked: Directives, *, with_gpus: bool) -> str:
    """Return the keyword arguments of `SlurmExecutor.update_parameters`, as JSON. Raises ConfigError."""
    if slurm.time is None:
        raise ConfigError(
            "launcher.slurm.backend submitit needs launcher.slurm.time: submitit's default is 5 minutes."
        )
    options: dict[str, Any] = {name: value or True for name, value in asked.options}
    for words in asked.extra:
        options |= _by_name(words)
    limit_s = slurm_time.to_seconds(slurm.time)
    job_name = options.pop("job-name")
    options.pop("wckey", None)
    # To the steps, where submitit's handler is; without B: the batch shell gets none.
    options["signal"] = f"USR2@{signal_lead_s(slurm.time)}"
    parameters = {
        # `hpc-rl cancel` sends USR1 to the batch script, which is submitit's and would die of it; the
        # supervisor sees the request on disk.
        "setup": ["trap '' USR1"],
        "job_name": job_name,
        # submitit's own idea of the time limit; the option counts.
        "time": UNLIMITED_MIN if limit_s is None else max(1, limit_s // 60),
        # submitit names one of its own otherwise.
        "wckey": slurm.wckey,
        "stderr_to_stdout": True,
        "srun_args": [*STEP.split(), *(["--gpus-per-node=0"] if with_gpus else [])],
        "additional_parameters": options,
    }
    return json.dumps(parameters, indent=2, sort_keys=True) + "\n"


def _by_name(words: list[str]) -> dict[str, Any]:
    """Return `--name=value` and `--name` as submitit takes options."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            raise ConfigError(
                f"launcher.slurm.extra_args: {word!r} can't be passed to submitit; "
                "write --name=value, or use backend sbatch."
            )
        found[name.removeprefix("--")] = value if equals else True
    return found
