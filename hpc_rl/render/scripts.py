"""Plan -> text of the scripts. Pure: reads templates, writes nothing, asks no scheduler and no clock."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from hpc_rl.config.sections.experiment import Config
from hpc_rl.errors import ConfigError
from hpc_rl.name_resolve import keys, names_dir
from hpc_rl.plan.schema import Plan
from hpc_rl.render import container_command, layouts, submitit_script
from hpc_rl.render.hooks import EVENTS, Hook, gather
from hpc_rl.render.layers import Layers
from hpc_rl.render.templates import LINE_BREAK, environment
from hpc_rl.schedulers.submitit import PARAMETERS
from hpc_rl.trial import Trial

SERVERS = ("sbatch/servers.sbatch.j2", "servers.sbatch")  # of layout jobs, beside the trial's own
TEMPLATES = {
    "slurm": ("sbatch/trial.sbatch.j2", "trial.sbatch"),
    "local": ("templates/local.sh.j2", "local.sh"),
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
        new_batches: The first start sets later batches aside.
        avoid: Nodes that failed the trial lately.
    """

    version: str
    config_sha256: str
    command: list[str]
    tag: str
    wheel: str
    workdir: Path
    start_mode: str
    from_step: int | None = None
    new_batches: bool = False
    avoid: tuple[str, ...] = ()


def job_name(trial: Trial) -> str:
    return f"hpc-rl.{trial.experiment}.{trial.name}"


def script_name(scheduler: str) -> str:
    """File name below scripts/ of what the scheduler is handed."""
    return TEMPLATES[scheduler][1]


def render(
    config: Config, plan: Plan, trial: Trial, stamp: Stamp, scheduler: str, site: Sequence[Path] = ()
) -> dict[str, str]:
    """File name below `scripts/` -> text. Raises ConfigError, also for a template of the site's that does not render.

    Args:
        config: The checked configuration.
        plan: What was planned from it.
        trial: Whose scripts they are.
        stamp: What they say of their origin.
        scheduler: `slurm` or `local`.
        site: The site's directories, highest precedence first.
    """
    wanted: list[tuple[str, str, dict[str, Any]]] = [(*TEMPLATES[scheduler], {})]
    if scheduler == "slurm":
        asks = layouts.Asks(
            config.launcher.slurm,
            plan,
            job_name(trial),
            stamp.tag,
            str(stamp.workdir),
            trial.jobs,
            stamp.avoid,
        )
        wanted = [(*TEMPLATES[scheduler], layouts.trial_values(asks))]
        wanted += [(*SERVERS, layouts.server_values(asks))] if plan.layout == "jobs" else []
    hooks = gather(config.launcher.hooks, site)
    jinja = environment(template_layers(config, site))
    common = _common(plan, trial, stamp) | _hook_values(config, hooks)
    common["owner_lease"] = str(names_dir(trial, config) / keys.OWNER)
    layouts.refuse_hooks(plan, {hook.event for hook in hooks})
    texts = {hook.name: hook.text for hook in hooks}
    texts |= {
        name: _text(
            jinja, template, common | {"script_path": str(trial.scripts / name), "script_name": name} | values
        )
        for template, name, values in wanted
    }
    if scheduler == "slurm" and config.launcher.slurm.backend == "submitit":
        texts[PARAMETERS] = submitit_script.text(layouts.submitit_values(asks))
    return texts


def _text(jinja: jinja2.Environment, template: str, values: dict[str, Any]) -> str:
    overrides = jinja.loader.overrides(template) if isinstance(jinja.loader, Layers) else []
    try:
        return jinja.get_template(template).render(values | {"overrides": [str(path) for path in overrides]})
    except jinja2.TemplateError as error:
        changed = f" (changed by {', '.join(map(str, overrides))})" if overrides else ""
        raise ConfigError(
            f"the template {template}{changed} does not render ({type(error).__name__}): {error}"
        ) from error
    except RecursionError as error:
        raise ConfigError(
            f"the template {template} extends itself: write `below/{template}` in {overrides[0]}."
        ) from error


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
    container_command.check_places(plan, trial.dir, stamp.workdir)
    return {
        "version": stamp.version,
        "trial_dir": str(trial.dir),
        "attempts": "attempts",
        "config_sha256": stamp.config_sha256,
        "command": shlex.join(stamp.command),
        "workdir": str(stamp.workdir),
        "python": plan.python,
        "wheel": stamp.wheel,
        "mode": plan.recover_mode,
        "start_mode": stamp.start_mode,
        "from_step": stamp.from_step,
        "new_batches": stamp.new_batches,
    }
