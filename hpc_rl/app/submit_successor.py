"""Called by a job script that may not be requeued: submits the job that continues it, and prints its id."""

import argparse
import sys
from pathlib import Path

from hpc_rl import log
from hpc_rl.errors import CannotWrite, HpcRlError
from hpc_rl.supervise.successor import submit_successor
from hpc_rl.trial import Trial


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_rl.app.submit_successor", description=__doc__)
    parser.add_argument("--trial_dir", required=True, type=Path)
    parser.add_argument("--job_id", required=True, help="the submission")
    parser.add_argument(
        "--restart", required=True, type=int, help="number of the start that the new job makes"
    )
    parser.add_argument("--after", required=True, help="Slurm's id of the job that runs now")
    parser.add_argument("--name", required=True, help="job name")
    parser.add_argument("--script", required=True, help="file name below scripts/")
    parser.add_argument("--array", default="", help="task of an array that continues alone")
    parser.add_argument(
        "--exclude", help="nodes to avoid instead of those that the script names; empty for none"
    )
    parser.add_argument("arguments", nargs="*", help="further arguments of the script")
    args = parser.parse_args()
    trial = Trial(args.trial_dir)
    log.setup("successor")
    try:
        job = submit_successor(
            trial,
            args.job_id,
            args.restart,
            after=args.after,
            name=args.name,
            script=trial.scripts / args.script,
            array=args.array,
            exclude=args.exclude,
            arguments=tuple(args.arguments),
        )
    except (HpcRlError, OSError) as error:
        print(f"no successor: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, HpcRlError) else CannotWrite.exit_code
    print(job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
