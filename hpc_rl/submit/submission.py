"""Submission: a checked configuration and its plan become a trial directory and one job; a refusal leaves nothing behind.

`render_to` stops before the scheduler. What the job then does is the rendered script's and the supervisor's business.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import hpc_rl
from hpc_rl.config.loading.load import Loaded, to_dict, trainer_of
from hpc_rl.config.loading.profiles import site_dirs
from hpc_rl.config.loading.source import literal
from hpc_rl.config.sections.experiment import Config
from hpc_rl.config.tables.changes import Change
from hpc_rl.errors import CannotWrite, ConfigError, SchedulerError, TrialBusy
from hpc_rl.plan.schema import Plan
from hpc_rl.render import code_zip
from hpc_rl.render.scripts import Stamp, job_name, render, script_name
from hpc_rl.schedulers import make_scheduler, pick
from hpc_rl.schedulers.base import JobSpec, Scheduler
from hpc_rl.schedulers.shared_query import cluster_name
from hpc_rl.schedulers.submitit import SubmititScheduler
from hpc_rl.status.scheduler_view import scheduler_of
from hpc_rl.status.trial_status import TrialJob, read_jobs
from hpc_rl.submit import trial_index
from hpc_rl.submit.first_start import FirstStart, check_start, predict_start, stale_leftovers
from hpc_rl.submit.lock import TrialLock
from hpc_rl.supervise import bad_nodes
from hpc_rl.supervise.server_array import submit_servers
from hpc_rl.trial import Trial, account, read_json, write_json

GIT_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Submission:
    """What was made. `job_id` is empty where only rendering was asked for."""

    trial: Trial
    script: Path
    scheduler: str
    job_id: str = ""
    output: Path | None = None  # where the script's own words go
    server_job_id: str = ""  # of layout jobs
    changes: tuple[Change, ...] = ()  # what differs from the configuration that the trial had; all safe
    allocation_was: str = ""  # of the plan before, where there was one
    step: int | None = None  # of the generation that it starts from, as things are now
    unread: tuple[str, ...] = ()  # files of it that only the start reads
    dropped: tuple[Path, ...] = ()  # what earlier starts under other options had left, and nothing came of


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What `hpc-rl recover` adds to a submission: its first start resumes, whatever the stored mode is.

    Args:
        from_step: The generation that a person named; None for the newest valid one.
        parent: TrialJob id of the submission that this one goes on from.
    """

    from_step: int | None = None
    parent: str | None = None


def trial_of(config: Config) -> Trial:
    """Where a configuration's trial lies, for the account that asks."""
    return Trial.of(config.cluster.fileroot, account(), config.experiment_name, config.trial_name)


def submit(
    loaded: Loaded,
    plan: Plan,
    *,
    command: Sequence[str],
    trial: Trial | None = None,
    recovery: Recovery | None = None,
    scheduler: Scheduler | None = None,
    avoid: Sequence[str] | None = None,
) -> Submission:
    """Hand the trial in.

    Args:
        loaded: The configuration.
        plan: What was planned from it.
        command: The command line, for the records.
        trial: Where it lies; by default as the configuration says.
        recovery: Of `hpc-rl recover`.
        scheduler: Whom to ask; by default as `launcher.type` says.
        avoid: Nodes to avoid besides; by default those that failed the trial lately.

    Raises:
        TrialBusy, NothingToResume, CannotWrite, SchedulerError, ConfigError. A directory that was not there before is gone then.
    """
    trial = trial or trial_of(loaded.config)
    scheduler = scheduler or make_scheduler(loaded.config.launcher.type, trial)
    if loaded.config.launcher.slurm.backend == "submitit" and scheduler.name == "slurm":
        scheduler = SubmititScheduler()
    check_submittable(trial, loaded, plan, scheduler.name, recovery)
    with TrialLock(trial) as claim:
        outlook, changed = check_submittable(
            trial, loaded, plan, scheduler.name, recovery
        )  # whoever held it before may have submitted
        allocation_was = str((read_json(trial.plan_json) or {}).get("allocation") or "")
        start = _start(plan, recovery)
        dropped = stale_leftovers(trial, loaded.config)
        made = _prepare(claim, loaded, plan, list(command), start, scheduler.name, avoid)
        for path in (trial.done, *dropped):  # where it was at its end, it goes on
            claim.remove(path)
        job_id = scheduler.submit(JobSpec(job_name(trial), made.script, made.tag))
        servers = ""
        if plan.layout == "jobs":
            servers = _servers(trial, plan, job_id, made.tag, scheduler)
        claim.keep()
        job = {
            "job_id": job_id,
            "scheduler": scheduler.name,
            "time": time.time(),
            "command": list(command),
            "tag": made.tag,
        }
        job |= {"start_mode": made.start_mode, "lineage_parent": recovery.parent if recovery else None}
        job |= {"cluster": cluster_name()} if scheduler.name == "slurm" else {}
        write_json(
            trial.job(job_id), job | {"from_step": start[1], "changed": [str(change) for change in changed]}
        )
    trial_index.record(trial)
    output = trial.jobs / f"{job_id}.out"
    return Submission(
        trial,
        made.script,
        scheduler.name,
        job_id,
        output,
        servers,
        changes=tuple(changed),
        allocation_was=allocation_was,
        step=outlook.decision.step,
        unread=outlook.unread,
        dropped=tuple(dropped),
    )


