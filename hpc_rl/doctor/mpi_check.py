"""What a trainer that is started by MPI needs of this machine: mpiexec, mpi4py, and one MPI for both."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

# Of the first lines of `mpiexec --version` and of what mpi4py says of its library.
_NAMES = {
    "Open MPI": r"Open MPI|OpenRTE|PRRTE",
    "Intel MPI": r"Intel\(R\) MPI",
    "MPICH": r"HYDRA|MPICH|MVAPICH",
}
_LIBRARY = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False  # on a login node MPI may not start
try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    print("none", *str(error).split())
else:
    print("library", *MPI.Get_library_version().splitlines()[0].split(",")[0].split())
"""
FIX = "`pip install 'mpi4py>=4'` into launcher.python, and use the mpiexec of the MPI that it loads."


@dataclass(frozen=True)
class MpiLook:
    """What was found, or the problem; a certain one is the same on every node."""

    found: str = ""
    problem: str = ""
    is_certain: bool = False


def inspect_mpi(python: str, mpiexec: str) -> MpiLook:
    """Ask the trainer's interpreter for its MPI, and mpiexec (empty where srun is used) for its own."""
    code, said = _call([python, "-c", _LIBRARY])
    if code is None:
        return MpiLook(problem=f"{python} can't be asked: {said}")
    if code != 0:
        last = said.splitlines()[-1] if said else f"exit code {code}"
        return MpiLook(
            problem=f"mpi4py is missing in the trainer's Python, {python}: {last}", is_certain=True
        )
    kind, _, library = said.partition(" ")
    if kind != "library":
        return MpiLook(problem=f"mpi4py in {python} finds no MPI library: {library}")
    if not mpiexec:
        return MpiLook(found=library)
    if shutil.which(mpiexec) is None:
        return MpiLook(problem=f"launcher.mpi.mpiexec {mpiexec} is not an executable program here")
    code, said = _call([mpiexec, "--version"])
    own, other = find_name(said), find_name(library)
    if code != 0 or not own:
        return MpiLook(
            problem=f"{mpiexec} --version names neither Open MPI, MPICH nor Intel MPI: {said[:200]}"
        )
    if other and (own == "Open MPI") != (other == "Open MPI"):  # the others speak one protocol
        text = f"{mpiexec} is of {own}, but mpi4py in {python} loads {library}: each rank would be alone"
        return MpiLook(problem=text, is_certain=True)
    return MpiLook(found=f"{mpiexec} of {own}, mpi4py with {library}")


def find_name(text: str) -> str:
    """Return the implementation that a text is about; empty if it names none."""
    return next((name for name, words in _NAMES.items() if re.search(words, text)), "")


def _call(argv: list[str]) -> tuple[int | None, str]:
    """Return code and output of a command; None, and why, where it gives none."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    return done.returncode, done.stdout.strip()
