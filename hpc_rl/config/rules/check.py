"""Check a loaded configuration: adapt defaults that the planned devices don't support, then apply all rules.

A rule yields refusals. The options that the user set are never changed, only refused.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import fields, replace
from typing import Any

from hpc_rl.config import algorithm_defaults
from hpc_rl.config.load.stored import Loaded, find_trainer
from hpc_rl.config.options.experiment import (
    ABSENT,
    LENGTH_OPTIONS,
    Config,
    GRPOConfig,
    get_value,
    has_trainer,
    replace_value,
)
from hpc_rl.config.rules import (
    algorithm_rules,
    consistency,
    container_rules,
    curriculum_rules,
    dataset_rules,
    distillation_rules,
    engine_rules,
    environment_rules,
    evaluation_rules,
    file_rules,
    generation_rules,
    judge_rules,
    lora_rules,
    mpi_rules,
    pool_rules,
    purpose_rules,
    sampling_rules,
    set_algorithm_rules,
    sglang_rules,
    sharing_rules,
    slurm_rules,
    teacher_rules,
    training_rules,
    vllm_rules,
    vocabulary_rules,
)
from hpc_rl.core.backends import SERVER_BACKENDS
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal, make_note

DEFAULT_RECOVER_SECS = 600

Rule = Callable[[Config, Collection[str]], Iterator[Refusal]]
RULES: list[Rule] = [
    *consistency.RULES,
    *generation_rules.RULES,
    *training_rules.RULES,
    *engine_rules.RULES,
    *lora_rules.RULES,
    *slurm_rules.RULES,
    *container_rules.RULES,
    *mpi_rules.RULES,
    *evaluation_rules.RULES,
]
GRPO_RULES: list[Callable[[GRPOConfig, Collection[str]], Iterator[Refusal]]] = [
    *generation_rules.GRPO_RULES,
    *sglang_rules.GRPO_RULES,
    *vllm_rules.GRPO_RULES,
    *training_rules.GRPO_RULES,
    *algorithm_rules.GRPO_RULES,
    *set_algorithm_rules.GRPO_RULES,
    *environment_rules.GRPO_RULES,
    *evaluation_rules.GRPO_RULES,
    *pool_rules.GRPO_RULES,
    *teacher_rules.GRPO_RULES,
    *judge_rules.GRPO_RULES,
    *curriculum_rules.GRPO_RULES,
    *distillation_rules.GRPO_RULES,
    *sharing_rules.GRPO_RULES,
    *purpose_rules.GRPO_RULES,
]
FILE_RULES: list[Rule] = [
    *dataset_rules.RULES,
    *file_rules.RULES,
    *vocabulary_rules.RULES,
    *pool_rules.FILE_RULES,
    *teacher_rules.FILE_RULES,
    *judge_rules.FILE_RULES,
    *lora_rules.FILE_RULES,
    *curriculum_rules.FILE_RULES,
    *distillation_rules.FILE_RULES,
    *container_rules.FILE_RULES,
]

# A trial without a trainer may keep the options of the trainer.
OF_TRAINING: set[Callable[..., Any]] = {
    *training_rules.RULES,
    *training_rules.GRPO_RULES,
    *engine_rules.RULES,
    *lora_rules.RULES,
    *algorithm_rules.GRPO_RULES,
    *set_algorithm_rules.GRPO_RULES,
    *sharing_rules.GRPO_RULES,
    generation_rules.check_groups,
    environment_rules.check_length,
    curriculum_rules.check_curriculum,
}


class RulesRefuse(ConfigError):
    """Rules refuse the configuration, which is `adapted`."""

    def __init__(
        self,
        refusals: Sequence[Refusal],
        adapted: Loaded,
        rules: Set[Callable[..., Any]],
        unreadable: set[str],
    ) -> None:
        super().__init__(*(refusal.locate(adapted.origins) for refusal in refusals))
        self.adapted = adapted
        self.unreadable = unreadable  # sections of datasets
        self.is_about_files_only = rules <= {*FILE_RULES}


def check(loaded: Loaded, *, files: bool = True) -> Loaded:
    """Return the configuration with adapted defaults, and notes about it.

    `files` false skips the rules about files on disk. Raises RulesRefuse.
    """
    config, notes, adapted = adapt(loaded.config, loaded.explicit)
    rules: list[Callable[..., Iterator[Refusal]]] = [*RULES]
    rules += GRPO_RULES if isinstance(config, GRPOConfig) else []
    rules += FILE_RULES if files else []
    if not has_trainer(config):
        rules = [rule for rule in rules if rule not in OF_TRAINING]
    found = {rule: list(rule(config, loaded.explicit)) for rule in rules}
    if refusals := list({str(one): one for one in itertools.chain(*found.values())}.values()):
        so_far = replace(loaded, config=config, adapted=adapted)
        of_data = (one for rule in dataset_rules.RULES for one in found.get(rule, ()))
        unreadable = {name.partition(".")[0] for one in of_data for name in one.options}
        raise RulesRefuse(refusals, so_far, {rule for rule, some in found.items() if some}, unreadable)
    notes += _list_notes(config, loaded.explicit)
    if files:
        notes += [
            *file_rules.list_notes(config),
            *dataset_rules.list_notes(config),
            *lora_rules.list_file_notes(config),
        ]
    return Loaded(config, loaded.origins, [*loaded.notes, *notes], adapted)


def adapt(config: Config, explicit: Collection[str]) -> tuple[Config, list[Refusal], dict[str, str]]:
    """Replace defaults that the planned devices or the trainer don't support; `explicit` options stay.

    Returns the configuration, notes, and option -> reason of each replacement.
    """
    wanted: dict[str, tuple[Any, str]] = {}  # option -> value, and the reason for the note; empty for no note
    notes: list[Refusal] = []
    adapted: dict[str, str] = {}
    if isinstance(config, GRPOConfig):
        config, adapted = algorithm_defaults.fill_defaults(config, explicit)
    if not isinstance(config, GRPOConfig):
        kind = find_trainer(config)
        wanted |= {f"{section}.type": (kind, "") for section in ("train_dataset", "valid_dataset")}
    elif not config.cluster.n_gpus_per_node:
        used = {pool.backend for pool in consistency.list_server_pools(config)}
        for name, backend in SERVER_BACKENDS.items():
            reason = "the plan has no GPUs" if name in used else ""
            for option, value in backend.without_gpus.items():
                wanted[f"{backend.section}.{option}"] = (value, reason)
    for rules in (training_rules, engine_rules, lora_rules, dataset_rules, evaluation_rules):
        wanted |= rules.adapt_defaults(config, explicit)
    wanted |= generation_rules.adapt_defaults(config)
    quiet = {"total_train_epochs": "another length is set"}
    quiet |= dict.fromkeys((backend.section for backend in SERVER_BACKENDS.values()), "the plan has no GPUs")
    for name, (value, reason) in wanted.items():
        old = get_value(config, name)
        if name in explicit or old == value or old is ABSENT:
            continue
        config = replace_value(config, name.split("."), value)
        adapted[name] = reason or quiet.get(name.partition(".")[0], f"trainer is {find_trainer(config)}")
        if reason:
            old, new = ("null" if one is None else one for one in (old, value))
            notes.append(make_note(name, f"is {new} instead of the default {old}: {reason}"))
    if isinstance(config, GRPOConfig) and (held_out := config.eval_gconfig) is not None:
        of_eval = (field.name for field in fields(held_out) if f"eval_gconfig.{field.name}" in explicit)
        own = {"n_samples": 1} | {name: getattr(held_out, name) for name in of_eval}
        config = replace(config, eval_gconfig=replace(config.gconfig, **own))
    recover = config.recover
    if has_trainer(config) and recover.mode != "disabled" and not consistency.has_period(recover):
        config = replace_value(config, ["recover", "freq_secs"], DEFAULT_RECOVER_SECS)
        unset = "none of recover.freq_epochs, freq_steps, freq_secs is set"
        adapted["recover.freq_secs"] = unset
        notes.append(
            make_note("recover", f": a checkpoint is saved every {DEFAULT_RECOVER_SECS} s, because {unset}")
        )
    return config, notes, adapted


def _list_notes(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    if isinstance(config, GRPOConfig) and not has_trainer(config):
        yield from generation_rules.list_notes(config)
        return
    if isinstance(config, GRPOConfig):
        yield from training_rules.list_notes(config)
        yield from algorithm_rules.list_notes(config)
        yield from generation_rules.list_notes(config)
        yield from sampling_rules.list_notes(config)
    yield from training_rules.list_reference_notes(config)
    yield from training_rules.list_learning_rate_notes(config)
    yield from consistency.list_idle_notes(config, explicit)
    yield from lora_rules.list_notes(config, explicit)
    if config.recover.mode == "disabled" and consistency.has_period(config.recover):
        why = "has no effect: recover.mode disabled neither saves nor loads checkpoints"
        yield make_note("recover.freq_*", why, Kind.NO_EFFECT, related=("recover.mode",))
    limits = {name: getattr(config, name) for name in LENGTH_OPTIONS}
    texts = [f"{name} {limit}" for name, limit in limits.items() if limit is not None]
    if len(texts) > 1:
        yield make_note("", f"the trial stops at the earliest of {', '.join(texts)}", related=LENGTH_OPTIONS)
    if config.saver.keep_best is not None and not consistency.has_period(config.evaluator):
        yield make_note(
            "saver.keep_best",
            "compares only the first and the last weights, because no evaluator.freq_* is set",
        )
    if isinstance(config, GRPOConfig) and config.async_training and not config.rollout.max_head_offpolicyness:
        why = ": generation waits for each update of the weights; with 1 or more it runs ahead of training"
        yield make_note("rollout.max_head_offpolicyness", why, value=0)
