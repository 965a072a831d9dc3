"""What the loader can't see: defaults that the planned device can't do, and options that contradict each other or the disk.

`check` first adapts defaults (with a note each), then asks every rule in RULES. A rule is a small function that yields
refusals; an option that somebody wrote is never changed, only refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_rl.config.loading.load import Loaded
from hpc_rl.config.rules import consistency, container_rules
from hpc_rl.config.rules.model_rules import model_rules
from hpc_rl.config.rules.slurm_rules import scheduler_options
from hpc_rl.config.rules.training_rules import TRAIN_RULES, adapted
from hpc_rl.config.rules.training_rules import notes as train_notes
from hpc_rl.config.sections.cluster import environment_of
from hpc_rl.config.sections.experiment import (
    ABSENT,
    LENGTH_OPTIONS,
    Config,
    GRPOConfig,
    SFTConfig,
    replaced,
    value_of,
)
from hpc_rl.config.show import REDACTED, is_secret
from hpc_rl.config.tables.unavailable import unavailable
from hpc_rl.errors import ConfigError
from hpc_rl.files import mount_of
from hpc_rl.trial import check_name

DEFAULT_RECOVER_SECS = 600
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "devtmpfs")
_DISK_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay")


def check(loaded: Loaded, *, files: bool = True) -> Loaded:
    """The configuration with its defaults adapted and notes about it. `files` false leaves out what must exist on disk.

    Raises NotBuilt, ConfigError: one line for each refusal.
    """
    config, notes = adapt(loaded.config, loaded.explicit)
    refusals = [refusal for rule in RULES for refusal in rule(config, loaded.explicit)]
    if files:
        refusals += [
            refusal for rule in (*FILE_RULES, model_rules) for refusal in rule(config, loaded.explicit)
        ]
    if refusals:
        raise ConfigError(
            "\n".join(_with_origins(refusal, loaded.origins) for refusal in dict.fromkeys(refusals))
        )
    told = [*notes, *_notes(config, loaded.explicit), *(_notes_on_places(config) if files else [])]
    return Loaded(config, loaded.origins, [*loaded.notes, *told])


def _with_origins(refusal: str, origins: Mapping[str, str]) -> str:
    """The refusal, and where the options that it names were written."""
    named = dict.fromkeys(
        word for word in re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)*", refusal) if word in origins
    )
    places = list(dict.fromkeys(origins[name] for name in named))
    return f"{refusal} ({', '.join(places[:3])})" if places else refusal


# -- defaults that adapt


def adapt(config: Config, explicit: Collection[str]) -> tuple[Config, list[str]]:
    """Replace defaults that the planned device or trainer can't do. What is in `explicit` stays."""
    wanted: dict[str, Any] = {}
    if isinstance(config, SFTConfig):
        wanted |= {"train_dataset.type": "sft", "valid_dataset.type": "sft"}
    reasons = adapted(config)
    quiet = set(wanted) | {name for name, (_, reason) in reasons.items() if not reason}
    if isinstance(config, GRPOConfig) and not config.cluster.n_gpus_per_node:
        sglang: dict[str, Any] = {"sglang.dtype": "float32", "sglang.attention_backend": "torch_native"}
        sglang |= dict.fromkeys(
            ("sglang.mem_fraction_static", "sglang.chunked_prefill_size", "sglang.max_prefill_tokens")
        )
        wanted |= sglang
        quiet |= set() if config.allocation_mode.startswith("sglang") else set(sglang)
    recover = config.recover
    if recover.mode != "disabled" and recover.freq_epochs is recover.freq_steps is recover.freq_secs is None:
        wanted["recover.freq_secs"] = DEFAULT_RECOVER_SECS
    wanted |= {name: value for name, (value, _) in reasons.items()}
    notes = []
    for name, value in wanted.items():
        old = value_of(config, name)
        if name in explicit or old == value or old is ABSENT:
            continue
        config = replaced(config, name.split("."), value)
        if name == "recover.freq_secs":
            notes.append(
                f"recover: saves every {value} s, for none of recover.freq_epochs, freq_steps, freq_secs is set."
            )
        elif name not in quiet:
            old, value = ("null" if one is None else one for one in (old, value))
            reason = reasons[name][1] if name in reasons else "the plan has no GPUs"
            notes.append(f"{name} is {value} instead of the default {old}: {reason}.")
    return config, notes


