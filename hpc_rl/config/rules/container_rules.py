"""Rules about containers: images, what is bound into them, and options that would break how the roles are run.

Which image a role has is said here, for the rules and the plan. How an image is started is render/container_command.py's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

from hpc_rl.config.sections.cluster import SlurmLauncherConfig
from hpc_rl.config.sections.experiment import Config

Role = Literal["server", "rollout", "trainer"]
OPTION: dict[Role, str] = {
    "trainer": "trainer_image",
    "rollout": "rollout_image",
    "server": "inference_server_image",
}
SEPARATORS = ',:\\"'  # what the two programs read within a bind: parts, lists, escapes, quotes

_PIDS = "the supervisor ends the roles by their process ids, which must be the node's"
_APPTAINER = {  # option of `apptainer exec` -> why it can't be given
    **dict.fromkeys(("-p", "--pid"), _PIDS),
    **dict.fromkeys(("-C", "--containall"), f"it implies --pid: {_PIDS}"),
    **dict.fromkeys(("-e", "--cleanenv"), "ranks are told by the environment who they are"),
    **dict.fromkeys(("--env", "--env-file"), "use launcher.trainer_env_vars or inference_server_env_vars"),
    **dict.fromkeys(("-B", "--bind", "--mount"), "use launcher.slurm.mount"),
    **dict.fromkeys(("--nv", "--rocm", "--nvccli"), "it follows from the plan: roles with GPUs get --nv"),
    **dict.fromkeys(("--pwd", "--cwd"), "the roles start in the working directory of the submission"),
    **dict.fromkeys(("--hostname", "--uts"), "processes are known by the name of their node"),
    **dict.fromkeys(
        ("--net", "--network", "--network-args"), "the roles talk to each other over the node's network"
    ),
}
_PYXIS = {  # option of pyxis -> why it can't be given
    "--container-image": "use launcher.slurm.trainer_image, rollout_image or inference_server_image",
    "--container-mounts": "use launcher.slurm.mount",
    "--container-workdir": "the roles start in the working directory of the submission",
    "--container-env": "use launcher.trainer_env_vars or inference_server_env_vars",
    "--container-entrypoint": "an entry point would read what the supervisor writes to the role",
}


def image_of(slurm: SlurmLauncherConfig, role: Role) -> str:
    """The image of a role; empty where it has none."""
    if role == "rollout" and slurm.rollout_image is not None:
        return "" if slurm.rollout_image == "none" else slurm.rollout_image
    return (slurm.inference_server_image if role == "server" else slurm.trainer_image) or ""


def binds_of(mount: str) -> list[str]:
    """`launcher.slurm.mount`, one bind an item."""
    return [bind for bind in mount.split(",") if bind]


# -- rules


def images(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """Images are files; without one nothing else about containers has an effect."""
    slurm = config.launcher.slurm
    given = [name for name in OPTION.values() if getattr(slurm, name) not in (None, "", "none")]
    if given and slurm.container_type == "none":
        yield f"launcher.slurm.{given[0]} contradicts launcher.slurm.container_type none: use apptainer, or leave the image out."
    for name in given:
        yield from _image(f"launcher.slurm.{name}", getattr(slurm, name), slurm.container_type)
    defaults = SlurmLauncherConfig()
    for name in (
        "mount",
        "container_args",
        "trainer_image_python",
        "rollout_image_python",
        "inference_server_image_python",
    ):
        needs = {
            "trainer_image_python": "trainer",
            "rollout_image_python": "rollout",
            "inference_server_image_python": "server",
        }
        roles = [needs[name]] if name in needs else OPTION
        named = any(image_of(slurm, role) for role in roles)  # type: ignore[arg-type]
        if getattr(slurm, name) != getattr(defaults, name) and not named:
            wanted = OPTION[roles[0]] if name in needs else "trainer_image or inference_server_image"  # type: ignore[index]
            yield f"launcher.slurm.{name} has no effect without launcher.slurm.{wanted}."


def _image(name: str, image: str, kind: str) -> Iterator[str]:
    if re.search(r"[a-z]+:/", image):
        pull = "enroot import -o FILE.sqsh" if kind == "pyxis" else "apptainer pull FILE.sif"
        yield f"{name} {image} is no file: pull it once, to where every node sees it, as with `{pull} docker://…`, and name that."
    elif "/" not in image:
        yield f"{name} {image} is no path: write /…/{image}, or ./{image}; none means no container."
    elif ":" in image:
        yield f"{name} {image} can't be used: the path of an image holds no colons."


def mounts(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """`launcher.slurm.mount`, and the paths that are bound without being asked for."""
    slurm = config.launcher.slurm
    for bind in slurm.mount.split(",") if slurm.mount else []:
        parts = bind.split(":")
        if (
            not 1 <= len(parts) <= 3
            or not all(part.startswith("/") for part in parts[:2])
            or set(bind) & set('\\"')
        ):
            yield f"launcher.slurm.mount: {bind!r} is no bind: /source:/target, several separated by commas."
    if not any(image_of(slurm, role) for role in OPTION):
        return
    for name, path in bound_paths(config):
        if set(path) & set(SEPARATORS):
            yield f"{name} {path} can't be bound into a container: the path of a bind holds none of {' '.join(SEPARATORS)}"


def bound_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Option and path of what every container needs; all of them are absolute by now."""
    yield "cluster.fileroot", config.cluster.fileroot
    yield "cluster.name_resolve.nfs_record_root", config.cluster.name_resolve.nfs_record_root
    for name in ("actor", "ref", "model"):
        section = getattr(config, name, None)
        yield f"{name}.path", section.path if section else ""
    yield "tokenizer_path", config.tokenizer_path
    for name in ("train_dataset", "valid_dataset"):
        section = getattr(config, name)
        yield f"{name}.path", section.path if section else ""


