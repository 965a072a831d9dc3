"""ATLAS names of the top level: the option that each stands for, or why it is refused or has no effect.

`{model}` is `actor` for grpo and `model` for sft. Some values are translated.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_rl.config.loading.source import Settings, SourceValue

_SERVERS = "allocation_mode says what generates, and where: use vllm:dN+fsdp:dM for N servers of vLLM"
_QUESTIONS = (
    "train_dataset.batch_size counts questions: set it to per_device_train_batch_size * "
    "gradient_accumulation_steps * trainer ranks / num_generations, and limit memory with "
    "{model}.mb_spec.max_tokens_per_mb"
)


_VLLM_DTYPES = {"half": "float16", "float": "float32"}  # vLLM's other names
ANY = object()  # among the values that have no effect: every value


@dataclass(frozen=True)
class Alias:
    """What an ATLAS name stands for."""

    to: str = ""  # the option; empty where there is none
    translate: Callable[[Any], Any] = lambda value: value  # raises ValueError with the reason
    idle: tuple[Any, ...] = ()  # values that have no effect; without `to` the others are refused
    why: str = ""  # why there is no effect, and what to use
    note: str = ""  # with `to`: what differs
    needs: str = ""  # with `to`: the section without which there is no effect

    def describe(self) -> str:
        if self.to:
            alone = f"no effect without a section {self.needs}" if self.needs else ""
            return "; ".join(filter(None, (self.to, self.note, alone)))
        if ANY in self.idle:
            return f"no effect: {self.why}"
        accepted = ", ".join(str(value).lower().replace("none", "null") for value in self.idle)
        return f"refused: only {accepted}: {self.why}" if accepted else f"refused: {self.why}"


def _neutral_if(neutral: float, *idle: float | None) -> Callable[[Any], Any]:
    return lambda value: neutral if value in idle else value


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
    "gradient_accumulation_steps": Alias(idle=(1,), why=_QUESTIONS),
    "warmup_ratio": Alias("{model}.optimizer.warmup_steps_proportion"),
    "weight_decay": Alias("{model}.optimizer.weight_decay"),
    "max_grad_norm": Alias("{model}.optimizer.gradient_clipping"),
    "beta": Alias("actor.beta", note="the KL coefficient in the loss; actor.kl_ctl is the one in the reward"),
    "temperature": Alias("gconfig.temperature"),
    "num_generations": Alias("gconfig.n_samples"),
    "max_completion_length": Alias("gconfig.max_new_tokens"),
    "max_prompt_length": Alias("train_dataset.max_length", note="longer prompts are dropped, not truncated"),
    "reward_weights": Alias(
        idle=(None,),
        why="a trial has one reward function: weigh inside it, with rollout.reward_fn package.module:name",
    ),
    "top_k": Alias("gconfig.top_k", _neutral_if(100_000_000, None, -1)),
    "top_p": Alias("gconfig.top_p"),
    "min_p": Alias("gconfig.min_p", _neutral_if(0.0, None)),
    "repetition_penalty": Alias("gconfig.repetition_penalty", _neutral_if(1.0, None)),
    "generation_aggregation_steps": Alias(idle=(ANY,), why="servers batch whatever is in flight"),
    "shuffle_generation_inputs": Alias(idle=(ANY,), why="each prompt goes to whichever server is free"),
    **dict.fromkeys(("use_vllm", "use_vllm_server"), Alias(idle=(False,), why=_SERVERS)),
    "vllm_device": Alias(idle=("auto",), why=_SERVERS),
    "vllm_gpu_memory_utilization": Alias("vllm.gpu_memory_utilization"),
    "vllm_dtype": Alias("vllm.dtype", lambda value: _VLLM_DTYPES.get(value, value)),
    "vllm_max_model_len": Alias("vllm.max_model_len"),
    **dict.fromkeys(("vllm_host", "vllm_port"), Alias(idle=(None,), why=_SERVERS)),
    "num_vllm_clients": Alias(idle=(1,), why=_SERVERS),
    "offload_untrained_models": Alias(
        "ref.fsdp.offload_params",
        idle=(False,),
        why="models that are not trained have servers of their own, but for the reference model",
        needs="ref",
    ),
    "ds3_gather_for_generation": Alias(
        idle=(True,),
        why="weights are always published whole; servers generate, not the trainer; omit it",
    ),
    "backprop_accumulation_steps": Alias("{model}.mb_spec.n_mbs", _neutral_if(1, None)),
    "backprop_accumulation_micro_batch_size": Alias("{model}.mb_spec.max_seqs_per_mb"),
    "remove_unused_columns": Alias(
        idle=(False,), why="the reward function gets every column of a row; omit it"
    ),
    "max_probe_tokens": Alias("teacher.max_probe_tokens"),
    **{
        name: Alias(f"teacher.templates.{to}", idle=(None,), why="the default of teacher.templates is used")
        for name, to in (
            ("student_diagnostic_template", "diagnostic"),
            ("teacher_adaptive_template", "adaptive"),
            ("student_with_teaching_template", "with_teaching"),
            ("student_baseline_template", "baseline"),
        )
    },
    "logging_steps": Alias(idle=(ANY,), why="every step is logged"),
    "save_steps": Alias("saver.freq_steps"),
    "eval_steps": Alias("evaluator.freq_steps"),
    "save_total_limit": Alias("saver.keep_last"),
    "load_best_model_at_end": Alias(
        "saver.keep_best.as_final",
        idle=(False,),
        why="the final export is the last step's",
        note="exports/final is the best model",
    ),
    "metric_for_best_model": Alias(
        "saver.keep_best.metric",
        _metric,
        idle=(None,),
        why="the trainer's own is used",
        note="exports/best is the best model",
    ),
    "greater_is_better": Alias(
        "saver.keep_best.mode", _mode, idle=(None,), why="smaller is better for a loss only"
    ),
    "report_to": Alias(
        "stats_logger.wandb.mode", _report_to, note="JSON lines and TensorBoard files are always written"
    ),
}


@dataclass
class Translated:
    """Sources with our names in place of ATLAS's, with notes and refusals."""

    sources: list[Settings]
    notes: list[str]
    refusals: list[str]


