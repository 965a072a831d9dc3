"""What the section `launcher.slurm` can't say: options that contradict each other or the plan, and further arguments that do.

sbatch accepts some of these contradictions without a word and then does one of the two.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Collection, Iterator

from hpc_rl.config.sections.cluster import ServerJobsConfig, SlurmLauncherConfig
from hpc_rl.config.sections.experiment import Config, GRPOConfig, value_of

DERIVED = "derived"  # the value of an option that the plan decides

_PLAN, _SCRIPT = (
    "the plan decides it, from cluster, allocation_mode and the launcher's numbers",
    "the script needs its own",
)
_GPUS = "set launcher.slurm.gpus_by, gpu_type or gres"
# What extra_args may not hold, and where it is said instead.
OURS = {
    **dict.fromkeys(("--nodes", "-N"), "set cluster.n_nodes"),
    **dict.fromkeys(("--ntasks", "-n", "--array", "-a", "--cores-per-socket", "--ntasks-per-gpu"), _PLAN),
    **dict.fromkeys(
        ("--gpus", "-G", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket", "--cpus-per-gpu"), _GPUS
    ),
    **dict.fromkeys(
        ("--output", "-o", "--error", "-e", "--open-mode", "--chdir", "-D", "--job-name", "-J"), _SCRIPT
    ),
    **dict.fromkeys(
        ("--signal", "--export", "--input", "-i", "--no-kill", "-k", "--wrap", "--parsable", "--wait", "-W"),
        _SCRIPT,
    ),
    **dict.fromkeys(("--requeue", "--no-requeue"), "recover.mode decides it"),
    "--test-only": "`hpc-rl render --check` asks it",
}
_SHORT = {
    "-c": "cpus_per_task",
    "-t": "time",
    "-p": "partition",
    "-A": "account",
    "-q": "qos",
    "-C": "constraint",
}
_SHORT |= {"-w": "nodelist", "-x": "exclude", "-d": "dependency", "-L": "licenses"}
_NOT_SBATCH = ("extra_args", "srun_additional_args", "container_type", "mount", "gpus_by", "gpu_type")
_LAYOUT = ("layout", "servers", "continue_by", "backend")


def asks_for_gpus(gres: str | None) -> bool:
    """Whether a list of generic resources names GPUs, as `gpu:a100:8` or `gres/gpu:8` do."""
    return any(re.match(r"(gres/)?gpu([:=]|$)", part) for part in (gres or "").split(","))


def scheduler_options(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """Refusals of the section, in words."""
    slurm = config.launcher.slurm
    for field in dataclasses.fields(slurm):
        value = getattr(slurm, field.name)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and any(
                ord(char) < 32 or ord(char) in (127, 0x85, 0x2028, 0x2029) for char in text
            ):
                yield f"launcher.slurm.{field.name}: {text!r} holds a line break or control character."
            elif text == "" and field.name not in ("srun_additional_args", "mount"):
                yield f"launcher.slurm.{field.name}: empty; use null to leave the option out."
    for name, value in vars(slurm.servers).items():
        if value == "" or (
            isinstance(value, str) and any(ord(char) < 32 or ord(char) == 127 for char in value)
        ):
            yield f"launcher.slurm.servers.{name}: {value!r} can't be given to sbatch; null means as in launcher.slurm."
    yield from _conflicts(config, explicit)
    yield from _extra_args(slurm)
    yield from _layouts(config, explicit)


def _layouts(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """What the layouts and backends can't do, and options that would have no effect in the one that was chosen."""
    slurm = config.launcher.slurm
    if slurm.backend == "submitit" and slurm.layout != "allocation":
        yield (
            f"launcher.slurm.backend submitit can't be used with layout {slurm.layout}: submitit submits single jobs and arrays "
            "of one function, no heterogeneous jobs; use backend sbatch, or layout allocation."
        )
    if slurm.backend == "submitit" and slurm.continue_by == "successor":
        yield (
            "launcher.slurm.backend submitit can't be used with continue_by successor: submitit goes on by requeueing its job; "
            "use backend sbatch, or continue_by requeue."
        )
    if slurm.layout != "allocation" and not isinstance(config, GRPOConfig):
        yield f"launcher.slurm.layout {slurm.layout} is about servers; a {config.trainer} trial has none: use allocation."
    if slurm.layout != "allocation" and config.launcher.type == "local":
        yield f"launcher.slurm.layout {slurm.layout} needs Slurm, but launcher.type is local: use slurm, or layout allocation."
    if slurm.layout == "hetjob" and slurm.switches is not None:
        yield "launcher.slurm.switches can't be used with layout hetjob: Slurm counts switches for each component alone."
    given = sorted(name for name in explicit if name.startswith("launcher.slurm.servers."))
    usual = ServerJobsConfig()  # said at its default, as `config show` prints it, an option changes nothing
    given = [name for name in given if value_of(config, name) != getattr(usual, name.rpartition(".")[2])]
    elastic = [name for name in given if name.rpartition(".")[2] in ("max_running", "idle_s")]
    if slurm.layout == "allocation" and given:
        yield f"{given[0]} has no effect in layout allocation, where servers share the job: use layout jobs or hetjob."
    elif slurm.layout == "hetjob" and elastic:
        yield f"{elastic[0]} has no effect in layout hetjob, whose servers come and go with the job: use layout jobs."
    if slurm.layout == "hetjob" and slurm.servers.time is not None:
        yield "launcher.slurm.servers.time can't be used in layout hetjob: its components end together; use launcher.slurm.time."