def _servers(trial: Trial, plan: Plan, job_id: str, tag: str, scheduler: Scheduler) -> str:
    """The second job of layout `jobs`; where it is refused, the first one goes too."""
    try:
        return submit_servers(trial, plan, job_id, tag, job_name(trial), scheduler)
    except SchedulerError as error:
        scheduler.cancel(job_id)
        raise SchedulerError(f"the servers' job: {error} The trial's job {job_id} was cancelled.") from error


def render_to(
    loaded: Loaded, plan: Plan, directory: Path | None = None, *, command: Sequence[str]
) -> Submission:
    """A whole trial directory (by default where the trial belongs), not handed in; its script runs by plain sbatch or bash.

    Raises TrialBusy, NothingToResume, CannotWrite, ConfigError.
    """
    trial = Trial(Path(os.path.expanduser(directory)).absolute()) if directory else trial_of(loaded.config)
    name = pick(loaded.config.launcher.type)
    check_idle(trial)
    with TrialLock(trial, "rendered") as claim:
        outlook = predict_start(trial, loaded.config, plan.recover_mode)
        changed = (
            check_start(trial, loaded.config, outlook) if trial.has_state() else []
        )  # else what it starts from may come yet
        dropped = stale_leftovers(trial, loaded.config)
        made = _prepare(claim, loaded, plan, list(command), (plan.recover_mode, None), name)
        for path in dropped:
            claim.remove(path)
    return Submission(
        trial, made.script, name, changes=tuple(changed), step=outlook.decision.step, dropped=tuple(dropped)
    )


def check_submittable(
    trial: Trial, loaded: Loaded, plan: Plan, scheduler: str, recovery: Recovery | None = None
) -> tuple[FirstStart, list[Change]]:
    """Whether a submission may begin: what its first start would do now, and the options that change.

    Reads files, asks the scheduler at most once. Raises TrialBusy, NothingToResume, ConfigError, SchedulerError.
    """
    plan.refuse_unbuilt()
    check_idle(trial)
    start_mode, from_step = _start(plan, recovery)
    outlook = predict_start(trial, loaded.config, start_mode, from_step)
    changed = check_start(trial, loaded.config, outlook)
    if scheduler == "local":
        check_programs(plan, loaded)
    return outlook, changed


def _start(plan: Plan, recovery: Recovery | None) -> tuple[str, int | None]:
    """Mode and named generation of the first start."""
    return ("resume", recovery.from_step) if recovery else (plan.recover_mode, None)


def check_programs(plan: Plan, loaded: Loaded) -> None:
    """Whether this machine, which is to run the trial, has what it is started with. Raises ConfigError."""
    python = plan.python
    if "launcher.python" in loaded.explicit and shutil.which(python) is None:
        raise ConfigError(
            f"launcher.python {python} is not a program that can be run here; leave it out for {sys.executable}."
        )
    for program in {unit.container.program for unit in plan.units if unit.container}:
        if shutil.which(program) is None:
            raise ConfigError(
                f"launcher.slurm.container_program {program} is not a program that can be run here; "
                "install it, or leave the images out to run without containers."
            )


def check_idle(trial: Trial) -> None:
    """Raises TrialBusy while a job of the trial waits or runs; SchedulerError where only another cluster can tell."""
    jobs: dict[tuple[str, str], list[TrialJob]] = {}
    for job in read_jobs(trial):
        if not job.over:
            jobs.setdefault((job.scheduler, job.cluster), []).append(job)
    for together in jobs.values():
        states = scheduler_of(trial, together[0]).states([job.native_id for job in together])
        for job_id, state in states.items():
            if state.state.alive:
                raise TrialBusy(
                    f"trial {trial} is {state.state} as job {job_id}. "
                    f"See `hpc-rl status {trial}`; end it with `hpc-rl cancel {trial}`."
                )


