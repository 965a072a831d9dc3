"""Slurm requests of each layout (one job, one job of two components, two jobs), and of submitit. Pure."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc_rl.config.options.cluster import SlurmLauncherConfig
from hpc_rl.core import slurm_time
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.trial import Trial
from hpc_rl.plan.schema import Group, Plan
from hpc_rl.render.slurm_options import (
    Option,
    compute_signal_lead_s,
    make_directives,
    select_component,
    split_words,
)

ELASTIC = ("max_running", "idle_s")  # of launcher.slurm.servers; the other options are sbatch's
UNLIMITED_MIN = 365 * 24 * 60
# submitit runs its callable as a step, which must leave the resources to the steps of the roles.
STEP = "--overlap --relative=0 --nodes=1 --ntasks=1 --cpus-per-task=1 --mem=0 --export=ALL"


@dataclass(frozen=True)
class SbatchRequests:
    """The values of a trial's batch scripts."""

    slurm: SlurmLauncherConfig
    plan: Plan
    trial: Trial
    tag: str  # unique word of the submission
    workdir: str  # working directory of the scripts
    avoid: tuple[str, ...] = ()  # nodes that this submission excludes in addition to the section's

    def describe_trial(self) -> dict[str, Any]:
        """Return the values of trial.sbatch: for the trial, or in layout jobs for the trainer's part."""
        slurm, plan = self.slurm, self.plan
        group, component = plan.find_group("trial"), None
        if plan.layout == "hetjob":
            component = select_component(
                self._make_directives(select_servers(slurm), plan.find_group("servers"), {})
            )
        saves = plan.recover_mode != "disabled"
        given = self._make_options(slurm, self.trial.job_name, self.tag, "%j.out", saves)
        return self._make_values(slurm, group, given) | {
            "n_nodes": plan.n_nodes if plan.layout == "hetjob" else len(group.nodes),
            "layout": plan.layout,
            "backend": slurm.backend,
            "component": component,
        }

    def describe_servers(self) -> dict[str, Any]:
        """Return the values of servers.sbatch: an array with one task for each server node.

        Replicas that span nodes have a task together. In layout allocation a job gets only the tasks of lost
        nodes, as options on the command line.
        """
        slurm, group = select_servers(self.slurm), self.plan.find_group("servers")
        tasks = self.plan.list_server_tasks()
        throttle = f"%{slurm.servers.max_running}" if slurm.servers.max_running else ""
        # A server is requeued in any recover.mode: it has no state to lose.
        given = self._make_options(
            slurm, f"{self.trial.job_name}.servers", f"{self.tag}:servers", "%A_%a.out", saves=True
        )
        given["array"] = f"0-{len(tasks) - 1}{throttle}"
        given["dependency"] = None  # only the trial waits for other jobs
        if max(map(len, tasks)) > 1:
            given["no-kill"] = None  # a replica needs all its nodes: Slurm starts the task again elsewhere
        one = replace(group, nodes=tasks[0])
        return self._make_values(slurm, one, given) | {
            "n_nodes": 1,  # watched by Slurm alone
            "layout": "jobs",
            "backend": "sbatch",
            "mode": "auto",
            "start_mode": "auto",
            "attempts": "server_attempts",
        }

    def make_submitit_parameters(self) -> str:
        """Return the keyword arguments of `SlurmExecutor.update_parameters`, as JSON. Raises ConfigError."""
        slurm, asked = self.slurm, self.describe_trial()["directives"]
        if slurm.time is None:
            why = "needs launcher.slurm.time: submitit's default is 5 minutes"
            option, related = "launcher.slurm.backend", ("launcher.slurm.time",)
            raise ConfigError(
                Refusal(option=option, value="submitit", kind=Kind.MISSING, why=why, related=related)
            )
        every = (option for options in asked.values() for option in options)
        options: dict[str, Any] = {name: value or True for name, value in every if value is not None}
        for argument in slurm.extra_args:
            options |= _format_option(split_words(argument))
        limit_s = slurm_time.parse_time_limit(slurm.time)
        job_name = options.pop("job-name")
        options.pop("wckey", None)
        # For the steps, which have submitit's handler; without B: the batch shell gets no signal.
        options["signal"] = f"USR2@{compute_signal_lead_s(slurm.time)}"
        with_gpus = any(unit.gpus_per_task for unit in self.plan.units)
        parameters = {
            # `hpc-rl cancel` sends USR1 to the batch script. It would kill submitit's script; the supervisor
            # sees the request on disk.
            "setup": ["trap '' USR1"],
            "job_name": job_name,
            # submitit's own time limit; Slurm uses the option.
            "time": UNLIMITED_MIN if limit_s is None else max(1, limit_s // 60),
            # submitit sets its own otherwise.
            "wckey": slurm.wckey,
            "stderr_to_stdout": True,
            "srun_args": [*STEP.split(), *(["--gpus-per-node=0"] if with_gpus else [])],
            "additional_parameters": options,
        }
        return json.dumps(parameters, indent=2, sort_keys=True) + "\n"

    def _make_directives(
        self, slurm: SlurmLauncherConfig, group: Group, given: dict[str, str | None]
    ) -> dict[str, list[Option]]:
        nodes = set(group.nodes)
        units = [unit for unit in self.plan.units if not nodes.isdisjoint(unit.nodes)]
        n_gpus = self.plan.n_gpus_per_node if any(unit.gpus_per_task for unit in units) else 0
        return make_directives(exclude_nodes(slurm, self.avoid), group, n_gpus, given)

    def _make_options(
        self, slurm: SlurmLauncherConfig, name: str, tag: str, output: str, saves: bool
    ) -> dict[str, str | None]:
        """Return the options of a job that the section does not decide, or not alone."""
        is_requeued = saves and slurm.continue_by == "requeue"
        return {
            "job-name": name,
            "comment": f"{tag} {slurm.comment}" if slurm.comment else tag,
            "chdir": self.workdir,
            "output": f"{str(self.trial.jobs).replace('%', '%%')}/{output}",  # %% is a literal %
            "open-mode": "append",
            "no-kill": "",
            "requeue": "" if is_requeued else None,
            "no-requeue": None if is_requeued else "",
            "signal": f"B:USR1@{compute_signal_lead_s(slurm.time)}" if saves else None,
        }

    def _make_values(
        self, slurm: SlurmLauncherConfig, group: Group, given: dict[str, str | None]
    ) -> dict[str, Any]:
        return {
            "job_name": given["job-name"],
            "continue_by": slurm.continue_by,
            # The script names only the section's excluded nodes, because bad nodes may recover.
            "exclude": slurm.exclude or "",
            "directives": self._make_directives(slurm, group, given),
            "extra": [split_words(argument) for argument in slurm.extra_args],
        }


def select_servers(slurm: SlurmLauncherConfig) -> SlurmLauncherConfig:
    """Return the section with the values for the server nodes."""
    own = vars(slurm.servers).items()
    given = {name: value for name, value in own if value is not None and name not in ELASTIC}
    if "gres" not in given and "gpu_type" in given:
        given["gres"] = None
    if "mem" in given:
        given |= {"mem_per_cpu": None, "mem_per_gpu": None}
    return replace(slurm, **given)


def exclude_nodes(slurm: SlurmLauncherConfig, nodes: Sequence[str]) -> SlurmLauncherConfig:
    """Return the section with these nodes excluded, too."""
    if not nodes:
        return slurm
    servers = slurm.servers
    if servers.exclude:
        servers = replace(servers, exclude=",".join([servers.exclude, *nodes]))
    exclude = ",".join([*([slurm.exclude] if slurm.exclude else []), *nodes])
    return replace(slurm, exclude=exclude, servers=servers)


def refuse_hooks(plan: Plan, events: Collection[str]) -> None:
    """Raise ConfigError for hooks that the layout can't run on their nodes."""
    if hooks := find_unplaced_hooks(plan.layout, events):
        why = "(or hooks.d of the site) does not work with launcher.slurm.layout hetjob: no single srun "
        raise ConfigError(
            Refusal(
                option=f"launcher.hooks.{hooks[0]}",
                kind=Kind.CONFLICT,
                why=f"{why}can run on all nodes of a heterogeneous job",
                use="use layout allocation or jobs, or remove the hook",
                related=("launcher.slurm.layout",),
            )
        )


def find_unplaced_hooks(layout: str, events: Collection[str]) -> list[str]:
    """Return the hooks that a layout can't run."""
    return sorted({"pre_node", "post_node"} & set(events)) if layout == "hetjob" else []


def _format_option(argument: list[str]) -> dict[str, Any]:
    """Convert `--name=value` and `--name` to submitit's form of options."""
    found: dict[str, Any] = {}
    for word in argument:
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            why, use = f": {word!r} can't be passed to submitit", "write --name=value, or use backend sbatch"
            option, related = "launcher.slurm.extra_args", ("launcher.slurm.backend",)
            raise ConfigError(Refusal(option=option, kind=Kind.CONFLICT, why=why, use=use, related=related))
        found[name.removeprefix("--")] = value if equals else True
    return found