def translate(
    sources: Sequence[Settings], known: Mapping[str, Any], present: Collection[str] = ()
) -> Translated:
    """Replace ATLAS names. `present` are the sections at the top level that are not null.

    An option that has different values by its two names is refused; arguments take precedence over files.
    """
    done = Translated([], [], [])
    by_alias: dict[tuple[bool, str], tuple[str, SourceValue]] = {}
    for source in sources:
        settings: Settings = {}
        for name, item in source.items():
            if name not in ALIASES:
                settings[name] = item
            elif found := _one(name, ALIASES[name], item, known, present, done):
                option, value = found
                by_alias[item.is_argument, option] = (name, value)
                if option not in source:  # else it has the same value, or is refused below
                    settings[option] = value
        done.sources.append(settings)
    for source in sources:
        for (is_argument, option), (name, value) in by_alias.items():
            native = source.get(option)
            if native is None or native.is_argument != is_argument:
                continue  # an argument counts more than a file, by either name
            if native.plain() != value.plain() and "${" not in str(native.plain()):
                both = (
                    f"{name} ({value.origin}) {value.plain()} and {option} ({native.origin}) {native.plain()}"
                )
                done.refusals.append(f"{both} are the same option with different values; use one of them.")
    done.notes = list(dict.fromkeys(done.notes))
    return done


def _one(
    name: str,
    alias: Alias,
    item: SourceValue,
    known: Mapping[str, Any],
    present: Collection[str],
    done: Translated,
) -> tuple[str, SourceValue] | None:
    """Return the option that a name stands for, with its value; None where it has no effect or is refused."""
    model = "actor" if "actor" in known else "model"
    value, why = item.plain(), alias.why.replace("{model}", model)
    is_idle = ANY in alias.idle or any(value == one and type(value) is type(one) for one in alias.idle)
    if is_idle or (alias.needs in known and alias.needs not in present):
        done.notes.append(f"{name} ({item.origin}) has no effect here: {why}.")
        return None
    if not alias.to:
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
        done.refusals.append(f"{name} ({item.origin}): {shown} can't be used: {why}.")
        return None
    option = alias.to.replace("{model}", model)
    if option not in known:
        done.refusals.append(
            f"{name} ({item.origin}) stands for {option}, which this trainer does not have; omit it."
        )
        return None
    done.notes.append(f"{name} ({item.origin}) is {option}{'; ' + alias.note if alias.note else ''}.")
    try:
        made = value if "${" in str(value) else alias.translate(value)
    except ValueError as error:
        done.refusals.append(f"{name} ({item.origin}): {value} can't be used: {error}.")
        return None
    if made != value:
        item = dataclasses.replace(item, value=made, text=str(made))
    return option, dataclasses.replace(item, origin=f"{item.origin} ({name})")
