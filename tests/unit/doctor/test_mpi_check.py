"""What the trainer's interpreter and an mpiexec say of their MPI; scripts play both."""

from pathlib import Path

import pytest

from hpc_rl.doctor.mpi_check import inspect_mpi

NO_MPI4PY = "ModuleNotFoundError: No module named 'mpi4py'"
OPEN_MPI, MPICH = "library Open MPI v5.0.11", "library MPICH Version: 5.0.2"


def program(path: Path, says: str, code: int = 0) -> str:
    path.write_text(f"#!/bin/bash\necho {says!r}\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("python", "mpiexec", "problem", "is_certain"),
    [
        ((OPEN_MPI, 0), "mpiexec (Open MPI) 5.0.11", "", False),
        ((MPICH, 0), "HYDRA build details:", "", False),
        ((MPICH, 0), "Intel(R) MPI Library for Linux* OS", "", False),
        ((OPEN_MPI, 0), "HYDRA build details:", "each rank would be alone", True),
        ((MPICH, 0), "mpiexec (OpenRTE) 4.1.4", "each rank would be alone", True),
        ((MPICH, 0), "usage: lamexec", "names neither Open MPI, MPICH nor Intel MPI: usage: lamexec", False),
        ((MPICH, 0), None, "is not an executable program here", False),
        (
            (NO_MPI4PY, 1),
            "HYDRA",
            f"mpi4py is missing in the trainer's Python, {{python}}: {NO_MPI4PY}",
            True,
        ),
        (
            ("none cannot load MPI library", 0),
            "HYDRA",
            "finds no MPI library: cannot load MPI library",
            False,
        ),
    ],
)
def test_the_problem_is_named(tmp_path, python, mpiexec, problem, is_certain):
    interpreter = program(tmp_path / "python", *python)
    found = inspect_mpi(interpreter, program(tmp_path / "mpiexec", mpiexec) if mpiexec else "/no/mpiexec")
    assert problem.format(python=interpreter) in found.problem and found.is_certain == is_certain
    assert bool(problem) != bool(found.found)


def test_srun_needs_no_mpiexec(tmp_path):
    assert inspect_mpi(program(tmp_path / "python", MPICH), "").found == "MPICH Version: 5.0.2"


def test_an_interpreter_that_is_not_there_can_not_be_asked():
    assert "/no/python can't be asked" in inspect_mpi("/no/python", "mpiexec").problem
