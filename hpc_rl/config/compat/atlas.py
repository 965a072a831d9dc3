"""Translate top-level ATLAS names to our options, or refuse them, or note that they have no effect.

`{model}` is `actor` for grpo and `model` for sft. Some values are translated too.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hpc_rl.config.compat.renamed import explain_name
from hpc_rl.config.load.source import Settings, SourceValue
from hpc_rl.core.allocation import parse
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal, make_note

_VLLM = "use vllm:dN+fsdp:dM in allocation_mode for N servers of vLLM"
_OWN_SERVERS = "the trial starts its own servers, which announce their addresses"
_HERE = (None, "localhost", "127.0.0.1", "0.0.0.0")  # values of vllm_host for the trial's own servers
_VLLM_DTYPES = {"half": "float16", "float": "float32"}  # vLLM's other names
ANY = object()  # every value
PROBE_TOKENS = 500  # the default of max_probe_tokens, which does not choose a trainer
_ALL_TRAINERS = ("grpo", "teacher", "sft", "rw", "dpo")
_OPTIONAL = ("ref", "valid_dataset")  # sections that may be missing
_NO_ROWS = "there is no valid_dataset"
_NO_BEST = "the best model is kept where a valid_dataset and a metric are given"


@dataclass(frozen=True)
class Alias:
    """The meaning of an ATLAS name."""

    to: str = ""  # our option, if any
    translate: Callable[[Any], Any] = lambda value: value  # raises ValueError with the reason
    idle: tuple[Any, ...] = ()  # values without effect; without `to` other values are refused
    why: str = ""  # why it has no effect, and a replacement
    note: str = ""  # with `to`: the difference
    needs: str = ""  # with `to`: the section that must exist for an effect
    default: Any = ANY  # with `needs`: the value that is accepted without that section
    allocates: bool = False  # chooses vLLM in an empty allocation_mode
    times: tuple[str, ...] = ()  # with `to`: names whose given values are factors of this one
    also: Mapping[str, Any] = field(default_factory=dict)  # other options to set, unless they are given
    also_for: tuple[str, ...] = ("grpo", "teacher")  # trainers that get the options of `also`

    def describe(self) -> str:
        if self.to:
            product = "".join(f" * {name}" for name in self.times)
            is_product = f"{self.to} is the name{product}" if product else self.to
            trainers = "" if self.also_for == _ALL_TRAINERS else f" ({', '.join(self.also_for)})"
            also = ", ".join(
                f"{name} becomes {_format_value(value)}{trainers}" for name, value in self.also.items()
            )
            alone = f"no effect without a section {self.needs}" if self.needs else ""
            return "; ".join(filter(None, (is_product, self.note, also, alone)))
        if self.allocates:
            return self.note
        if ANY in self.idle:
            return f"no effect: {self.why}"
        accepted = ", ".join(str(value).lower().replace("none", "null") for value in self.idle)
        return f"refused: only {accepted}: {self.why}" if accepted else f"refused: {self.why}"


def _format_value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _make_neutral(neutral: float, *idle: float | None) -> Callable[[Any], Any]:
    return lambda value: neutral if value in idle else value


def _parse_count(value: Any) -> Any:
    if value is None:
        return 1
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError("it must be a whole number, 1 or larger")
    return value


def _translate_report_to(value: Any) -> Any:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("it must be a list of names: wandb, tensorboard, none")
    unknown = [name for name in names if name not in ("wandb", "tensorboard", "none")]
    if unknown:
        raise ValueError(f"{unknown[0]} is not known; allowed: wandb, tensorboard (always written), none")
    return "online" if "wandb" in names else "disabled"


def _translate_metric(value: Any) -> Any:
    # Hugging Face accepts names with `eval_` or without; ATLAS's own log has eval/reward.
    if not isinstance(value, str):
        raise ValueError("it must be the name of a metric, such as eval_reward")
    return f"eval_{value.replace('eval/', 'eval_').removeprefix('eval_')}"


def _translate_mode(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("it must be true or false")
    return "max" if value else "min"


ALIASES: dict[str, Alias] = {
    "model_name_or_path": Alias("{model}.path"),
    "learning_rate": Alias("{model}.optimizer.lr"),
    "num_train_epochs": Alias("total_train_epochs"),
    "per_device_train_batch_size": Alias(
        "train_dataset.sequences_per_rank", _parse_count, times=("gradient_accumulation_steps",)
    ),
    "gradient_accumulation_steps": Alias(
        "{model}.mb_spec.n_mbs",
        _parse_count,
        times=("backprop_accumulation_steps",),
        note="a factor of per_device_train_batch_size, too",
    ),
    "warmup_ratio": Alias(
        "{model}.optimizer.warmup_steps_proportion",
        note="the warm-up is Hugging Face's",
        also={"{model}.optimizer.warmup_from_zero": True},
        also_for=_ALL_TRAINERS,
    ),
    "weight_decay": Alias(
        "{model}.optimizer.weight_decay",
        note="norms and biases are not decayed, as in Hugging Face's Trainer",
        also={"{model}.optimizer.decay_norms_and_biases": False},
        also_for=_ALL_TRAINERS,
    ),
    "max_grad_norm": Alias("{model}.optimizer.gradient_clipping"),
    "beta": Alias(
        "actor.beta",
        note="the KL coefficient in the loss; actor.kl_ctl is the one in the reward",
        also={"ref.path": "${actor.path}"},
    ),
    "temperature": Alias("gconfig.temperature"),
    "num_generations": Alias("gconfig.n_samples"),
    "max_completion_length": Alias("gconfig.max_new_tokens"),
    "max_prompt_length": Alias(
        "train_dataset.max_length", also={"train_dataset.too_long": "truncate_left"}, also_for=("grpo",)
    ),
    "reward_weights": Alias(
        "rollout.reward_weights", note="one for each function of rollout.reward_fn, in their order"
    ),
    "top_k": Alias("gconfig.top_k", _make_neutral(100_000_000, None, -1)),
    "top_p": Alias("gconfig.top_p"),
    "min_p": Alias("gconfig.min_p", _make_neutral(0.0, None)),
    "repetition_penalty": Alias("gconfig.repetition_penalty", _make_neutral(1.0, None)),
    "generation_aggregation_steps": Alias(
        idle=(ANY,),
        why="servers batch the requests in flight, which rollout.max_concurrent_rollouts limits",
    ),
    "shuffle_generation_inputs": Alias(
        idle=(ANY,),
        why="rollout.schedule_policy chooses servers, and train_dataset.shuffle shuffles the rows",
    ),
    **dict.fromkeys(
        ("use_vllm", "use_vllm_server"),
        Alias(
            allocates=True,
            note="true: an empty allocation_mode becomes vllm:dN+fsdp:d*, where N is num_vllm_clients or 1; "
            "one that is given must have vLLM servers",
        ),
    ),
    "vllm_device": Alias(idle=(ANY,), why="allocation_mode assigns GPUs to the servers"),
    "vllm_gpu_memory_utilization": Alias("vllm.gpu_memory_utilization"),
    "vllm_dtype": Alias("vllm.dtype", lambda value: _VLLM_DTYPES.get(value, value)),
    "vllm_max_model_len": Alias("vllm.max_model_len"),
    "vllm_host": Alias(idle=_HERE, why=f"{_OWN_SERVERS}; {_VLLM}"),
    "vllm_port": Alias(idle=(ANY,), why=_OWN_SERVERS),
    "num_vllm_clients": Alias(
        allocates=True,
        note="the number of vLLM servers, if use_vllm or use_vllm_server is true; an allocation_mode that is "
        "given must have as many",
    ),
    "offload_untrained_models": Alias(
        "ref.fsdp.offload_params",
        idle=(False,),
        why="models that are not trained have separate servers, except the reference model",
        needs="ref",
    ),
    "ds3_gather_for_generation": Alias(
        idle=(ANY,),
        why="servers generate, not the trainer, and weights are always published whole",
    ),
    "backprop_accumulation_steps": Alias(
        "{model}.mb_spec.n_mbs", _parse_count, times=("gradient_accumulation_steps",)
    ),
    "backprop_accumulation_micro_batch_size": Alias("{model}.mb_spec.max_seqs_per_mb"),
    "remove_unused_columns": Alias(
        idle=(False,), why="the reward function gets every column of a row; remove it"
    ),
    "max_probe_tokens": Alias(
        "teacher.max_probe_tokens",
        why="only trainer teacher has a student to probe",
        needs="teacher",
        default=PROBE_TOKENS,
    ),
    **{
        name: Alias(f"teacher.templates.{to}", idle=(None,), why="the default of teacher.templates is used")
        for name, to in (
            ("student_diagnostic_template", "diagnostic"),
            ("teacher_adaptive_template", "adaptive"),
            ("student_with_teaching_template", "with_teaching"),
            ("student_baseline_template", "baseline"),
        )
    },
    "logging_steps": Alias("stats_logger.every_steps", note="metrics.jsonl has every step"),
    "save_steps": Alias(
        "saver.freq_steps",
        note="checkpoints to resume from are saved as often",
        also={"recover.mode": "auto", "recover.freq_steps": "${saver.freq_steps}"},
        also_for=_ALL_TRAINERS,
    ),
    "eval_steps": Alias("evaluator.freq_steps", why=_NO_ROWS, needs="valid_dataset", default=500),
    "save_total_limit": Alias(
        "saver.keep_last", also={"recover.keep": "${saver.keep_last}"}, also_for=_ALL_TRAINERS
    ),
    "load_best_model_at_end": Alias(
        "saver.keep_best.as_final",
        idle=(False,),
        why=f"exports/final is the last step's: {_NO_BEST}",
        note="exports/final is the best model",
        needs="valid_dataset",
        default=True,
    ),
    "metric_for_best_model": Alias(
        "saver.keep_best.metric",
        _translate_metric,
        idle=(None,),
        why=f"null is the trainer's own metric: {_NO_BEST}",
        note="exports/best is the best model",
        needs="valid_dataset",
        default="eval_reward",
    ),
    "greater_is_better": Alias(
        "saver.keep_best.mode",
        _translate_mode,
        idle=(None,),
        why=f"null is `false` for a loss only: {_NO_BEST}",
        needs="valid_dataset",
        default=True,
    ),
    "report_to": Alias(
        "stats_logger.wandb.mode",
        _translate_report_to,
        note="JSON lines and TensorBoard files are always written",
    ),
}


def _describe_origin(item: SourceValue, name: str) -> str:
    """Return the origin of an ATLAS name; on the command line it contains the name already."""
    return item.origin if item.origin.endswith(name) else f"{item.origin} ({name})"


_OF_ITS_CODE = "0, the default of ATLAS's code"
_UNSET = "null, the default of ATLAS's code"
PRESET_DEPARTURES = {  # name -> ATLAS's documented default, and the value of --preset atlas
    "per_device_train_batch_size": ("8", "null: train_dataset.batch_size counts questions, 1 by default"),
    "warmup_ratio": ("0.1", _OF_ITS_CODE),
    "weight_decay": ("0.01", _OF_ITS_CODE),
    "eval_steps": (
        "500",
        f"{_UNSET}; with a valid_dataset it evaluates before the first and after the last step",
    ),
    "save_total_limit": ("3", _UNSET),
    "load_best_model_at_end": ("true", _UNSET),
    "metric_for_best_model": ("eval_reward", _UNSET),
    "greater_is_better": ("true", f"{_UNSET}: true but for a loss"),
    "report_to": ("[wandb]", "JSON lines and TensorBoard alone: nothing leaves the cluster unless asked for"),
}


@dataclass
class Translated:
    """Sources with our names instead of ATLAS's, with notes and refusals."""

    sources: list[Settings]
    notes: list[Refusal]
    refusals: list[Refusal]


