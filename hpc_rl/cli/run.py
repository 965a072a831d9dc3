"""`hpc-rl run`: a trial in the foreground of the Slurm job that the command is typed in."""

import os
import signal
import sys
from dataclasses import replace

from hpc_rl.cli import submit
from hpc_rl.cli.options import CommandParser, Namespace
from hpc_rl.config.load.load import Loaded
from hpc_rl.config.rules.slurm_rules import job_threads_limit
from hpc_rl.core.errors import ConfigError, ExitCode, SchedulerError
from hpc_rl.core.trial import Trial
from hpc_rl.plan.plan import with_threads_per_core
from hpc_rl.schedulers.local import AllocationScheduler
from hpc_rl.schedulers.sinfo import with_threads
from hpc_rl.schedulers.slurm import SlurmScheduler
from hpc_rl.trials import submission
from hpc_rl.trials.cancellation import cancel
from hpc_rl.trials.checklist import Planned, plan_of
from hpc_rl.trials.first_start import Recovery
from hpc_rl.trials.surrounding_job import SurroundingJob, refuse_misfit, surrounding_job

ABOUT = """Run a trial in the Slurm job that this is typed in (salloc, or an interactive job): by steps on
all of its nodes, in the foreground. Ends with the trial's exit code; Ctrl-C saves the state and ends it."""
EPILOG = """examples:
  salloc -N 2 -c 16 --gpus-per-node=4 hpc-rl run grpo.yaml
  hpc-rl run grpo.yaml actor.optimizer.lr=1e-6"""
LEAVE_S = 30.0  # for the runner, once the trial is over
# Options of launcher.slurm that only sbatch would use.
OF_SBATCH = {
    "time", "constraint", "nodelist", "exclude", "tmp", "switches", "exclusive", "partition", "account",
    "qos", "reservation", "licenses", "wckey", "comment", "mail_type", "mail_user", "dependency",
    "continue_by",
}  # fmt: skip


def parser() -> CommandParser:
    made = CommandParser(ABOUT, EPILOG)
    made.add_config()
    return made


def run(args: Namespace) -> int:
    job = surrounding_job(os.environ)
    planned = plan_in(submit.loaded(args), args, job)
    return run_here(planned, submission.trial_of(planned.loaded.config), args.argv)


def plan_in(given: Loaded, args: Namespace, job: SurroundingJob) -> Planned:
    """Return the plan for the nodes of a job. Raises ConfigError."""
    if given.config.launcher.type == "local" and "cpu" not in args.preset:
        raise ConfigError(
            "launcher.type local starts no steps in a Slurm job: omit it, or use `hpc-rl submit`."
        )
    if "cluster.n_nodes" in given.explicit:  # the plan uses the first ones
        job = replace(job, nodes=job.nodes[: given.config.cluster.n_nodes])
    of_job = {"cluster.n_nodes": len(job.nodes), "cluster.n_gpus_per_node": job.gpus_per_node}
    defaults = {name: value for name, value in of_job.items() if value and name not in given.explicit}
    args.overrides = [
        *(f"{name}={value}" for name, value in defaults.items()),
        "launcher.type=slurm",
        *args.overrides,
    ]
    again = submit.loaded(args)
    notes = [f"{name} is {value}, as job {job.job_id} has it." for name, value in defaults.items()]
    if idle := sorted({f"launcher.slurm.{name}" for name in OF_SBATCH} & given.explicit):
        notes.append(f"no effect in a job that is there already: {', '.join(idle)}.")
    planned = plan_of(replace(again, notes=[*again.notes, *notes]))
    plan = with_threads_per_core(planned.plan, _threads_per_core(planned, job))
    refuse_misfit(job, plan)
    return replace(planned, plan=plan)


def _threads_per_core(planned: Planned, job: SurroundingJob) -> int:
    """Return the threads per core of the job's nodes, by one sinfo; what was planned where that fails."""
    names = {node.name for node in job.nodes}
    try:
        nodes = [node for node in SlurmScheduler().nodes() if node.name in names]
    except SchedulerError:
        return planned.plan.threads_per_core
    limit = job_threads_limit(planned.loaded.config.launcher.slurm)
    return max(
        (node.threads_per_core for node in with_threads(nodes, limit)), default=planned.plan.threads_per_core
    )


def run_here(planned: Planned, trial: Trial, argv: list[str], recovery: Recovery | None = None) -> int:
    """Start the trial as a child of this process, and show it until it is over; return its exit code."""
    scheduler = AllocationScheduler(trial)
    made = submission.submit(
        planned.loaded,
        planned.plan,
        command=["hpc-rl", *argv],
        trial=trial,
        recovery=recovery,
        scheduler=scheduler,
        avoid=(),
    )
    runner = scheduler.runner
    assert runner is not None
    # The end of the surrounding job: save while there is time, as a job would.
    signal.signal(signal.SIGTERM, lambda *_: runner.terminate())
    print("\n".join(submit.lines(made, planned)), flush=True)
    code = _watch(trial)
    runner.wait(LEAVE_S)
    return code


def _watch(trial: Trial) -> int:
    from hpc_rl.status import follow as live  # importing rich takes time

    interrupts = 0
    while True:
        try:
            return live.follow(trial)
        except KeyboardInterrupt:
            interrupts += 1
            if interrupts > 2:
                return ExitCode.KILLED_BY_PERSON
            cancel(trial, now=interrupts > 1)
            next_one = "ends it now" if interrupts == 1 else "leaves it"
            print(f"\nhpc-rl: stopping, with its state saved; another Ctrl-C {next_one}", file=sys.stderr)
