"""Submission: a checked configuration and its plan become a trial directory and one job; a refusal leaves nothing behind.

`render_to` stops before the scheduler. What the job then does is the rendered script's and the supervisor's business.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import hpc_rl
from hpc_rl.config.load import Loaded, to_dict, trainer_of
from hpc_rl.config.root import Config
from hpc_rl.errors import CannotWrite, ConfigError, NothingToResume, TrialBusy
from hpc_rl.launch import bad_nodes, index, provenance
from hpc_rl.launch.claim import Claim
from hpc_rl.launch.story import newest_generation
from hpc_rl.plan.schema import Plan
from hpc_rl.render import wheel
from hpc_rl.render.scripts import Stamp, job_name, render, script_name
from hpc_rl.schedulers import make_scheduler, pick, record
from hpc_rl.schedulers.base import JobSpec, Scheduler
from hpc_rl.trial import Trial, account, read_json, write_json


@dataclass(frozen=True)
class Submission:
    """What was made. `job_id` is empty where only rendering was asked for."""

    trial: Trial
    script: Path
    scheduler: str
    job_id: str = ""
    output: Path | None = None  # where the script's own words go


def trial_of(config: Config) -> Trial:
    """Where a configuration's trial lies, for the account that asks."""
    return Trial.of(config.cluster.fileroot, account(), config.experiment_name, config.trial_name)


def submit(
    loaded: Loaded,
    plan: Plan,
    *,
    command: Sequence[str],
    trial: Trial | None = None,
    recover: bool = False,
    lineage_parent: str | None = None,
    scheduler: Scheduler | None = None,
) -> Submission:
    """Hand the trial in.

    Args:
        loaded: The configuration.
        plan: What was planned from it.
        command: The command line, for the records.
        trial: Where it lies; by default as the configuration says.
        recover: `hpc-rl recover`: the first start resumes, whatever the stored mode is.
        lineage_parent: Job id of the submission that this one goes on from.
        scheduler: Whom to ask; by default as `launcher.type` says.

    Raises:
        TrialBusy, NothingToResume, CannotWrite, SchedulerError, ConfigError. A directory that was not there before is gone then.
    """
    trial = trial or trial_of(loaded.config)
    scheduler = scheduler or make_scheduler(loaded.config.launcher.type, trial)
    check(trial, loaded.config.recover.mode, recover)
    if scheduler.name == "local" and "launcher.python" in loaded.explicit:
        check_interpreter(plan.python)
    with Claim(trial) as claim:
        check(trial, loaded.config.recover.mode, recover)  # whoever held the claim before may have submitted
        check_length(trial, loaded.config.total_train_steps)
        made = _prepare(claim, loaded, plan, list(command), "resume" if recover else plan.recover_mode, scheduler.name)
        job_id = scheduler.submit(JobSpec(job_name(trial), made.script, made.tag))
        claim.keep()
        job = {"job_id": job_id, "scheduler": scheduler.name, "time": time.time(), "command": list(command), "tag": made.tag}
        write_json(trial.job(job_id), job | {"start_mode": made.start_mode, "lineage_parent": lineage_parent})
    index.record(trial)
    return Submission(trial, made.script, scheduler.name, job_id, trial.jobs / f"{job_id}.out")


def render_to(loaded: Loaded, plan: Plan, directory: Path | None = None, *, command: Sequence[str]) -> Submission:
    """A whole trial directory (by default where the trial belongs), not handed in; its script runs by plain sbatch or bash.

    Raises TrialBusy, CannotWrite, ConfigError.
    """
    trial = Trial(Path(os.path.expanduser(directory)).absolute()) if directory else trial_of(loaded.config)
    name = pick(loaded.config.launcher.type)
    check_idle(trial)
    with Claim(trial) as claim:
        made = _prepare(claim, loaded, plan, list(command), plan.recover_mode, name)
    return Submission(trial, made.script, name)


