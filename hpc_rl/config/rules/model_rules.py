"""Rules about the model's directory: it exists, is a Hugging Face checkpoint, and its context holds what is asked of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from hpc_rl.config.rules.consistency import is_embedded
from hpc_rl.config.rules.training_rules import models
from hpc_rl.config.sections.experiment import Config, GRPOConfig
from hpc_rl.config.sections.training import TrainEngineConfig
from hpc_rl.trial import read_json

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def model_rules(config: Config, explicit: Collection[str]) -> Iterator[str]:
    """Refusals about the paths of the models and the tokenizer."""
    for section, engine in models(config):
        yield from _model(config, section, engine)


def context_of(config: GRPOConfig) -> int | None:
    """Tokens that the trial's servers take for input and output together, as far as files say; None where they don't."""
    found = read_json(Path(config.actor.path) / "config.json")
    limits = [found.get("max_position_embeddings") if isinstance(found, dict) else None]
    limits += [] if is_embedded(config) else [config.sglang.context_length]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def _model(config: Config, section: str, engine: TrainEngineConfig) -> Iterator[str]:
    name, path = f"{section}.path", Path(engine.path)
    if not path.is_dir():
        made = _maker(path)
        yield (
            f"{name} {path} is not a directory: it must be a Hugging Face checkpoint on a disk that the nodes see; {made}."
            " A relative path is taken from the working directory."
        )
        return
    found = read_json(path / "config.json")
    if not isinstance(found, dict):
        yield f"{name} {path} has no readable config.json: it must be a Hugging Face checkpoint, as save_pretrained leaves it."
        return
    if not engine.init_from_scratch and not any(any(path.glob(pattern)) for pattern in _WEIGHTS):
        yield f"{name} {path} holds no weights (*.safetensors); {section}.init_from_scratch true would start from random ones."
    if section == "ref":
        return
    tokenizer = Path(config.tokenizer_path) if config.tokenizer_path else path
    if not (tokenizer / "tokenizer.json").is_file():
        option = "tokenizer_path" if config.tokenizer_path else name
        yield f"{option} {tokenizer} has no tokenizer.json: set tokenizer_path to a directory that has one."
    if isinstance(config, GRPOConfig):
        yield from _context(config, found)


def _maker(path: Path) -> str:
    if "quickstart" in path.parts:
        return "`hpc-rl quickstart` makes the models of the shipped examples"
    return "a model's name on a hub is not enough, download it first"


def _context(config: GRPOConfig, found: dict[str, Any]) -> Iterator[str]:
    limit = found.get("max_position_embeddings")
    new, prompt = config.gconfig.max_new_tokens, config.train_dataset.max_length
    if not isinstance(limit, int):
        return
    if new >= limit:
        yield f"gconfig.max_new_tokens {new} leaves no prompt: the model's context (max_position_embeddings) is {limit}."
    elif prompt is not None and prompt + new > limit:
        total = f"train_dataset.max_length {prompt} and gconfig.max_new_tokens {new} make {prompt + new}"
        yield f"{total}, above the model's context (max_position_embeddings) of {limit}."
