"""Resuming a trial under another configuration: what changed, and which changes its state allows.

A `safe` change takes effect with the next step. An `unsafe` one contradicts what is on disk (weights,
position in the data) and needs another trial. Every option is in one of the two tables. Some safe
changes need new batches.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from hpc_rl.config.load.fields import generic
from hpc_rl.config.load.stored import REDACTED, is_secret
from hpc_rl.config.options.experiment import ABSENT, CONFIGS, Config, value_of
from hpc_rl.config.show import scalar
from hpc_rl.core.errors import ConfigError

_MODEL = "the checkpoints hold this model"
_DATA = "the position in the data and the sealed batches depend on it"
_GROUPS = "finished groups that are not in a batch yet were made with it"
_NAME = "it identifies the trial"

# What a checkpoint can only be loaded with, in a fork, too.
OF_THE_STATE = (
    "model.path", "model.init_from_scratch", "model.is_critic", "model.dtype", "model.optimizer.type",
)  # fmt: skip
UNSAFE: dict[str, str] = {  # option -> what on disk contradicts a change; `model` includes actor
    "experiment_name": _NAME,
    "trial_name": _NAME,
    "trainer": _NAME,
    "cluster.fileroot": "the trial is stored there",
    "seed": _DATA,
    "tokenizer_path": _GROUPS,
    "train_dataset.path": _DATA,
    "train_dataset.columns": _DATA,
    "train_dataset.type": _DATA,
    "train_dataset.batch_size": _DATA,
    "train_dataset.shuffle": _DATA,
    "train_dataset.max_length": _DATA,
    "train_dataset.too_long": _DATA,
    "train_dataset.drop_last": _DATA,
    "rollout.batch_order": "the sealed batches follow the old order",
    **dict.fromkeys(OF_THE_STATE, _MODEL),
    "ref.path": "the KL divergence would refer to another model",
}
SAFE = (  # options and whole sections, except what is in UNSAFE
    "allocation_mode", "total_train_epochs", "total_train_steps", "total_train_n_seqs", "async_training",
    "cluster", "launcher", "scheduler", "sglang", "vllm", "embedded", "saver", "evaluator", "recover",
    "stats_logger", "train_dataset.sequences_per_rank", "train_dataset.pin_memory",
    "train_dataset.num_workers", "valid_dataset", "gconfig", "eval_gconfig", "rollout", "model", "ref",
    "environments", "pools", "teacher",
)  # fmt: skip
# Options and whole sections that change the policy or the data, except those in REPLAYS: earlier batches and
# groups are set aside. With --replay the changes in NOT_WITH_REPLAY are refused.
NEW_BATCHES = (
    "actor",
    "gconfig",
    "rollout.reward_fn",
    "rollout.reward_weights",
    "rollout.judge",
    "rollout.workflow",
    "rollout.workflow_args",
    "pools",
    "teacher",
)
REPLAYS = (
    "actor.experiment_name", "actor.trial_name", "actor.pad_to_maximum", "actor.attn_impl",
    "actor.grad_reduce_dtype", "actor.backend", "actor.fsdp", "actor.megatron", "actor.ds_auto_tp",
    "actor.gradient_checkpointing",
    "actor.mb_spec", "actor.optimizer.offload", "actor.log_agent_stats", "actor.log_agent_stats_keys",
    "pools.NAME.max_requests", "pools.NAME.api_key_env", "pools.NAME.python",
)  # fmt: skip
NOT_WITH_REPLAY = (
    "gconfig.n_samples", "gconfig.temperature", "gconfig.greedy", "rollout.workflow",
    "rollout.workflow_args",
    "pools.NAME", "pools.NAME.path", "pools.NAME.url", "pools.NAME.model",
)  # fmt: skip
# Options and whole sections that the numbers of an evaluation depend on, except those in REPLAYS: with others
# they can't be compared.
MEASURES = (
    "valid_dataset.path",
    "valid_dataset.columns",
    "valid_dataset.max_length",
    "valid_dataset.too_long",
    "eval_gconfig",
    "rollout.reward_fn",
    "rollout.reward_weights",
    "rollout.judge",
    "rollout.workflow",
    "rollout.workflow_args",
    "pools",
    "teacher",
)
# Options and whole sections that decide, beside the user's code, which prompts are rejected.
JUDGES = (
    "gconfig",
    "rollout.reward_fn",
    "rollout.reward_weights",
    "rollout.reward_timeout_s",
    "rollout.judge",
    "rollout.workflow",
    "rollout.workflow_args",
    "rollout.check_trajectory_format",
    "pools",
    "teacher",
)
REMARKS = {  # what a safe change does not do
    "actor.ppo_n_minibatches": "the learning-rate schedule continues at the same share of the training",
    "eval_gconfig": "held-out rewards before and after are not comparable",
    "valid_dataset": "held-out rewards before and after are not comparable",
}


@dataclass(frozen=True)
class Change:
    """One option that differs."""

    name: str  # of the option, or of a section that is added or removed
    old: Any
    new: Any
    safe: bool  # the state of the trial allows it
    reason: str = ""  # why it is unsafe, or what a safe change leaves as it was
    new_batches: bool = False  # earlier batches are set aside, and their prompts issued again

    def __str__(self) -> str:
        text = f"{self.name}: {_shown(self.name, self.old)} -> {_shown(self.name, self.new)}"
        return f"{text}  ({'safe' if self.safe else 'unsafe'}{': ' + self.reason if self.reason else ''})"


def changes(old: Config, new: Config) -> list[Change]:
    """Return the options whose values differ; a section that is added or removed is one change."""
    found = []
    for name, a, b in _differences(old, new, ""):
        nearest = next((one for one in _ways(_generic(name)) if one in NEW_BATCHES or one in REPLAYS), "")
        found.append(Change(name, a, b, *classify(name), new_batches=nearest in NEW_BATCHES))
    return found


def measured_by(config: Config, names: Sequence[str] = MEASURES) -> dict[str, str]:
    """Return what the numbers of an evaluation depend on: options by their names, of each value a digest.

    With other `names`, of options and sections, it is those.
    """
    return {
        option: xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True, default=str).encode())
        for name in names
        for option, value in _single(value_of(config, name), name)
        if _generic(option) not in REPLAYS
    }


def _single(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the options of a section, or of sections by name, with their values."""
    if dataclasses.is_dataclass(value) or _is_mapping([value]):
        for part in _names(value):
            yield from _single(value_of(value, part), f"{name}.{part}")
    elif value is not ABSENT:
        yield name, value


