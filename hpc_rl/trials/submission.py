"""Submission: a checked configuration and its plan become a trial directory and one job.

A refusal leaves no files. `render_to` stops before the scheduler.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

import hpc_rl
from hpc_rl.config.load.profiles import list_site_dirs
from hpc_rl.config.load.source import escape_references
from hpc_rl.config.load.stored import (
    REDACTED,
    VARIABLES,
    Loaded,
    find_trainer,
    list_secret_variables,
    redact_secrets,
    to_dict,
)
from hpc_rl.config.options.experiment import Config, get_value
from hpc_rl.config.snapshot import list_snapshot_files
from hpc_rl.core.errors import CannotWrite, ConfigError, SchedulerError, TrialBusy
from hpc_rl.core.log import MIN_SECRET_CHARS
from hpc_rl.core.records import JobRecord
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.trial import Trial, find_account_name, load_object, write_json
from hpc_rl.plan.schema import Plan
from hpc_rl.render import code_zip
from hpc_rl.render.scripts import Stamp, choose_script_name, render
from hpc_rl.schedulers import make_scheduler, pick
from hpc_rl.schedulers.base import JobSpec, Scheduler
from hpc_rl.schedulers.shared_query import find_cluster_name
from hpc_rl.schedulers.submitit import SubmititScheduler
from hpc_rl.status.scheduler_view import make_job_scheduler
from hpc_rl.status.submitted_jobs import TrialJob, load_jobs
from hpc_rl.supervise import bad_nodes
from hpc_rl.supervise.server_array import submit_servers
from hpc_rl.trials import trial_index
from hpc_rl.trials.first_start import Continuation, FirstStart, Recovery, find_stale_leftovers
from hpc_rl.trials.lock import TrialLock
from hpc_rl.trials.user_code import checkout_of, user_code

GIT_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Submission:
    """The result of a submission. `job_id` is empty where only rendering was asked for."""

    trial: Trial
    script: Path
    scheduler: str
    tag: str  # finds the job after a submission whose answer was lost
    start: FirstStart
    dropped: tuple[Path, ...]  # removed leftovers of earlier starts under other options
    allocation_was: str  # of the plan before, if there was one
    continuation: Continuation  # before the job has started
    job_id: str = ""
    server_job_id: str = ""  # of layout jobs
    notes_before: tuple[str, ...] = ()  # that the submission before this one printed


def make_trial(config: Config) -> Trial:
    """Return the trial of a configuration, for this account."""
    return Trial.of(config.cluster.fileroot, find_account_name(), config.experiment_name, config.trial_name)


def submit(
    loaded: Loaded,
    plan: Plan,
    *,
    command: Sequence[str],
    trial: Trial | None = None,
    recovery: Recovery | None = None,
    scheduler: Scheduler | None = None,
    avoid: Sequence[str] | None = None,
    options: Sequence[str] = (),
    is_checked: bool = False,
) -> Submission:
    """Write the trial directory and submit its job; `command` is for the records, `options` are sbatch's.

    By default the configuration names the directory and the scheduler, and `avoid` has the nodes that failed
    the trial recently. `is_checked` if `check_submittable` was called just before. Raises
    TrialBusy, NothingToResume, CannotWrite, SchedulerError or ConfigError; no new directory is left.
    """
    trial = trial or make_trial(loaded.config)
    scheduler = scheduler or make_scheduler(loaded.config.launcher.type, trial)
    if loaded.config.launcher.slurm.backend == "submitit" and scheduler.name == "slurm":
        scheduler = SubmititScheduler()
    if not is_checked:
        check_submittable(trial, loaded, plan, scheduler.name, recovery)
    with TrialLock(trial) as lock:
        # Checked again: another process may have submitted while this one waited for the lock.
        start = check_submittable(trial, loaded, plan, scheduler.name, recovery)
        made = prepare_directory(lock, loaded, plan, list(command), start, scheduler.name, avoid)
        lock.remove(trial.done)  # a trial that was done continues
        job_id, server_job_id = _submit_jobs(made, plan, scheduler, options)
        lock.keep()
        record_job(made, loaded.config, job_id, scheduler, command, recovery)
    return replace(made, job_id=job_id, server_job_id=server_job_id)


def record_job(
    made: Submission,
    config: Config,
    job_id: str,
    scheduler: Scheduler,
    command: Sequence[str],
    recovery: Recovery | None = None,
    native_id: str = "",
) -> None:
    """Record a job that the scheduler accepted, in the trial and in the index of trials. Raises OSError.

    `native_id` is the scheduler's id, where it differs from the trial's.
    """
    start = made.start
    record = JobRecord(
        job_id=job_id,
        native_id=native_id,
        scheduler=scheduler.name,
        cluster=find_cluster_name() if scheduler.name == "slurm" else "",
        time=time.time(),
        command=tuple(_hide_secrets(command, config)),
        tag=made.tag,
        start_mode=start.mode,
        from_step=start.situation.wanted,
        new_batches=start.new_batches,
        lineage_parent=recovery.parent if recovery else None,
        changed=tuple(map(str, start.changes)),
    )
    write_json(made.trial.job(job_id), record.to_json())
    trial_index.record_trial(made.trial)


def _submit_jobs(
    made: Submission, plan: Plan, scheduler: Scheduler, options: Sequence[str] = ()
) -> tuple[str, str]:
    """Submit the trial's job, and with layout `jobs` its servers' job; return their ids.

    Where the second one is refused, the first one is cancelled. Raises SchedulerError.
    """
    job_id = scheduler.submit(JobSpec(made.trial.job_name, made.script, made.tag, options=tuple(options)))
    if plan.layout != "jobs":
        return job_id, ""
    try:
        return job_id, submit_servers(made.trial, plan, job_id, made.tag, scheduler)
    except SchedulerError as error:
        scheduler.cancel(job_id)
        raise SchedulerError(
            f"the job of the servers was refused: {error} So job {job_id} of the trial was cancelled."
        ) from error


def render_to(
    loaded: Loaded, plan: Plan, directory: Path | None = None, *, command: Sequence[str]
) -> Submission:
    """Write a whole trial directory without submitting it; its script runs by plain sbatch or bash.

    Raises TrialBusy, NothingToResume, CannotWrite, ConfigError.
    """
    trial = Trial(Path(os.path.expanduser(directory)).absolute()) if directory else make_trial(loaded.config)
    check_idle(trial)
    with TrialLock(trial, "rendered") as lock:
        start = FirstStart(trial, loaded.config)
        if trial.has_state():  # without state, its checkpoint may still be imported
            start.check()
        return prepare_directory(lock, loaded, plan, list(command), start, pick(loaded.config.launcher.type))


def check_submittable(
    trial: Trial, loaded: Loaded, plan: Plan, scheduler: str, recovery: Recovery | None = None
) -> FirstStart:
    """Return the first start of a submission, as of now.

    Reads files, queries the scheduler at most once. Raises TrialBusy, NothingToResume, ConfigError,
    SchedulerError.
    """
    check_idle(trial)
    start = FirstStart(trial, loaded.config, recovery)
    start.check()
    if scheduler == "local":
        check_programs(plan, loaded)
    return start


def check_programs(plan: Plan, loaded: Loaded) -> None:
    """Raise ConfigError if this machine, which is to run the trial, lacks a program that starts it."""
    refuse = partial(
        Refusal, kind=Kind.MACHINE, why=f"is not an executable program on {socket.gethostname()}"
    )
    python = plan.python
    if "launcher.python" in loaded.explicit and shutil.which(python) is None:
        use = f"remove it to use {sys.executable}"
        raise ConfigError(refuse(option="launcher.python", value=python, use=use))
    for program in {unit.container.program for unit in plan.units if unit.container}:
        if shutil.which(program) is None:
            use = "install it, or remove the images to run without containers"
            raise ConfigError(refuse(option="launcher.slurm.container_program", value=program, use=use))


def check_idle(trial: Trial) -> None:
    """Raise TrialBusy while a job of the trial is alive; SchedulerError where another cluster has it."""
    jobs: dict[tuple[str, str], list[TrialJob]] = {}
    for job in load_jobs(trial):
        if not job.over:
            jobs.setdefault((job.scheduler, job.cluster), []).append(job)
    for group in jobs.values():
        states = make_job_scheduler(trial, group[0]).query_states([job.native_id for job in group])
        for job_id, state in states.items():
            if state.state.alive:
                raise TrialBusy(
                    f"trial {trial} is {state.state} as job {job_id}. "
                    f"See `hpc-rl status {trial}`; cancel it with `hpc-rl cancel {trial}`."
                )


def prepare_directory(
    lock: TrialLock,
    loaded: Loaded,
    plan: Plan,
    command: list[str],
    start: FirstStart,
    scheduler: str,
    avoid: Sequence[str] | None = None,
) -> Submission:
    """Write all files of the job, and remove leftovers that no start may use."""
    trial, config = lock.trial, redact_secrets(loaded.config)
    dropped = find_stale_leftovers(trial, config, start)
    continuation = start.continuation(is_dropped=bool(dropped))
    allocation_was = str(load_object(trial.plan_json).get("allocation") or "")
    zip_name, zip_bytes = code_zip.build()
    bad = tuple(bad_nodes.find_bad_nodes(trial, time.time()) if avoid is None else avoid)
    code = _take_snapshot(config)
    stamp = replace(
        _make_stamp(trial, config, zip_name, code),
        avoid=bad,
        start_mode=start.mode,
        from_step=start.situation.wanted,
        new_batches=start.new_batches,
    )
    files: dict[Path, str | bytes] = {
        trial.config_json: _format_json(to_dict(config)),
        trial.plan_json: _format_json(plan.to_json()),
        trial.scripts / zip_name: zip_bytes,
    }
    files |= {trial.scripts / stamp.snapshot / name: data for name, data in code.items()}
    scripts = render(config, plan, trial, stamp, scheduler, list_site_dirs())
    texts = {trial.scripts / name: text for name, text in scripts.items()}
    hashes = {str(path.relative_to(trial.dir)): hash_text(data) for path, data in (files | texts).items()}
    try:
        trial.make_dirs(int(config.launcher.umask, 8))
        trial.make_secret()
    except OSError as error:
        path = error.filename or trial.secret
        raise CannotWrite(f"{path} can't be written: {error.strerror or error}") from error
    for name in VARIABLES:
        variables = list_secret_variables(loaded.config, name)
        text = "".join(f"{key}={value}\0" for key, value in variables.items())
        if text or trial.secret_variables(name).exists():
            lock.write(trial.secret_variables(name), text, mode=0o600)
    explicit = escape_references(list_explicit_options(replace(loaded, config=config)))
    config_yaml = yaml.safe_dump(explicit, sort_keys=False, allow_unicode=True)
    lock.write(trial.config_yaml, config_yaml, mode=0o600)
    about = make_provenance(_hide_secrets(command, loaded.config), stamp.workdir, hashes)
    notes_before = tuple(load_object(trial.provenance_json).get("notes") or ())
    about["notes"] = [str(note) for note in (*loaded.notes, *plan.notes)]
    about["code"] = user_code(config, stamp.workdir, find_git_state)
    lock.write(trial.provenance_json, _format_json(about), mode=0o600)
    for path, data in files.items():
        lock.write(path, data, mode=0o600)
    for path, text in texts.items():
        lock.write(path, text, mode=0o755)
    for path in dropped:
        lock.remove(path)
    script = trial.scripts / choose_script_name(scheduler)
    return Submission(
        trial,
        script,
        scheduler,
        stamp.tag,
        start,
        tuple(dropped),
        allocation_was,
        continuation,
        notes_before=notes_before,
    )


def _hide_secrets(command: Sequence[str], config: Config) -> list[str]:
    """Return the words of a command with secret variables starred."""
    secrets = [item for name in VARIABLES for item in list_secret_variables(config, name).items()]
    shown = list(command)
    for name, value in secrets:
        for i, word in enumerate(shown):
            if len(value) >= MIN_SECRET_CHARS:
                shown[i] = word.replace(value, REDACTED)
            elif i and name in shown[i - 1] and word == value:
                shown[i] = REDACTED
            else:  # a short value may be part of other words
                pair = rf"({re.escape(name)}\W*){re.escape(value)}(?!\w)"
                shown[i] = re.sub(pair, rf"\1{REDACTED}", word)
    return shown


def _take_snapshot(config: Config) -> dict[str, bytes]:
    """Return the user's code that travels with the trial, by name. Raises ConfigError."""
    found = list_snapshot_files(config, Path.cwd())
    try:
        return {name: path.read_bytes() for name, path in found.items()}
    except OSError as error:
        why = f": {error.filename} can't be read: {error.strerror}"
        raise ConfigError(Refusal(option="launcher.snapshot", kind=Kind.FILE, why=why)) from error


