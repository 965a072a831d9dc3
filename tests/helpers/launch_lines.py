"""steps.sh of a trial that was never submitted."""

from pathlib import Path
from typing import Any

from toy_plans import toy_plan

from hpc_rl.core.trial import Trial
from hpc_rl.plan.schema import Unit
from hpc_rl.render.scripts import render_steps


def write_steps(
    trial: Trial, *units: Unit, python: str = "python", scheduler: str = "slurm", **plan: Any
) -> Path:
    """Write the launch lines of these units; `plan` replaces fields of the toy plan."""
    path = trial.scripts / "steps.sh"
    path.parent.mkdir(parents=True, exist_ok=True)
    made = toy_plan(list(units), python, **plan)
    path.write_text(render_steps(made, trial, Path.cwd(), scheduler=scheduler))
    return path
