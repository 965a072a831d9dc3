"""The plan of a trial and its needs, as lines and for --json: for `submit --dry_run` and `fork --dry_run`."""

from collections.abc import Sequence
from typing import Any

from hpc_rl.render.steps import make_plan_lines
from hpc_rl.schedulers import pick
from hpc_rl.trials import needs, submission
from hpc_rl.trials.checklist import Planned

NOTHING_WRITTEN = "nothing was written or submitted"


def format_plan_json(planned: Planned) -> dict[str, Any]:
    trial = submission.make_trial(planned.loaded.config)
    return {
        "trial": str(trial),
        "dir": str(trial.dir),
        "plan": planned.plan.to_json(),
        "notes": [str(note) for note in planned.notes],
        "estimate": needs.make_json(planned.needs) if planned.needs else None,
    }


def describe_plan(planned: Planned, changed: Sequence[str] = ()) -> list[str]:
    """Return the plan and its needs; the `changed` lines follow the plan."""
    trial, plan = submission.make_trial(planned.loaded.config), planned.plan
    config = planned.loaded.config
    nodes = "1 node" if plan.n_nodes == 1 else f"{plan.n_nodes} nodes"
    work = plan.trainer if plan.purpose == "train" else plan.purpose
    unknown = ["memory     not estimated: no config.json of a model that is known here"]
    return [
        *planned.note_lines(),
        f"trial      {trial}",
        f"directory  {trial.dir}",
        f"plan       {work}, {plan.allocation}, {nodes}, {pick(config.launcher.type)}",
        *changed,
        *(f"           {line}" for line in make_plan_lines(plan)),
        *(needs.describe_needs(planned.needs, config, plan) if planned.needs else unknown),
    ]