def arguments(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """`launcher.slurm.container_args`: each an option, none that is derived or that hides the roles from the supervisor."""
    slurm, name = config.launcher.slurm, "launcher.slurm.container_args"
    pyxis = slurm.container_type == "pyxis"
    for text in slurm.container_args:
        option = re.split("[= ]", text, maxsplit=1)[0]
        why = (_PYXIS if pyxis else _APPTAINER).get(option if option.startswith("--") else text[:2])
        if not text.startswith("-"):
            yield f"{name}: {text!r} is no option; write one with its value per item: --name=value."
        elif not option.startswith("--") and len(text) > 2:
            yield f"{name}: {text!r}: write the long form, --name=value."
        elif " " in text.partition("=")[0]:
            yield f"{name}: {text!r}: write the value behind an equals sign: {option}=…"
        elif why:
            yield f"{name}: {option} can't be given: {why}."
        elif pyxis and not option.startswith(("--container-", "--no-container-")):
            yield f"{name}: {option} is no option of pyxis; other options of srun go to launcher.slurm.srun_additional_args."


RULES = [images, mounts, arguments]


# -- rules that look at files


def image_files(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """What is missing on a disk that this node sees would be missing on the others too, after the wait in the queue."""
    slurm = config.launcher.slurm
    for name in OPTION.values():
        image = getattr(slurm, name)
        if not image or image == "none" or not _seen(image):
            continue
        kind = (
            "a .sqsh file"
            if slurm.container_type == "pyxis"
            else "a .sif file or an unpacked image's directory"
        )
        if not Path(image).exists():
            yield f"launcher.slurm.{name} {image} does not exist; it must be {kind}, where every node sees it."
        elif slurm.container_type == "pyxis" and not Path(image).is_file():
            yield f"launcher.slurm.{name} {image} is not a file; pyxis needs {kind}."
    for bind in binds_of(slurm.mount):
        source = bind.partition(":")[0]
        if _seen(source) and not Path(source).exists():
            yield f"launcher.slurm.mount: {source} does not exist, so it can't be bound."


def _seen(path: str) -> bool:
    """Whether this node would see the path if it existed: something of it above the root is there."""
    return any(
        str(parent) != parent.anchor and parent.exists() for parent in (Path(path), *Path(path).parents)
    )


FILE_RULES = [image_files]
