"""Submit a job from within a job; called by job scripts.

`successor` submits the job that continues a job which may not be requeued, and prints its id. `servers`
submits the servers of layout `jobs` if none waits or runs. `replacement` submits the servers of nodes that an
attempt in layout `allocation` has lost.
"""

import argparse
import json
import logging
import sys
from pathlib import Path

from hpc_rl.core import log
from hpc_rl.core.errors import CannotWrite, HpcRlError
from hpc_rl.core.records import JobRecord
from hpc_rl.core.trial import Trial
from hpc_rl.plan.schema import Plan
from hpc_rl.schedulers.slurm import SlurmScheduler
from hpc_rl.supervise.server_array import ensure_servers, replace_servers
from hpc_rl.supervise.successor import refuse_cancelled, submit_successor

logger = logging.getLogger(__name__)


def main() -> int:
    args = _parse_arguments()
    log.configure(args.what)
    try:
        SUBMITTERS[args.what](Trial(args.trial_dir), args)
    except (HpcRlError, OSError, ValueError) as error:
        logger.error("the %s job can't be submitted: %s", args.what, error)
        return error.exit_code if isinstance(error, HpcRlError) else CannotWrite.exit_code
    return 0


def _parse_arguments() -> argparse.Namespace:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--trial_dir", required=True, type=Path)
    common.add_argument("--job_id", required=True, help="the submission of the trial")
    parser = argparse.ArgumentParser(prog="python -m hpc_rl.roles.submit_again", description=__doc__)
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("servers", parents=[common])
    lost = what.add_parser("replacement", parents=[common])
    lost.add_argument("--attempt", required=True)
    lost.add_argument("--task", required=True, type=int, help="number of the task in the array of servers")
    new = what.add_parser("successor", parents=[common])
    new.add_argument("--restart", required=True, type=int, help="number of the start that the new job makes")
    new.add_argument("--after", required=True, help="Slurm's id of the job that runs now")
    new.add_argument("--name", required=True, help="job name")
    new.add_argument("--script", required=True, help="file name below scripts/")
    new.add_argument("--array", help="task of an array that continues alone")
    new.add_argument("--exclude", help="nodes to exclude, instead of the script's; empty for none")
    new.add_argument("arguments", nargs="*", help="further arguments of the script")
    return parser.parse_args()


def _submit_successor(trial: Trial, args: argparse.Namespace) -> None:
    given = (("array", args.array), ("exclude", args.exclude))
    job = submit_successor(
        trial,
        args.job_id,
        args.restart,
        after=args.after,
        name=args.name,
        script=trial.scripts / args.script,
        options=tuple(f"--{name}={value}" for name, value in given if value is not None),
        arguments=tuple(args.arguments),
    )
    print(job)


def _submit_replacement(trial: Trial, args: argparse.Namespace) -> None:
    plan, tag = _load_plan(trial), _find_tag(trial, args.job_id)
    refuse_cancelled(trial, args.job_id)
    made = replace_servers(trial, plan, args.job_id, args.attempt, args.task, tag, SlurmScheduler())
    logger.info("job %s is submitted for the servers of the lost nodes", made)


def _load_plan(trial: Trial) -> Plan:
    return Plan.from_json(json.loads(trial.plan_json.read_bytes()))


def _find_tag(trial: Trial, job_id: str) -> str:
    job = JobRecord.read(trial.job(job_id))
    return job.tag if job and job.tag else f"hpc-rl:{trial}:{job_id}"


def _submit_servers(trial: Trial, args: argparse.Namespace) -> None:
    plan, tag = _load_plan(trial), _find_tag(trial, args.job_id)
    made = ensure_servers(trial, plan, args.job_id, tag, SlurmScheduler())
    if made:
        logger.info("job %s had no servers left, so job %s is submitted to run them", args.job_id, made)


SUBMITTERS = {
    "servers": _submit_servers,
    "replacement": _submit_replacement,
    "successor": _submit_successor,
}

if __name__ == "__main__":
    sys.exit(main())
