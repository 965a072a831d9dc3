"""The Slurm job that a command is typed in, whose nodes `hpc-rl run` uses, and whether a plan fits them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_rl.core.errors import ConfigError, DoesNotFit, SchedulerError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.plan.schema import Plan
from hpc_rl.schedulers import slurm
from hpc_rl.schedulers.hostlist import expand

OUTSIDE = (
    "`hpc-rl run` must be used inside a Slurm allocation (SLURM_JOB_ID is not set). Start one with "
    "`salloc --nodes=N --exclusive`, or use `hpc-rl submit`"
)
# Of `scontrol show job -d`: a line for the nodes that have the same.
_SHARE = re.compile(r"\bNodes=(\S+) CPU_IDs=(\S+) Mem=(\d+)\S* GRES=(\S*)")
_GPUS = re.compile(r"\bgpu(?::[^:(,]+)?:(\d+)")


@dataclass(frozen=True)
class JobNode:
    """What a job has of one node; memory in MB, 0 for all that there is."""

    name: str
    cpus: int
    mem_mb: int
    gpus: int


@dataclass(frozen=True)
class SurroundingJob:
    """A job and its nodes, in Slurm's order."""

    job_id: str
    nodes: tuple[JobNode, ...]

    @property
    def gpus_per_node(self) -> int:
        return min(node.gpus for node in self.nodes)


def is_inside(environ: Mapping[str, str]) -> bool:
    """Return whether this process is in a Slurm job."""
    return bool(environ.get("SLURM_JOB_ID"))


def find_surrounding_job(environ: Mapping[str, str]) -> SurroundingJob:
    """Return the job that this process is in. Raises ConfigError outside of one, SchedulerError."""
    if not is_inside(environ):
        raise ConfigError(f"{OUTSIDE}.")
    job_id = environ["SLURM_JOB_ID"]
    if environ.get("SLURM_HET_SIZE"):
        why = "is heterogeneous, and no srun can span its components"
        raise ConfigError(f"job {job_id} {why}: use an allocation of one component, or `hpc-rl submit`.")
    said = slurm.query_output(["scontrol", "show", "job", "-d", "-o", job_id])
    nodes = _parse_nodes(said)
    order = expand(environ.get("SLURM_JOB_NODELIST", ""))
    if not order or not set(order) <= set(nodes):
        raise SchedulerError(
            f"`scontrol show job {job_id}` does not list the nodes of the job: {said[:200]!r}"
        )
    return SurroundingJob(job_id, tuple(nodes[name] for name in order))


def _parse_nodes(text: str) -> dict[str, JobNode]:
    found = {}
    for names, cpu_ids, mem, gres in _SHARE.findall(text):
        cpus = len(expand(f"[{cpu_ids}]"))
        gpus = sum(map(int, _GPUS.findall(gres)))
        for name in expand(names):
            found[name] = JobNode(name, cpus, int(mem), gpus)
    return found


def refuse_misfit(job: SurroundingJob, plan: Plan) -> None:
    """Raise DoesNotFit with the numbers where a plan asks for more than the job has, ConfigError for layouts.

    The plan uses the first nodes.
    """
    if plan.layout != "allocation":
        why = "submits further jobs, but `hpc-rl run` trains inside the job in which it was started"
        use = "use layout allocation, or `hpc-rl submit`"
        raise ConfigError(
            Refusal(option="launcher.slurm.layout", value=plan.layout, kind=Kind.CONFLICT, why=why, use=use)
        )
    lacking = []
    if plan.n_nodes > len(job.nodes):
        lacking.append(f"{plan.n_nodes} nodes, and has {len(job.nodes)}")
    wants_gpus = plan.slurm_knows_gpus and any(unit.gpus_per_task for unit in plan.units)
    least = {what: min(getattr(node, what) for node in job.nodes) for what in ("cpus", "mem_mb", "gpus")}
    wanted = {
        "CPUs": (plan.cpus_per_node, least["cpus"]),
        "GPUs": (plan.n_gpus_per_node if wants_gpus else 0, least["gpus"]),
        "MB of memory": (plan.mem_mb_per_node if least["mem_mb"] else 0, least["mem_mb"]),
    }
    lacking += [
        f"{need} {what} on each node, and has {has}" for what, (need, has) in wanted.items() if need > has
    ]
    if lacking:
        gpus = f" --gpus-per-node={plan.n_gpus_per_node}" if wants_gpus else ""
        fits = f"salloc --nodes={plan.n_nodes} --ntasks-per-node=1 --cpus-per-task={plan.cpus_per_node}{gpus}"
        why = f"job {job.job_id} is too small, it needs {'; '.join(lacking)}. What fits: {fits} "
        use = "or request less (--n_nodes, launcher.*_cpus_per_gpu, *_mem_per_gpu)"
        related = ("cluster.n_nodes", "cluster.n_gpus_per_node")
        why += f"--mem={plan.mem_mb_per_node}"
        raise DoesNotFit(Refusal(option="", kind=Kind.MACHINE, why=why, use=use, related=related))
