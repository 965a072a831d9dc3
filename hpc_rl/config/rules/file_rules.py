"""Rules about what must exist on disk: models, datasets, templates, and directories that all nodes share."""

import importlib.metadata
import importlib.util
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_rl.config.options.experiment import Config, GRPOConfig, value_of
from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.config.pool_view import as_pool, reward_models
from hpc_rl.config.row_shapes import JSONL
from hpc_rl.config.rules.consistency import context_option
from hpc_rl.config.rules.container_rules import is_trusted
from hpc_rl.config.rules.training_rules import models, samplings
from hpc_rl.config.rules.weight_rules import weights_problem
from hpc_rl.config.snapshot import snapshot_files
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.files import appears, mount_of, similar_file
from hpc_rl.core.trial import read_json

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_OTHER_SENSES = ("vision_config", "audio_config", "vision_tower", "img_processor")
_SCORES = "ForSequenceClassification"
_DECODERS = ("ForCausalLM", "LMHeadModel", _SCORES, "GenerationDecoder")
DATA_FILES = (*JSONL, ".parquet")
_HUB_WORD = r"[A-Za-z0-9][\w.-]*"
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
_DISK_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay")


def model_files(config: Config, explicit: Collection[str]) -> Iterator[str]:
    for section, engine in models(config):
        if not is_trusted(config, engine.path):
            yield from _model(config, section, engine)


def _model(config: Config, section: str, engine: TrainEngineConfig) -> Iterator[str]:
    name = f"{section}.path"
    scratch = f"; {section}.init_from_scratch true starts from random ones"
    yield from checkpoint(name, engine.path, "" if engine.init_from_scratch else scratch)
    if (found := _settings_of(engine.path)) is None:
        return
    why = untrainable(found, engine.is_critic)
    if not why and not _has_own_environment(config):
        why = unknown_kind(found)
    if why:
        yield f"{name} {engine.path} {why}"
    if section == "ref":
        return
    if not is_trusted(config, config.tokenizer_path or engine.path):
        yield from tokenizer(name, engine.path, "tokenizer_path", config.tokenizer_path)
    if isinstance(config, GRPOConfig):
        for name, g in samplings(config).items():
            if name != "gconfig" and g.max_new_tokens == config.gconfig.max_new_tokens:
                continue
            dataset = config.train_dataset if name == "gconfig" else config.valid_dataset
            longest = dataset.max_length if dataset else None
            yield from context(f"{name}.max_new_tokens", g.max_new_tokens, found, longest)


def checkpoint(name: str, folder: str, without_weights: str = ".") -> Iterator[str]:
    """Yield why a directory can't be used as a Hugging Face checkpoint.

    `without_weights` ends the refusal of one without weights; empty accepts it.
    """
    path = Path(folder)
    if not path.is_dir():
        near = similar_file(path) if not path.exists() else ""
        hint = f"did you mean {near}?" if near else f"{hub_hint(path)}{relative_hint(path)}"
        if "quickstart" in path.parts:
            hint = "`hpc-rl quickstart` makes the models of the shipped examples"
        needed = "it must be a Hugging Face checkpoint that all nodes see"
        line = f"{name} {path} is not a directory: {needed}; {hint}".rstrip("; ")
        yield line if near and hint.endswith("?") else f"{line}."
    elif _settings_of(folder) is None:
        yield f"{name} {path} has no readable config.json: it must be a Hugging Face checkpoint."
    elif without_weights and not any(any(path.glob(pattern)) for pattern in _WEIGHTS):
        yield f"{name} {path} contains no weights (*.safetensors){without_weights.rstrip('.')}."
    elif without_weights and (problem := weights_problem(path)):
        yield f"{name} {path}: {problem}."


def untrainable(model: Any, is_critic: bool) -> str:
    """Return why no engine trains a model, from its config.json; empty for a decoder of text.

    Only a critic, such as a reward model, may be one that scores texts.
    """
    if not isinstance(model, dict):
        return ""  # it is refused as damaged
    kinds = [str(one) for one in model.get("architectures") or () if one]
    other = next((key for key in _OTHER_SENSES if key in model), "")
    if other:
        why = f"its config.json has {other}: models of images or sound can't be trained yet"
    elif model.get("is_encoder_decoder") or (kinds and not any(one.endswith(_DECODERS) for one in kinds)):
        why = "it is no language model that continues a text (a decoder)"
    elif not is_critic and kinds and all(one.endswith(_SCORES) for one in kinds):
        why = "it scores texts and generates none"
    else:
        return ""
    shown = ", ".join(kinds) or model.get("model_type")
    return f"({shown}) can't be trained: {why}. Use a model of text alone (...ForCausalLM)."


def _has_own_environment(config: Config) -> bool:
    """Return whether the trainer may have other packages than this process."""
    launcher = config.launcher
    return bool(launcher.modules or launcher.setup or launcher.python or launcher.slurm.trainer_image)