def check(trial: Trial, mode: str, recover: bool = False) -> None:
    """Whether a submission may begin. Reads files, asks the scheduler at most once. Raises TrialBusy, NothingToResume."""
    check_idle(trial)
    if recover or mode == "resume":
        if not any(trial.recover.glob("gen-*/manifest.json")):
            raise NothingToResume(
                f"trial {trial} has no generation to resume from in {trial.recover}; "
                "`hpc-rl submit` with recover.mode=auto starts it from step 0."
            )
    elif mode in ("disabled", "fault") and trial.has_state():
        raise TrialBusy(
            f"trial {trial} has state already, and recover.mode={mode} starts fresh. Go on from it with `hpc-rl recover {trial}` "
            f"or recover.mode=auto; for a fresh start give another trial_name, or remove {trial.dir}."
        )


def check_length(trial: Trial, total_steps: int | None) -> None:
    """Raises ConfigError where the trial would end before the generation that it goes on from."""
    newest = newest_generation(trial)
    if newest is not None and total_steps is not None and total_steps < newest:
        raise ConfigError(
            f"total_train_steps {total_steps}: trial {trial} goes on from generation {newest}, which is past that. "
            f"Allowed: {newest} or more; for a shorter trial give another trial_name."
        )


def check_interpreter(python: str) -> None:
    """Whether this machine, which is to run the trial, has the interpreter. Raises ConfigError."""
    if shutil.which(python) is None:
        raise ConfigError(f"launcher.python {python} is not a program that can be run here; leave it out for {sys.executable}.")


def check_idle(trial: Trial) -> None:
    """Raises TrialBusy while a job of the trial waits or runs."""
    jobs: dict[str, list[str]] = {}
    for path in sorted(trial.jobs.glob("*.json")):
        job = read_json(path)
        ended = [event for event in record.read(trial, path.stem)[-1:] if event["event"] == "ended"]
        if isinstance(job, dict) and not ended:
            jobs.setdefault(str(job.get("scheduler", "")), []).append(path.stem)
    for name, job_ids in jobs.items():
        for job_id, state in make_scheduler(name, trial).states(job_ids).items():
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


def _prepare(claim: Claim, loaded: Loaded, plan: Plan, command: list[str], start_mode: str, scheduler: str) -> _Prepared:
    """Write everything that the job reads."""
    trial, config = claim.trial, loaded.config
    config_json = _json(to_dict(config))
    zip_name, zip_bytes = wheel.build()
    tag = f"hpc-rl:{trial}:{secrets.token_hex(4)}"
    stamp = Stamp(
        version=hpc_rl.__version__,
        config_sha256=provenance.sha256(config_json),
        command=["hpc-rl", "render", "--config", str(trial.config_yaml)],
        tag=tag,
        wheel=zip_name,
        workdir=Path.cwd(),
        start_mode=start_mode,
    )
    plan_json = _json(plan.to_json())
    scripts = render(_without_bad_nodes(config, trial), plan, trial, stamp, scheduler)
    hashes = {
        "config.json": stamp.config_sha256,
        "plan.json": provenance.sha256(plan_json),
        zip_name: provenance.sha256(zip_bytes),
    }
    hashes |= {f"scripts/{name}": provenance.sha256(text) for name, text in scripts.items()}
    try:
        trial.make_secret()
    except OSError as error:
        raise CannotWrite(f"{trial.secret} can't be written: {error.strerror or error}") from error
    claim.write(trial.config_yaml, yaml.safe_dump(given(loaded), sort_keys=False, allow_unicode=True))
    claim.write(trial.config_json, config_json)
    claim.write(trial.plan_json, plan_json)
    claim.write(trial.provenance_json, _json(provenance.collect(command, stamp.workdir, hashes)))
    claim.write(trial.scripts / zip_name, zip_bytes)
    for name, text in scripts.items():
        claim.write(trial.scripts / name, text, mode=0o755)
    return _Prepared(trial.scripts / script_name(scheduler), tag, start_mode)


def _without_bad_nodes(config: Config, trial: Trial) -> Config:
    """The configuration as this one submission needs it: it avoids the nodes that failed the trial lately."""
    slurm = config.launcher.slurm
    avoiding = dataclasses.replace(slurm, exclude=bad_nodes.merged(slurm.exclude, trial, time.time()))
    return dataclasses.replace(config, launcher=dataclasses.replace(config.launcher, slurm=avoiding))


def given(loaded: Loaded) -> dict[str, Any]:
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
