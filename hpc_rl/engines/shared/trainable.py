"""The choice of parameters that are trained, published and exported: all parameters, or an adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from hpc_rl.config.options.training import TrainEngineConfig
from hpc_rl.core import adapters
from hpc_rl.engines.base import PublishedPiece
from hpc_rl.engines.shared import hf_io, lora, model
from hpc_rl.engines.shared.expert_files import Shapes
from hpc_rl.engines.shared.mesh import Mesh
from hpc_rl.engines.shared.pieces import Piece
from hpc_rl.engines.shared.published import name_pieces


class RankParts(Protocol):
    """One rank's part of a model in an engine. Pieces have the names of the Hugging Face model."""

    mesh: Mesh
    device: torch.device

    def list_trained(self) -> list[Piece]:
        """Return the pieces of trained parameters that no other rank has."""

    def list_base(self) -> list[Piece]:
        """Return the pieces of the other parameters that no other rank has."""

    def weights(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """See Engine."""


class Trainable(Protocol):
    """The choice for one model. `parts` are a rank's; methods that take them are collective."""

    shapes: Shapes  # of the trained parameters

    def is_trained(self, name: str) -> bool:
        """Return whether the parameter with this name is trained."""

    def attach(self, hf: Any) -> None:
        """Add the trained parameters that a model of transformers lacks, and freeze the others."""

    def fill(self, pieces: Iterable[Piece], seed: int) -> None:
        """Initialize a rank's pieces of the parameters that `attach` adds."""

    def make_merge(self, parts: RankParts) -> Callable[[Piece], Piece]:
        """Return the function from a piece of the base to the same piece of the trained model."""

    def list_published_pieces(self, parts: RankParts, whole_model: bool) -> list[PublishedPiece] | None:
        """See Engine. An adapter is published alone unless `whole_model`."""

    def write_model_files(self, folder: Path, tokenizer: Path | None, whole_model: bool) -> None:
        """See Engine."""

    def export(self, parts: RankParts, folder: Path, tokenizer: Path | None) -> None:
        """See Engine."""


class Full:
    """All parameters are trained. See Trainable."""

    def __init__(self, config: TrainEngineConfig, hf: Any) -> None:
        self.config, self.hf = config, hf
        self.shapes: Shapes = {name: tuple(one.shape) for name, one in hf.named_parameters()}

    def is_trained(self, name: str) -> bool:
        return True

    def attach(self, hf: Any) -> None:
        pass

    def fill(self, pieces: Iterable[Piece], seed: int) -> None:
        pass

    def make_merge(self, parts: RankParts) -> Callable[[Piece], Piece]:
        return lambda piece: piece

    def list_published_pieces(self, parts: RankParts, whole_model: bool) -> list[PublishedPiece] | None:
        return name_pieces(self.hf, self.shapes, parts.list_trained(), model.DTYPES[self.config.dtype])

    def write_model_files(self, folder: Path, tokenizer: Path | None, whole_model: bool) -> None:
        model.write_model_files(folder, self.config, self.hf, tokenizer)

    def export(self, parts: RankParts, folder: Path, tokenizer: Path | None) -> None:
        writes = parts.mesh.rank == 0
        model.write_export(folder, self.config, self.hf, parts.weights(), tokenizer, writes)


class Lora:
    """An adapter is trained, and the head of a reward model. See Trainable."""

    def __init__(self, config: TrainEngineConfig, hf: Any) -> None:
        """Choose the layers to adapt. Raises ConfigError."""
        self.config, self.hf = config, hf
        self.dtype = model.DTYPES[config.dtype]
        self.base_shapes: Shapes = {name: tuple(one.shape) for name, one in hf.named_parameters()}
        self.targets = lora.find_targets(hf, config.target_modules)
        self.factors: Shapes = lora.list_shapes(self.targets, config.lora_rank)
        heads = {lora.HEAD: self.base_shapes[lora.HEAD]} if config.is_critic else {}
        self.shapes: Shapes = {**self.factors, **heads}
        self.settings = lora.make_settings(config, self.targets)

    def is_trained(self, name: str) -> bool:
        return name in self.shapes

    def attach(self, hf: Any) -> None:
        lora.attach(hf, self.targets, self.config)
        for name, parameter in hf.named_parameters():
            if not self.is_trained(name):
                parameter.data = parameter.data.to(self.dtype)

    def fill(self, pieces: Iterable[Piece], seed: int) -> None:
        if self.config.lora_path:
            lora.load(Path(self.config.lora_path), pieces, self.shapes)
        else:
            lora.draw(pieces, seed)

    def make_merge(self, parts: RankParts) -> Callable[[Piece], Piece]:
        factors = lora.gather(parts.list_trained(), self.shapes, parts.device)
        return lora.Merge(factors, self.config.lora_alpha / self.config.lora_rank).apply

    def list_published_pieces(self, parts: RankParts, whole_model: bool) -> list[PublishedPiece] | None:
        trained = parts.list_trained()
        if not whole_model:
            return [
                PublishedPiece(adapters.PREFIX + one.name, one.local, one.offset, one.shape, self.dtype)
                for one in trained
            ]
        merge = self.make_merge(parts)
        heads = [piece for piece in trained if piece.name == lora.HEAD]
        merged = [merge(piece) for piece in parts.list_base()]
        return name_pieces(self.hf, self.base_shapes, merged + heads, self.dtype)

    def write_model_files(self, folder: Path, tokenizer: Path | None, whole_model: bool) -> None:
        if whole_model:
            model.write_model_files(folder, self.config, self.hf, tokenizer)
        else:
            self.settings.write(folder)

    def export(self, parts: RankParts, folder: Path, tokenizer: Path | None) -> None:
        tensors = lora.gather(parts.list_trained(), self.shapes, parts.device)
        if parts.mesh.rank:
            return
        folder.mkdir(parents=True, exist_ok=True)
        lora.write(folder, {name: one.to(self.dtype) for name, one in tensors.items()}, self.settings)
        if tokenizer is not None:
            hf_io.copy_tokenizer(tokenizer, folder)
        hf_io.fsync_folder(folder)


def choose(config: TrainEngineConfig, hf: Any) -> Trainable:
    """Return what to train of a model. Raises ConfigError."""
    return Lora(config, hf) if config.use_lora else Full(config, hf)