def translate(
    sources: Sequence[Settings], known: Mapping[str, Any], present: Collection[str] = ()
) -> Translated:
    """Replace ATLAS names. `present` names the top-level sections that are not null.

    An option with different values under its two names is refused. The command line wins over files.
    """
    return _Translator(sources, known, present).translate()


class _Translator:
    def __init__(
        self, sources: Sequence[Settings], known: Mapping[str, Any], present: Collection[str]
    ) -> None:
        self.sources, self.known = sources, known
        self.model = "actor" if "actor" in known else "model"
        self.trainer = "teacher" if "teacher" in known else "grpo" if "actor" in known else "sft"
        self.given = {name: item for source in sources for name, item in source.items()}  # the last counts
        self.present = set(present)
        for name, item in self.given.items():
            self.present |= {option.partition(".")[0] for option in self.find_extra_settings(name, item)}
        self.done = Translated([], [], [])

    def translate(self) -> Translated:
        by_alias: dict[tuple[bool, str], tuple[str, SourceValue]] = {}
        if self.wants_vllm():  # this code fills in an empty allocation_mode
            self.sources = [
                {name: item for name, item in source.items() if name != "allocation_mode" or item.to_plain()}
                for source in self.sources
            ]
        for source in self.sources:
            settings: Settings = {}
            for name, item in source.items():
                if name not in ALIASES:
                    settings[name] = item
                elif found := self.translate_name(name, item):
                    option, value = found
                    by_alias[item.is_argument, option] = (name, value)
                    if option not in source:  # else both have the same value, or are refused below
                        settings[option] = value
                    settings |= self.find_extra_settings(name, item)
            self.done.sources.append(settings)
        for source in self.sources:
            for (is_argument, option), (name, value) in by_alias.items():
                native = source.get(option)
                if native is None or native.is_argument != is_argument:
                    continue  # the command line wins over a file, under either name
                if native.to_plain() != value.to_plain() and "${" not in str(native.to_plain()):
                    ours = f"{option} ({native.origin}) {native.to_plain()}"
                    both = f"{name} ({value.origin}) {value.to_plain()} and {ours}"
                    self.done.refusals.append(
                        Refusal(
                            option="",
                            kind=Kind.CONFLICT,
                            why=f"{both} are the same option with different values",
                            use="keep one of them",
                            related=(name, option),
                        )
                    )
        self.done.notes = list(dict.fromkeys(self.done.notes))
        return self.done

    def find_extra_settings(self, name: str, item: SourceValue) -> Settings:
        """Return the settings that a name adds to its own option."""
        alias = ALIASES.get(name)
        if alias is None or not item.to_plain() or self.trainer not in alias.also_for:
            return {}
        origin = _describe_origin(item, name)
        also = {option.replace("{model}", self.model): value for option, value in alias.also.items()}
        return {
            option: SourceValue(value, origin)
            for option, value in also.items()
            if not {option, option.rpartition(".")[0]} & self.given.keys() and not self.is_decided(option)
        }

    def is_decided(self, option: str) -> bool:
        """Return whether another given option decides this one."""
        mode = self.given.get("recover.mode")
        if option.startswith("recover.") and mode is not None and mode.to_plain() == "disabled":
            return True
        periods = {"recover.freq_epochs", "recover.freq_secs"}
        return option == "recover.freq_steps" and bool(periods & self.given.keys())

    def refuse(self, name: str, item: SourceValue, kind: Kind, why: str, *related: str) -> None:
        self.done.refusals.append(
            Refusal(option=name, origin=item.origin, kind=kind, why=why, related=related)
        )

    def note(self, name: str, item: SourceValue, why: str, kind: Kind = Kind.VALUE, *related: str) -> None:
        self.done.notes.append(make_note(name, why, kind, origin=item.origin, related=related))

    def wants_vllm(self) -> bool:
        """Return whether the user asks for vLLM servers."""
        return any(self.get_value(name) is True for name in ("use_vllm", "use_vllm_server"))

    def get_value(self, name: str) -> Any:
        item = self.given.get(name)
        return None if item is None else item.to_plain()

    def choose_allocation(self, name: str, item: SourceValue) -> tuple[str, SourceValue] | None:
        """Return `allocation_mode` with vLLM servers; None if it is given, or nothing is to change."""
        count = 1
        try:
            if name != "num_vllm_clients" and not isinstance(item.to_plain(), bool):
                raise ValueError("it must be true or false")
            count = _parse_count(self.get_value("num_vllm_clients"))
        except ValueError as error:
            if name == "num_vllm_clients" or not isinstance(item.to_plain(), bool):
                self.refuse(name, item, Kind.VALUE, f"{item.to_plain()} can't be used: {error}")
            return None
        if not self.wants_vllm() or self.model != "actor":
            is_off = "neither use_vllm nor use_vllm_server is true"
            why = "this trainer generates no completions" if self.model != "actor" else is_off
            self.note(name, item, f"has no effect here: {why}", Kind.NO_EFFECT)
            return None
        mode = self.given.get("allocation_mode")
        if mode is not None and mode.to_plain():
            self.check_allocation(name, item, mode)
            return None
        if self.trainer == "teacher":
            use = "allocation_mode=vllm:dN+vllm[student]:dM+fsdp:d*"
            why = f"can't be used, because a teacher trial has two pools of servers; use {use}"
            self.refuse(name, item, Kind.CONFLICT, why)
            return None
        engine = self.get_value("actor.backend") or "fsdp"
        text = f"vllm:d{count}+{engine}:d*"
        self.note(name, item, f"sets allocation_mode to {text}")
        return "allocation_mode", dataclasses.replace(
            item, value=text, text=text, origin=_describe_origin(item, name)
        )

    def check_allocation(self, name: str, item: SourceValue, mode: SourceValue) -> None:
        """Note or refuse a name that comes together with an `allocation_mode`."""
        value = item.to_plain()
        try:
            pools = parse(str(mode.to_plain()), "").pools
        except ConfigError:
            return  # the plan refuses it
        others = {one.split(".")[1] for one in self.given if one.startswith("pools.") and one.count(".") > 1}
        servers = next((one for one in pools if one.pool not in others), None)
        where = f"allocation_mode {mode.to_plain()} ({mode.origin})"
        if servers is None or (servers.backend != "vllm" and value is True):
            generates = f"has {servers.backend} servers" if servers else "has no servers"
            why = f"is true, but {where} {generates}; {_VLLM}, or remove {name}"
            self.refuse(name, item, Kind.CONFLICT, why, "allocation_mode")
        elif name == "num_vllm_clients" and value not in (None, 1) and servers.d not in (None, value):
            agree = f"use vllm:d{value} in allocation_mode, or remove {name}"
            why = f"is {value}, but {where} has {servers.d} servers; {agree}"
            self.refuse(name, item, Kind.CONFLICT, why, "allocation_mode")
        else:
            self.note(name, item, f"has no effect here: {where} sets it", Kind.NO_EFFECT, "allocation_mode")

    def translate_name(self, name: str, item: SourceValue) -> tuple[str, SourceValue] | None:
        """Return the option that a name means, with its value; None if it is idle or refused."""
        alias, value = ALIASES[name], item.to_plain()
        option, why = (text.replace("{model}", self.model) for text in (alias.to, alias.why))
        if alias.allocates:
            return self.choose_allocation(name, item)
        is_idle = ANY in alias.idle or any(value == one and type(value) is type(one) for one in alias.idle)
        there = self.present if alias.needs in _OPTIONAL else self.known
        is_default = value == alias.default or alias.default is ANY
        if is_idle or (alias.needs and alias.needs not in there and is_default):
            self.note(name, item, f"has no effect here: {why}", Kind.NO_EFFECT)
            return None
        if not alias.to:
            self.refuse(name, item, Kind.UNSUPPORTED, f"{_format_value(value)} can't be used: {why}")
            return None
        if option not in self.known:
            why = f"stands for {option}, which trainer {self.trainer} does not have; remove it"
            self.refuse(name, item, Kind.UNSUPPORTED, why, option)
            return None
        also = (
            f"{other} is {_format_value(set_to.value)}"
            for other, set_to in self.find_extra_settings(name, item).items()
        )
        self.note(name, item, "; ".join(filter(None, (explain_name(option), alias.note, *also))))
        try:
            made = value if "${" in str(value) else alias.translate(value)
            for other in (other for other in alias.times if other in self.given):
                made = _parse_count(made)
                with suppress(ValueError):  # the other name gets its own refusal
                    made *= _parse_count(self.given[other].to_plain())
        except ValueError as error:
            self.refuse(name, item, Kind.VALUE, f"{value} can't be used: {error}")
            return None
        if made != value:
            item = dataclasses.replace(item, value=made, text=str(made))
        return option, dataclasses.replace(item, origin=_describe_origin(item, name))
