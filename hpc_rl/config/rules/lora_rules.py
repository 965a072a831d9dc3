"""Rules about adapters (LoRA)."""

from collections.abc import Collection, Iterator, Mapping
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
from hpc_rl.config.rules.weight_rules import load_weight_shapes
from hpc_rl.core import adapters
from hpc_rl.core.adapters import AdapterSettings
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal, make_idle_note, make_note
from hpc_rl.core.tensor_files import Shape
from hpc_rl.core.trial import load_object

_OPTIONS = ("peft_type", "lora_rank", "lora_alpha", "target_modules", "lora_path", "lora_publish")
_ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
_MLP = ("down_proj", "gate_proj", "up_proj")
# model_type of config.json -> linear layers outside of the head and the experts
LAYERS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), (*_ATTENTION, *_MLP)),
    **dict.fromkeys(("mixtral", "qwen3_moe"), _ATTENTION),
}
_MODEL, _EXPERTS = "model.", ".experts."  # in names of tensors
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


def list_file_notes(config: Config) -> Iterator[Refusal]:
    """Yield a note for each adapter to start from that was trained with another base."""
    for section, engine in list_trained_models(config):
        if not engine.use_lora or not engine.lora_path:
            continue
        base = str(load_object(Path(engine.lora_path) / adapters.CONFIG_NAME).get(adapters.BASE_KEY) or "")
        if base and not _is_same_model(base, engine.path):
            why = f": it was trained with the base {base}, and {section}.path is {engine.path}"
            option, related = f"{section}.lora_path", (f"{section}.path",)
            yield make_note(option, why, Kind.FILE, value=engine.lora_path, related=related, is_warning=True)


def _is_same_model(base: str, path: str) -> bool:
    """Return whether a path probably has the model of an adapter: by its files, else by its name.

    The base may be a name of the Hugging Face Hub, and a path may be in its cache.
    """
    folders = [Path(base), Path(path)]
    if all((folder / "config.json").is_file() for folder in folders):
        return folders[0].samefile(folders[1]) or _list_sizes(folders[0]) == _list_sizes(folders[1])
    ours, theirs = ({*folder.parts, *(part.split("--")[-1] for part in folder.parts)} for folder in folders)
    return folders[0].name in theirs or folders[1].name in ours


def _list_sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of a checkpoint's configuration and weights, in bytes, by file name."""
    files = [folder / "config.json", *folder.glob("*.safetensors")]
    return {file.name: file.stat().st_size for file in files}


def check_files(config: Config, explicit: Collection[str]) -> Iterator[Refusal]:
    for section, engine in list_trained_models(config):
        if engine.use_lora:
            known = LAYERS.get(str(load_object(Path(engine.path) / "config.json").get("model_type")))
            yield from _check_layers(section, engine, known)
            layers = _list_layers(engine, known)
            yield from _check_rank(section, engine, layers)
            yield from _check_start(section, engine, layers)


def _check_layers(
    section: str, engine: TrainEngineConfig, known: tuple[str, ...] | None
) -> Iterator[Refusal]:
    """Refuse layers that a known model does not have; other models are checked when they are built."""
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


def _list_layers(engine: TrainEngineConfig, known: tuple[str, ...] | None) -> dict[str, tuple[int, int]]:
    """Return the (out, in) features of the adapted layers of a known model, by name.

    They are the shapes in the headers of its weights. Returns {} if these can't be read here.
    """
    if known is None:
        return {}
    is_all = not engine.target_modules or adapters.ALL_LINEAR in engine.target_modules
    wanted = known if is_all else engine.target_modules
    shapes = load_weight_shapes(Path(engine.path))
    prefix = "" if any(name.startswith(_MODEL) for name in shapes) else _MODEL  # of a bare decoder's file
    found = {}
    for name, shape in shapes.items():
        layer, _, kind = name.rpartition(".")
        is_wanted = layer.rpartition(".")[2] in wanted and _EXPERTS not in layer
        if is_wanted and kind == "weight" and len(shape) == 2:
            found[prefix + layer] = (shape[0], shape[1])
    return found


def _check_rank(
    section: str, engine: TrainEngineConfig, layers: Mapping[str, tuple[int, int]]
) -> Iterator[Refusal]:
    """Refuse a rank above the width of a layer."""
    if not layers:
        return
    narrowest = min(layers, key=lambda name: min(layers[name]))
    if engine.lora_rank > (width := min(layers[narrowest])):
        yield Refusal(
            option=f"{section}.lora_rank",
            value=engine.lora_rank,
            kind=Kind.VALUE,
            why=f"is more than the smallest width of the layers: {narrowest} has {list(layers[narrowest])}",
            use=f"use at most {width}, or other {section}.target_modules",
            related=(f"{section}.target_modules", f"{section}.path"),
        )


def _check_start(
    section: str, engine: TrainEngineConfig, layers: Mapping[str, tuple[int, int]]
) -> Iterator[Refusal]:
    """Refuse an adapter to start from with other options or layers than the trial's, or a damaged file."""
    if not engine.lora_path:
        return
    option, folder = f"{section}.lora_path", Path(engine.lora_path)
    try:
        found, tensors = AdapterSettings.read(folder), adapters.load_tensor_shapes(folder)
    except ConfigError as error:
        yield Refusal(option=option, value=engine.lora_path, kind=Kind.FILE, why=f": {error}")
        return
    except OSError:  # this account can't read it; the job tries again
        return
    pairs = {"lora_rank": (engine.lora_rank, found.rank), "lora_alpha": (engine.lora_alpha, found.alpha)}
    differing = {name: (ours, theirs) for name, (ours, theirs) in pairs.items() if ours != theirs}
    for name, (ours, theirs) in differing.items():
        yield Refusal(
            option=f"{section}.{name}",
            value=ours,
            kind=Kind.CONFLICT,
            why=f"must be {theirs:g}, as in {engine.lora_path}",
            related=(option,),
        )
    if "lora_rank" in differing:
        return  # it explains the other shapes
    if problem := _explain_tensors(engine, layers, tensors):
        use = "use an adapter of this base with these layers and rank, or start a new one"
        related = (f"{section}.path", f"{section}.target_modules", f"{section}.lora_rank")
        yield Refusal(
            option=option, value=engine.lora_path, kind=Kind.FILE, why=problem, use=use, related=related
        )


def _explain_tensors(
    engine: TrainEngineConfig, layers: Mapping[str, tuple[int, int]], tensors: Mapping[str, Shape]
) -> str:
    """Return how an adapter's tensors differ from the trial's; empty if this is not known."""
    head = f"{adapters.HEAD}.weight"
    if engine.is_critic != (head in tensors):
        if engine.is_critic:
            return f"lacks {head}, the head of a reward model or critic"
        return f"has {head}, the head of a reward model or critic, which this model does not have"
    factors = {name: shape for name, shape in tensors.items() if name != head}
    if layers:
        return adapters.explain_difference(factors, adapters.list_factor_shapes(layers, engine.lora_rank))
    there = {
        name.removesuffix(adapters.A).rpartition(".")[2] for name in factors if name.endswith(adapters.A)
    }
    wanted = {*engine.target_modules}
    if wanted and adapters.ALL_LINEAR not in wanted and wanted != there:
        return (
            f"has the layers {', '.join(sorted(there))}, and target_modules has {', '.join(sorted(wanted))}"
        )
    return ""


RULES = [check_adapter]
FILE_RULES = [check_files]
