"""Compare two configurations of a trial, and tell which changes its saved state allows.

A `safe` change takes effect with the next step. An `unsafe` one contradicts the files on disk (weights,
position in the data) and needs another trial. The tables UNSAFE and SAFE cover every option. Some safe
changes need new batches.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from hpc_rl.config.load.fields import make_generic
from hpc_rl.config.load.stored import REDACTED, is_secret
from hpc_rl.config.options.experiment import ABSENT, CONFIGS, Config, get_value
from hpc_rl.config.show import format_scalar
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal

_MODEL = "the trial's checkpoints hold the model that this option describes"
_WEIGHTS = "the fork begins with the weights of that trial"
_DATA = "the position in the data and the batches on disk depend on it"
_GROUPS = "completions that are not trained on yet were made with the old value"
_NAME = "it identifies the trial"

# A checkpoint loads only with the same values, also in a fork.
OF_THE_WEIGHTS = (
    *("model.path", "model.init_from_scratch", "model.is_critic"),
    *("model.use_lora", "model.lora_rank", "model.lora_alpha", "model.target_modules"),
)
OF_THE_STATE = (*OF_THE_WEIGHTS, "model.dtype", "model.optimizer.type")
UNSAFE: dict[str, str] = {  # option -> why the files on disk forbid a change; `model` is each trained model
    "experiment_name": _NAME,
    "trial_name": _NAME,
    "trainer": _NAME,
    "purpose": _NAME,
    "cluster.fileroot": "the trial is stored there",
    "seed": _DATA,
    "tokenizer_path": _GROUPS,
    "train_dataset.path": _DATA,
    "train_dataset.columns": _DATA,
    "train_dataset.mix": _DATA,
    "train_dataset.type": _DATA,
    "train_dataset.batch_size": _DATA,
    "train_dataset.shuffle": _DATA,
    "train_dataset.max_length": _DATA,
    "train_dataset.too_long": _DATA,
    "train_dataset.drop_last": _DATA,
    "rollout.batch_order": "the batches on disk follow the old order",
    **dict.fromkeys(OF_THE_STATE, _MODEL),
    "ref.path": "the KL divergence would refer to another model",
}
SAFE = (  # options and whole sections, except the options in UNSAFE
    "allocation_mode", "total_train_epochs", "total_train_steps", "total_train_n_seqs", "async_training",
    "cluster", "launcher", "sglang", "vllm", "embedded", "saver", "evaluator", "recover",
    "stats_logger", "train_dataset.sequences_per_rank", "train_dataset.pin_memory",
    "train_dataset.num_workers", "train_dataset.curriculum", "train_dataset.pass_band",
    "train_dataset.outside_share", "train_dataset.weight_column", "valid_dataset", "gconfig",
    "eval_gconfig", "rollout", "model", "ref", "environments", "pools", "teacher", "weights", "distillation",
    "keep_best_samples", "callbacks",
)  # fmt: skip
# Options and whole sections that change the policy or the data, except the options in REPLAYS. After such a
# change earlier batches and groups are set aside. --replay refuses the changes in NOT_WITH_REPLAY.
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
    "distillation",
)
REPLAYS = (
    "actor.pad_to_maximum", "actor.attn_impl",
    "actor.grad_reduce_dtype", "actor.backend", "actor.fsdp", "actor.megatron",
    "actor.gradient_checkpointing", "actor.enable_torch_compile", "actor.weight_update_mode",
    "actor.lora_publish",
    "actor.mb_spec", "actor.optimizer.offload", "actor.log_agent_stats", "actor.log_agent_stats_keys",
    "pools.NAME.max_requests", "pools.NAME.api_key_env", "pools.NAME.python",
)  # fmt: skip
NOT_WITH_REPLAY = (
    "gconfig.n_samples", "gconfig.temperature", "gconfig.greedy", "rollout.workflow",
    "rollout.workflow_args",
    "pools.NAME", "pools.NAME.path", "pools.NAME.url", "pools.NAME.model", "distillation.pool",
    "distillation.top_k", "distillation.demonstration_column", "distillation.demonstration_template",
)  # fmt: skip
# Options and whole sections that change the numbers of an evaluation, except the options in REPLAYS. Numbers
# with different values can't be compared.
MEASURES = (
    "valid_dataset.path",
    "valid_dataset.columns",
    "valid_dataset.max_length",
    "valid_dataset.too_long",
    "eval_gconfig",
    "evaluator.sets",
    "rollout.reward_fn",
    "rollout.reward_weights",
    "rollout.judge",
    "rollout.workflow",
    "rollout.workflow_args",
    "pools",
    "teacher",
)
# Options and whole sections that, together with the user's code, decide which prompts are rejected.
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
REMARKS = {  # limits of a safe change
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
    reason: str = ""  # why it is unsafe, or a limit of a safe change
    new_batches: bool = False  # earlier batches are set aside, and their prompts issued again

    def __str__(self) -> str:
        text = f"{self.name}: {_format_value(self.name, self.old)} -> {_format_value(self.name, self.new)}"
        return f"{text}  ({'safe' if self.safe else 'unsafe'}{': ' + self.reason if self.reason else ''})"


def list_changes(old: Config, new: Config) -> list[Change]:
    """Return the options whose values differ; a section that is added or removed is one change."""
    found = []
    for name, a, b in _find_differences(old, new, ""):
        nearest = next(
            (one for one in _list_prefixes(_make_generic(name)) if one in NEW_BATCHES or one in REPLAYS), ""
        )
        found.append(Change(name, a, b, *classify(name), new_batches=nearest in NEW_BATCHES))
    return found


def digest_options(config: Config, names: Sequence[str] = MEASURES) -> dict[str, str]:
    """Return option -> digest of its value, for the options and sections in `names`.

    The default are the options that change the numbers of an evaluation.
    """
    return {
        option: xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True, default=str).encode())
        for name in names
        for option, value in _list_values(get_value(config, name), name)
        if _make_generic(option) not in REPLAYS
    }


def _list_values(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each option in a section, or in a mapping of sections."""
    if dataclasses.is_dataclass(value) or _has_sections([value]):
        for part in _list_keys(value):
            yield from _list_values(get_value(value, part), f"{name}.{part}")
    elif value is not ABSENT:
        yield name, value


