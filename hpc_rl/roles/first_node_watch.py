"""Watches over the first node of a job: `keep` starts them on other nodes, `watch` is one watch."""

import argparse
import json
import logging
import os
import shlex
import socket
import sys
from pathlib import Path

from hpc_rl.config.load.stored import from_dict
from hpc_rl.core import log
from hpc_rl.core.errors import Stale
from hpc_rl.core.trial import Trial
from hpc_rl.name_resolve import keys, open_names
from hpc_rl.plan.schema import Plan
from hpc_rl.render.steps import has_slurm_gpus
from hpc_rl.schedulers.hostlist import expand
from hpc_rl.supervise.first_node import LOOK_EVERY_S, Watch, WatchedJob
from hpc_rl.supervise.host_watch import HostWatch
from hpc_rl.supervise.watch_steps import WatchSteps

logger = logging.getLogger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hpc_rl.roles.first_node_watch", description=__doc__)
    parser.add_argument("what", choices=("keep", "watch"))
    parser.add_argument("--trial_dir", required=True, type=Path)
    parser.add_argument("--job_id", required=True, help="the submission of the trial")
    parser.add_argument("--restart", required=True, type=int, help="number of this start of the submission")
    parser.add_argument("--slurm_job", required=True, help="Slurm's id of this start")
    parser.add_argument("--first_node", required=True)
    parser.add_argument("--number", type=int, default=0, help="number of this watch (default: 0, the first)")
    args = parser.parse_args()
    log.configure(f"watch-{args.number}" if args.what == "watch" else "watches")
    trial = Trial(args.trial_dir)
    return (_keep if args.what == "keep" else _watch)(trial, args)


def _keep(trial: Trial, args: argparse.Namespace) -> int:
    plan = Plan.from_json(json.loads(trial.plan_json.read_bytes()))
    flags = ["--gpus-per-node=0"] if has_slurm_gpus(plan) else []
    nodes = os.environ["SLURM_JOB_NODELIST"]
    if plan.layout == "hetjob":
        nodes = os.environ["SLURM_JOB_NODELIST_HET_GROUP_1"]
        flags.append("--het-group=1")
    others = [name for name in expand(nodes) if name != args.first_node]
    own = [sys.executable, "-m", "hpc_rl.roles.first_node_watch", "watch", *sys.argv[2:]]
    logger.info(
        "processes on two of the nodes %s watch the job's first node: %s", ",".join(others), shlex.join(own)
    )
    steps = WatchSteps(
        others,
        flags,
        lambda number: [*own, "--number", str(number)],
        trial.jobs / f"{args.job_id}.watch.log",
    )
    steps.keep()
    return 0


def _watch(trial: Trial, args: argparse.Namespace) -> int:
    config = from_dict(json.loads(trial.config_json.read_bytes()))
    plan = Plan.from_json(json.loads(trial.plan_json.read_bytes()))
    names = open_names(trial, config)
    me = {"attempt": trial.attempt(f"{args.job_id}.{args.restart}").id, "host": socket.gethostname()}
    own = names.lease(keys.watch(args.number), me)
    look_every_s = float(os.environ.get("HPC_RL_WATCH_S") or LOOK_EVERY_S)
    job = WatchedJob(
        job_id=args.slurm_job,
        num_requeues=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        restart=args.restart,
        first_node=args.first_node,
        requeues=plan.recover_mode != "disabled" and config.launcher.slurm.continue_by == "requeue",
        trial=trial,
        submission=args.job_id,
    )
    # of the first node, which called srun; its name may not resolve
    address = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    hosts = HostWatch({args.first_node: address} if address else {}, lambda: True)
    try:
        Watch(job, names, own, hosts, args.number, look_every_s).run()
    except Stale as error:
        logger.info("this watch of the first node ends, because another one has replaced it: %s", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
