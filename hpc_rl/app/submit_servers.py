"""Called by the script of a trainer job in layout `jobs`: submits the servers where none waits or runs."""

import argparse
import json
import logging
import sys
from pathlib import Path

from hpc_rl import log
from hpc_rl.errors import CannotWrite, HpcRlError
from hpc_rl.plan.schema import Plan
from hpc_rl.records import JobRecord
from hpc_rl.render.scripts import job_name
from hpc_rl.schedulers.slurm import SlurmScheduler
from hpc_rl.supervise.server_array import ensure_servers
from hpc_rl.trial import Trial

logger = logging.getLogger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_rl.app.submit_servers", description=__doc__)
    parser.add_argument("--trial_dir", required=True, type=Path)
    parser.add_argument("--job_id", required=True, help="the submission of the trial")
    args = parser.parse_args()
    trial = Trial(args.trial_dir)
    log.setup("server_array")
    try:
        plan = Plan.from_json(json.loads(trial.plan_json.read_bytes()))
        job = JobRecord.read(trial.job(args.job_id))
        tag = job.tag if job and job.tag else f"hpc-rl:{trial}:{args.job_id}"
        made = ensure_servers(trial, plan, args.job_id, tag, job_name(trial), SlurmScheduler())
    except (HpcRlError, OSError, ValueError) as error:
        logger.error("the servers can't be submitted again: %s", error)
        return error.exit_code if isinstance(error, HpcRlError) else CannotWrite.exit_code
    if made:
        logger.info("no server of job %s was left: submitted as job %s", args.job_id, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
