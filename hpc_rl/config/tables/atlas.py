"""ATLAS names of the top level: the option that each stands for, or why it is refused or has no effect.

`{model}` is `actor` for grpo and `model` for sft. Some values are translated.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_rl.config.loading.source import SourceValue

_NOT_BUILT_VLLM = "vLLM servers are not implemented; use sglang servers: allocation_mode sglang:dN+fsdp:dM"
_NOT_BUILT_TEACHER = "the adaptive teacher is not implemented; omit it"
_QUESTIONS = (
    "train_dataset.batch_size counts questions: set it to per_device_train_batch_size * "
    "gradient_accumulation_steps * trainer ranks / num_generations, and limit memory with "
    "{model}.mb_spec.max_tokens_per_mb"
)


@dataclass(frozen=True)
class Alias:
    """What an ATLAS name stands for.

    Args:
        to: The option; empty where there is none.
        translate: Return the option's value for ATLAS's; raises ValueError with the reason.
        accepts: Without `to`: values that are accepted and have no effect.
        unless: With `to`: values that have no effect.
        why: Why there is no effect, and what to use.
        note: With `to`: what differs.
        any_value: Accept every value, without effect.
    """

    to: str = ""
    translate: Callable[[Any], Any] | None = None
    accepts: tuple[Any, ...] = ()
    unless: tuple[Any, ...] = ()
    why: str = ""
    note: str = ""
    any_value: bool = False

    def describe(self) -> str:
        if self.to:
            return f"{self.to}{'; ' + self.note if self.note else ''}"
        if self.any_value:
            return f"no effect: {self.why}"
        accepted = ", ".join(str(value).lower().replace("none", "null") for value in self.accepts)
        return f"refused: only {accepted}: {self.why}" if accepted else f"refused: {self.why}"


def _all_if_null(value: Any) -> Any:
    return 100_000_000 if value is None or value == -1 else value


def _neutral_if_null(neutral: float) -> Callable[[Any], Any]:
    return lambda value: neutral if value is None else value


def _report_to(value: Any) -> Any:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("it must be a list of names: wandb, tensorboard, none")
    unknown = [name for name in names if name not in ("wandb", "tensorboard", "none")]
    if unknown:
        raise ValueError(f"{unknown[0]} is not known; allowed: wandb, tensorboard (always written), none")
    return "online" if "wandb" in names else "disabled"


def _metric(value: Any) -> Any:
    # Hugging Face accepts names with `eval_` or without; ATLAS's own log has eval/reward.
    if not isinstance(value, str):
        raise ValueError("it must be the name of a metric, such as eval_reward")
    return f"eval_{value.replace('eval/', 'eval_').removeprefix('eval_')}"


def _mode(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("it must be true or false")
    return "max" if value else "min"


ALIASES: dict[str, Alias] = {
    "model_name_or_path": Alias("{model}.path"),
    "learning_rate": Alias("{model}.optimizer.lr"),
    "num_train_epochs": Alias("total_train_epochs"),
    "per_device_train_batch_size": Alias(why=_QUESTIONS),
    "gradient_accumulation_steps": Alias(accepts=(1,), why=_QUESTIONS),
    "warmup_ratio": Alias("{model}.optimizer.warmup_steps_proportion"),
    "weight_decay": Alias("{model}.optimizer.weight_decay"),
    "max_grad_norm": Alias("{model}.optimizer.gradient_clipping"),
    "beta": Alias("actor.beta", note="the KL coefficient in the loss; actor.kl_ctl is the one in the reward"),
    "temperature": Alias("gconfig.temperature"),
    "num_generations": Alias("gconfig.n_samples"),
    "max_completion_length": Alias("gconfig.max_new_tokens"),
    "max_prompt_length": Alias("train_dataset.max_length", note="longer prompts are dropped, not truncated"),
    "reward_weights": Alias(
        accepts=(None,),
        why="a trial has one reward function: weigh inside it, with rollout.reward_fn package.module:name",
    ),
    "top_k": Alias("gconfig.top_k", _all_if_null),
    "top_p": Alias("gconfig.top_p"),
    "min_p": Alias("gconfig.min_p", _neutral_if_null(0.0)),
    "repetition_penalty": Alias("gconfig.repetition_penalty", _neutral_if_null(1.0)),
    "generation_aggregation_steps": Alias(any_value=True, why="servers batch whatever is in flight"),
    "shuffle_generation_inputs": Alias(any_value=True, why="each prompt goes to whichever server is free"),
    "use_vllm": Alias(accepts=(False,), why=_NOT_BUILT_VLLM),
    "use_vllm_server": Alias(accepts=(False,), why=_NOT_BUILT_VLLM),
    "vllm_device": Alias(accepts=("auto",), why=_NOT_BUILT_VLLM),
    "vllm_gpu_memory_utilization": Alias(why=_NOT_BUILT_VLLM + ", and sglang.mem_fraction_static"),
    "vllm_dtype": Alias(accepts=("auto",), why=_NOT_BUILT_VLLM + ", and sglang.dtype"),
    "vllm_max_model_len": Alias(accepts=(None,), why=_NOT_BUILT_VLLM + ", and sglang.context_length"),
    "vllm_host": Alias(accepts=(None,), why=_NOT_BUILT_VLLM),
    "vllm_port": Alias(accepts=(None,), why=_NOT_BUILT_VLLM),
    "num_vllm_clients": Alias(accepts=(1,), why=_NOT_BUILT_VLLM),
    "offload_untrained_models": Alias(
        accepts=(False,), why="offloading the reference model is not implemented; omit it"
    ),
    "ds3_gather_for_generation": Alias(
        accepts=(True,),
        why="weights are always published whole; servers generate, not the trainer; omit it",
    ),
    "backprop_accumulation_steps": Alias("{model}.mb_spec.n_mbs", _neutral_if_null(1)),
    "backprop_accumulation_micro_batch_size": Alias(
        accepts=(None,), why="micro-batches are cut by tokens; use {model}.mb_spec.max_tokens_per_mb"
    ),
    "remove_unused_columns": Alias(
        accepts=(False,), why="the reward function gets every column of a row; omit it"
    ),
    "max_probe_tokens": Alias(why=_NOT_BUILT_TEACHER),
    "student_diagnostic_template": Alias(accepts=(None,), why=_NOT_BUILT_TEACHER),
    "teacher_adaptive_template": Alias(accepts=(None,), why=_NOT_BUILT_TEACHER),
    "student_with_teaching_template": Alias(accepts=(None,), why=_NOT_BUILT_TEACHER),
    "student_baseline_template": Alias(accepts=(None,), why=_NOT_BUILT_TEACHER),
    "logging_steps": Alias(any_value=True, why="every step is logged"),
    "save_steps": Alias("saver.freq_steps"),
    "eval_steps": Alias("evaluator.freq_steps"),
    "save_total_limit": Alias("saver.keep_last"),
    "load_best_model_at_end": Alias(
        "saver.keep_best.as_final",
        unless=(False,),
        why="the final export is the last step's",
        note="exports/final is the best model",
    ),
    "metric_for_best_model": Alias(
        "saver.keep_best.metric",
        _metric,
        unless=(None,),
        why="the trainer's own is used",
        note="exports/best is the best model",
    ),
    "greater_is_better": Alias(
        "saver.keep_best.mode", _mode, unless=(None,), why="smaller is better for a loss only"
    ),
    "report_to": Alias(
        "stats_logger.wandb.mode", _report_to, note="JSON lines and TensorBoard files are always written"
    ),
}


@dataclass
class Translated:
    """Sources with our names in place of ATLAS's, with notes and refusals."""

    sources: list[SourceValue]
    notes: list[str]
    refusals: list[str]


