"""Rules about containers: images, binds, and options that would break the start of the roles.

This module decides the image of a role, for the rules and the plan; plan/containers.py starts it.
"""

import re
import shutil
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from hpc_rl.config.options.cluster import SlurmLauncherConfig
from hpc_rl.config.options.experiment import Config, get_value, list_datasets
from hpc_rl.config.rules.consistency import is_default
from hpc_rl.core.refusal import Kind, Refusal

Role = Literal["server", "rollout", "trainer"]
OPTION: dict[Role, str] = {
    "trainer": "trainer_image",
    "rollout": "rollout_image",
    "server": "inference_server_image",
}
PYTHONS: dict[Role, str] = {role: f"{image}_python" for role, image in OPTION.items()}
SEPARATORS = ',:\\"'  # special characters of apptainer and pyxis in a bind: parts, lists, escapes, quotes

_PIDS = "the supervisor stops roles by their process ids, which must be the node's"
_ENV = ("use launcher.trainer_env_vars or inference_server_env_vars", "launcher.trainer_env_vars")
_MOUNT = ("use launcher.slurm.mount", "launcher.slurm.mount")
_CWD = "the roles start in the working directory of the submission"
_GPU_KIND = ("roles with GPUs get it by cluster.gpu_kind", "cluster.gpu_kind")
_Reasons = dict[str, tuple[str, ...]]  # option -> why it can't be given, and the options that this names
_APPTAINER: _Reasons = {  # of `apptainer exec`
    **dict.fromkeys(("-p", "--pid"), (_PIDS,)),
    **dict.fromkeys(("-C", "--containall"), (f"it implies --pid: {_PIDS}",)),
    **dict.fromkeys(("-e", "--cleanenv"), ("ranks read their number from the environment",)),
    **dict.fromkeys(("--env", "--env-file"), _ENV),
    **dict.fromkeys(("-B", "--bind", "--mount"), _MOUNT),
    **dict.fromkeys(("--nv", "--rocm", "--nvccli"), _GPU_KIND),
    **dict.fromkeys(("--pwd", "--cwd"), (_CWD,)),
    **dict.fromkeys(("--hostname", "--uts"), ("processes are identified by the name of their node",)),
    **dict.fromkeys(("--net", "--network", "--network-args"), ("the roles use the node's network",)),
}
_PYXIS: _Reasons = {
    "--container-image": (
        "use launcher.slurm.trainer_image, rollout_image or inference_server_image",
        "launcher.slurm.trainer_image",
    ),
    "--container-mounts": _MOUNT,
    "--container-workdir": (_CWD,),
    "--container-env": _ENV,
    "--container-entrypoint": ("an entry point would read the input that the supervisor sends to the role",),
}


def find_image(slurm: SlurmLauncherConfig, role: Role) -> str:
    """Return the image of a role; empty if it has none."""
    if role == "rollout" and slurm.rollout_image is not None:
        return "" if slurm.rollout_image == "none" else slurm.rollout_image
    return (slurm.inference_server_image if role == "server" else slurm.trainer_image) or ""


def split_binds(mount: str) -> list[str]:
    """Return the binds of `launcher.slurm.mount`."""
    return [bind for bind in mount.split(",") if bind]


