"""Prepare a trial before its submission: configuration -> checks -> plan -> comparison with the cluster.

Commands call these functions with the arguments of the command line. The calls go down only: prepare reads
the configuration, has it planned, and has scripts rendered. `submission` then writes and submits.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpc_rl.checkpoint.decide import Decision
from hpc_rl.config.load.load import Loaded, UnusableOptions, load
from hpc_rl.config.load.stored import VARIABLES, restore_secrets
from hpc_rl.config.rules.check import check
from hpc_rl.config.rules.slurm_rules import find_job_threads_limit
from hpc_rl.core.errors import ConfigError, HpcRlError, SchedulerError, TrialStateError
from hpc_rl.core.records import load_lineages
from hpc_rl.core.refusal import Kind, Refusal, make_note
from hpc_rl.core.trial import Trial
from hpc_rl.plan.plan import apply_threads_per_core
from hpc_rl.schedulers import pick, slurm
from hpc_rl.schedulers.sinfo import limit_threads
from hpc_rl.schedulers.slurm import SlurmScheduler
from hpc_rl.supervise import bad_nodes
from hpc_rl.trials import preflight, submission
from hpc_rl.trials.check_result import CheckResult
from hpc_rl.trials.checklist import (
    ALL,
    WITHOUT_A_PLAN,
    Planned,
    Stage,
    Verdict,
    judge,
    make_planned,
    refuse_unreadable,
)
from hpc_rl.trials.first_start import FirstStart, Recovery
from hpc_rl.trials.hub import Fetched, fetch_all
from hpc_rl.trials.lock import check_unlocked
from hpc_rl.trials.surrounding_job import SurroundingJob, refuse_misfit

# Options of launcher.slurm that only sbatch uses.
SBATCH_ONLY = {
    "time", "constraint", "nodelist", "exclude", "tmp", "switches", "exclusive", "partition", "account",
    "qos", "reservation", "licenses", "wckey", "comment", "mail_type", "mail_user", "dependency",
    "continue_by",
    "replace_servers",
}  # fmt: skip


@dataclass(frozen=True)
class ConfigSources:
    """The configuration that a command line names."""

    command: str  # the name of the command, for its error message
    files: Sequence[str]
    overrides: Sequence[str]  # a.b=VALUE, --a.b VALUE
    presets: Sequence[str]
    cluster: str | None  # profile


def load_config(sources: ConfigSources) -> Loaded:
    """Load the configuration of a command.

    Raises ConfigError. If only some options are unusable, the error also lists the refusals that do not
    depend on them.
    """
    if not sources.files and not sources.overrides:
        why = f"no configuration is given; run `hpc-rl {sources.command} FILE`"
        raise ConfigError(Refusal(option="", kind=Kind.MISSING, why=why))
    try:
        return load(
            sources.files,
            sources.overrides,
            presets=sources.presets,
            cluster=sources.cluster,
            environ=os.environ,
        )
    except UnusableOptions as error:
        rows = judge(error.rest, WITHOUT_A_PLAN).refusals
        independent = [
            row.refusal or row.detail for row in rows if not any(map(error.is_unknown, row.options))
        ]
        raise ConfigError(*{str(one): one for one in (*error.refusals, *independent)}.values()) from None


def fetch_from_hub(sources: ConfigSources) -> tuple[ConfigSources, list[Fetched]]:
    """Fetch the models and data that a configuration names on the hub.

    Returns the configuration with the paths of the fetched files in place of the names. Raises ConfigError.
    """
    fetched = fetch_all(load_config(sources).config)
    paths = [f"{one.named.option}={one.path}" for one in fetched]
    return replace(sources, overrides=[*sources.overrides, *paths]), fetched


def load_stored(trial: Trial, overrides: Sequence[str]) -> Loaded:
    """Load the configuration that a trial was submitted with. Raises TrialStateError, ConfigError."""
    if not trial.config_yaml.is_file():
        raise TrialStateError(
            f"{trial} has no {trial.config_yaml.name} in {trial.dir}: neither `hpc-rl submit` nor "
            "`hpc-rl render` made this directory."
        )
    loaded = load([trial.config_yaml], overrides)
    known = {name: trial.load_variables(name) for name in VARIABLES}
    return replace(loaded, config=restore_secrets(loaded.config, known))


def judge_config(
    sources: ConfigSources, stages: frozenset[Stage] = ALL, counts_rows: bool = False
) -> Verdict:
    """Return the verdict on the configuration of a command, even if it can't be loaded."""
    try:
        loaded = load_config(sources)
    except ConfigError as error:
        return refuse_unreadable(error)
    return judge(loaded, stages, counts_rows=counts_rows)


def plan_submission(loaded: Loaded, skip_cluster: bool) -> Planned:
    """Check and plan a new submission. Raises the error of the refusals."""
    skipped = {Stage.ACCEPTANCE, *([Stage.CLUSTER] if skip_cluster else [])}
    return judge(loaded, ALL - skipped).require()