def translate(sources: Sequence[SourceValue], model: str, known: Mapping[str, Any]) -> Translated:
    """Replace ATLAS names at the top level of each source.

    An option that has different values by its two names is refused; arguments take precedence over files.
    """
    done = Translated([], [], [])
    by_alias: dict[tuple[bool, str], tuple[str, SourceValue]] = {}
    for source in sources:
        tree: dict[str, SourceValue] = {}
        for name, item in source.value.items():
            if name not in ALIASES:
                tree[name] = item
                continue
            found = _one(name, ALIASES[name], item, model, known, done)
            if found is None:
                continue
            target, value = found
            if find(source, target) is None:  # else it has the same value, or is refused below
                tree[target] = value
            by_alias[source.is_argument, target] = (name, value)
        done.sources.append(dataclasses.replace(source, value=tree))
    for source in sources:
        for (is_argument, target), (name, value) in by_alias.items():
            native = find(source, target)
            if native is None or source.is_argument != is_argument:
                continue  # an argument counts more than a file, by either name
            if native.plain() != value.plain() and "${" not in str(native.plain()):
                done.refusals.append(_twice(name, value, target, native))
    done.notes = list(dict.fromkeys(done.notes))
    return done


def _one(
    name: str, alias: Alias, item: SourceValue, model: str, known: Mapping[str, Any], done: Translated
) -> tuple[str, SourceValue] | None:
    value, why = item.plain(), alias.why.replace("{model}", model)
    idle = alias.unless if alias.to else alias.accepts
    silent = alias.any_value or any(value == one and type(value) is type(one) for one in idle)
    if not alias.to or silent:
        if silent:
            done.notes.append(f"{name} ({item.origin}) has no effect here: {why}.")
        else:
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
            done.refusals.append(f"{name} ({item.origin}): {shown} can't be used: {why}.")
        return None
    target = alias.to.replace("{model}", model)
    if target not in known:
        done.refusals.append(
            f"{name} ({item.origin}) stands for {target}, which this trainer does not have; omit it."
        )
        return None
    done.notes.append(f"{name} ({item.origin}) is {target}{'; ' + alias.note if alias.note else ''}.")
    if alias.translate is None or "${" in str(value):
        return target, SourceValue(item.value, f"{item.origin} ({name})", item.text, item.is_argument)
    try:
        made = alias.translate(value)
    except ValueError as error:
        done.refusals.append(f"{name} ({item.origin}): {value} can't be used: {error}.")
        return None
    if made == value:
        return target, SourceValue(item.value, f"{item.origin} ({name})", item.text, item.is_argument)
    return target, SourceValue(made, f"{item.origin} ({name})", str(made), item.is_argument)


def _twice(name: str, item: SourceValue, other: str, native: SourceValue) -> str:
    return (
        f"{name} ({item.origin}) {item.plain()} and {other} ({native.origin}) {native.plain()} are the same "
        "option with different values; use one of them."
    )


def find(source: SourceValue, name: str) -> SourceValue | None:
    """Return the value of a dotted option in a source, whether its keys are nested or dotted."""
    if name in source.value:
        return source.value[name]
    for key, item in source.value.items():
        if isinstance(item.value, dict) and name.startswith(f"{key}."):
            found = find(item, name[len(key) + 1 :])
            if found is not None:
                return found
    return None
