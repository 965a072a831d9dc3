"""Rules about files on disk: models, datasets, templates, and directories that all nodes share."""

import importlib.metadata
import importlib.util
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hpc_rl.config.held_out import find_sampling
from hpc_rl.config.options.experiment import Config, GRPOConfig, get_value, list_datasets
from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.config.pool_view import is_scoring_teacher, list_reward_models, view_pool
from hpc_rl.config.row_shapes import JSONL
from hpc_rl.config.rules.consistency import find_context_option
from hpc_rl.config.rules.container_rules import is_trusted
from hpc_rl.config.rules.training_rules import list_models, list_samplings
from hpc_rl.config.rules.weight_rules import find_weights_problem
from hpc_rl.config.snapshot import list_snapshot_files
from hpc_rl.core.adapters import is_adapter
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.files import find_similar_file, mount_of, wait_for_path
from hpc_rl.core.refusal import Kind, Refusal, make_note
from hpc_rl.core.trial import load_json

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_OTHER_SENSES = ("vision_config", "audio_config", "vision_tower", "img_processor")
_SCORES = "ForSequenceClassification"
_DECODERS = ("ForCausalLM", "LMHeadModel", _SCORES, "GenerationDecoder")
DATA_FILES = (*JSONL, ".parquet")
_HUB_WORD = r"[A-Za-z0-9][\w.-]*"
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
_DISK_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay")