def _notes(config: Config, explicit: Collection[str]) -> Iterator[str]:
    yield from train_notes(config, explicit)
    yield from consistency.idle_notes(config, explicit)
    recover = config.recover
    if recover.mode == "disabled" and any(
        f"recover.freq_{unit}" in explicit for unit in ("epochs", "steps", "secs")
    ):
        yield "recover.freq_* has no effect: recover.mode is disabled, so nothing is saved and nothing can be resumed."
    given = [
        f"{name} {getattr(config, name)}" for name in LENGTH_OPTIONS if getattr(config, name) is not None
    ]
    if len(given) > 1:
        yield f"the trial ends at the earliest of {', '.join(given)}."
    evaluator = config.evaluator
    if (
        config.saver.keep_best is not None
        and evaluator.freq_epochs is evaluator.freq_steps is evaluator.freq_secs is None
    ):
        yield "saver.keep_best has little choice: no evaluator.freq_* is set, so only first and last weights are evaluated."
    if isinstance(config, GRPOConfig) and config.async_training and not config.rollout.max_head_offpolicyness:
        yield "generation never runs ahead of training, for rollout.max_head_offpolicyness is 0; 1 or more makes it asynchronous."


# -- rules without files


def names(config: Config, explicit: Collection[str]) -> Iterator[str]:
    for what in ("experiment_name", "trial_name"):
        try:
            check_name(what, getattr(config, what))
        except ConfigError as error:
            yield str(error)


def ends(config: Config, explicit: Collection[str]) -> Iterator[str]:
    if all(getattr(config, name) is None for name in LENGTH_OPTIONS):
        yield f"{', '.join(LENGTH_OPTIONS)} are all null: nothing would end the trial; set one of them."


def datasets(config: Config, explicit: Collection[str]) -> Iterator[str]:
    wanted = "rl" if isinstance(config, GRPOConfig) else "sft" if isinstance(config, SFTConfig) else "rw"
    for section in ("train_dataset", "valid_dataset"):
        dataset = getattr(config, section)
        if dataset and dataset.type != wanted:
            yield f"{section}.type {dataset.type}: a {config.trainer} trial needs rows of type {wanted}."


def devices(config: Config, explicit: Collection[str]) -> Iterator[str]:
    if isinstance(config, GRPOConfig) and not config.cluster.n_gpus_per_node:
        where = " without GPUs (cluster.n_gpus_per_node 0)"
        backends = ["torch_native", "intel_amx"]
        if config.sglang.attention_backend not in (None, *backends):
            backend = config.sglang.attention_backend
            yield f"sglang.attention_backend {backend} can't be used{where}; allowed: {', '.join(backends)}."
        if config.sglang.dtype == "float16":
            yield f"sglang.dtype float16 can't be used{where}; allowed: bfloat16, float32."


def groups(config: Config, explicit: Collection[str]) -> Iterator[str]:
    if not isinstance(config, GRPOConfig):
        return
    actor, n_samples = config.actor, config.gconfig.n_samples
    if actor.group_size not in (None, n_samples):
        yield f"actor.group_size {actor.group_size} must equal gconfig.n_samples {n_samples}; leave it out, it follows."
    for name, norm in (("reward_norm", actor.reward_norm), ("adv_norm", actor.adv_norm)):
        if norm and "group" in (norm.mean_level, norm.std_level) and n_samples < 2:
            yield f"gconfig.n_samples {n_samples}: actor.{name} is by group, and a group of one says nothing; use at least 2."
    rows, parts = config.train_dataset.batch_size * n_samples, actor.ppo_n_minibatches
    if rows % parts:
        most = min(parts, rows)
        near = next(
            (n for n in range(most, max(0, most - 100_000), -1) if rows % n == 0), 1
        )  # a long search helps nobody
        yield (
            f"actor.ppo_n_minibatches {parts} does not divide train_dataset.batch_size * gconfig.n_samples = {rows} rows; "
            f"the nearest that does is {near}."
        )


