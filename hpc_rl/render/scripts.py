"""Plan -> text of the scripts. Pure: reads templates, writes nothing, asks no scheduler and no clock."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from hpc_rl.config.cluster import SlurmLauncherConfig
from hpc_rl.config.root import Config
from hpc_rl.errors import ConfigError, NotBuilt
from hpc_rl.plan.schema import Plan
from hpc_rl.render.environment import LINE_BREAK, environment
from hpc_rl.render.slurm_time import signal_lead_s
from hpc_rl.trial import Trial

TEMPLATES = {"slurm": ("sbatch/trial.sbatch.j2", "trial.sbatch"), "local": ("templates/local.sh.j2", "local.sh")}

_PLAN, _SCRIPT = "the plan decides it, from cluster, allocation_mode and the launcher's numbers", "the script needs its own"
OURS = {
    **dict.fromkeys(("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--cpus-per-task", "-c", "--array", "-a"), _PLAN),
    **dict.fromkeys(("--mem", "--mem-per-cpu", "--mem-per-gpu"), "set launcher.slurm.mem"),
    **dict.fromkeys(
        ("--gres", "--gpus", "-G", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket"), "set launcher.slurm.gres"
    ),
    **dict.fromkeys(("--output", "-o", "--open-mode", "--chdir", "-D", "--job-name", "-J", "--signal", "--export"), _SCRIPT),
    **dict.fromkeys(("--requeue", "--no-requeue"), "recover.mode decides it"),
    "--comment": "set launcher.slurm.comment",
}


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """What a rendered file says of its origin, and what is not the plan's to decide.

    Args:
        version: Version of hpc-rl.
        config_sha256: Hash of config.json.
        command: The command that renders it again.
        tag: Unique word of this submission, by which a lost job is found.
        wheel: File name of the code in scripts/.
        workdir: Directory of the submission; the processes start there.
        start_mode: Recover mode of the first start: the stored one, or `resume` for `hpc-rl recover`.
        from_step: The generation of the first start, where a person named it.
    """

    version: str
    config_sha256: str
    command: list[str]
    tag: str
    wheel: str
    workdir: Path
    start_mode: str
    from_step: int | None = None


def job_name(trial: Trial) -> str:
    return f"hpc-rl.{trial.experiment}.{trial.name}"


def script_name(scheduler: str) -> str:
    """File name below scripts/ of what the scheduler is handed."""
    return TEMPLATES[scheduler][1]


def render(config: Config, plan: Plan, trial: Trial, stamp: Stamp, scheduler: str) -> dict[str, str]:
    """File name below `scripts/` -> text. Raises ConfigError, also for a site template that does not render."""
    site = Path(config.launcher.site_templates).expanduser() if config.launcher.site_templates else None
    template, name = TEMPLATES[scheduler]
    values = _common(plan, trial, stamp) | {"script_path": str(trial.scripts / name)}
    if scheduler == "slurm":
        values |= _slurm(config.launcher.slurm, plan, trial, stamp)
    try:
        return {name: environment(site).get_template(template).render(values)}
    except jinja2.TemplateError as error:
        raise ConfigError(f"the template {template} does not render ({type(error).__name__}): {error}") from error


def _common(plan: Plan, trial: Trial, stamp: Stamp) -> dict[str, Any]:
    for what, path in (("cluster.fileroot", trial.dir), ("the working directory", stamp.workdir)):
        if ":" in str(path) or LINE_BREAK.search(str(path)):
            raise ConfigError(
                f"{what}: {str(path)!r} can't be used: PYTHONPATH and #SBATCH lines hold no colons and no line breaks."
            )
    return {
        "version": stamp.version,
        "trial_dir": str(trial.dir),
        "config_sha256": stamp.config_sha256,
        "command": shlex.join(stamp.command),
        "workdir": str(stamp.workdir),
        "python": plan.python,
        "wheel": stamp.wheel,
        "mode": plan.recover_mode,
        "start_mode": stamp.start_mode,
        "from_step": stamp.from_step,
    }


def _slurm(slurm: SlurmLauncherConfig, plan: Plan, trial: Trial, stamp: Stamp) -> dict[str, Any]:
    if slurm.layout != "allocation":
        raise NotBuilt(f"launcher.slurm.layout: {slurm.layout!r} is not built yet; allowed: allocation.")
    needs_gpus = any(unit.gpus_per_task for unit in plan.units)
    lead_s = signal_lead_s(slurm.time)
    return {
        "slurm": slurm,
        "job_name": job_name(trial),
        "job_comment": f"{stamp.tag} {slurm.comment}" if slurm.comment else stamp.tag,
        "n_nodes": plan.n_nodes,
        "cpus_per_node": plan.cpus_per_node,
        "mem": slurm.mem or f"{plan.mem_mb_per_node}M",
        "gpus_per_node": plan.n_gpus_per_node if needs_gpus and slurm.gres is None else None,
        "output": f"{_no_patterns(trial.jobs)}/%j.out",
        "signal": None if plan.recover_mode == "disabled" else f"B:USR1@{lead_s}",
        "extra_args": [_extra(argument) for argument in slurm.extra_args],
    }


def _no_patterns(path: Path) -> str:
    return str(path).replace("%", "%%")


def _extra(argument: str) -> str:
    """One further sbatch option, as it stands; it must be one, stay on its line, and not contradict what the plan decided."""
    words = [word for word in argument.split() if word.startswith("-")]
    names = [word.partition("=")[0] if word.startswith("--") else word[:2] for word in words]
    if not argument.startswith("-") or LINE_BREAK.search(argument):
        raise ConfigError(f"launcher.slurm.extra_args: {argument!r} is no sbatch option; write one per item, as --licenses=a:1.")
    for name in names:
        if name in OURS:
            raise ConfigError(f"launcher.slurm.extra_args: {name} can't be given here: {OURS[name]}.")
    return argument