def check_model_files(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    for section, engine in list_models(config):
        if not is_trusted(config, engine.path):
            yield from _check_model(config, section, engine)


def _check_model(config: Config, section: str, engine: TrainEngineConfig) -> Iterator[Refusal]:
    name = f"{section}.path"
    scratch = f"{section}.init_from_scratch"
    yield from check_checkpoint(name, engine.path, scratch, needs_weights=not engine.init_from_scratch)
    if (found := _load_settings(engine.path)) is None:
        return
    if why := explain_untrainable(found, engine.is_critic):
        yield Refusal(option=name, value=engine.path, kind=Kind.FILE, why=why)
    elif not _has_own_environment(config) and (why := explain_unknown_kind(found)):
        yield Refusal(option=name, value=engine.path, kind=Kind.MACHINE, why=why)
    if section in ("ref", "critic"):
        return
    if not is_trusted(config, config.tokenizer_path or engine.path):
        yield from check_tokenizer(name, engine.path, "tokenizer_path", config.tokenizer_path)
    if isinstance(config, GRPOConfig):
        samplings = list_samplings(config)
        if config.purpose in ("train", "evaluate"):
            sets = {name: find_sampling(config, name)[0] for name in config.evaluator.sets}
            samplings |= {f"evaluator.sets.{name}": one for name, one in sets.items()}
        checked = set[int]()
        for name, g in samplings.items():
            if g.max_new_tokens in checked:
                continue
            checked.add(g.max_new_tokens)
            dataset = config.train_dataset if name == "gconfig" else config.valid_dataset
            longest = dataset.max_length if dataset else None
            yield from check_context(f"{name}.max_new_tokens", g.max_new_tokens, found, longest)


def check_checkpoint(
    name: str, folder: str, scratch: str = "", needs_weights: bool = True
) -> Iterator[Refusal]:
    """Refuse a directory that is not a usable Hugging Face checkpoint.

    `scratch` is the option that makes random weights, if there is one.
    """
    if not folder:
        why, use = "is empty", "set it to the directory of a Hugging Face checkpoint"
        yield Refusal(option=name, kind=Kind.MISSING, why=why, use=use)
        return
    path = Path(folder)
    refuse = partial(Refusal, option=name, value=path, kind=Kind.FILE)
    if not path.is_dir():
        near = find_similar_file(path) if not path.exists() else ""
        hint = f"did you mean {near}?" if near else f"{make_hub_hint(path)}{make_relative_hint(path)}"
        if "quickstart" in path.parts:
            hint = "`hpc-rl quickstart` makes the models of the shipped examples"
        why = "is not a directory: it must be a Hugging Face checkpoint that all nodes see"
        yield refuse(why=why, use=hint.rstrip("; "))
    elif _load_settings(folder) is None and is_adapter(path):
        use = "merge it with `hpc-rl checkpoint export --merge`, or use it as lora_path of a trained model"
        yield refuse(why="has an adapter instead of a whole model", use=use)
    elif _load_settings(folder) is None:
        yield refuse(why="has no readable config.json: it must be a Hugging Face checkpoint")
    elif needs_weights and not any(any(path.glob(pattern)) for pattern in _WEIGHTS):
        use = f"{scratch} true starts from random ones" if scratch else ""
        related = (scratch,) if scratch else ()
        yield refuse(why="contains no weights (*.safetensors)", use=use, related=related)
    elif needs_weights and (problem := find_weights_problem(path)):
        yield refuse(why=f": {problem}")


def explain_untrainable(model: Any, is_critic: bool) -> str:
    """Return why no engine can train a model, by its config.json; empty for a text decoder.

    Only a critic, such as a reward model, may score texts.
    """
    if not isinstance(model, dict):
        return ""  # another rule refuses it as damaged
    kinds = [str(one) for one in model.get("architectures") or () if one]
    other = next((key for key in _OTHER_SENSES if key in model), "")
    if other:
        why = f"its config.json has {other}: models of images or sound can't be trained yet"
    elif model.get("is_encoder_decoder") or (kinds and not any(one.endswith(_DECODERS) for one in kinds)):
        why = "it is not a language model that continues a text (a decoder)"
    elif not is_critic and kinds and all(one.endswith(_SCORES) for one in kinds):
        why = "it scores texts and generates none"
    else:
        return ""
    shown = ", ".join(kinds) or model.get("model_type")
    return f"({shown}) can't be trained: {why}. Use a model of text alone (...ForCausalLM)."


def _has_own_environment(config: Config) -> bool:
    """Return whether the trainer's packages may differ from this process's."""
    launcher = config.launcher
    return bool(launcher.modules or launcher.setup or launcher.python or launcher.slurm.trainer_image)


def explain_unknown_kind(model: Any) -> str:
    """Return why the installed transformers does not know a model, by its config.json; empty if it does.

    This searches the source text of transformers, because importing it takes seconds.
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


def make_relative_hint(path: Path) -> str:
    """Return where relative paths start, if a path may have been relative; else empty."""
    return "relative paths start at the working directory" if path.is_relative_to(Path.cwd()) else ""


def make_hub_hint(
    path: Path, kind: str = "models", split: str = "", environ: Mapping[str, str] = os.environ
) -> str:
    """Return a hint for a path that may be a name on the Hugging Face hub: its cached copy, or the download.

    `kind` is models or datasets; `split` is the wanted part of a dataset. Empty for other paths.
    """
    name = find_hub_name(path, kind)
    if not name:
        return ""
    home = environ.get("HF_HOME") or Path(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()
    folders = sorted((cache / f"{kind}--{name.replace('/', '--')}").glob("snapshots/*"), key=_rank_snapshot)
    for folder in folders:
        here = find_split_file(folder, split) if kind == "datasets" else folder
        if here is not None and (kind == "datasets" or (folder / "config.json").is_file()):
            return f"the cache of the hub has {name} in {here}: use that path; "
    if "/" not in name:
        return ""
    flag = " --repo-type dataset" if kind == "datasets" else ""
    download = f"`hf download {name}{flag} --local-dir DIR`"
    return f"if {name} is a name on the hub, add --fetch, or {download}, and use DIR; "


def find_hub_name(path: Path, kind: str = "models") -> str:
    """Return the name on the hub, OWNER/NAME or NAME, that a path of the working directory may be; or ''."""
    try:
        name = path.relative_to(Path.cwd())
    except ValueError:
        return ""
    is_file = kind == "datasets" and path.suffix in DATA_FILES
    is_name = 1 <= len(name.parts) <= 2 and all(re.fullmatch(_HUB_WORD, part) for part in name.parts)
    return "" if is_file or not is_name else str(name)


def find_split_file(folder: Path, split: str) -> Path | None:
    """Return the data file below a directory that most likely has the split; None if there is no file."""
    found = sorted(one for suffix in (".jsonl", ".parquet") for one in folder.rglob(f"*{suffix}"))
    order = {
        one: (not one.name.startswith(split), one.parent.name not in (folder.name, "main")) for one in found
    }
    return min(found, key=order.__getitem__, default=None)


def _rank_snapshot(snapshot: Path) -> tuple[bool, str]:
    main = snapshot.parent.parent / "refs" / "main"
    return not (main.is_file() and main.read_text().strip() == snapshot.name), snapshot.name


def _load_settings(folder: str) -> dict[str, Any] | None:
    found = load_json(Path(folder) / "config.json")
    return found if isinstance(found, dict) else None


def check_tokenizer(name: str, folder: str, option: str, own: str) -> Iterator[Refusal]:
    """Refuse a model without a tokenizer in its directory, or in the directory `own` of `option`."""
    if not (Path(own or folder) / "tokenizer.json").is_file():
        hint = make_hub_hint(Path(own)) if own else ""
        yield Refusal(
            option=option if own else name,
            value=own or folder,
            kind=Kind.FILE,
            why=f"has no tokenizer.json: {hint}set {option} to a directory that has one",
            related=() if own else (option,),
        )


def check_context(
    option: str, new: int, model: dict[str, Any], prompt: int | None = None
) -> Iterator[Refusal]:
    """Refuse `new` tokens that, with the longest prompt, exceed the context of a model."""
    limit = model.get("max_position_embeddings")
    if not isinstance(limit, int):
        return
    of_model = f"the model's context (max_position_embeddings) is {limit}"
    if new >= limit:
        why = f"leaves no room for a prompt, because {of_model}; lower it"
        yield Refusal(option=option, value=new, kind=Kind.VALUE, why=why)
    elif prompt is not None and prompt + new > limit:
        dataset = "valid_dataset" if option.startswith("eval_") else "train_dataset"
        yield Refusal(
            option=f"{dataset}.max_length",
            value=prompt,
            kind=Kind.CONFLICT,
            why=f"and {option} {new} make {prompt + new} tokens, but {of_model}; lower one of them",
            related=(option,),
        )


def check_pool_files(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    if not isinstance(config, GRPOConfig):
        return
    for name, pool in config.pools.items():
        if not pool.path or is_trusted(config, pool.path):
            continue
        option = f"pools.{name}"
        yield from check_checkpoint(f"{option}.path", pool.path)
        if (found := _load_settings(pool.path)) is not None:
            yield from check_tokenizer(
                f"{option}.path", pool.path, f"{option}.tokenizer_path", pool.tokenizer_path
            )
            if name in list_reward_models(config):
                yield from _check_reward_model(name, pool.path, found)
            elif _is_reward_model(found):
                kinds = ", ".join(found["architectures"])
                yield Refusal(
                    option=f"{option}.path",
                    value=pool.path,
                    kind=Kind.FILE,
                    why=f"({kinds}) is a reward model: it scores texts and generates none",
                    use="name the pool in rollout.reward_fn, or use another model (...ForCausalLM)",
                    related=("rollout.reward_fn",),
                )
            elif not is_scoring_teacher(config, name):
                yield from check_context(f"{option}.max_new_tokens", pool.max_new_tokens, found)


def _check_reward_model(name: str, path: str, model: dict[str, Any]) -> Iterator[Refusal]:
    """Refuse a model that is not a reward model, by its config.json."""
    labels = model.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else model.get("num_labels", 2)  # as in transformers
    kinds = ", ".join(map(str, model.get("architectures") or ())) or model.get("model_type")
    use = "use an export of a trial of trainer rw, or another ...ForSequenceClassification with one label"
    if not _is_reward_model(model):
        problem = "it has no head that scores a text"
    elif num_labels != 1:
        problem = f"it has {num_labels} labels, and so no single score"
    else:
        return
    yield Refusal(
        option=f"pools.{name}.path",
        value=path,
        kind=Kind.FILE,
        why=f"({kinds}) can't be a reward model (rollout.reward_fn {name}): {problem}",
        use=use,
        related=("rollout.reward_fn",),
    )


def _is_reward_model(model: dict[str, Any]) -> bool:
    kinds = model.get("architectures")
    return isinstance(kinds, list) and bool(kinds) and all(str(one).endswith(_SCORES) for one in kinds)


def find_context(config: GRPOConfig, pool: str = "") -> int | None:
    """Return the largest number of tokens of prompt and completion; None means no limit.

    This is for the trained model, or for the model of a pool.
    """
    view = view_pool(config, pool)
    found = _load_settings(view.actor.path) or {}
    limits = [found.get("max_position_embeddings"), get_value(view, find_context_option(config, pool))]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def find_vocab_size(config: GRPOConfig) -> int | None:
    """Return the model's number of token ids, or None if unknown; its tokenizer may have fewer."""
    size = (_load_settings(config.actor.path) or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def check_templates_dir(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    name, folder = "launcher.templates_dir", config.launcher.templates_dir
    if folder and not Path(folder).is_dir():
        why, use = "is not a directory", make_relative_hint(Path(folder))
        yield Refusal(option=name, value=folder, kind=Kind.FILE, why=why, use=use)


def check_snapshot(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    try:
        list_snapshot_files(config, Path.cwd())
    except ConfigError as error:
        yield from error.refusals


def check_shared_places(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    if ":" in config.cluster.fileroot:
        why = "contains a colon, which a path in PYTHONPATH can't have"
        yield Refusal(option="cluster.fileroot", value=config.cluster.fileroot, kind=Kind.VALUE, why=why)
    for name, place, kind in _list_places(config):
        if kind in _MEMORY_FILE_SYSTEMS:
            nodes = config.cluster.n_nodes
            why = (
                f"is on {kind}, which only this node sees, but the trial has {nodes} nodes; use a shared disk"
            )
            yield Refusal(option=name, value=place, kind=Kind.FILE, why=why)


RULES = [check_templates_dir, check_shared_places, check_snapshot, check_model_files, check_pool_files]


def list_inputs(config: Config) -> Iterator[tuple[str, str]]:
    """Yield option and path of each model and dataset of the trial."""
    for section, engine in list_models(config):
        yield f"{section}.path", engine.path
    for name, pool in config.pools.items() if isinstance(config, GRPOConfig) else ():
        yield f"pools.{name}.path", pool.path
    yield "tokenizer_path", config.tokenizer_path
    for section, dataset in list_datasets(config):
        yield f"{section}.path", dataset.path


def check_on_node(config: Config, node: str, wait_s: float = 0.0) -> None:
    """Raise ConfigError for models and datasets that do not appear on this node within `wait_s` seconds."""
    until = time.monotonic() + wait_s
    why, use = f"does not exist on node {node}, where the job runs", "correct the path, or copy it there"
    gone = [
        Refusal(option=name, value=path, kind=Kind.FILE, why=why, use=use)
        for name, path in list_inputs(config)
        if path and not wait_for_path(Path(path), until)
    ]
    if gone:
        raise ConfigError(*gone)


def list_notes(config: Config) -> Iterator[Refusal]:
    if copied := list_snapshot_files(config, Path.cwd()):
        why = f": {len(copied)} files are copied into the trial now, and its jobs import these copies"
        yield make_note("launcher.snapshot", why, Kind.FILE)
    for name, path in list_inputs(config):
        if path and is_trusted(config, path):
            why = "does not exist on this machine; the job will check it on its nodes"
            yield make_note(name, why, Kind.FILE, value=path)
    # A local disk may be exported to all nodes; only they can tell.
    for name, place, kind in _list_places(config):
        if kind in _DISK_FILE_SYSTEMS:
            ask = "make sure that all nodes see it (`hpc-rl doctor --allocation` checks this)"
            yield make_note(name, f"is on {kind}, a disk of this machine: {ask}", Kind.FILE, value=place)


def _list_places(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield option, directory and file system of each shared directory; nothing for a single node."""
    for name in ("cluster.fileroot", "cluster.name_resolve.nfs_record_root"):
        place = get_value(config, name)
        if place and config.cluster.n_nodes > 1:
            yield name, place, mount_of(Path(place))[0]