def policy_loss(config: Config, explicit: Collection[str]) -> Iterator[str]:
    if not isinstance(config, GRPOConfig):
        return
    actor = config.actor
    if actor.use_decoupled_loss and "actor.recompute_logprob" in explicit and not actor.recompute_logprob:
        yield "actor.use_decoupled_loss needs recomputed log-probabilities, but actor.recompute_logprob is false; leave that out."
    if actor.behav_imp_weight_cap is not None and not actor.use_decoupled_loss:
        yield "actor.behav_imp_weight_cap has no effect without actor.use_decoupled_loss: set that to true, or leave the cap out."


def sampling(config: Config, explicit: Collection[str]) -> Iterator[str]:
    if not isinstance(config, GRPOConfig):
        return
    g, actor = config.gconfig, config.actor
    if g.greedy or g.temperature == 0:
        why = "gconfig.greedy" if g.greedy else "gconfig.temperature 0"
        yield f"{why}: all {g.n_samples} samples of a prompt would be the same, and nothing is learnt; sample with a temperature."
    elif actor.temperature not in (None, g.temperature):
        yield f"actor.temperature {actor.temperature} must equal gconfig.temperature {g.temperature}; leave it out, it follows."
    if g.min_new_tokens > g.max_new_tokens:
        yield f"gconfig.min_new_tokens {g.min_new_tokens} is above gconfig.max_new_tokens {g.max_new_tokens}."


def lengths(config: Config, explicit: Collection[str]) -> Iterator[str]:
    if not isinstance(config, GRPOConfig):
        return
    g, limit, context = config.gconfig, config.actor.mb_spec.max_tokens_per_mb, config.sglang.context_length
    if g.max_new_tokens >= g.max_tokens:
        yield f"gconfig.max_new_tokens {g.max_new_tokens} leaves no prompt: gconfig.max_tokens {g.max_tokens} is for both."
    if limit is not None and limit <= g.max_new_tokens:
        yield f"actor.mb_spec.max_tokens_per_mb {limit} can't hold gconfig.max_new_tokens {g.max_new_tokens} and a prompt."
    if not consistency.is_embedded(config) and context is not None and g.max_new_tokens >= context:
        yield f"gconfig.max_new_tokens {g.max_new_tokens} leaves no prompt: sglang.context_length is {context}."


def asynchrony(config: Config, explicit: Collection[str]) -> Iterator[str]:
    if not isinstance(config, GRPOConfig):
        return
    ahead = config.rollout.max_head_offpolicyness
    if not config.async_training and ahead:
        yield f"rollout.max_head_offpolicyness {ahead} contradicts async_training false: use 0, or async_training true."


