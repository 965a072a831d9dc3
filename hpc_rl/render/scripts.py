"""Scripts: plan -> {file name: text}. Reads templates, writes nothing, queries no scheduler or clock."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from hpc_rl.config.load.stored import list_open_variables, list_secret_variables
from hpc_rl.config.options.experiment import Config
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.trial import Trial
from hpc_rl.plan import containers
from hpc_rl.plan.schema import Plan
from hpc_rl.render import layouts, steps
from hpc_rl.render.hooks import gather, load_environment_files, make_container_removal, make_removal
from hpc_rl.render.jinja_environment import LINE_BREAK, LayeredEnvironment
from hpc_rl.render.overrides import refuse_overrides
from hpc_rl.schedulers.submitit import PARAMETERS

TRIAL, LOCAL = "trial.sbatch", "local.sh"
SERVERS = "servers.sbatch"  # of the server nodes of layout jobs, or of lost nodes of layout allocation
SITE, STEPS = "site.sh", "steps.sh"


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """The origin of rendered files, and values that are not in the plan."""

    version: str  # of hpc-rl
    config_sha256: str  # of config.json
    command: list[str]  # that renders the files again
    tag: str  # unique word of this submission, to find a lost job
    wheel: str  # file name of the code in scripts/
    workdir: Path  # directory of the submission, and working directory of all processes
    start_mode: str  # recover mode of the first start: the stored one, or `resume` for `hpc-rl recover`
    from_step: int | None = None  # the checkpoint of the first start, if the user named one
    snapshot: str = ""  # directory in scripts/ of the user's code; empty for none
    new_batches: bool = False  # the first start sets later batches aside
    avoid: tuple[str, ...] = ()  # nodes that recently failed the trial


def choose_script_name(scheduler: str) -> str:
    """Return the file name below scripts/ of the submitted script."""
    return TRIAL if scheduler == "slurm" else LOCAL


def render(
    config: Config, plan: Plan, trial: Trial, stamp: Stamp, scheduler: str, site: Sequence[Path] = ()
) -> dict[str, str]:
    """Return file name below `scripts/` -> text. `site`: directories, highest precedence first.

    Raises ConfigError, also for an invalid override.
    """
    folders = find_template_layers(config, site)
    refuse_overrides(folders)
    hooks = gather(config.launcher.hooks, site)
    layouts.refuse_hooks(plan, {event for event, files in hooks.items() if files})
    if plan.layout != "hetjob":
        hooks["post_node"] |= make_removal(config.cluster.local_dir) if config.cluster.local_dir else {}
        names = {steps.make_container_name(unit, trial.dir) for unit in plan.units} - {""}
        hooks["post_node"] |= make_container_removal(sorted(names))
    jinja = LayeredEnvironment(folders)
    common = _make_common_values(plan, trial, stamp, scheduler) | {
        "hooks": {event: list(files) for event, files in hooks.items()},
        "hook_limit_s": config.launcher.hooks.timeout_s,
        "on_preempt_limit_s": config.launcher.hooks.on_preempt_timeout_s,
        "umask": config.launcher.umask,
        "modules": config.launcher.modules,
        "setup": config.launcher.setup.rstrip("\n"),
        "variables": list_open_variables(config, "env"),
        "secret_variables": str(trial.secret_variables("env"))
        if list_secret_variables(config, "env")
        else "",
        "site_files": load_environment_files(config.launcher.hooks, site),
    }
    texts = {name: text for files in hooks.values() for name, text in files.items()}
    texts[SITE] = _render(jinja, SITE, trial, common)
    if scheduler != "slurm":
        texts[LOCAL] = _render(jinja, LOCAL, trial, common | {"n_nodes": 1, "layout": "allocation"})
    if scheduler == "allocation":
        texts[STEPS] = render_steps(plan, trial, stamp.workdir, folders)
        return texts
    if scheduler == "local":
        if by_mpiexec := [unit for unit in plan.units if unit.by_mpiexec]:
            texts[STEPS] = render_steps(
                replace(plan, units=by_mpiexec), trial, stamp.workdir, folders, scheduler
            )
        return texts
    slurm = config.launcher.slurm
    requests = layouts.SbatchRequests(slurm, plan, trial, stamp.tag, str(stamp.workdir), stamp.avoid)
    texts[STEPS] = render_steps(plan, trial, stamp.workdir, folders)
    texts[TRIAL] = _render(jinja, TRIAL, trial, common | requests.describe_trial())
    replaces = slurm.replace_servers and slurm.backend == "sbatch" and plan.layout == "allocation"
    if plan.layout == "jobs" or (replaces and plan.list_server_tasks()):
        texts[SERVERS] = _render(jinja, SERVERS, trial, common | requests.describe_servers())
    if slurm.backend == "submitit":
        texts[PARAMETERS] = requests.make_submitit_parameters()
    return texts


def render_steps(
    plan: Plan, trial: Trial, workdir: Path, folders: Sequence[Path] = (), scheduler: str = "slurm"
) -> str:
    """Return steps.sh: the launch line of each role, and pool of servers. Raises ConfigError."""
    launch = steps.make_launch_lines(plan, trial.dir, workdir)
    values: dict[str, Any] = {
        role: next((line for line in launch if line["role"] == role), None) for role in steps.ROLES
    }
    values["servers"] = [line for line in launch if line["role"] == "server"]
    values |= {"roles": [line["name"] for line in launch], "layout": plan.layout, "scheduler": scheduler}
    return _render(LayeredEnvironment(folders), STEPS, trial, values)


def _render(jinja: LayeredEnvironment, name: str, trial: Trial, values: dict[str, Any]) -> str:
    template = f"{'sbatch' if name.endswith('.sbatch') else 'templates'}/{name}.j2"
    overrides = jinja.find_overrides(template)
    submit = ["bash" if name == LOCAL else "sbatch", str(trial.scripts / name)]
    own = {
        "template": template,
        "script_name": name,
        "overrides": [str(path) for path in overrides],
        "submit_command": shlex.join(submit),
    }
    try:
        return jinja.get_template(template).render(values | own)
    except jinja2.TemplateError as error:
        changed = f" (changed by {', '.join(map(str, overrides))})" if overrides else ""
        why = f"the template {template}{changed} has an error ({type(error).__name__}): {error}"
        raise ConfigError(Refusal(option="", kind=Kind.FILE, why=why, related=(_OWN,))) from error
    except RecursionError as error:
        why, use = f"the template {template} extends itself", f"write `below/{template}` in {overrides[0]}"
        raise ConfigError(Refusal(option="", kind=Kind.FILE, why=why, use=use, related=(_OWN,))) from error


_OWN = "launcher.templates_dir"


def find_template_layers(config: Config, site: Sequence[Path]) -> list[Path]:
    """Return the directories that may override templates, highest precedence first. Raises ConfigError."""
    own = config.launcher.templates_dir
    if own and not Path(own).is_dir():
        raise ConfigError(Refusal(option=_OWN, value=repr(own), kind=Kind.FILE, why="is not a directory"))
    return [*([Path(own)] if own else []), *(folder for folder in site if folder.is_dir())]


def _make_common_values(plan: Plan, trial: Trial, stamp: Stamp, scheduler: str) -> dict[str, Any]:
    for option, what, path in (
        ("cluster.fileroot", ":", trial.dir),
        ("", "the working directory", stamp.workdir),
    ):
        if ":" in str(path) or LINE_BREAK.search(str(path)):
            why = f"{what} {str(path)!r} can't be used: PYTHONPATH and #SBATCH lines can't have colons or "
            raise ConfigError(Refusal(option=option, kind=Kind.VALUE, why=f"{why}line breaks"))
    containers.check_places(plan, trial.dir, stamp.workdir)
    return vars(stamp) | {
        "scheduler": scheduler,
        "trial_dir": str(trial.dir),
        "attempts": "attempts",
        "command": shlex.join(stamp.command),
        "recover_command": shlex.join(["hpc-rl", "recover", str(trial.dir)]),
        "workdir": str(stamp.workdir),
        "python": plan.python,
        "mode": plan.recover_mode,
        "retries": plan.recover_retries,
        "from_step": "" if stamp.from_step is None else stamp.from_step,
        "allocation": plan.allocation,
        "plan_lines": steps.make_plan_lines(plan),
    }
