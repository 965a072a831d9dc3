"""Rules about adapters (LoRA)."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from hpc_rl.config.options.experiment import Config, GRPOConfig
from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.config.rules.consistency import find_server_backend, list_given
from hpc_rl.config.rules.sharing_rules import has_shared_units
from hpc_rl.config.rules.training_rules import (
    find_reference,
    find_trained_model,
    list_models,
    list_trained_models,
)
from hpc_rl.core import adapters
from hpc_rl.core.adapters import AdapterSettings
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal, make_idle_note, make_note
from hpc_rl.core.trial import load_object

_OPTIONS = ("peft_type", "lora_rank", "lora_alpha", "target_modules", "lora_path", "lora_publish")
_ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
_MLP = ("down_proj", "gate_proj", "up_proj")
# model_type of config.json -> linear layers outside of the head and the experts
LAYERS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), (*_ATTENTION, *_MLP)),
    **dict.fromkeys(("mixtral", "qwen3_moe"), _ATTENTION),
}
MAX_RANK_OF_VLLM = 512


def adapt_defaults(config: Config, explicit: Collection[str]) -> dict[str, tuple[Any, str]]:
    """Return option -> (new default, reason) if servers can't get an adapter alone."""
    if not isinstance(config, GRPOConfig) or not config.actor.use_lora:
        return {}
    why = _explain_merging(config)
    return {"actor.lora_publish": ("merged", why)} if why else {}


def _explain_merging(config: GRPOConfig) -> str:
    """Return why servers can't get an adapter alone; empty if they can."""
    if config.actor.weight_update_mode == "xccl":
        return "actor.weight_update_mode xccl sends whole models"
    if has_shared_units(config):
        return "servers that take turns with the trainer load whole models"
    if find_server_backend(config) == "sglang" and not config.cluster.n_gpus_per_node:
        return "SGLang loads adapters only on GPUs"
    if find_server_backend(config) == "vllm" and config.actor.lora_rank > MAX_RANK_OF_VLLM:
        return f"vLLM loads adapters up to rank {MAX_RANK_OF_VLLM}"
    return ""


def check_adapter(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    for section, engine in list_models(config):
        if section == "ref" and engine.use_lora:
            why, use = ": the reference model is not trained", "remove it"
            yield Refusal(option="ref.use_lora", value="true", kind=Kind.NO_EFFECT, why=why, use=use)
    for section, engine in list_trained_models(config):
        if engine.use_lora and engine.init_from_scratch:
            yield Refusal(
                option=f"{section}.init_from_scratch",
                value="true",
                kind=Kind.CONFLICT,
                why=f"can't be used with {section}.use_lora: an adapter needs the base that it was trained "
                "with",
                use="give a checkpoint with weights",
                related=(f"{section}.use_lora",),
            )
    if isinstance(config, GRPOConfig) and config.actor.use_lora:
        yield from _check_publication(config)


def _check_publication(config: GRPOConfig) -> Iterator[Refusal]:
    why = _explain_merging(config)
    if config.actor.lora_publish == "adapter" and why:
        yield Refusal(
            option="actor.lora_publish",
            value="adapter",
            kind=Kind.CONFLICT,
            why=f"can't be used: {why}",
            use="use merged, or remove it",
        )


def list_notes(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    for section, engine in list_models(config):
        given = list_given(config, explicit, tuple(f"{section}.{name}" for name in _OPTIONS))
        if given and not engine.use_lora:
            yield make_idle_note(given, f"{section}.use_lora is false")
    section, policy = find_trained_model(config)
    reference = find_reference(config)
    if policy.use_lora and reference is not None and reference.path == policy.path:
        why = f": the reference model is the frozen base of {section}.use_lora; no second model is loaded"
        yield make_note("ref", why, related=(f"{section}.use_lora",))


def check_files(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    for section, engine in list_trained_models(config):
        if engine.use_lora:
            yield from _check_layers(section, engine)
            yield from _check_start(section, engine)


def _check_layers(section: str, engine: TrainEngineConfig) -> Iterator[Refusal]:
    """Refuse layers that a known model does not have; other models are checked when they are built."""
    content = load_object(Path(engine.path) / "config.json")
    known = LAYERS.get(str(content.get("model_type")))
    if known is None or adapters.ALL_LINEAR in engine.target_modules:
        return
    if unknown := [one for one in engine.target_modules if one not in known]:
        has_experts = known == _ATTENTION and {*unknown} <= {*_MLP}
        yield Refusal(
            option=f"{section}.target_modules",
            value=", ".join(unknown),
            kind=Kind.VALUE,
            why=": experts can't have adapters" if has_experts else f": {engine.path} has no such layers",
            use=f"allowed: {adapters.ALL_LINEAR}, {', '.join(known)}",
            related=(f"{section}.path",),
        )


def _check_start(section: str, engine: TrainEngineConfig) -> Iterator[Refusal]:
    """Refuse an adapter to start from that has other options than the trial."""
    if not engine.lora_path:
        return
    option = f"{section}.lora_path"
    try:
        found = AdapterSettings.read(Path(engine.lora_path))
    except ConfigError as error:
        yield Refusal(option=option, value=engine.lora_path, kind=Kind.FILE, why=f": {error}")
        return
    pairs = {"lora_rank": (engine.lora_rank, found.rank), "lora_alpha": (engine.lora_alpha, found.alpha)}
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            yield Refusal(
                option=f"{section}.{name}",
                value=ours,
                kind=Kind.CONFLICT,
                why=f"must be {theirs:g}, as in {engine.lora_path}",
                related=(option,),
            )


RULES = [check_adapter]
FILE_RULES = [check_files]
