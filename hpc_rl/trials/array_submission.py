"""Several trials with equal requests as one job array: one call of sbatch, one task for each trial.

A task runs the trial's own script, under the submission `<array>-<task>`; Slurm's id is `<array>_<task>`.
"""

import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import hpc_rl
from hpc_rl.core.errors import SchedulerError
from hpc_rl.core.records import JobRecord
from hpc_rl.core.sweep import ArrayRecord, Sweep
from hpc_rl.core.trial import Trial, write_atomic, write_json
from hpc_rl.plan.schema import Plan
from hpc_rl.render.scripts import TRIAL
from hpc_rl.schedulers.base import JobSpec
from hpc_rl.schedulers.shared_query import find_cluster_name
from hpc_rl.schedulers.slurm import SlurmScheduler
from hpc_rl.supervise.successor import make_comment_option
from hpc_rl.trials import trial_index
from hpc_rl.trials.checklist import Planned
from hpc_rl.trials.lock import TrialLock
from hpc_rl.trials.submission import (
    Submission,
    check_submittable,
    prepare_directory,
    record_job,
    render_scripts,
)

OWN = ("--job-name=", "--comment=", "--output=")  # options that differ between trials by nature
HEAD = """#!/bin/bash
# Trials of a sweep, one task each, by hpc-rl {version}
# sweep    {sweep}
{directives}
set -euo pipefail
: "${{SLURM_ARRAY_TASK_ID:?this script is for sbatch, as an array}}"
trials=(
{trials}
)
trial=${{trials[$SLURM_ARRAY_TASK_ID]}}
submission=$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID
exec bash "$trial/scripts/{script}" "$submission" 0 >>"$trial/jobs/$submission.out" 2>&1
"""


@dataclass(frozen=True)
class ArrayMember:
    """A planned trial that may be a task of an array."""

    trial: Trial
    planned: Planned


def has_equal_requests(members: Sequence[ArrayMember]) -> bool:
    """Return whether trials may be one array: their scripts have equal options of sbatch."""
    if len(members) < 2:
        return False
    if any(not _may_be_task(one.planned.plan, one) for one in members):
        return False
    first, *rest = (_render_directives(one) for one in members)
    return all(other == first for other in rest)


def _may_be_task(plan: Plan, member: ArrayMember) -> bool:
    slurm = member.planned.loaded.config.launcher.slurm
    return plan.layout == "allocation" and slurm.backend == "sbatch"


def _render_directives(member: ArrayMember) -> list[str]:
    loaded, plan = member.planned.loaded, member.planned.plan
    return select_directives(render_scripts(loaded, plan, member.trial, "slurm")[TRIAL])


def select_directives(script: str) -> list[str]:
    """Return the `#SBATCH` lines of a script, without lines that differ between trials by nature."""
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    return [line for line in lines if not line.removeprefix("#SBATCH ").startswith(OWN)]


def submit_array(
    sweep: Sweep,
    members: Sequence[ArrayMember],
    max_running: int | None,
    command: Sequence[str],
    scheduler: SlurmScheduler,
) -> list[Submission]:
    """Write the directories of trials and submit them as one array, at most `max_running` at once.

    Raises TrialBusy, NothingToResume, CannotWrite, ConfigError or SchedulerError; no new directory of a trial
    is left then.
    """
    made: list[Submission] = []
    with ExitStack() as stack:
        locks = [stack.enter_context(TrialLock(one.trial)) for one in members]
        for lock, one in zip(locks, members, strict=True):
            loaded, plan = one.planned.loaded, one.planned.plan
            start = check_submittable(one.trial, loaded, plan, scheduler.name)
            avoid = one.planned.avoid
            made.append(prepare_directory(lock, loaded, plan, list(command), start, scheduler.name, avoid))
            lock.remove(one.trial.done)
        path, array = _record_array(sweep, made)
        spec = _make_spec(sweep, array, path, made, max_running)
        try:
            job_id = scheduler.submit(spec)
        except SchedulerError:
            path.unlink()  # there is no such array
            raise
        for lock in locks:
            lock.keep()
        write_json(path, {**array.to_json(), "job_id": job_id})
        for number, (submission, member) in enumerate(zip(made, members, strict=True)):
            config = member.planned.loaded.config
            own, native = name_task(job_id, number)
            record_job(submission, config, own, scheduler, command, native_id=native)
    return made


def name_task(job_id: str, number: int) -> tuple[str, str]:
    """Return the submission of a task, and Slurm's id of it."""
    return f"{job_id}-{number}", f"{job_id}_{number}"


def _record_array(sweep: Sweep, made: Sequence[Submission]) -> tuple[Path, ArrayRecord]:
    path = sweep.array_path(len(sweep.list_arrays()))
    names = tuple(one.trial.name for one in made)
    job_name = f"hpc-rl.{sweep.experiment}.{sweep.name}"
    start_mode = made[0].start.mode
    array = ArrayRecord(tag=made[0].tag, job_name=job_name, trials=names, start_mode=start_mode)
    write_json(path, array.to_json())
    return path, array


def _make_spec(
    sweep: Sweep, array: ArrayRecord, path: Path, made: Sequence[Submission], max_running: int | None
) -> JobSpec:
    directives = select_directives(made[0].script.read_text())
    text = HEAD.format(
        version=hpc_rl.__version__,
        sweep=str(sweep.dir).replace("\n", " "),
        directives="\n".join(directives),
        trials="\n".join(f"  {shlex.quote(str(one.trial.dir))}" for one in made),
        script=TRIAL,
    )
    script = path.with_suffix(".sbatch")
    write_atomic(script, text, 0o755)
    throttle = f"%{max_running}" if max_running else ""
    output = str(sweep.dir).replace("%", "%%")
    options = (
        f"--array=0-{len(made) - 1}{throttle}",
        f"--job-name={array.job_name}",
        make_comment_option(made[0].trial, array.tag),
        f"--output={output}/%A_%a.out",
    )
    return JobSpec(array.job_name, script, array.tag, options=options)


def adopt_arrays(sweep: Sweep, scheduler: SlurmScheduler, command: Sequence[str]) -> None:
    """Record the jobs of arrays whose submission was interrupted. Raises SchedulerError, OSError.

    An array without an answer is looked up by its tag; Slurm is asked only if there is one.
    """
    for path, array in sweep.list_arrays():
        missing = [name for name in array.trials if not any(sweep.trial(name).jobs.glob("*.json"))]
        if not missing:
            continue
        job_id = array.job_id or scheduler.find(JobSpec(array.job_name, path, array.tag)) or ""
        if not job_id:
            continue
        write_json(path, {**array.to_json(), "job_id": job_id})
        for name in missing:
            trial = sweep.trial(name)
            own, native = name_task(job_id, array.trials.index(name))
            record = JobRecord(
                job_id=own,
                native_id=native,
                scheduler=scheduler.name,
                cluster=find_cluster_name(),
                time=time.time(),
                command=tuple(command),
                tag=array.tag,
                start_mode=array.start_mode,
            )
            write_json(trial.job(own), record.to_json())
            trial_index.record_trial(trial)
