"""Publishes an engine's weights with sparse changes, and compares each version with a full export."""

import os
import random
import shutil
import threading
from pathlib import Path

import torch
from version_history import read_model

from hpc_rl.core.trial import Trial
from hpc_rl.core.types import WeightVersion
from hpc_rl.engines.base import Engine
from hpc_rl.weight_files.chain import VersionIndex
from hpc_rl.weight_files.model_copy import ModelCopy
from hpc_rl.weights.disk_transport import DiskTransport
from hpc_rl.weights.transport import Published, TransportContext

SHARES = (0.02, 0.0, 0.02, 0.9, 0.02)  # of the values that change before each further version
# a longer chain of random shares, for soak tests: the number of versions
LENGTH_VARIABLE = "HPC_RL_TEST_VERSIONS"


class AllServers:
    def publish(
        self, version: WeightVersion, path: Path, num_bytes: int, stopping: threading.Event
    ) -> Published:
        return Published(["server"])


def perturb(engine: Engine, share: float) -> None:
    """Change a share of the parameters; copies on other ranks change in the same way."""
    for kind, piece, _ in engine.local.pieces:
        if kind == "model":
            values = piece.local.detach()
            bits = values.contiguous().view(torch.int32).remainder(1000)
            values[bits < 1000 * share] *= 1.25
    if hasattr(engine.optimizer, "parameters_from_main"):
        engine.optimizer.parameters_from_main()


def check(engine: Engine, folder: Path, lineage: int = 0) -> None:
    """Publish and compare; rank 0 has the servers. The trial in `folder` may have versions of other layouts."""
    trial, rank = Trial(folder / "published"), engine.mesh.rank
    trial.weights.mkdir(parents=True, exist_ok=True)
    servers = AllServers() if rank == 0 else None
    transport = DiskTransport(
        TransportContext(
            trial=trial,
            engine=engine,
            publisher=servers,
            stopping=threading.Event(),
            tokenizer=folder,
        )
    )
    copy = ModelCopy(folder / "copy", trial.weights)
    bases, length = [], int(os.environ.get(LENGTH_VARIABLE, "0"))
    chance = random.Random(length)  # the same on all ranks
    shares = [chance.choice((0.0, 0.01, 0.02, 0.1, 0.9)) for _ in range(length)] or SHARES
    for step, share in enumerate((0.0, *shares)):
        perturb(engine, share)
        version = WeightVersion(lineage, step)
        transport.start(version)
        engine.export(folder / f"export-{version}")
        published = transport.settle(wait=True)
        if rank == 0:
            assert published is not None and published.acknowledged == ["server"]
            copy.bring_to(version)
            assert read_model(copy.model) == read_model(folder / f"export-{version}"), version
            shutil.rmtree(folder / f"export-{version}")
            index = VersionIndex.read(trial.published(str(version)))
            bases.append(index.base and index.base.step)
    if rank == 0 and length:
        assert len(bases) == length + 1 and 2 <= bases.count(None) <= length / 2, bases
    elif rank == 0:
        assert bases == [None, 0, 1, 2, None, 4], bases
