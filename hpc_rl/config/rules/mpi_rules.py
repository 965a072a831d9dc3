"""Rules about starting the trainer by MPI: `launcher.trainer_start`, `launcher.mpi`, `srun_mpi`."""

from collections.abc import Collection, Iterator

from hpc_rl.config.options.experiment import Config
from hpc_rl.config.rules.consistency import list_given
from hpc_rl.config.rules.container_rules import find_image
from hpc_rl.config.rules.slurm_rules import parse_option

_DERIVED = {  # options of any mpiexec that the plan sets
    "-n", "-np", "-c", "--n", "--np", "-N", "-ppn", "-perhost", "--map-by", "--npernode", "-npernode",
    "--host", "-host", "-H", "-hosts", "--hosts", "-f", "--hostfile", "-hostfile", "--machinefile",
    "-machinefile",
}  # fmt: skip


def check_start(config: Config, explicit: Collection[str]) -> Iterator[str]:
    launcher, name = config.launcher, "launcher.trainer_start mpiexec"
    slurm = launcher.slurm
    if launcher.trainer_start != "mpiexec":
        for option in list_given(config, explicit, "launcher.mpi."):
            yield f"{option} has no effect with launcher.trainer_start srun; use mpiexec."
    else:
        if find_image(slurm, "trainer"):
            use = "use trainer_start srun (with launcher.slurm.srun_mpi, if it needs MPI), or omit the image"
            yield f"{name} can't start a container, but launcher.slurm.trainer_image is set: {use}."
        if slurm.layout == "hetjob":
            use = "its steps name a component; use layout allocation or jobs, or trainer_start srun"
            yield f"{name} can't be used with launcher.slurm.layout hetjob: {use}."
        if slurm.srun_mpi != "none":
            use = "use srun, or remove it"
            yield f"launcher.slurm.srun_mpi {slurm.srun_mpi} has no effect with {name}; {use}."
        if slurm.srun_args.trainer:
            yield f"launcher.slurm.srun_args.trainer has no effect with {name}; use launcher.mpi.args."
    if slurm.srun_mpi != "none" and launcher.type == "local":
        yield f"launcher.slurm.srun_mpi {slurm.srun_mpi} needs srun, but launcher.type is local; use slurm."
    of_all = slurm.srun_additional_args.split()
    for option, args in (("srun_additional_args", of_all), ("srun_args.trainer", slurm.srun_args.trainer)):
        if slurm.srun_mpi != "none" and "--mpi" in map(parse_option, args):
            yield f"launcher.slurm.{option} has --mpi, and so has launcher.slurm.srun_mpi; omit one."


def check_arguments(config: Config, explicit: Collection[str]) -> Iterator[str]:
    name = "launcher.mpi.args"
    for text in config.launcher.mpi.args:
        option = text.partition("=")[0].partition(" ")[0]
        if any(ord(char) < 32 for char in text) or not text:
            yield f"{name}: {text!r} is empty or contains a control character."
        elif option in _DERIVED:
            yield f"{name}: {option} is derived from the plan and can't be given."


RULES = [check_start, check_arguments]
