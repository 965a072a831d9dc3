"""Histories of published versions with random changes, written as several ranks would write them."""

import itertools
import shutil

import numpy as np
import torch
from safetensors import safe_open

from hpc_rl.core.types import WeightVersion
from hpc_rl.weight_files import rank_file
from hpc_rl.weight_files.chain import VersionIndex, load_chain
from hpc_rl.weight_files.difference import Rectangle
from hpc_rl.weight_files.model_copy import WEIGHTS_NAME, ModelFile, build_model
from hpc_rl.weight_files.rank_file import compare

SHAPES = {"embed": (33, 8), "norm": (8,), "experts": (3, 5, 7), "scale": ()}


def split_tensor(rng, shape, num_ranks):
    """Rectangles of `num_ranks` ranks that cover a tensor: cut along a random dimension, or on one rank."""
    if not shape or rng.random() < 0.2:
        owner = rng.integers(num_ranks)
        return [((0,) * len(shape), shape if rank == owner else None) for rank in range(num_ranks)]
    dim = rng.integers(len(shape))
    cuts = [0, *sorted(rng.integers(0, shape[dim] + 1, num_ranks - 1)), shape[dim]]
    parts = []
    for a, b in itertools.pairwise(cuts):
        offset = tuple(int(a) if i == dim else 0 for i in range(len(shape)))
        parts.append((offset, tuple(int(b - a) if i == dim else size for i, size in enumerate(shape))))
    return parts


def publish_version(folder, rng, version, base, before, after, num_ranks, whole):
    """Write a version as `num_ranks` ranks would."""
    target = folder / str(version)
    target.mkdir(parents=True)
    ranks = [[] for _ in range(num_ranks)]
    for name, shape in SHAPES.items():
        for rank, (offset, size) in enumerate(split_tensor(rng, shape, num_ranks)):
            if size is None:
                continue
            rectangle = Rectangle(name, "BF16", offset, size, shape)
            new = np.ascontiguousarray(rectangle.view(after[name])).reshape(-1)
            old = np.ascontiguousarray(rectangle.view(before[name])).reshape(-1)
            ranks[rank].append(compare(rectangle, None if whole else old, new))
    files = tuple(
        rank_file.write(target / f"rank-{rank:05d}.safetensors", rank, stored)
        for rank, stored in enumerate(ranks)
    )
    size = sum(values.nbytes for values in after.values())
    if whole:
        (target / "model").mkdir()
        (target / "model" / "config.json").write_text(f'"of {version}"')
    index = VersionIndex(version, None if whole else base, files, size)
    index.write(target)
    return index


def publish_model(folder, version, base, before, after, num_ranks=2):
    """Write a version of a Hugging Face checkpoint in the folder `after`, with all values if `before` is None.

    Ranks have equal shares of each tensor's first dimension.
    """
    target = folder / str(version)
    (target / "model").mkdir(parents=True)
    new = ModelFile(after / WEIGHTS_NAME)
    old = ModelFile(before / WEIGHTS_NAME) if before else None
    files = []
    for rank in range(num_ranks):
        stored = []
        for name, place in new.places.items():
            length, *rest = place.shape
            start, end = length * rank // num_ranks, length * (rank + 1) // num_ranks
            offset = (start, *[0] * len(rest))
            rectangle = Rectangle(name, place.dtype, offset, (end - start, *rest), place.shape)
            views = [rectangle.view(file.get_values(rectangle)).reshape(-1) for file in (old, new) if file]
            stored.append(compare(rectangle, views[0] if old else None, views[-1]))
        files.append(rank_file.write(target / f"rank-{rank:05d}.safetensors", rank, stored))
    if before is None:
        for path in after.iterdir():
            if path.name != WEIGHTS_NAME:
                shutil.copyfile(path, target / "model" / path.name)
    index = VersionIndex(
        version, base if before else None, tuple(files), (after / WEIGHTS_NAME).stat().st_size
    )
    index.write(target)
    return index


def make_history(folder, seed, num_versions, lineage=0, first=1):
    rng = np.random.default_rng(seed)
    weights = {
        name: rng.integers(0, 1 << 16, int(np.prod(shape)), np.uint16) for name, shape in SHAPES.items()
    }
    history, indices, base = {}, {}, None
    for step in range(first, first + num_versions):
        version = WeightVersion(lineage, step)
        after = {name: values.copy() for name, values in weights.items()}
        for values in after.values():
            hits = rng.random(len(values)) < rng.choice([0, 0.02, 0.9])
            values[hits] ^= rng.integers(1, 1 << 16, hits.sum(), np.uint16)
        whole = base is None or rng.random() < 0.1
        ranks = int(rng.integers(1, 5))
        indices[version] = publish_version(folder, rng, version, base, weights, after, ranks, whole)
        history[version] = weights = after
        base = version
    return history, indices


def rebuild(trial, label, target):
    """Write the Hugging Face checkpoint of a published version into a directory; return the directory."""
    target.mkdir(parents=True, exist_ok=True)
    build_model(target, trial.weights, load_chain(trial.weights, WeightVersion.parse(label)))
    return target


def as_bytes(weights):
    """Return the bytes of each tensor."""
    return {name: values.tobytes() for name, values in weights.items()}


def read_model(folder):
    """Return the bytes of each tensor of a checkpoint, read by the safetensors library."""
    with safe_open(folder / WEIGHTS_NAME, framework="pt") as file:
        return {
            name: file.get_tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes()
            for name in file.keys()  # noqa: SIM118
        }
