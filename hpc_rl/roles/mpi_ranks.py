"""Ranks started by MPI: their numbers, local ranks, and the address of rank 0's store.

MPI is used only for this. It is finalized before training begins, so that torch's process group is the only
communicator, and processes exit normally.
"""

from __future__ import annotations

import os
from typing import Any

from hpc_rl.core.errors import ConfigError

# Of process managers, srun's last: names the files of a rank if its MPI does not start.
_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


class MpiRanks:
    """This process in MPI_COMM_WORLD; `rank`, and `local_rank` on its node.

    If MPI does not start, `check` raises the reason, so that the process can leave a record first.
    """

    def __init__(self, num_ranks: int) -> None:
        self._mpi: Any = None
        self._problem = ""
        self.rank = int(next(filter(None, map(os.environ.get, _RANK)), 0))
        self.local_rank = 0
        try:
            import mpi4py

            mpi4py.rc.initialize = mpi4py.rc.finalize = False
            from mpi4py import MPI
        except ImportError as error:
            self._problem = (
                f"mpi4py is missing in the trainer's Python ({error}); pip install 'mpi4py>=4' there."
            )
            return
        except RuntimeError as error:
            self._problem = (
                f"mpi4py finds no MPI library ({error}); load the MPI library that mpiexec uses, "
                "or set MPI4PY_LIBMPI to its path."
            )
            return
        MPI.Init_thread(MPI.THREAD_FUNNELED)  # the main thread alone calls MPI
        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        size, library = self._world.Get_size(), MPI.Get_library_version().split("\n")[0].strip(" \0")
        if size != num_ranks:
            self._problem = (
                f"MPI has {size} rank(s), the plan has {num_ranks}: mpi4py's MPI ({library}) does not match "
                "the launcher. Use the mpiexec of that MPI (launcher.mpi.mpiexec), or a value of "
                "launcher.slurm.srun_mpi that it supports."
            )
            return
        self.rank = self._world.Get_rank()
        self.local_rank = self._world.Split_type(MPI.COMM_TYPE_SHARED).Get_rank()

    def check(self) -> None:
        """Raise ConfigError if MPI did not start, or its number of ranks differs from the plan."""
        if self._problem:
            raise ConfigError(self._problem)

    def share(self, value: Any) -> Any:
        """Return the value of rank 0 on every rank."""
        return self._world.bcast(value, root=0)

    def finish(self) -> None:
        """Finalize MPI; all ranks must call it."""
        self._mpi.Finalize()
