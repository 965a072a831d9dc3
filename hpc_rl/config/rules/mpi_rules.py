"""Rules about starting the trainer by MPI: `launcher.trainer_start`, `launcher.mpi`, `srun_mpi`."""

from collections.abc import Collection, Iterator
from functools import partial

from hpc_rl.config.options.experiment import Config
from hpc_rl.config.rules.consistency import list_given
from hpc_rl.config.rules.container_rules import find_image
from hpc_rl.config.rules.slurm_rules import parse_option
from hpc_rl.core.refusal import Kind, Refusal

_DERIVED = {  # options of any mpiexec that the plan sets
    "-n", "-np", "-c", "--n", "--np", "-N", "-ppn", "-perhost", "--map-by", "--npernode", "-npernode",
    "--host", "-host", "-H", "-hosts", "--hosts", "-f", "--hostfile", "-hostfile", "--machinefile",
    "-machinefile",
}  # fmt: skip


def check_start(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    launcher, slurm = config.launcher, config.launcher.slurm
    start, mpi = "launcher.trainer_start", "launcher.slurm.srun_mpi"
    if launcher.trainer_start != "mpiexec":
        for option in list_given(config, explicit, "launcher.mpi."):
            why = f"has no effect with {start} srun"
            yield Refusal(
                option=option,
                kind=Kind.NO_EFFECT,
                why=why,
                use=f"set {start} mpiexec, or remove it",
                related=(start,),
            )
    elif find_image(slurm, "trainer"):
        yield Refusal(
            option=start,
            value="mpiexec",
            kind=Kind.CONFLICT,
            why="can't start a container, but launcher.slurm.trainer_image is set",
            use=f"use trainer_start srun (with {mpi}, if it needs MPI), or omit the image",
            related=("launcher.slurm.trainer_image", mpi),
        )
    of_all = slurm.srun_additional_args.split()
    for option, args in (("srun_additional_args", of_all), ("srun_args.trainer", slurm.srun_args.trainer)):
        if slurm.srun_mpi != "none" and "--mpi" in map(parse_option, args):
            name, why = f"launcher.slurm.{option}", f"sets --mpi, and {mpi} sets it too"
            yield Refusal(option=name, kind=Kind.CONFLICT, why=why, use="remove one", related=(mpi,))


def check_arguments(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    refuse = partial(Refusal, option="launcher.mpi.args", kind=Kind.VALUE)
    for text in config.launcher.mpi.args:
        option = text.partition("=")[0].partition(" ")[0]
        if any(ord(char) < 32 for char in text) or not text:
            yield refuse(why=f": {text!r} is empty or contains a control character")
        elif option in _DERIVED:
            yield refuse(why=f": {option} can't be given, because the trial sets it itself; remove it")


RULES = [check_start, check_arguments]
