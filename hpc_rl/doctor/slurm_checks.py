"""Checks of Slurm from a login node: programs, version, controller, accounting, capacity."""

import re
import shutil
from collections.abc import Callable

from hpc_rl.doctor.finding import Finding, Requirements, Verdict, apply_checks, fail, judge, ok, warn
from hpc_rl.schedulers import sinfo, slurm
from hpc_rl.schedulers.slurm import SlurmScheduler

PROGRAMS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
# Since then --overlap shares GPUs too, which the steps that watch the nodes need.
OLDEST = (22, 5)
MAX_MESSAGE = 300  # characters


def check_slurm_programs(needs: Requirements) -> Verdict:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if not missing:
        return ok("sbatch, srun and the others are on the PATH")
    if needs.on_slurm or len(missing) < len(PROGRAMS):
        fix = "load Slurm's module, or use a login node of the cluster."
        return fail(f"not on the PATH: {', '.join(missing)}", fix)
    return ok("none on the PATH: trials run on this machine")


def check_slurm_version(needs: Requirements) -> Verdict:
    said = slurm.call(["sinfo", "--version"]).stdout
    numbers = tuple(map(int, re.findall(r"\d+", said)[:2]))
    if not numbers:
        return fail("not known", "`sinfo --version` must print it.")
    oldest = f"{OLDEST[0]}.{OLDEST[1]:02d}"
    fix = f"{oldest} or newer is needed: with older ones --overlap does not share GPUs."
    return judge(said.split()[-1], fix, fail=numbers < OLDEST)


def check_slurm_controller(needs: Requirements) -> Verdict:
    done = slurm.call(["scontrol", "ping"])
    lines = done.stdout.splitlines()
    if done.returncode != 0 and not any("UP" in line for line in lines):
        last = _get_last_line(done.stderr or done.stdout)
        fix = f"on a cluster, check SLURM_CONF and munge, or report it; {slurm.LOCAL_INSTEAD}."
        return judge(
            f"none answers: {last or 'scontrol ping printed nothing'}", fix, needs.on_slurm, warn=True
        )
    down = [line for line in lines if "DOWN" in line]
    fix = "the backup controller answers; report it to your administrators."
    return judge("; ".join(down or lines) or "answers", fix, warn=bool(down))


def check_slurm_accounting(needs: Requirements) -> Verdict:
    done = slurm.call(["sacct", "-n", "-X", "-S", "now", "-o", "JobID"])
    if done.returncode != 0:
        fix = "trials work without it; of jobs that ended long ago only their own files are known then."
        return warn(_get_last_line(done.stderr) or "no answer", fix)
    return ok("sacct answers")


def _get_last_line(said: str) -> str:
    return "".join(said.strip().splitlines()[-1:])[:MAX_MESSAGE]


def check_capacity(needs: Requirements) -> Verdict:
    nodes = SlurmScheduler().query_nodes()
    if not nodes:
        return warn("sinfo shows no nodes", "ask your administrators for a partition that you may use.")
    request = sinfo.JobRequest(
        n_nodes=needs.num_nodes,
        cpus=needs.cpus or None,
        mem_mb=needs.mem_mb or None,
        gpus=needs.gpus or None,
        partition=needs.partition or None,
    )
    limits = sinfo.judge(request, nodes)
    if not limits:
        return ok(f"{len({node.name for node in nodes})} nodes; the request fits")
    nearest = "; ".join(limit.nearest for limit in limits if limit.nearest)
    fix = f"nearest that fits: {nearest}." if nearest else "ask for less, or name another partition."
    found = " ".join(limit.message for limit in limits)
    return judge(found, fix, fail=any(limit.certain for limit in limits), warn=True)


SLURM_CHECKS = (check_slurm_version, check_slurm_accounting)  # of a controller that answers


def check_slurm(
    needs: Requirements, capacity: Callable[[Requirements], Verdict] = check_capacity
) -> list[Finding]:
    """Return the findings about Slurm; only the first ones without Slurm, or if no controller answers.

    `capacity` judges the request of a trial.
    """
    found = apply_checks((check_slurm_programs,), needs)
    if shutil.which("sinfo") is None or shutil.which("scontrol") is None:
        return found
    found += apply_checks((check_slurm_controller,), needs)
    down = found[-1].fix and not slurm.can_reach_scheduler()
    return found if down else found + apply_checks((*SLURM_CHECKS, capacity), needs)
