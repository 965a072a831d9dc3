"""User code of a trial: the files of its reward and workflow, as they were at a submission.

They are found as Python would find them in the working directory, without being imported.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hpc_rl.config.sections.experiment import Config, GRPOConfig


def user_code(
    config: Config, workdir: Path, git_state: Callable[[Path], dict[str, Any] | None]
) -> dict[str, dict[str, Any]]:
    """Return {option: {"file", "sha256", "git"}} of the options that name code of the user's.

    A file that is not found here, or can't be read, is left out: the nodes may have it.
    """
    if not isinstance(config, GRPOConfig):
        return {}
    found = {}
    rewards = config.rollout.reward_functions
    named = {f"rollout.reward_fn {one}" if rewards[1:] else "rollout.reward_fn": one for one in rewards}
    for name, path in (named | {"rollout.workflow": config.rollout.workflow}).items():
        module, colon, _ = path.partition(":")
        file = source_file(module, [str(workdir), *sys.path]) if colon else None
        try:
            data = file.read_bytes() if file is not None else None
        except OSError:
            data = None
        if file is not None and data is not None:
            digest = hashlib.sha256(data).hexdigest()
            checkout = next((one for one in file.parents if (one / ".git").exists()), file.parent)
            found[name] = {"file": str(file), "sha256": digest, "git": git_state(checkout)}
    return found


def source_file(module: str, path: Sequence[str]) -> Path | None:
    """Return the file of a module, None where it is not found or has none."""
    places: Sequence[str] | None = path
    for depth, _ in enumerate(parts := module.split(".")):
        spec = PathFinder.find_spec(".".join(parts[: depth + 1]), places)
        if spec is None:
            return None
        places = spec.submodule_search_locations or []
    return Path(spec.origin) if spec is not None and spec.origin and spec.has_location else None


def code_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the options whose code differs between two results of `user_code`, with both sides."""
    digests = [{name: one.get("sha256") for name, one in side.items()} for side in (a, b)]
    differing = [name for name in sorted({*a, *b}) if digests[0].get(name) != digests[1].get(name)]
    return {name: (a.get(name), b.get(name)) for name in differing}