def import_paths(config: Config, explicit: Collection[str]) -> Iterator[str]:
    if not isinstance(config, GRPOConfig):
        return
    built_in = {"workflow": ["single_turn"], "reward_fn": ["exact_match", "contains"]}
    for name, known in built_in.items():
        value = getattr(config.rollout, name)
        if value in known or re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", value):
            continue
        near = difflib.get_close_matches(value, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        yield f"rollout.{name} {value!r} is not known; allowed: {', '.join(known)}, or package.module:name of your own.{hint}"


def without_effect(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """No option is accepted and then ignored."""
    evaluator = config.evaluator
    often = [
        f"evaluator.freq_{unit}"
        for unit in ("epochs", "steps", "secs")
        if getattr(evaluator, f"freq_{unit}") is not None
    ]
    if often and config.valid_dataset is None:
        yield f"{often[0]} has no effect without valid_dataset."


def environments(config: Config, explicit: Collection[str]) -> Iterator[str]:
    for name in ("inference_server_env_vars", "trainer_env_vars"):
        try:
            found = environment_of(f"launcher.{name}", getattr(config.launcher, name))
        except ConfigError as error:
            yield str(error)
            continue
        for variable, value in found.items():
            if value == REDACTED and is_secret(variable):
                yield f"launcher.{name}: {variable} is {REDACTED}, as config show stars a secret; write the value itself."


# -- rules that look at files


def dataset_files(config: Config, explicit: Collection[str]) -> Iterator[str]:
    for section in ("train_dataset", "valid_dataset"):
        dataset = getattr(config, section)
        if dataset is None:
            continue
        path = Path(dataset.path)
        if not path.exists():
            yield f"{section}.path {path} does not exist{_relative_hint(f'{section}.path', explicit)}."
        elif path.is_dir():
            yield from _saved_dataset(f"{section}.path", path)
        elif path.suffix not in (".jsonl", ".parquet"):
            yield f"{section}.path {path} can't be read; allowed: a .jsonl or .parquet file, or a directory with a saved dataset."
        elif not path.stat().st_size:
            yield f"{section}.path {path} is empty."


def _saved_dataset(name: str, path: Path) -> Iterator[str]:
    """What Dataset.save_to_disk leaves: state.json beside the data; of a DatasetDict it is one directory for each split."""
    if (path / "state.json").is_file():
        return
    splits = sorted(one.parent.name for one in path.glob("*/state.json"))
    if splits:
        yield f"{name} {path} has the splits {', '.join(splits)}: give the path of one of them, as {path / splits[0]}."
        return
    files = sorted(one for pattern in ("*.jsonl", "*.parquet") for one in path.glob(pattern))
    hint = f"; did you mean {files[0]}?" if files else "."
    yield f"{name} {path} is a directory, but no saved Hugging Face dataset (it has no state.json){hint}"


def _relative_hint(name: str, explicit: Collection[str]) -> str:
    return "; a relative path is taken from the working directory" if name in explicit else ""


def templates_dir(config: Config, explicit: Collection[str]) -> Iterator[str]:
    folder = config.launcher.templates_dir
    if folder and not Path(folder).is_dir():
        yield f"launcher.templates_dir {folder} is not a directory{_relative_hint('launcher.templates_dir', explicit)}."


def fileroot(config: Config, explicit: Collection[str]) -> Iterator[str]:
    if ":" in config.cluster.fileroot:
        yield f"cluster.fileroot {config.cluster.fileroot} can't be used: the search path of Python's modules holds no colons."


def shared_places(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """What several nodes read and write must not lie in the memory of one."""
    for name, place, kind in _places(config):
        if kind in _MEMORY_FILE_SYSTEMS:
            yield f"{name} {place} is on {kind}, which only this node sees, but the trial has {config.cluster.n_nodes} nodes."


def _notes_on_places(config: Config) -> Iterator[str]:
    """A disk may be exported from here to all nodes: only they can tell."""
    for name, place, kind in _places(config):
        if kind in _DISK_FILE_SYSTEMS:
            yield (
                f"{name} {place} is on {kind}, a disk of this machine: do all nodes see it there? "
                "`hpc-rl doctor --allocation` asks them."
            )


def _places(config: Config) -> Iterator[tuple[str, str, str]]:
    """(Option, directory, type of its file system) of what all nodes share; nothing where there is one node."""
    places = {
        "cluster.fileroot": config.cluster.fileroot,
        "cluster.name_resolve.nfs_record_root": config.cluster.name_resolve.nfs_record_root,
    }
    for name, place in places.items() if config.cluster.n_nodes > 1 else ():
        if place:
            yield name, place, mount_of(Path(place))[0]


Rule = Callable[[Config, Collection[str]], Iterator[str]]
RULES: list[Rule] = [
    names,
    ends,
    datasets,
    devices,
    groups,
    policy_loss,
    sampling,
    lengths,
    asynchrony,
    import_paths,
    without_effect,
    scheduler_options,
    environments,
    unavailable,
    *TRAIN_RULES,
    *consistency.RULES,
    *container_rules.RULES,
]
FILE_RULES: list[Rule] = [dataset_files, templates_dir, fileroot, shared_places, *container_rules.FILE_RULES]
