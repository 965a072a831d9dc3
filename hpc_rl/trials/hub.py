"""Hugging Face's hub, on the login node: fetch models and data sets by name, upload an export.

A fetched repository lies in the hub's cache, in a folder named after its commit. The trial gets the path of
that folder, so a later commit of the repository does not change it. Jobs never call the hub.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpc_rl.config.options.experiment import ABSENT, Config, GRPOConfig, get_value, list_datasets
from hpc_rl.config.rules.file_rules import find_hub_name, find_split_file
from hpc_rl.core.errors import CannotWrite, ConfigError, HpcRlError
from hpc_rl.core.refusal import Kind, Refusal

MODEL_OPTIONS = ("actor.path", "critic.path", "ref.path", "model.path", "tokenizer_path")
# of a model's repository: no weights in other formats than safetensors
MODEL_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "LICENSE*", "README.md"]
DATA_FILES = ["*.jsonl", "*.parquet", "LICENSE*", "README.md"]
_IN_CACHE = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})")


@dataclass(frozen=True)
class HubName:
    """An option whose value is the name of a repository on the hub."""

    option: str
    name: str  # OWNER/NAME
    revision: str  # a branch, a tag or a commit; empty means the newest commit of the main branch
    is_dataset: bool


@dataclass(frozen=True)
class Fetched:
    """A repository in the cache of the hub, and the path for the option that named it."""

    named: HubName
    commit: str
    path: Path  # a folder, or the file of a data set


def find_hub_names(config: Config) -> Iterator[HubName]:
    """Yield the options of a configuration that name a repository of the hub and no path that exists."""
    models = list(MODEL_OPTIONS)
    if isinstance(config, GRPOConfig):
        models += [f"pools.{pool}.path" for pool in config.pools]
    values = {name: get_value(config, name) for name in models}
    datasets = {f"{section}.path": dataset.path for section, dataset in list_datasets(config)}
    for option, value in (values | datasets).items():
        if value is not ABSENT and value and (named := _parse(option, Path(value), option in datasets)):
            yield named


def _parse(option: str, path: Path, is_dataset: bool) -> HubName | None:
    """Return the name on the hub that a path may be, as `OWNER/NAME` or `OWNER/NAME@REVISION`."""
    if path.exists():
        return None
    last, _, revision = path.name.partition("@")
    name = find_hub_name(path.with_name(last), "datasets" if is_dataset else "models") if last else ""
    return HubName(option, name, revision, is_dataset) if "/" in name else None


def fetch(named: HubName) -> Fetched:
    """Download a repository into the hub's cache, or find it there. Raises ConfigError."""
    hub = _import_hub(f"--fetch {named.name}")
    refuse = partial(Refusal, option=named.option, value=named.name, kind=Kind.FILE)
    try:
        folder = hub.snapshot_download(
            named.name,
            repo_type="dataset" if named.is_dataset else "model",
            revision=named.revision or None,
            allow_patterns=DATA_FILES if named.is_dataset else MODEL_FILES,
        )
    except (OSError, ValueError, _get_http_error(hub)) as error:
        why = f"can't be fetched from the hub: {_describe(error)}"
        use = "give the path of a folder, or see that this machine reaches the hub"
        raise ConfigError(refuse(why=why, use=use)) from error
    path = found = Path(folder)
    if named.is_dataset:
        split = "test" if named.option.startswith(("valid_dataset", "evaluator")) else "train"
        file = find_split_file(found, split)
        if file is None:
            why = f"has no file {' or '.join(DATA_FILES[:2])} in {found}"
            raise ConfigError(refuse(why=why))
        path = file
    return Fetched(named, found.name, path)


def fetch_all(config: Config) -> list[Fetched]:
    """Fetch everything that a configuration names on the hub, each repository once. Raises ConfigError."""
    return [fetch(named) for named in find_hub_names(config)]


def find_origin(folder: str | Path) -> tuple[str, str]:
    """Return the name on the hub and the commit of a model's folder in the hub's cache; else two ''."""
    match = _IN_CACHE.search(str(folder))
    return (f"{match[1]}/{match[2]}", match[3]) if match else ("", "")


def check_push(repository: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if nothing can be uploaded to `OWNER/NAME`: before an export that takes minutes."""
    refuse = partial(Refusal, option="--push", value=repository)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        why = "is not the name of a repository"
        raise ConfigError(refuse(kind=Kind.VALUE, why=why, use="give OWNER/NAME"))
    hub = _import_hub("--push")
    if hub.constants.HF_HUB_OFFLINE:
        why = "needs the hub, and HF_HUB_OFFLINE is set"
        raise ConfigError(refuse(kind=Kind.CONFLICT, why=why, use="unset HF_HUB_OFFLINE"))
    if not hub.get_token():
        why = "needs a token of the hub that may write"
        use = "run `hf auth login`, or export HF_TOKEN"
        raise ConfigError(refuse(kind=Kind.MISSING, why=why, use=use))


def push(folder: Path, repository: str, private: bool) -> str:
    """Upload an export to a repository, made if it is missing; return its URL. Raises CannotWrite."""
    hub = _import_hub("--push")
    api = hub.HfApi()
    try:
        url = str(api.create_repo(repository, private=private, exist_ok=True))
        api.upload_folder(
            repo_id=repository, folder_path=str(folder), commit_message=f"Upload {folder.name} by hpc-rl"
        )
    except (OSError, ValueError, _get_http_error(hub)) as error:
        again = f"the export is in {folder}; `hf upload {repository} {folder}` tries again"
        raise CannotWrite(f"{repository} can't be uploaded: {_describe(error)}; {again}") from error
    return url


def _get_http_error(hub: Any) -> type[Exception]:
    """Return the base of all errors of the client's HTTP library, which depends on the client's version."""
    base: type[Exception] = hub.errors.HfHubHTTPError.__bases__[0]
    return base


def _describe(error: Exception) -> str:
    """Return the first line of an error, or its kind."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def _import_hub(what: str) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise HpcRlError(f"{what} needs huggingface_hub ({error}): pip install 'hpc-rl[train]'") from error
    return huggingface_hub