def _make_stamp(trial: Trial, config: Config, zip_name: str, code: Mapping[str, bytes]) -> Stamp:
    return Stamp(
        version=hpc_rl.__version__,
        config_sha256=hash_text(_format_json(to_dict(config))),
        command=["hpc-rl", "render", "--config", str(trial.config_yaml)],
        tag=f"hpc-rl:{trial}:{secrets.token_hex(4)}",
        wheel=zip_name,
        snapshot=f"code-{hash_text(repr(sorted(code.items())))[:12]}" if code else "",
        workdir=Path.cwd(),
        start_mode=config.recover.mode,
    )


def render_scripts(loaded: Loaded, plan: Plan, trial: Trial, scheduler: str) -> dict[str, str]:
    """Return the scripts of a submission by their names below scripts/. Raises ConfigError."""
    stamp = _make_stamp(trial, loaded.config, code_zip.build()[0], _take_snapshot(loaded.config))
    return render(loaded.config, plan, trial, stamp, scheduler, list_site_dirs())


def list_explicit_options(loaded: Loaded) -> dict[str, Any]:
    """Return the options that were given explicitly, as a tree that loads to the same configuration."""
    tree: dict[str, Any] = {"trainer": find_trainer(loaded.config)}
    for name in sorted(loaded.origins):
        *path, last = name.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = get_value(loaded.config, name)
    return tree


def _format_json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def hash_text(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def make_provenance(command: list[str], workdir: Path, hashes: dict[str, str]) -> dict[str, Any]:
    """Return the content of provenance.json; the time is in the job's record."""
    return {
        "version": hpc_rl.__version__,
        "git": find_own_git_state(),
        "command": command,
        "workdir": str(workdir),
        "workdir_git": find_git_state(checkout_of(workdir)),
        "user": find_account_name(),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "sha256": hashes,
    }


@functools.cache
def find_own_git_state() -> dict[str, Any] | None:
    """Return the commit of this package, as `find_git_state`. A process keeps the code that it has loaded."""
    return find_git_state(Path(hpc_rl.__file__).parent.parent)


def find_git_state(checkout: Path) -> dict[str, Any] | None:
    """Return the commit of a checkout, and whether it has changes; None for other folders."""
    if not (checkout / ".git").exists():
        return None
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    command = ["git", "--no-optional-locks", "-C", str(checkout), *describe]
    said = ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S).stdout
    commit, _, dirty = said.strip().partition("-")
    return {"commit": commit or None, "dirty": bool(dirty) if commit else None}