def refuse_unsafe(found: Sequence[Change], trial: str, replay: bool = False) -> None:
    """Raise ConfigError with a line for each unsafe change: why, and what to do.

    With `replay`, finished groups are used in batches, so what they were made with can't change.
    """
    wrong = [change for change in found if not change.safe]
    if replay:
        mixed = [change for change in found if _generic(change.name) in NOT_WITH_REPLAY]
        wrong += [replace(change, reason=f"{_GROUPS}, and --replay keeps them") for change in mixed]
    if not wrong:
        return
    lines, keep = [], ""
    for change in wrong:
        old, new = _shown(change.name, change.old), _shown(change.name, change.new)
        lines.append(f"{change.name} can't change from {old} to {new} in trial {trial}: {change.reason}.")
        keep += f" {change.name}={old}" if change.old is not ABSENT else ""
    back = f"To resume {trial}, use{keep}" if keep else f"To resume {trial}, omit it"
    new = next((str(change.new) for change in wrong if change.name == "trial_name"), "NEW")
    fork = (
        f"`hpc-rl fork {trial} {new}` begins a new trial with its checkpoint, `hpc-rl submit` one without it."
    )
    raise ConfigError("\n".join([*lines, f"{back}. For other values, {fork}"]))


def refuse_other_model(found: Sequence[Change], trial: str) -> None:
    """Raise ConfigError with a line for each change that a fork of a trial can't have: it loads its state."""
    wrong = [one for one in found if _of_model(one.name) in ("trainer", *OF_THE_STATE)]
    lines = [
        f"{one.name} can't change from {_shown(one.name, one.old)} to {_shown(one.name, one.new)} "
        f"in a fork of {trial}: {_MODEL}."
        for one in wrong
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def classify(name: str) -> tuple[bool, str]:
    """Return whether a change of an option is safe, and the reason or remark. Raises KeyError if unknown."""
    for known in _ways(_of_model(name)):
        if known in UNSAFE:
            return False, UNSAFE[known]
        if known in SAFE:
            return True, next((REMARKS[one] for one in _ways(name) if one in REMARKS), "")
    raise KeyError(name)


def _of_model(name: str) -> str:
    """Return the name in the table, where `model` includes actor."""
    return name.replace("actor", "model", 1) if name.partition(".")[0] == "actor" else name


def _generic(name: str) -> str:
    return next((like for cls in CONFIGS.values() if (like := generic(cls, name)) != name), name)


def _ways(name: str) -> Iterator[str]:
    """Yield a.b.c, a.b, a: the most specific first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _differences(old: Any, new: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, old, new), a whole section as plain data. The classes differ with the trainer."""
    for name in dict.fromkeys([*_names(new), *_names(old)]):
        a, b = value_of(old, name), value_of(new, name)
        both = [one for one in (a, b) if one is not ABSENT]
        if len(both) == 2 and (all(map(dataclasses.is_dataclass, both)) or _is_mapping(both)):
            yield from _differences(a, b, f"{prefix}{name}.")
        elif a != b:
            yield prefix + name, _plain(a), _plain(b)


def _names(section: Any) -> list[str]:
    if isinstance(section, dict):
        return list(section)
    return [field.name for field in dataclasses.fields(section)]


def _is_mapping(both: Sequence[Any]) -> bool:
    """Return whether two values are mappings of sections, one of them not empty."""
    members = [part for one in both if isinstance(one, dict) for part in one.values()]
    return any(map(dataclasses.is_dataclass, members))


def _plain(value: Any) -> Any:
    is_section = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return dataclasses.asdict(value) if is_section else value


def _shown(name: str, value: Any) -> str:
    if value is ABSENT:
        return "nothing"
    if isinstance(value, dict) and "path" in value:
        return f"{{path: {scalar(value['path'])}, ...}}"
    return REDACTED if is_secret(name) and value else scalar(value)
