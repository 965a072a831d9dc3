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
    refuse = partial(Refusal, option=start, value="mpiexec", kind=Kind.CONFLICT)
    if launcher.trainer_start != "mpiexec":
        for option in list_given(config, explicit, "launcher.mpi."):
            why = f"has no effect with {start} srun"
            yield Refusal(option=option, kind=Kind.NO_EFFECT, why=why, use="use mpiexec", related=(start,))
    else:
        if find_image(slurm, "trainer"):
            image = "launcher.slurm.trainer_image"
            use = f"use trainer_start srun (with {mpi}, if it needs MPI), or omit the image"
            why = f"can't start a container, but {image} is set: {use}"
            yield refuse(why=why, related=(image, mpi))
        if slurm.layout == "hetjob":
            layout = "launcher.slurm.layout"
            why = f"can't be used with {layout} hetjob: its steps name a component"
            use = "use layout allocation or jobs, or trainer_start srun"
            yield refuse(why=why, use=use, related=(layout,))
        if slurm.srun_mpi != "none":
            yield Refusal(
                option=mpi,
                value=slurm.srun_mpi,
                kind=Kind.NO_EFFECT,
                why=f"has no effect with {start} mpiexec",
                use="use srun, or remove it",
                related=(start,),
            )
        if slurm.srun_args.trainer:
            yield Refusal(
                option="launcher.slurm.srun_args.trainer",
                kind=Kind.NO_EFFECT,
                why=f"has no effect with {start} mpiexec",
                use="use launcher.mpi.args",
                related=(start, "launcher.mpi.args"),
            )
    if slurm.srun_mpi != "none" and launcher.type == "local":
        yield Refusal(
            option=mpi,
            value=slurm.srun_mpi,
            kind=Kind.CONFLICT,
            why="needs srun, but launcher.type is local",
            use="use slurm",
            related=("launcher.type",),
        )
    of_all = slurm.srun_additional_args.split()
    for option, args in (("srun_additional_args", of_all), ("srun_args.trainer", slurm.srun_args.trainer)):
        if slurm.srun_mpi != "none" and "--mpi" in map(parse_option, args):
            name, why = f"launcher.slurm.{option}", f"has --mpi, and so has {mpi}"
            yield Refusal(option=name, kind=Kind.CONFLICT, why=why, use="omit one", related=(mpi,))


def check_arguments(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    refuse = partial(Refusal, option="launcher.mpi.args", kind=Kind.VALUE)
    for text in config.launcher.mpi.args:
        option = text.partition("=")[0].partition(" ")[0]
        if any(ord(char) < 32 for char in text) or not text:
            yield refuse(why=f": {text!r} is empty or contains a control character")
        elif option in _DERIVED:
            yield refuse(why=f": {option} is derived from the plan and can't be given")


RULES = [check_start, check_arguments]
