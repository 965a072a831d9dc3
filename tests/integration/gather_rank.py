"""A trainer's rank that has a part of the weights; rank 0 gathers them in buckets."""

import json
import threading
from pathlib import Path

import gloo_ranks
import torch

from hpc_rl.core.trial import Trial
from hpc_rl.core.types import WeightVersion
from hpc_rl.engines.base import PublishedPiece
from hpc_rl.weights import collective_transport
from hpc_rl.weights.collective_transport import CollectiveTransport
from hpc_rl.weights.transport import Published, TransportContext


class Engine:
    """Tensors divided by rows or by columns; one of them is on one rank only."""

    device = torch.device("cpu")

    def __init__(self, rank: int, num_ranks: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.whole = {
            "a": torch.randn(9, 40, generator=generator),
            "b": torch.randn(30, 12, generator=generator),
            "c": torch.randn(100, generator=generator),
            "d": torch.arange(7),
        }
        self.rank, self.num_ranks = rank, num_ranks

    def list_published_pieces(self) -> list[PublishedPiece]:
        rank, step = self.rank, 12 // self.num_ranks
        rows, columns = slice(3 * rank, 3 * rank + 3), slice(step * rank, step * rank + step)
        pieces = [
            PublishedPiece("a", self.whole["a"][rows], (3 * rank, 0), (9, 40), torch.bfloat16),
            PublishedPiece("b", self.whole["b"][:, columns], (0, step * rank), (30, 12), torch.float32),
        ]
        alone = {1: ["c"], 2: ["d"]}.get(rank, [])
        return pieces + [PublishedPiece.of_whole(name, self.whole[name]) for name in alone]

    def write_model_files(self, folder: Path, tokenizer: Path | None = None) -> None:
        pass

    def list_tensors(self) -> dict[str, torch.Tensor]:
        return {**self.whole, "a": self.whole["a"].to(torch.bfloat16)}


class Receiving:
    """Reads every bucket of a version twice, and nothing of the second version."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.count = engine, 0

    def publish(self, version, path, num_bytes, stopping, source):
        self.count = len(source.buckets)
        if version.step != 2:
            for index in (*range(self.count), *range(self.count)):
                for name, tensor in source.buckets[index].split(source.load(index)):
                    assert torch.equal(tensor, self.engine.list_tensors()[name]), name
        return Published(["s"])


def scenario_gather(folder: Path, rank: int, num_ranks: int) -> None:
    collective_transport.BUCKET_BYTES = 1600
    engine = Engine(rank, num_ranks)
    trial = Trial(folder / "trial")
    trial.make_dirs()
    servers = Receiving(engine)
    transport = CollectiveTransport(
        TransportContext(
            trial=trial, engine=engine, publisher=servers, stopping=threading.Event(), tokenizer=folder
        )
    )
    for step in (1, 2, 3):
        for tensor in engine.whole.values():
            tensor.add_(step)
        transport.start(WeightVersion(0, step))
        published = transport.settle(wait=True)
        assert (published is None) == (rank != 0)
    if rank == 0:
        (folder / "done.json").write_text(json.dumps({"buckets": servers.count}))


if __name__ == "__main__":
    gloo_ranks.main({name: value for name, value in globals().items() if name.startswith("scenario_")})