@dataclass(frozen=True)
class _Prepared:
    script: Path
    tag: str
    start_mode: str


def _prepare(
    claim: TrialLock,
    loaded: Loaded,
    plan: Plan,
    command: list[str],
    start: tuple[str, int | None],
    scheduler: str,
    avoid: Sequence[str] | None = None,
) -> _Prepared:
    """Write everything that the job reads. `start`: mode and generation of the first start."""
    trial, config = claim.trial, loaded.config
    config_json = _json(to_dict(config))
    zip_name, zip_bytes = code_zip.build()
    bad = tuple(bad_nodes.current(trial, time.time()) if avoid is None else avoid)
    stamp = dataclasses.replace(_stamp(trial, config_json, zip_name, *start), avoid=bad)
    plan_json = _json(plan.to_json())
    scripts = render(config, plan, trial, stamp, scheduler, site_dirs())
    hashes = {
        "config.json": stamp.config_sha256,
        "plan.json": sha256(plan_json),
        zip_name: sha256(zip_bytes),
    }
    hashes |= {f"scripts/{name}": sha256(text) for name, text in scripts.items()}
    try:
        trial.make_secret()
    except OSError as error:
        raise CannotWrite(f"{trial.secret} can't be written: {error.strerror or error}") from error
    claim.write(
        trial.config_yaml,
        yaml.safe_dump(literal(explicit_options(loaded)), sort_keys=False, allow_unicode=True),
    )
    claim.write(trial.config_json, config_json)
    claim.write(trial.plan_json, plan_json)
    claim.write(trial.provenance_json, _json(provenance(command, stamp.workdir, hashes)))
    claim.write(trial.scripts / zip_name, zip_bytes)
    for name, text in scripts.items():
        claim.write(trial.scripts / name, text, mode=0o755)
    return _Prepared(trial.scripts / script_name(scheduler), stamp.tag, start[0])


def _stamp(
    trial: Trial, config_json: str, zip_name: str, start_mode: str, from_step: int | None = None
) -> Stamp:
    return Stamp(
        version=hpc_rl.__version__,
        config_sha256=sha256(config_json),
        command=["hpc-rl", "render", "--config", str(trial.config_yaml)],
        tag=f"hpc-rl:{trial}:{secrets.token_hex(4)}",
        wheel=zip_name,
        workdir=Path.cwd(),
        start_mode=start_mode,
        from_step=from_step,
    )


def render_scripts(loaded: Loaded, plan: Plan, trial: Trial, scheduler: str) -> dict[str, str]:
    """The scripts of a submission, without one: file name below scripts/ -> text. Writes nothing. Raises ConfigError."""
    stamp = _stamp(trial, _json(to_dict(loaded.config)), code_zip.build()[0], plan.recover_mode)
    return render(loaded.config, plan, trial, stamp, scheduler, site_dirs())


def explicit_options(loaded: Loaded) -> dict[str, Any]:
    """What was said explicitly, as one file: loading it gives the same configuration, defaults left to adapt again."""
    tree: dict[str, Any] = {"trainer": trainer_of(loaded.config)}
    for name in sorted(loaded.origins):
        *path, last = name.split(".")
        section: Any = loaded.config
        branch = tree
        for part in path:
            section = getattr(section, part)
            branch = branch.setdefault(part, {})
        branch[last] = getattr(section, last)
    return tree


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def sha256(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def provenance(command: list[str], workdir: Path, hashes: dict[str, str]) -> dict[str, Any]:
    """What provenance.json says, apart from the time, which the job's record has."""
    return {
        "version": hpc_rl.__version__,
        "git": git_state(Path(hpc_rl.__file__).parent.parent),
        "command": command,
        "workdir": str(workdir),
        "user": account(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "sha256": hashes,
    }


def git_state(checkout: Path) -> dict[str, Any] | None:
    """Commit of the checkout that this code runs from, and whether it has changes; None where it is no checkout."""
    if not (checkout / ".git").exists():
        return None
    commit = _git(checkout, "rev-parse", "--verify", "--quiet", "HEAD")
    changes = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit.strip() if commit else None,
        "dirty": bool(changes.strip()) if changes is not None else None,
    }


def _git(checkout: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(checkout), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