def plan_recovery(trial: Trial, loaded: Loaded, skip_cluster: bool) -> Planned:
    """Plan a trial that continues; its state is checked later.

    Raises TrialBusy, ConfigError, SchedulerError.
    """
    submission.check_idle(trial)
    planned = compare_with_cluster(make_planned(loaded), trial, skip_cluster)
    if pick(planned.loaded.config.launcher.type) == "slurm":
        slurm.require("sbatch")
    return planned


def make_recovery(trial: Trial, from_step: int | None = None, replay: bool = False) -> Recovery:
    """Return the additions of a recover to a trial's submission."""
    parent = next((record.submission for record in reversed(load_lineages(trial))), None)
    return Recovery(from_step=from_step, replay=replay, parent=parent)


def explain_start(
    trial: Trial, loaded: Loaded, recovery: Recovery, skip_cluster: bool
) -> tuple[FirstStart, Decision]:
    """Return the first start of a recovery and its decision: the refusal of `recover`, if it would refuse."""
    start = FirstStart(trial, check(loaded, files=False).config, recovery)
    with contextlib.suppress(ConfigError):  # reported below, at the same point as by a recover
        start.find_changes()
    try:
        check_unlocked(trial)
        planned = plan_recovery(trial, loaded, skip_cluster)
        scheduler = pick(planned.loaded.config.launcher.type)
        submission.check_submittable(trial, planned.loaded, planned.plan, scheduler, recovery)
    except HpcRlError as error:
        return start, Decision("refuse", str(error), exit_code=error.exit_code)
    return start, start.decision


def compare_with_cluster(planned: Planned, trial: Trial, skip: bool = False) -> Planned:
    """Fit a plan to the nodes of the cluster and add notes. Raises ConfigError if the request never fits."""
    config = planned.loaded.config
    if skip or pick(config.launcher.type) != "slurm":
        return planned
    bad = list(bad_nodes.find_bad_nodes(trial, time.time()))
    capacity = preflight.quick_check(config, planned.plan, SlurmScheduler(), bad)
    loaded = replace(planned.loaded, notes=[*planned.loaded.notes, *capacity.notes])
    return replace(planned, loaded=loaded, plan=capacity.plan, avoid=capacity.avoid)


def check_scripts(planned: Planned, trial: Trial) -> list[CheckResult]:
    """Run all checks of the scripts and of the request."""
    config = planned.loaded.config
    scheduler = pick(config.launcher.type)
    scripts = submission.render_scripts(planned.loaded, planned.plan, trial, scheduler)
    cluster = SlurmScheduler() if scheduler == "slurm" else None
    return preflight.full_check(config, planned.plan, scripts, cluster)


def plan_for_job(sources: ConfigSources, job: SurroundingJob) -> Planned:
    """Plan a trial for the nodes of the Slurm job around this process. Raises ConfigError, DoesNotFit."""
    given = load_config(sources)
    if given.config.launcher.type == "local" and "cpu" not in sources.presets:
        why, use = "can't be used in a Slurm job", "remove it, or use `hpc-rl submit`"
        raise ConfigError(
            Refusal(option="launcher.type", value="local", kind=Kind.CONFLICT, why=why, use=use)
        )
    if "cluster.n_nodes" in given.explicit:  # the plan uses the first ones
        job = replace(job, nodes=job.nodes[: given.config.cluster.n_nodes])
    of_job = {"cluster.n_nodes": len(job.nodes), "cluster.n_gpus_per_node": job.gpus_per_node}
    defaults = {name: value for name, value in of_job.items() if value and name not in given.explicit}
    settings = [*(f"{name}={value}" for name, value in defaults.items()), "launcher.type=slurm"]
    loaded = load_config(replace(sources, overrides=[*settings, *sources.overrides]))
    notes = [
        make_note(name, f"is {value}, as in job {job.job_id} around this command")
        for name, value in defaults.items()
    ]
    if unused := sorted({f"launcher.slurm.{name}" for name in SBATCH_ONLY} & given.explicit):
        why = f"no effect, because the job runs already: {', '.join(unused)}"
        notes.append(make_note("", why, Kind.NO_EFFECT, related=tuple(unused)))
    planned = make_planned(replace(loaded, notes=[*loaded.notes, *notes]))
    plan = apply_threads_per_core(planned.plan, _find_threads_per_core(planned, job))
    refuse_misfit(job, plan)
    return replace(planned, plan=plan)


def _find_threads_per_core(planned: Planned, job: SurroundingJob) -> int:
    """Return the threads per core of the job's nodes by one sinfo; the planned number if it fails."""
    names = {node.name for node in job.nodes}
    try:
        nodes = [node for node in SlurmScheduler().query_nodes() if node.name in names]
    except SchedulerError:
        return planned.plan.threads_per_core
    limit = find_job_threads_limit(planned.loaded.config.launcher.slurm)
    return max(
        (node.threads_per_core for node in limit_threads(nodes, limit)), default=planned.plan.threads_per_core
    )
