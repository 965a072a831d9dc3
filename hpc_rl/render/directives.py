"""What one job, or one component of it, asks of sbatch: options in their order, by group. Pure; the template only writes them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

from hpc_rl import slurm_time
from hpc_rl.config.rules.slurm_rules import DERIVED, asks_for_gpus
from hpc_rl.config.sections.cluster import SlurmLauncherConfig
from hpc_rl.errors import ConfigError
from hpc_rl.render.templates import LINE_BREAK

Option = tuple[str, str]  # name without dashes; value, empty for an option that has none


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What the plan wants of one job or component; the section `launcher.slurm` says how it is put.

    Args:
        n_nodes: Nodes.
        cpus_per_node: CPUs on each.
        mem_mb_per_node: Memory on each, in MB.
        n_gpus_per_node: GPUs on each; 0 asks for none.
        job_name: Name.
        tag: Unique word of the submission, which begins the comment.
        workdir: Where the script starts.
        output: sbatch's file name pattern for the script's own words; a literal % is %%.
        requeue: Whether Slurm may start the script again.
        signal: Value of --signal; empty for none.
        more: Further options of this kind of job, as `("array", "0-7")`.
    """

    n_nodes: int
    cpus_per_node: int
    mem_mb_per_node: int
    n_gpus_per_node: int
    job_name: str
    tag: str
    workdir: str
    output: str
    requeue: bool
    signal: str = ""
    more: list[Option] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Directives:
    """Options of one job or component, by what a person looks for."""

    resources: list[Option]
    accounting: list[Option]
    output: list[Option]
    policy: list[Option]
    extra: list[list[str]]


def directives(slurm: SlurmLauncherConfig, ask: Ask) -> Directives:
    """Every option of a job. What is null in the configuration is not there. Raises ConfigError."""
    return Directives(
        resources=resources(slurm, ask),
        accounting=accounting(slurm, ask),
        output=_present(("chdir", ask.workdir), ("output", ask.output), ("open-mode", "append")),
        policy=policy(slurm, ask),
        extra=[split_extra(argument) for argument in slurm.extra_args],
    )


def resources(slurm: SlurmLauncherConfig, ask: Ask) -> list[Option]:
    """What machines. The only group that differs between the components of one heterogeneous job."""
    exclusive: list[Option] = []
    if slurm.exclusive:
        exclusive = [("exclusive", "" if slurm.exclusive is True else slurm.exclusive)]
    return [
        ("nodes", str(ask.n_nodes)),
        *_present(
            ("ntasks-per-node", slurm.ntasks_per_node and str(slurm.ntasks_per_node)),
            (
                "cpus-per-task",
                str(ask.cpus_per_node) if slurm.cpus_per_task == DERIVED else slurm.cpus_per_task,
            ),
            *_memory(slurm, ask),
            *_gpus(slurm, ask),
            ("time", slurm.time),
            ("constraint", slurm.constraint),
            ("nodelist", slurm.nodelist),
            ("exclude", slurm.exclude),
            ("tmp", slurm.tmp),
            ("switches", slurm.switches),
        ),
        *exclusive,
        *ask.more,
    ]


def accounting(slurm: SlurmLauncherConfig, ask: Ask) -> list[Option]:
    """Under whose name, and who is told."""
    return _present(
        ("job-name", ask.job_name),
        ("comment", f"{ask.tag} {slurm.comment}" if slurm.comment else ask.tag),
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("reservation", slurm.reservation),
        ("licenses", slurm.licenses),
        ("wckey", slurm.wckey),
        ("mail-type", slurm.mail_type),
        ("mail-user", slurm.mail_user),
    )


def policy(slurm: SlurmLauncherConfig, ask: Ask) -> list[Option]:
    """What happens when something ends."""
    return [
        ("no-kill", ""),
        ("requeue" if ask.requeue else "no-requeue", ""),
        *_present(("signal", ask.signal or None), ("dependency", slurm.dependency)),
    ]


def _memory(slurm: SlurmLauncherConfig, ask: Ask) -> list[tuple[str, str | None]]:
    """One of the three; sbatch refuses two. A given --mem-per-… replaces the derived --mem."""
    per = [("mem-per-cpu", slurm.mem_per_cpu), ("mem-per-gpu", slurm.mem_per_gpu)]
    derived = None if slurm.mem_per_cpu or slurm.mem_per_gpu else f"{ask.mem_mb_per_node}M"
    return [("mem", derived if slurm.mem == DERIVED else slurm.mem), *per]


def _gpus(slurm: SlurmLauncherConfig, ask: Ask) -> list[tuple[str, str | None]]:
    """GPUs by one option only: Slurm takes --gres=gpu and --gpus-per-node together without a word, and one of them counts."""
    wanted = None
    if ask.n_gpus_per_node and slurm.gpus_by and not asks_for_gpus(slurm.gres):
        wanted = f"{slurm.gpu_type}:{ask.n_gpus_per_node}" if slurm.gpu_type else str(ask.n_gpus_per_node)
    if wanted and slurm.gpus_by == "gres":
        return [("gres", ",".join(filter(None, [f"gpu:{wanted}", slurm.gres])))]
    return [("gpus-per-node", wanted), ("gres", slurm.gres)]


def split_extra(argument: str) -> list[str]:
    """The words of one of `launcher.slurm.extra_args`, in sbatch's quoting. Raises ConfigError."""
    try:
        words = shlex.split(argument, posix=True)
    except ValueError as error:
        raise ConfigError(f"launcher.slurm.extra_args: {argument!r} can't be read: {error}.") from error
    if not words or LINE_BREAK.search(argument):
        raise ConfigError(
            f"launcher.slurm.extra_args: {argument!r} is no sbatch option; write one per item, as --licenses=a:1."
        )
    return words


def _present(*options: tuple[str, str | None]) -> list[Option]:
    return [(name, value) for name, value in options if value is not None]


def signal_lead_s(time_limit: str | None) -> int:
    """Return how long before the end of the job the batch script is signalled, in seconds."""
    if not time_limit:
        return 180
    limit_s = slurm_time.to_seconds(time_limit)
    # Slurm may be a minute early and acts every half minute; the rest is for a step and a save.
    return 300 if limit_s is None else max(1, min(300, limit_s // 5))
