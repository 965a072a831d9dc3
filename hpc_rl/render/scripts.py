"""Plan -> text of the scripts. Pure: reads templates, writes nothing, asks no scheduler and no clock."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from hpc_rl.config.cluster import SlurmLauncherConfig
from hpc_rl.config.root import Config
from hpc_rl.errors import ConfigError, NotBuilt
from hpc_rl.plan.schema import Plan
from hpc_rl.render import container
from hpc_rl.render.directives import Ask, directives
from hpc_rl.render.environment import LINE_BREAK, environment
from hpc_rl.render.hooks import EVENTS, Hook, gather
from hpc_rl.render.layers import Layers
from hpc_rl.render.slurm_time import signal_lead_s
from hpc_rl.trial import Trial

TEMPLATES = {"slurm": ("sbatch/trial.sbatch.j2", "trial.sbatch"), "local": ("templates/local.sh.j2", "local.sh")}


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


def render(config: Config, plan: Plan, trial: Trial, stamp: Stamp, scheduler: str, site: Sequence[Path] = ()) -> dict[str, str]:
    """File name below `scripts/` -> text. Raises ConfigError, also for a template of the site's that does not render.

    Args:
        config: The checked configuration.
        plan: What was planned from it.
        trial: Whose scripts they are.
        stamp: What they say of their origin.
        scheduler: `slurm` or `local`.
        site: The site's directories, highest precedence first.
    """
    template, name = TEMPLATES[scheduler]
    values = _common(plan, trial, stamp) | {"script_path": str(trial.scripts / name)}
    if scheduler == "slurm":
        values |= _slurm(config.launcher.slurm, plan, trial, stamp)
    hooks = gather(config.launcher.hooks, site)
    values |= _hook_values(config, hooks)
    jinja = environment(template_layers(config, site))
    overrides = jinja.loader.overrides(template) if isinstance(jinja.loader, Layers) else []
    try:
        text = jinja.get_template(template).render(values | {"overrides": [str(path) for path in overrides]})
    except jinja2.TemplateError as error:
        changed = f" (changed by {', '.join(map(str, overrides))})" if overrides else ""
        raise ConfigError(f"the template {template}{changed} does not render ({type(error).__name__}): {error}") from error
    except RecursionError as error:
        raise ConfigError(f"the template {template} extends itself: write `below/{template}` in {overrides[0]}.") from error
    return {name: text} | {hook.name: hook.text for hook in hooks}


def _hook_values(config: Config, hooks: list[Hook]) -> dict[str, Any]:
    """Scripts and time limits by moment; no hooks, no word of them in the script."""
    limits_s = dict.fromkeys(EVENTS, config.launcher.hooks.timeout_s)
    limits_s["on_preempt"] = config.launcher.hooks.on_preempt_timeout_s
    by_event = {event: [hook.name for hook in hooks if hook.event == event] for event in EVENTS}
    return {"hooks": by_event if hooks else {}, "hook_limits_s": limits_s}


def template_layers(config: Config, site: Sequence[Path]) -> list[Path]:
    """Directories that may override templates, highest precedence first. Raises ConfigError."""
    own = config.launcher.templates_dir
    if own and not Path(own).is_dir():
        raise ConfigError(f"launcher.templates_dir: {own!r} is not a directory.")
    return [*([Path(own)] if own else []), *(folder for folder in site if folder.is_dir())]


def _common(plan: Plan, trial: Trial, stamp: Stamp) -> dict[str, Any]:
    for what, path in (("cluster.fileroot", trial.dir), ("the working directory", stamp.workdir)):
        if ":" in str(path) or LINE_BREAK.search(str(path)):
            raise ConfigError(
                f"{what}: {str(path)!r} can't be used: PYTHONPATH and #SBATCH lines hold no colons and no line breaks."
            )
    container.check_places(plan, trial.dir, stamp.workdir)
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
    ask = Ask(
        n_nodes=plan.n_nodes,
        cpus_per_node=plan.cpus_per_node,
        mem_mb_per_node=plan.mem_mb_per_node,
        n_gpus_per_node=plan.n_gpus_per_node if any(unit.gpus_per_task for unit in plan.units) else 0,
        job_name=job_name(trial),
        tag=stamp.tag,
        workdir=str(stamp.workdir),
        output=f"{_no_patterns(trial.jobs)}/%j.out",
        requeue=plan.recover_mode != "disabled",
        signal="" if plan.recover_mode == "disabled" else f"B:USR1@{signal_lead_s(slurm.time)}",
    )
    return {"n_nodes": plan.n_nodes, "directives": directives(slurm, ask)}


def _no_patterns(path: Path) -> str:
    return str(path).replace("%", "%%")
