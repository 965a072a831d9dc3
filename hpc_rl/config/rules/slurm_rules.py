"""Rules about `launcher.slurm`: options and arguments that contradict each other or the plan.

sbatch silently accepts some of these contradictions and applies one of the two options.
"""

import dataclasses
import re
import shlex
from collections.abc import Collection, Iterable, Iterator
from functools import partial

from hpc_rl.config.options.cluster import SlurmLauncherConfig
from hpc_rl.config.options.experiment import Config, GRPOConfig
from hpc_rl.config.rules.consistency import is_default, list_given
from hpc_rl.core.refusal import Kind, Refusal

DERIVED = "derived"  # the plan decides the value

_PLAN = (
    "it is derived from cluster, allocation_mode and the resources in launcher",
    "cluster",
    "allocation_mode",
    "launcher",
)
_SCRIPT = ("the job script sets this option",)
_GPUS = ("set launcher.slurm.gpus_by, gpu_type or gres", "launcher.slurm.gpus_by")
# sbatch option that extra_args may not contain -> the reason or a replacement, and the options that it names
_SET_BY_THE_SCRIPT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("--nodes", "-N"), ("set cluster.n_nodes", "cluster.n_nodes")),
    **dict.fromkeys(("--ntasks", "-n", "--array", "-a", "--cores-per-socket", "--ntasks-per-gpu"), _PLAN),
    **dict.fromkeys(("--gpus", "-G", "--gpus-per-node", "--gpus-per-task"), _GPUS),
    **dict.fromkeys(("--gpus-per-socket", "--cpus-per-gpu"), _GPUS),
    **dict.fromkeys(("--output", "-o", "--error", "-e", "--open-mode", "--chdir", "-D"), _SCRIPT),
    **dict.fromkeys(
        ("--job-name", "-J", "--signal", "--export", "--input", "-i", "--no-kill", "-k"), _SCRIPT
    ),
    **dict.fromkeys(("--wrap", "--parsable", "--wait", "-W"), _SCRIPT),
    **dict.fromkeys(("--requeue", "--no-requeue"), ("recover.mode decides it", "recover.mode")),
    "--test-only": ("use `hpc-rl render --check`",),
}
_SHORT = {
    "-c": "cpus_per_task", "-t": "time", "-p": "partition", "-A": "account", "-q": "qos", "-C": "constraint",
    "-w": "nodelist", "-x": "exclude", "-d": "dependency", "-L": "licenses",
}  # fmt: skip
# Options of the section that are not options of sbatch.
_NOT_SBATCH = {
    "extra_args", "srun_additional_args", "srun_args", "container_type", "mount", "gpus_by", "gpu_type",
    "layout", "servers", "replace_servers", "continue_by", "backend", "srun_mpi",
}  # fmt: skip
_SRUN_SHORT = {
    "-K": "--kill-on-bad-exit", "-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task",
    "-w": "--nodelist", "-o": "--output", "-e": "--error", "-i": "--input",
    "-J": "--job-name", "-D": "--chdir", "-W": "--wait", "-k": "--no-kill",
}  # fmt: skip
_SRUN_DERIVED = {
    *_SRUN_SHORT, *_SRUN_SHORT.values(), "--ntasks-per-node", "--exact", "--overlap", "--mem",
    "--mem-per-cpu", "--mem-per-gpu", "--gpus-per-node", "--gpus-per-task", "--gpus", "--export",
    "--open-mode", "--label", "--unbuffered", "--het-group", "--multi-prog", "--pty",
}  # fmt: skip


def has_gpus(gres: str | None) -> bool:
    """Return whether a list of generic resources names GPUs, such as `gpu:a100:8` or `gres/gpu:8`."""
    return any(re.match(r"(gres/)?gpu([:=]|$)", part) for part in (gres or "").split(","))


