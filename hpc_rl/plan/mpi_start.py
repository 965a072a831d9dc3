"""Decide whether the trainer's ranks find each other by MPI, and which program starts them. Pure."""

from collections.abc import Sequence

from hpc_rl.config.options.experiment import Config
from hpc_rl.core.errors import DoesNotFit
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.plan.schema import MpiStart, Unit


def choose_mpi_start(config: Config, scheduler: str) -> MpiStart | None:
    """Return how MPI starts the trainer; None if the trainer uses no MPI."""
    launcher = config.launcher
    if launcher.trainer_start == "mpiexec":
        return MpiStart(mpiexec=launcher.mpi.mpiexec, args=list(launcher.mpi.args))
    if scheduler == "slurm" and launcher.slurm.srun_mpi != "none":
        return MpiStart(srun_mpi=launcher.slurm.srun_mpi)
    return None


def refuse_shared_gpus(units: Sequence[Unit]) -> None:
    """Raise DoesNotFit if mpiexec's ranks would see GPUs that Slurm gives to other steps on their nodes.

    On its own node mpiexec starts the ranks without srun, so they see all GPUs of the job there.
    """
    for unit in units:
        others = [other for other in units if other is not unit and other.gpus_per_task]
        shared = set(unit.nodes) & {node for other in others for node in other.nodes}
        if unit.by_mpiexec and unit.gpus_per_task and shared:
            node = f"node {min(shared)} has GPUs of the trainer and of servers"
            raise DoesNotFit(
                Refusal(
                    option="launcher.trainer_start",
                    value="mpiexec",
                    kind=Kind.CONFLICT,
                    why=f": {node}, and only srun divides them",
                    use="give the trainer its own nodes, set launcher.slurm.gpus_by null on whole nodes, or "
                    "use trainer_start srun with launcher.slurm.srun_mpi",
                    related=("allocation_mode", "cluster.n_nodes", "launcher.slurm.gpus_by"),
                )
            )