def check_images(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    slurm = config.launcher.slurm
    given = [name for name in OPTION.values() if getattr(slurm, name) not in (None, "", "none")]
    for name in given:
        yield from _check_image(f"launcher.slurm.{name}", getattr(slurm, name), slurm.container_type)
    for role, name in PYTHONS.items():
        option, needed = f"launcher.slurm.{name}", f"launcher.slurm.{OPTION[role]}"
        if not is_default(config, option) and not find_image(slurm, role):
            why = f"has no effect without {needed}"
            yield Refusal(option=option, kind=Kind.NO_EFFECT, why=why, related=(needed,))
    for name in ("mount", "container_args"):
        if getattr(slurm, name) and not any(find_image(slurm, role) for role in OPTION):
            image = "launcher.slurm.trainer_image"
            why = f"has no effect without {image} or inference_server_image"
            option = f"launcher.slurm.{name}"
            yield Refusal(option=option, kind=Kind.NO_EFFECT, why=why, related=(image,))


def _check_image(name: str, image: str, kind: str) -> Iterator[Refusal]:
    refuse = partial(Refusal, option=name, value=image, kind=Kind.VALUE)
    if re.search(r"[a-z]+:/", image):
        pull = "enroot import -o FILE.sqsh" if kind == "pyxis" else "apptainer pull FILE.sif"
        yield refuse(why=f"is not a file: run `{pull} docker://…` once, and use its path")
    elif "/" not in image:
        why = f"is not a path: use /…/{image} or ./{image}"
        yield refuse(why=why, use="to use no container, write none")
    elif ":" in image:
        yield refuse(why="has a colon, which the path of an image can't have", use="rename it")
    elif kind == "pyxis" and image.endswith(".sif"):
        use = "run `enroot import -o FILE.sqsh docker://…`, or use container_type apptainer"
        why, needed = "is an image of apptainer (.sif)", f"pyxis needs a .sqsh file: {use}"
        yield refuse(kind=Kind.CONFLICT, why=why, use=needed)


def check_mounts(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    slurm = config.launcher.slurm
    for bind in slurm.mount.split(",") if slurm.mount else []:
        parts = bind.split(":")
        are_paths = all(part.startswith("/") for part in parts[:2])
        if len(parts) > 3 or not are_paths or set(bind) & set('\\"'):
            why, use = f": {bind!r} is not of the form /source:/target", "separate several by commas"
            yield Refusal(option="launcher.slurm.mount", kind=Kind.VALUE, why=why, use=use)
    if not any(find_image(slurm, role) for role in OPTION):
        return
    for name, path in list_bound_paths(config):
        if set(path) & set(SEPARATORS):
            signs = " ".join(SEPARATORS)
            why = f"can't be mounted in a container, because its path has one of the signs {signs}"
            yield Refusal(option=name, value=path, kind=Kind.VALUE, why=why)


def list_bound_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Yield option and absolute path of everything that a container needs."""
    names = [
        "cluster.fileroot",
        "cluster.local_dir",
        "cluster.name_resolve.nfs_record_root",
        "actor.path",
        "ref.path",
        "model.path",
        "actor.lora_path",
        "critic.lora_path",
        "model.lora_path",
    ]
    for name in (*names, "tokenizer_path"):
        yield name, get_value(config, name) or ""
    for section, dataset in list_datasets(config):
        yield f"{section}.path", dataset.path


def check_arguments(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    slurm = config.launcher.slurm
    refuse = partial(Refusal, option="launcher.slurm.container_args", kind=Kind.VALUE)
    pyxis = slurm.container_type == "pyxis"
    refused = _PYXIS if pyxis else _APPTAINER
    for text in slurm.container_args:
        option = re.split("[= ]", text, maxsplit=1)[0]
        reason, *related = refused.get(option if option.startswith("--") else text[:2], ("",))
        if not text.startswith("-"):
            yield refuse(why=f": {text!r} is not an option", use="join an option and its value: --name=value")
        elif not option.startswith("--") and len(text) > 2:
            yield refuse(why=f": {text!r} is a short option", use="write the long form, --name=value")
        elif " " in text.partition("=")[0]:
            joined = f"{option}={text.removeprefix(option).strip()}"
            yield refuse(why=f": {text!r} has a blank between option and value", use=f"write {joined}")
        elif reason:
            yield refuse(why=f": {option} can't be given: {reason}", related=tuple(related))
        elif pyxis and not option.startswith(("--container-", "--no-container-")):
            other = "launcher.slurm.srun_additional_args"
            use = f"use {other} for other options of srun"
            yield refuse(why=f": {option} is not an option of pyxis", use=use, related=(other,))


def check_local_dir(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    folder, root, slurm = config.cluster.local_dir, config.cluster.fileroot, config.launcher.slurm
    refuse = partial(Refusal, option="cluster.local_dir", value=folder, kind=Kind.CONFLICT)
    if folder and Path(folder).is_relative_to(root):
        why = f"is in cluster.fileroot {root}, which all nodes share"
        use = "name a directory on the node's own disk"
        yield refuse(why=why, use=use, related=("cluster.fileroot",))
    if folder.startswith("$") and any(find_image(slurm, role) for role in OPTION):
        why = "can't be mounted in containers, because it begins with a variable"
        yield refuse(why=why, use="write a path, such as /scratch")


RULES = [check_images, check_mounts, check_arguments, check_local_dir]


def check_image_files(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    # A file that is missing on a shared disk would be missing on all nodes, after the wait in the queue.
    slurm = config.launcher.slurm
    pyxis = slurm.container_type == "pyxis"
    kind = "a .sqsh file" if pyxis else "a .sif file or the directory of an unpacked image"
    for name in OPTION.values():
        image = getattr(slurm, name)
        refuse = partial(Refusal, option=f"launcher.slurm.{name}", value=image, kind=Kind.FILE)
        if not image or image == "none" or is_trusted(config, image):
            continue
        if not Path(image).exists():
            yield refuse(why="does not exist", use=f"it must be {kind} that all nodes see")
        elif pyxis and not Path(image).is_file():
            yield refuse(why="is not a file", use=f"pyxis needs {kind}")
    for bind in split_binds(slurm.mount):
        source = bind.partition(":")[0]
        if not is_trusted(config, source) and not Path(source).exists():
            why = f": {source} does not exist, so it can't be mounted; correct the path or create it"
            yield Refusal(option="launcher.slurm.mount", kind=Kind.FILE, why=why)


def is_trusted(config: Config, path: str) -> bool:
    """Return whether only the nodes of a job can tell if a path exists.

    This holds for a path that does not exist here and is in cluster.node_dirs, or whose parents below the
    root are all missing here. Always false for a trial on this machine.
    """
    kind, here = config.launcher.type, Path(path)
    if kind == "local" or (kind == "auto" and not shutil.which("sbatch")) or here.exists():
        return False
    if any(here.is_relative_to(folder) for folder in config.cluster.node_dirs):
        return True
    return not any(str(parent) != parent.anchor and parent.exists() for parent in here.parents)


FILE_RULES = [check_image_files]