def parse_option(text: str) -> str:
    """Return the option, `-x` or `--name`, at the start of a text, without its value."""
    return text.partition("=")[0] if text.startswith("--") else text[:2]


def find_threads_limit(options: Iterable[str]) -> int | None:
    """Return the threads per core that options of sbatch or srun allow; None means all."""
    most = None
    for option in options:
        if option == "--hint=nomultithread":
            most = 1
        elif found := re.fullmatch(r"--threads-per-core=(\d+)", option):
            most = max(1, int(found[1]))
    return most


def find_job_threads_limit(slurm: SlurmLauncherConfig) -> int | None:
    """Return the threads per core that the `extra_args` of a job allow; None means all."""
    return find_threads_limit(word for argument in slurm.extra_args for word in shlex.split(argument))


def check_texts(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    slurm = config.launcher.slurm
    refuse = partial(Refusal, kind=Kind.VALUE)
    for name, value in vars(slurm).items():
        option = f"launcher.slurm.{name}"
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and _has_control_character(text):
                yield refuse(option=option, why=f": {text!r} contains a line break or control character")
            elif text == "" and name not in ("srun_additional_args", "mount"):
                yield refuse(option=option, why="is an empty text", use="write null to omit the option")
    for name, value in vars(slurm.servers).items():
        if value == "" or (isinstance(value, str) and _has_control_character(value)):
            yield refuse(
                option=f"launcher.slurm.servers.{name}",
                why=f": {value!r} is empty or has a control character",
                use="write a value, or null for the one in launcher.slurm",
                related=("launcher.slurm",),
            )


def _has_control_character(text: str) -> bool:
    return any(ord(char) < 32 or ord(char) in (127, 0x85, 0x2028, 0x2029) for char in text)


def check_conflicts(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    slurm, name = config.launcher.slurm, "launcher.slurm"
    refuse = partial(Refusal, kind=Kind.CONFLICT)
    memory = ("mem", "mem_per_cpu", "mem_per_gpu")
    memory_set = [f"{name}.{option}" for option in memory if getattr(slurm, option) not in (None, DERIVED)]
    if len(memory_set) > 1:
        first, *others = memory_set
        why = f"can't be used together with {' and '.join(others)}: sbatch takes one of them"
        yield refuse(option=first, why=why, use="keep one", related=tuple(others))
    if has_gpus(slurm.gres):
        yield from _check_gres(config)
    elif slurm.gpu_type is not None and slurm.gpus_by is None:
        why = f"has no effect, because {name}.gpus_by null requests no GPUs; remove one of the two"
        yield Refusal(option=f"{name}.gpu_type", kind=Kind.NO_EFFECT, why=why, related=(f"{name}.gpus_by",))


def _check_gres(config: Config) -> Iterator[Refusal]:
    slurm, per_node = config.launcher.slurm, config.cluster.n_gpus_per_node
    refuse = partial(Refusal, option="launcher.slurm.gres", value=slurm.gres, kind=Kind.CONFLICT)
    for name in ("gpus_by", "gpu_type"):
        other = f"launcher.slurm.{name}"
        if getattr(slurm, name) is not None and not is_default(config, other):
            why = f"names GPUs, and so does {other}: Slurm would apply only one of the two. Remove one"
            yield refuse(why=why, related=(other,))
    counts = [_count_gpus(part) for part in (slurm.gres or "").split(",") if has_gpus(part)]
    total = sum(filter(None, counts))
    if None not in counts and total != per_node and per_node:
        number, kind = "cluster.n_gpus_per_node", "launcher.slurm.gpu_type"
        planned = f"{number} is {per_node}: make them equal, or use {kind}"
        yield refuse(why=f"requests {total} GPUs per node, but {planned}", related=(number, kind))


def _count_gpus(gres: str) -> int | None:
    """Return the number of GPUs in one generic resource, or None if only Slurm understands it."""
    tail = re.split(r"[:=]", gres.split("(")[0])[-1]
    if tail.isdigit():
        return int(tail)
    return 1 if re.fullmatch(r"[A-Za-z_][\w.-]*", tail) else None


def check_extra_args(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    slurm = config.launcher.slurm
    refuse = partial(Refusal, option="launcher.slurm.extra_args", kind=Kind.VALUE)
    own = {f"--{field.name.replace('_', '-')}": field.name for field in dataclasses.fields(slurm)} | _SHORT
    for extra in slurm.extra_args:
        try:
            options = [parse_option(part) for part in shlex.split(extra) if part.startswith("-")]
        except ValueError as error:
            yield refuse(why=f": {extra!r} can't be split into arguments: {error}")
            continue
        if not extra.startswith("-"):
            use = "write options of sbatch, such as --hint=nomultithread"
            yield refuse(why=f": {extra!r} is not an option", use=use)
        for option in options:
            if option in _SET_BY_THE_SCRIPT:
                reason, *related = _SET_BY_THE_SCRIPT[option]
                yield refuse(why=f": {option} can't be given: {reason}", related=tuple(related))
            elif option in own and own[option] not in _NOT_SBATCH:
                other = f"launcher.slurm.{own[option]}"
                yield refuse(why=f": {option} can't be given", use=f"set {other} instead", related=(other,))


def check_layouts(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    slurm = config.launcher.slurm
    layout = "launcher.slurm.layout"
    if slurm.layout != "allocation" and not isinstance(config, GRPOConfig):
        why, use = f"needs servers, but trainer {config.trainer} has none", "use allocation"
        kind, related = Kind.CONFLICT, ("trainer",)
        yield Refusal(option=layout, value=slurm.layout, kind=kind, why=why, use=use, related=related)
    options = list_given(config, explicit, "launcher.slurm.servers.")
    elastic = [name for name in options if name.endswith((".max_running", ".idle_s"))]
    if slurm.layout == "allocation" and options:
        why = "has no effect in layout allocation: servers share the trainer's job"
        use = "use layout jobs or hetjob"
        yield Refusal(option=options[0], kind=Kind.NO_EFFECT, why=why, use=use, related=(layout,))
    elif slurm.layout == "hetjob" and elastic:
        why = "has no effect in layout hetjob: servers start and stop with the job"
        use = "use layout jobs"
        yield Refusal(option=elastic[0], kind=Kind.NO_EFFECT, why=why, use=use, related=(layout,))


def check_srun_options(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    name, text = "launcher.slurm.srun_additional_args", config.launcher.slurm.srun_additional_args
    try:
        yield from _check_srun_args(name, shlex.split(text))
    except ValueError as error:
        yield Refusal(option=name, kind=Kind.VALUE, why=f": {text!r} can't be split into arguments: {error}")
    for role, args in vars(config.launcher.slurm.srun_args).items():
        yield from _check_srun_args(f"launcher.slurm.srun_args.{role}", args)


def _check_srun_args(name: str, args: Iterable[str]) -> Iterator[Refusal]:
    refuse = partial(Refusal, option=name, kind=Kind.VALUE)
    for arg in args:
        option = parse_option(arg)
        if not arg.startswith("-") or _has_control_character(arg):
            use = "join an option and its value: --name=value"
            yield refuse(why=f": {arg!r} is not an option", use=use)
        elif option.startswith(("--container-", "--no-container-")):
            image = "launcher.slurm.trainer_image"
            use = f"use {image} and similar options for images, launcher.slurm.container_args for the rest"
            yield refuse(why=f": {option} can't be given", use=use, related=(image,))
        elif "$" in arg:
            yield refuse(why=f": the variable in {arg!r} is not replaced by its value", use="write the value")
        elif option in _SRUN_DERIVED:
            yield refuse(why=f": {option} can't be given, because the trial sets it itself; remove it")


RULES = [check_texts, check_conflicts, check_extra_args, check_layouts, check_srun_options]