def unknown_kind(model: Any) -> str:
    """Return why the transformers installed here knows no such model, from its config.json; else empty.

    The kinds are looked up in the text of transformers: importing it takes seconds.
    """
    kind = model.get("model_type") if isinstance(model, dict) else None
    package = importlib.util.find_spec("transformers")
    if not isinstance(kind, str) or package is None or package.origin is None:
        return ""
    tables = sorted(Path(package.origin).parent.glob("models/auto/*.py"))
    known = any(f'"{kind}"' in table.read_text() for table in tables)
    if known or not tables:
        return ""
    here = f"transformers {importlib.metadata.version('transformers')} does not know"
    return (
        f"({kind}) can't be trained: {here} model_type {kind!r}. Install a newer one, or use another model."
    )


def relative_hint(path: Path) -> str:
    """Return where relative paths start, for one that may have been relative: it is below."""
    return "relative paths start at the working directory" if path.is_relative_to(Path.cwd()) else ""


def hub_hint(
    path: Path, kind: str = "models", split: str = "", environ: Mapping[str, str] = os.environ
) -> str:
    """Return where this machine has what a path may name on the Hugging Face hub, or how to get it.

    `kind` is models or datasets; of a data set `split` is the part that is wanted. Empty for other paths.
    """
    try:
        name = path.relative_to(Path.cwd())
    except ValueError:
        return ""
    is_file = kind == "datasets" and path.suffix in DATA_FILES
    if is_file or len(name.parts) > 2 or not all(re.fullmatch(_HUB_WORD, part) for part in name.parts):
        return ""
    home = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()
    folders = sorted((cache / f"{kind}--{'--'.join(name.parts)}").glob("snapshots/*"), key=_main_first)
    for folder in folders:
        here = file_of_split(folder, split) if kind == "datasets" else folder
        if here is not None and (kind == "datasets" or (folder / "config.json").is_file()):
            return f"the cache of the hub has {name} in {here}: use that path; "
    if len(name.parts) < 2:
        return ""
    flag = " --repo-type dataset" if kind == "datasets" else ""
    return f"if {name} is a name on the hub, `hf download {name}{flag} --local-dir DIR`, and use DIR; "


def file_of_split(folder: Path, split: str) -> Path | None:
    """Return the file of rows below a directory that is most likely the wanted part; None without any."""
    found = sorted(one for suffix in (".jsonl", ".parquet") for one in folder.rglob(f"*{suffix}"))
    order = {
        one: (not one.name.startswith(split), one.parent.name not in (folder.name, "main")) for one in found
    }
    return min(found, key=order.__getitem__, default=None)


def _main_first(snapshot: Path) -> tuple[bool, str]:
    main = snapshot.parent.parent / "refs" / "main"
    return not (main.is_file() and main.read_text().strip() == snapshot.name), snapshot.name


def _settings_of(folder: str) -> dict[str, Any] | None:
    found = read_json(Path(folder) / "config.json")
    return found if isinstance(found, dict) else None


def tokenizer(name: str, folder: str, option: str, own: str) -> Iterator[str]:
    """Yield that a model has no tokenizer: in its directory, or in the one that `option` names."""
    if not (Path(own or folder) / "tokenizer.json").is_file():
        came = f"{option if own else name} {own or folder}"
        hint = hub_hint(Path(own)) if own else ""
        yield f"{came} has no tokenizer.json: {hint}set {option} to a directory that has one."


def context(option: str, new: int, model: dict[str, Any], prompt: int | None = None) -> Iterator[str]:
    """Yield that `new` tokens, and the longest prompt, are more than the context of a model."""
    limit = model.get("max_position_embeddings")
    if not isinstance(limit, int):
        return
    of_model = f"the model's context (max_position_embeddings) is {limit}"
    if new >= limit:
        yield f"{option} {new} leaves no room for a prompt: {of_model}."
    elif prompt is not None and prompt + new > limit:
        dataset = "valid_dataset" if option.startswith("eval_") else "train_dataset"
        both = f"{dataset}.max_length {prompt} and {option} {new}"
        yield f"{both} make {prompt + new} tokens, but {of_model}."


def pool_files(config: Config, explicit: Collection[str]) -> Iterator[str]:
    if not isinstance(config, GRPOConfig):
        return
    for name, pool in config.pools.items():
        if not pool.path or is_trusted(config, pool.path):
            continue
        option = f"pools.{name}"
        yield from checkpoint(f"{option}.path", pool.path)
        if (found := _settings_of(pool.path)) is not None:
            yield from tokenizer(f"{option}.path", pool.path, f"{option}.tokenizer_path", pool.tokenizer_path)
            if name in reward_models(config):
                yield from _reward_model(name, pool.path, found)
            elif _scores_texts(found):
                shown = f"{option}.path {pool.path} ({', '.join(found['architectures'])})"
                use = "name the pool in rollout.reward_fn, or use another model (...ForCausalLM)"
                yield f"{shown} is a reward model: it scores texts and generates none; {use}."
            else:
                yield from context(f"{option}.max_new_tokens", pool.max_new_tokens, found)


