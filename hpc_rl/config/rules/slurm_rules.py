"""Rules about `launcher.slurm`: options and arguments that contradict each other or the plan.

sbatch silently accepts some of these contradictions and applies one of the two options.
"""

import dataclasses
import re
import shlex
from collections.abc import Collection, Iterable, Iterator

from hpc_rl.config.options.cluster import SlurmLauncherConfig
from hpc_rl.config.options.experiment import Config, GRPOConfig
from hpc_rl.config.rules.consistency import is_default, list_given

DERIVED = "derived"  # the plan decides the value

_PLAN = "it is derived from cluster, allocation_mode and the resources in launcher"
_SCRIPT = "the script sets its own"
_GPUS = "set launcher.slurm.gpus_by, gpu_type or gres"
SET_BY_THE_SCRIPT = {  # sbatch option that extra_args may not contain -> the reason, or a replacement
    **dict.fromkeys(("--nodes", "-N"), "set cluster.n_nodes"),
    **dict.fromkeys(("--ntasks", "-n", "--array", "-a", "--cores-per-socket", "--ntasks-per-gpu"), _PLAN),
    **dict.fromkeys(("--gpus", "-G", "--gpus-per-node", "--gpus-per-task"), _GPUS),
    **dict.fromkeys(("--gpus-per-socket", "--cpus-per-gpu"), _GPUS),
    **dict.fromkeys(("--output", "-o", "--error", "-e", "--open-mode", "--chdir", "-D"), _SCRIPT),
    **dict.fromkeys(
        ("--job-name", "-J", "--signal", "--export", "--input", "-i", "--no-kill", "-k"), _SCRIPT
    ),
    **dict.fromkeys(("--wrap", "--parsable", "--wait", "-W"), _SCRIPT),
    **dict.fromkeys(("--requeue", "--no-requeue"), "recover.mode decides it"),
    "--test-only": "use `hpc-rl render --check`",
}
_SHORT = {
    "-c": "cpus_per_task", "-t": "time", "-p": "partition", "-A": "account", "-q": "qos", "-C": "constraint",
    "-w": "nodelist", "-x": "exclude", "-d": "dependency", "-L": "licenses",
}  # fmt: skip
# Options of the section that are not options of sbatch.
_NOT_SBATCH = {
    "extra_args", "srun_additional_args", "srun_args", "container_type", "mount", "gpus_by", "gpu_type",
    "layout", "servers", "continue_by", "backend", "srun_mpi",
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


def check_texts(config: Config, explicit: Collection[str]) -> Iterator[str]:
    slurm = config.launcher.slurm
    for name, value in vars(slurm).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and _has_control_character(text):
                yield f"launcher.slurm.{name}: {text!r} contains a line break or control character."
            elif text == "" and name not in ("srun_additional_args", "mount"):
                yield f"launcher.slurm.{name}: empty; use null to omit the option."
    for name, value in vars(slurm.servers).items():
        if value == "" or (isinstance(value, str) and _has_control_character(value)):
            yield f"launcher.slurm.servers.{name}: {value!r} can't be used; null means as in launcher.slurm."


def _has_control_character(text: str) -> bool:
    return any(ord(char) < 32 or ord(char) in (127, 0x85, 0x2028, 0x2029) for char in text)


def check_conflicts(config: Config, explicit: Collection[str]) -> Iterator[str]:
    slurm, name = config.launcher.slurm, "launcher.slurm"
    memory = ("mem", "mem_per_cpu", "mem_per_gpu")
    memory_set = [f"{name}.{option}" for option in memory if getattr(slurm, option) not in (None, DERIVED)]
    if len(memory_set) > 1:
        keep = "sbatch takes one of --mem, --mem-per-cpu, --mem-per-gpu. Keep one"
        yield f"{' and '.join(memory_set)} exclude each other: {keep}."
    if slurm.mem_per_gpu and not config.cluster.n_gpus_per_node:
        yield f"{name}.mem_per_gpu needs GPUs, but cluster.n_gpus_per_node is 0; use mem or mem_per_cpu."
    if slurm.mem_per_cpu and slurm.cpus_per_task is None:
        yield f"{name}.mem_per_cpu needs {name}.cpus_per_task, which is null: Slurm multiplies the two."
    if has_gpus(slurm.gres):
        yield from _check_gres(config)
    elif slurm.gpu_type is not None and slurm.gpus_by is None:
        yield f"{name}.gpu_type has no effect, because {name}.gpus_by is null: no GPUs are requested."


def _check_gres(config: Config) -> Iterator[str]:
    slurm, per_node = config.launcher.slurm, config.cluster.n_gpus_per_node
    for name in ("gpus_by", "gpu_type"):
        if getattr(slurm, name) is not None and not is_default(config, f"launcher.slurm.{name}"):
            other = f"launcher.slurm.{name}: Slurm would apply one of the two. Omit one"
            yield f"launcher.slurm.gres {slurm.gres} names GPUs, and so does {other}."
    counts = [_count_gpus(part) for part in (slurm.gres or "").split(",") if has_gpus(part)]
    total = sum(filter(None, counts))
    if None not in counts and total != per_node and per_node:
        planned = f"cluster.n_gpus_per_node is {per_node}: make them equal, or use launcher.slurm.gpu_type"
        yield f"launcher.slurm.gres {slurm.gres} requests {total} GPUs per node, but {planned}."


def _count_gpus(gres: str) -> int | None:
    """Return the number of GPUs in one generic resource, or None if only Slurm understands it."""
    tail = re.split(r"[:=]", gres.split("(")[0])[-1]
    if tail.isdigit():
        return int(tail)
    return 1 if re.fullmatch(r"[A-Za-z_][\w.-]*", tail) else None


def check_extra_args(config: Config, explicit: Collection[str]) -> Iterator[str]:
    slurm, name = config.launcher.slurm, "launcher.slurm.extra_args"
    own = {f"--{field.name.replace('_', '-')}": field.name for field in dataclasses.fields(slurm)} | _SHORT
    for extra in slurm.extra_args:
        try:
            options = [parse_option(part) for part in shlex.split(extra) if part.startswith("-")]
        except ValueError as error:
            yield f"{name}: {extra!r} can't be read: {error}."
            continue
        if not extra.startswith("-"):
            yield f"{name}: {extra!r} is not an sbatch option, such as --hint=nomultithread."
        for option in options:
            if option in SET_BY_THE_SCRIPT:
                yield f"{name}: {option} can't be given: {SET_BY_THE_SCRIPT[option]}."
            elif option in own and own[option] not in _NOT_SBATCH:
                yield f"{name}: {option} can't be given; use launcher.slurm.{own[option]}."


def check_layouts(config: Config, explicit: Collection[str]) -> Iterator[str]:
    slurm = config.launcher.slurm
    layout, no_submitit = f"layout {slurm.layout}", "launcher.slurm.backend submitit can't be used with"
    if slurm.backend == "submitit" and slurm.layout != "allocation":
        why = "submitit submits single jobs only; use backend sbatch, or layout allocation"
        yield f"{no_submitit} {layout}: {why}."
    if slurm.backend == "submitit" and slurm.continue_by == "successor":
        why = "submitit requeues its job; use backend sbatch, or continue_by requeue"
        yield f"{no_submitit} continue_by successor: {why}."
    if slurm.layout != "allocation" and not isinstance(config, GRPOConfig):
        yield f"launcher.slurm.{layout} needs servers, but trainer {config.trainer} has none; use allocation."
    if slurm.layout != "allocation" and config.launcher.type == "local":
        yield f"launcher.slurm.{layout} needs Slurm, but launcher.type is local; use slurm, or allocation."
    if slurm.layout == "hetjob" and slurm.switches is not None:
        yield "launcher.slurm.switches can't be used with layout hetjob: Slurm counts switches per component."
    if slurm.layout == "hetjob" and slurm.servers.time is not None:
        why = "its components stop together; use launcher.slurm.time"
        yield f"launcher.slurm.servers.time can't be used with layout hetjob: {why}."
    options = list_given(config, explicit, "launcher.slurm.servers.")
    elastic = [name for name in options if name.endswith((".max_running", ".idle_s"))]
    if slurm.layout == "allocation" and options:
        use = "servers share the trainer's job; use layout jobs or hetjob"
        yield f"{options[0]} has no effect in layout allocation: {use}."
    elif slurm.layout == "hetjob" and elastic:
        use = "servers start and stop with the job; use layout jobs"
        yield f"{elastic[0]} has no effect in layout hetjob: {use}."


def check_srun_options(config: Config, explicit: Collection[str]) -> Iterator[str]:
    name, text = "launcher.slurm.srun_additional_args", config.launcher.slurm.srun_additional_args
    try:
        yield from _check_srun_args(name, shlex.split(text))
    except ValueError as error:
        yield f"{name}: {text!r} can't be split: {error}."
    for role, args in vars(config.launcher.slurm.srun_args).items():
        yield from _check_srun_args(f"launcher.slurm.srun_args.{role}", args)


def _check_srun_args(name: str, args: Iterable[str]) -> Iterator[str]:
    for arg in args:
        option = parse_option(arg)
        if not arg.startswith("-") or _has_control_character(arg):
            yield f"{name}: {arg!r} is not an option; join an option and its value: --name=value."
        elif option.startswith(("--container-", "--no-container-")):
            use = "use launcher.slurm.trainer_image and the like for images, container_args for the rest"
            yield f"{name}: {option} can't be given; {use}."
        elif "$" in arg:
            yield f"{name}: {arg!r}: variables are not expanded; use the value."
        elif option in _SRUN_DERIVED:
            yield f"{name}: {option} is derived from the plan and can't be given."


RULES = [check_texts, check_conflicts, check_extra_args, check_layouts, check_srun_options]