def _conflicts(config: Config, explicit: Collection[str]) -> Iterator[str]:
    slurm, cluster = config.launcher.slurm, config.cluster
    memory = [
        name for name in ("mem", "mem_per_cpu", "mem_per_gpu") if getattr(slurm, name) not in (None, DERIVED)
    ]
    if len(memory) > 1:
        names = " and ".join(f"launcher.slurm.{name}" for name in memory)
        yield f"{names} exclude each other: sbatch takes one of --mem, --mem-per-cpu, --mem-per-gpu. Keep one."
    if slurm.mem_per_gpu and not cluster.n_gpus_per_node:
        yield "launcher.slurm.mem_per_gpu needs GPUs, but cluster.n_gpus_per_node is 0; use mem or mem_per_cpu."
    if slurm.mem_per_cpu and slurm.cpus_per_task is None:
        yield "launcher.slurm.mem_per_cpu needs launcher.slurm.cpus_per_task, which is null: Slurm multiplies the two."
    if asks_for_gpus(slurm.gres):
        yield from _gpus_in_gres(config)
    elif slurm.gpu_type is not None and slurm.gpus_by is None:
        yield "launcher.slurm.gpu_type has no effect, for launcher.slurm.gpus_by is null: no GPUs are asked of Slurm."
    if (slurm.mail_user is None) != (slurm.mail_type is None):
        have, lack = ("mail_user", "mail_type") if slurm.mail_type is None else ("mail_type", "mail_user")
        if have == "mail_user":
            yield f"launcher.slurm.{have} has no effect without launcher.slurm.{lack}: say when, as END,FAIL."


def _gpus_in_gres(config: Config) -> Iterator[str]:
    slurm, per_node = config.launcher.slurm, config.cluster.n_gpus_per_node
    for name in ("gpus_by", "gpu_type"):
        if getattr(slurm, name) not in (None, getattr(SlurmLauncherConfig(), name)):
            yield (
                f"launcher.slurm.gres {slurm.gres} names GPUs, and launcher.slurm.{name} too: Slurm would take both without a "
                "word, and one would count. Leave one out."
            )
    counts = [_count(part) for part in (slurm.gres or "").split(",") if asks_for_gpus(part)]
    if None not in counts and sum(filter(None, counts)) != per_node and per_node:
        yield (
            f"launcher.slurm.gres {slurm.gres} asks for {sum(filter(None, counts))} GPUs a node, but cluster.n_gpus_per_node is "
            f"{per_node}: make them equal, or use launcher.slurm.gpu_type, which takes the number from the plan."
        )


def _count(gres: str) -> int | None:
    """GPUs of one generic resource; None where it has suffixes that only Slurm knows."""
    tail = re.split(r"[:=]", gres.split("(")[0])[-1]
    return int(tail) if tail.isdigit() else 1 if re.fullmatch(r"[A-Za-z_][\w.-]*", tail) else None


def option_names(text: str) -> list[str]:
    """The options in a text as a shell would split it. Raises ValueError for quotes that don't end."""
    words = [word for word in shlex.split(text) if word.startswith("-")]
    return [word.partition("=")[0] if word.startswith("--") else word[:2] for word in words]


def _extra_args(slurm: SlurmLauncherConfig) -> Iterator[str]:
    own = {f"--{field.name.replace('_', '-')}": field.name for field in dataclasses.fields(slurm)} | _SHORT
    for extra in slurm.extra_args:
        try:
            names = option_names(extra)
        except ValueError as error:
            yield f"launcher.slurm.extra_args: {extra!r} can't be read: {error}."
            continue
        if not extra.startswith("-"):
            yield f"launcher.slurm.extra_args: {extra!r} is no sbatch option; one option per item, as --hint=nomultithread."
        for name in names:
            if name in OURS:
                yield f"launcher.slurm.extra_args: {name} can't be given here: {OURS[name]}."
            elif name in own and own[name] not in (*_NOT_SBATCH, *_LAYOUT):
                yield f"launcher.slurm.extra_args: {name} has an option of its own here: launcher.slurm.{own[name]}."