def _reward_model(name: str, path: str, model: dict[str, Any]) -> Iterator[str]:
    """Yield why a model can't be a reward model, from its config.json."""
    labels = model.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else model.get("num_labels", 2)  # as in transformers
    kinds = ", ".join(map(str, model.get("architectures") or ())) or model.get("model_type")
    use = "use what a trial of trainer rw exports, or another ...ForSequenceClassification with one label"
    came = f"pools.{name}.path {path} ({kinds}) can't be a reward model (rollout.reward_fn {name})"
    if not _scores_texts(model):
        yield f"{came}: it gives a text no score; {use}."
    elif num_labels != 1:
        yield f"{came}: it has {num_labels} labels, and so no single score; {use}."


def _scores_texts(model: dict[str, Any]) -> bool:
    kinds = model.get("architectures")
    return isinstance(kinds, list) and bool(kinds) and all(str(one).endswith(_SCORES) for one in kinds)


def context_of(config: GRPOConfig, pool: str = "") -> int | None:
    """Return the largest number of tokens of prompt and completion; None if nothing limits it.

    Of the model that is trained, or of that of a pool.
    """
    view = as_pool(config, pool)
    found = _settings_of(view.actor.path) or {}
    limits = [found.get("max_position_embeddings"), value_of(view, context_option(config, pool))]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def vocab_size_of(config: GRPOConfig) -> int | None:
    """Return the number of token ids that the model has; its tokenizer may have fewer. None if not known."""
    size = (_settings_of(config.actor.path) or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def templates_dir(config: Config, explicit: Collection[str]) -> Iterator[str]:
    name, folder = "launcher.templates_dir", config.launcher.templates_dir
    if folder and not Path(folder).is_dir():
        yield f"{name} {folder} is not a directory; {relative_hint(Path(folder))}".rstrip("; ") + "."


def snapshot(config: Config, explicit: Collection[str]) -> Iterator[str]:
    try:
        snapshot_files(config, Path.cwd())
    except ConfigError as error:
        yield str(error)


def shared_places(config: Config, explicit: Collection[str]) -> Iterator[str]:
    if ":" in config.cluster.fileroot:
        folder = config.cluster.fileroot
        yield f"cluster.fileroot {folder} can't be used: PYTHONPATH can't contain a path with a colon."
    for name, place, kind in _places(config):
        if kind in _MEMORY_FILE_SYSTEMS:
            nodes = config.cluster.n_nodes
            yield f"{name} {place} is on {kind}, which only this node sees, but the trial has {nodes} nodes."


RULES = [templates_dir, shared_places, snapshot, model_files, pool_files]


def inputs(config: Config) -> Iterator[tuple[str, str]]:
    """Yield option and path of each model and dataset that is read."""
    for section, engine in models(config):
        yield f"{section}.path", engine.path
    for name, pool in config.pools.items() if isinstance(config, GRPOConfig) else ():
        yield f"pools.{name}.path", pool.path
    yield "tokenizer_path", config.tokenizer_path
    for section in ("train_dataset", "valid_dataset"):
        if dataset := getattr(config, section):
            yield f"{section}.path", dataset.path


def check_on_node(config: Config, node: str, wait_s: float = 0.0) -> None:
    """Raise ConfigError for models and datasets that a node of the job does not see within `wait_s`."""
    until = time.monotonic() + wait_s
    gone = [f"{name} {path}" for name, path in inputs(config) if path and not appears(Path(path), until)]
    if gone:
        raise ConfigError(
            f"{'; '.join(gone)}: not on node {node}, where the job runs. Correct the path, or put it there."
        )


def notes(config: Config) -> Iterator[str]:
    if copied := snapshot_files(config, Path.cwd()):
        yield f"launcher.snapshot: {len(copied)} files are copied as they are now, and imported from there."
    for name, path in inputs(config):
        if path and is_trusted(config, path):
            yield f"{name} {path}: nothing of it is on this machine; only the job checks it, on its nodes."
    # A local disk may be exported to all nodes; only they can tell.
    for name, place, kind in _places(config):
        if kind in _DISK_FILE_SYSTEMS:
            ask = "make sure that all nodes see it (`hpc-rl doctor --allocation` checks this)"
            yield f"{name} {place} is on {kind}, a disk of this machine: {ask}."


def _places(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield option, directory and file system of what all nodes share; nothing for one node."""
    for name in ("cluster.fileroot", "cluster.name_resolve.nfs_record_root"):
        place = value_of(config, name)
        if place and config.cluster.n_nodes > 1:
            yield name, place, mount_of(Path(place))[0]