def refuse_unsafe(found: Sequence[Change], trial: str, replay: bool = False) -> None:
    """Raise ConfigError with a line for each unsafe change: the reason and the remedy.

    `replay` uses finished groups in batches, so the options that made them can't change.
    """
    wrong = [change for change in found if not change.safe]
    if replay:
        mixed = [change for change in found if _make_generic(change.name) in NOT_WITH_REPLAY]
        wrong += [replace(change, reason=f"{_GROUPS}, and --replay keeps them") for change in mixed]
    if not wrong:
        return
    kept = [change for change in wrong if change.old is not ABSENT]
    keep = "".join(f" {change.name}={_format_value(change.name, change.old)}" for change in kept)
    added = ", ".join(change.name for change in wrong)
    back = f"To resume {trial}, use{keep}" if keep else f"To resume {trial}, remove {added}"
    new = next((str(change.new) for change in wrong if change.name == "trial_name"), "NEW")
    fork = (
        f"`hpc-rl fork {trial} {new}` begins a new trial with its checkpoint, `hpc-rl submit` one without it."
    )
    refusals = (_refuse_change(change, f"trial {trial}", change.reason) for change in wrong)
    raise ConfigError(*refusals, f"{back}. For other values, {fork}")


def _refuse_change(change: Change, place: str, reason: str, use: str = "") -> Refusal:
    old, new = _format_value(change.name, change.old), _format_value(change.name, change.new)
    why = f"can't change from {old} to {new} in {place}: {reason}"
    return Refusal(option=change.name, kind=Kind.CONFLICT, why=why, use=use)


def refuse_other_model(found: Sequence[Change], trial: str, only_weights: bool = False) -> None:
    """Raise ConfigError with a line for each change that prevents a fork from loading the trial's state.

    `only_weights`: the fork loads published weights.
    """
    fixed, why = (OF_THE_WEIGHTS, _WEIGHTS) if only_weights else (OF_THE_STATE, _MODEL)
    wrong = [one for one in found if _replace_section(one.name) in ("trainer", *fixed)]
    if only_weights:  # its critic starts afresh
        wrong = [one for one in wrong if not one.name.startswith("critic.")]
    if wrong:
        use = "keep the old value, or begin a new trial with `hpc-rl submit`"
        raise ConfigError(*(_refuse_change(change, f"a fork of {trial}", why, use) for change in wrong))


def classify(name: str) -> tuple[bool, str]:
    """Return whether a change of an option is safe, with a reason or remark. Raises KeyError if unknown."""
    for known in _list_prefixes(_replace_section(name)):
        if known in UNSAFE:
            return False, UNSAFE[known]
        if known in SAFE:
            return True, next((REMARKS[one] for one in _list_prefixes(name) if one in REMARKS), "")
    raise KeyError(name)


def _replace_section(name: str) -> str:
    """Return the name in the tables, which list the options of trained models under `model`."""
    section, *rest = name.split(".", 1)
    return ".".join(["model", *rest]) if section in ("actor", "critic") else name


def _make_generic(name: str) -> str:
    return next((like for cls in CONFIGS.values() if (like := make_generic(cls, name)) != name), name)


def _list_prefixes(name: str) -> Iterator[str]:
    """Yield a.b.c, a.b, a: the most specific first."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _find_differences(old: Any, new: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, old, new); a whole section is plain data. The two may have different classes."""
    for name in dict.fromkeys([*_list_keys(new), *_list_keys(old)]):
        a, b = get_value(old, name), get_value(new, name)
        both = [one for one in (a, b) if one is not ABSENT]
        if len(both) == 2 and (all(map(dataclasses.is_dataclass, both)) or _has_sections(both)):
            yield from _find_differences(a, b, f"{prefix}{name}.")
        elif a != b:
            yield prefix + name, _make_plain(a), _make_plain(b)


def _list_keys(section: Any) -> list[str]:
    if isinstance(section, dict):
        return list(section)
    return [field.name for field in dataclasses.fields(section)]


def _has_sections(both: Sequence[Any]) -> bool:
    """Return whether any of the values is a mapping that contains sections."""
    members = [part for one in both if isinstance(one, dict) for part in one.values()]
    return any(map(dataclasses.is_dataclass, members))


def _make_plain(value: Any) -> Any:
    is_section = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return dataclasses.asdict(value) if is_section else value


def _format_value(name: str, value: Any) -> str:
    if value is ABSENT:
        return "nothing"
    if isinstance(value, dict) and "path" in value:
        return f"{{path: {format_scalar(value['path'])}, ...}}"
    return REDACTED if is_secret(name) and value else format_scalar(value)
