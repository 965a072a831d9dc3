"""The hooks of a submission: scripts of each event. The job runs copies of them."""

import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from hpc_rl.config.options.cluster import HooksConfig
from hpc_rl.config.options.limits import Place
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal

EVENTS = ("pre_job", "pre_node", "post_node", "post_job", "on_preempt")
FOLDER = "hooks.d"
ENVIRONMENT = "environment"  # in the same folders; sourced by every script
UNPACKED = "hpc-rl-"  # prefix of the names of containers that pyxis keeps
_UNPACKED_REMOVAL = """#!/bin/bash
# Remove the containers that pyxis unpacked for this trial. With container_scope `job`, pyxis does it itself.
if ! type enroot >/dev/null 2>&1; then exit 0; fi
for name in {names}; do
  enroot remove --force "pyxis_hpc-rl-$SLURM_JOB_ID-$name" </dev/null >/dev/null 2>&1 || true
done
"""
_REMOVAL = """#!/bin/bash
# Remove this job's directory in cluster.local_dir. Its processes lock it, so wait for the last ones to end.
# If another trial of this job runs, keep the directory.
folder={place}/hpc-rl-"$UID-${{SLURM_JOB_ID:-${{HPC_RL_ATTEMPT%.*}}}}"
if [[ ! -O $folder || -L $folder ]]; then exit 0; fi
exec flock --timeout 10 --conflict-exit-code 0 "$folder" rm -rf -- "$folder"
"""


def gather(hooks: HooksConfig, site: Sequence[Path]) -> dict[str, dict[str, str]]:
    """Return the scripts of each event in their order: file name below scripts/ -> text.

    Raises ConfigError for an unreadable script.
    """
    # Scripts of the site run first before an attempt, and last after it.
    found: dict[str, dict[str, str]] = {event: {} for event in EVENTS}
    for event in EVENTS:
        scripts = list(_load_scripts(event, hooks, site))
        if event.startswith("post_"):
            scripts.reverse()
        for number, text in enumerate(scripts):
            text = text if text.startswith("#!") else f"#!/bin/bash\n{text}"
            text = text if text.endswith("\n") else f"{text}\n"
            found[event][f"hook.{event}.{number}"] = text
    return found


def make_removal(local_dir: str) -> dict[str, str]:
    """Return the script of post_node that removes a job's files in `cluster.local_dir`."""
    first, slash, rest = local_dir.partition("/")
    place = f'"${{{first.strip("${}")}}}"{slash}{shlex.quote(rest) if rest else ""}'
    text = _REMOVAL.format(place=place if first else shlex.quote(local_dir))
    return {"hook.post_node.local_dir": text}


def make_container_removal(names: Collection[str]) -> dict[str, str]:
    """Return the script of post_node that removes pyxis's containers with these names."""
    return {"hook.post_node.containers": _UNPACKED_REMOVAL.format(names=shlex.join(names))} if names else {}


def load_environment_files(hooks: HooksConfig, site: Sequence[Path]) -> list[tuple[str, str]]:
    """Return path and text of the files that every script sources, the trial's last. Raises ConfigError."""
    return [(str(path), _load_text(path)) for path in _load_files(ENVIRONMENT, hooks, site)]


def _load_files(name: str, hooks: HooksConfig, site: Sequence[Path]) -> list[Path]:
    """Return the files with a name: of the machine, of the user, of the trial, in this order."""
    folders = [folder / FOLDER for folder in reversed(site)]
    if hooks.dir:
        if not Path(hooks.dir).is_dir():
            option, value = "launcher.hooks.dir", repr(hooks.dir)
            raise ConfigError(Refusal(option=option, value=value, kind=Kind.FILE, why="is not a directory"))
        folders.append(Path(hooks.dir))
    return [path for path in (folder / name for folder in folders) if path.exists()]


def _load_scripts(event: str, hooks: HooksConfig, site: Sequence[Path]) -> Iterator[str]:
    for path in _load_files(event, hooks, site):
        yield _load_text(path)
    option, value = f"launcher.hooks.{event}", getattr(hooks, event)
    if value is not None:
        yield _load_text(Path(value), option) if Place(or_script=True).is_path(value) else value


def _load_text(path: Path, option: str = "") -> str:
    what = f": {str(path)!r}" if option else str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a script in UTF-8"
        use = "a script given as text has several lines, or begins with #!" if option else ""
        why = f"{what} can't be read: {reason}"
        raise ConfigError(Refusal(option=option, kind=Kind.FILE, why=why, use=use)) from error
    if "\0" in text:
        why = f"{what} is not a script, because it has NUL bytes"
        raise ConfigError(Refusal(option=option, kind=Kind.FILE, why=why))
    return text
