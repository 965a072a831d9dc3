"""Called by a job script, to submit a job from within one.

`successor` submits the job that continues one which may not be requeued, and prints its id. `servers` submits
the servers of layout `jobs` where none waits or runs.
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
from hpc_rl.supervise.server_array import ensure_servers
from hpc_rl.supervise.successor import submit_successor

logger = logging.getLogger(__name__)


def main() -> int:
    args = _arguments()
    log.setup(args.what)
    try:
        (_successor if args.what == "successor" else _servers)(Trial(args.trial_dir), args)
    except (HpcRlError, OSError, ValueError) as error:
        logger.error("the %s can't be submitted: %s", args.what, error)
        return error.exit_code if isinstance(error, HpcRlError) else CannotWrite.exit_code
    return 0


def _arguments() -> argparse.Namespace:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--trial_dir", required=True, type=Path)
    common.add_argument("--job_id", required=True, help="the submission of the trial")
    parser = argparse.ArgumentParser(prog="python -m hpc_rl.roles.submit_again", description=__doc__)
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("servers", parents=[common])
    new = what.add_parser("successor", parents=[common])
    new.add_argument("--restart", required=True, type=int, help="number of the start that the new job makes")
    new.add_argument("--after", required=True, help="Slurm's id of the job that runs now")
    new.add_argument("--name", required=True, help="job name")
    new.add_argument("--script", required=True, help="file name below scripts/")
    new.add_argument("--array", help="task of an array that continues alone")
    new.add_argument(
        "--exclude", help="nodes to avoid instead of those that the script names; empty for none"
    )
    new.add_argument("arguments", nargs="*", help="further arguments of the script")
    return parser.parse_args()


def _successor(trial: Trial, args: argparse.Namespace) -> None:
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


def _servers(trial: Trial, args: argparse.Namespace) -> None:
    plan = Plan.from_json(json.loads(trial.plan_json.read_bytes()))
    job = JobRecord.read(trial.job(args.job_id))
    tag = job.tag if job and job.tag else f"hpc-rl:{trial}:{args.job_id}"
    made = ensure_servers(trial, plan, args.job_id, tag, SlurmScheduler())
    if made:
        logger.info("no server of job %s was left: submitted as job %s", args.job_id, made)


if __name__ == "__main__":
    sys.exit(main())
