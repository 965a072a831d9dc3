"""`submit --after`: sbatch's dependency of a new job on another: by its id, or as the newest of a trial."""

from hpc_rl.config.options.experiment import Config
from hpc_rl.core.errors import ConfigError, ExitCode, TrialStateError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.schedulers.base import State
from hpc_rl.schedulers.slurm import SlurmScheduler
from hpc_rl.status.submitted_jobs import load_jobs
from hpc_rl.trials import trial_index

_SLURM = "launcher.slurm"


def make_sbatch_options(after: str, only_if_done: bool, config: Config, scheduler: str) -> tuple[str, ...]:
    """Return sbatch's option for a job that waits for another; no option if the other is over.

    Args:
        after: A job id, or a trial as commands name it.
        only_if_done: The other job has to succeed.
        config: Whose `launcher.slurm.dependency` holds as well.
        scheduler: What the new job is for.

    Raises ConfigError, TrialStateError, TrialNameError, SchedulerError.
    """
    flag = "--after_ok" if only_if_done else "--after"
    slurm = config.launcher.slurm
    if scheduler != "slurm" or slurm.backend != "sbatch":
        why, related = (
            f"{flag} {after} needs Slurm and launcher.slurm.backend sbatch",
            (f"{_SLURM}.backend",),
        )
        raise ConfigError(Refusal(option="", kind=Kind.CONFLICT, why=why, related=related))
    if "?" in (slurm.dependency or ""):
        why = f"can't be combined with {flag}, because it has a `?`; give only one of them"
        option, value = f"{_SLURM}.dependency", slurm.dependency
        raise ConfigError(Refusal(option=option, value=value, kind=Kind.CONFLICT, why=why))
    job_id, code, is_over = after, None, False
    if not after.isdigit():
        job_id, code, is_over = _find_newest_job(after)
    seen = SlurmScheduler().query_states([job_id])[job_id]
    if seen.state.alive:
        kind = "afterok" if only_if_done else "afterany"
        return join_dependencies(f"{kind}:{job_id}", slurm.dependency)
    if seen.state is State.UNKNOWN and not is_over:
        raise ConfigError(f"{flag} {after}: Slurm knows no job {job_id} (squeue, sacct).")
    if only_if_done and not (code == ExitCode.DONE if is_over else seen.state is State.DONE):
        raise ConfigError(
            f"{flag} {after}: job {job_id} has ended without success; fix that first, or use --after."
        )
    return ()


def join_dependencies(word: str, configured: str | None) -> tuple[str, ...]:
    """Return sbatch's option for a dependency, in addition to `launcher.slurm.dependency`."""
    return (f"--dependency={','.join([word, *([configured] if configured else [])])}",)


def _find_newest_job(name: str) -> tuple[str, int | None, bool]:
    """Return the id of a trial's newest job, its exit code, and whether it is over."""
    trial = trial_index.resolve(name)
    jobs = [job for job in load_jobs(trial) if job.scheduler == "slurm"]
    if not jobs:
        raise TrialStateError(
            f"{trial} has no job in Slurm to wait for, because it was not submitted to Slurm."
        )
    return jobs[-1].native_id, jobs[-1].code, jobs[-1].over
