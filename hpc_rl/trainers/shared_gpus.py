"""GPUs that trainer and servers share: the trainer lends them while it waits for a batch or an evaluation.

It offloads its engines, lets the servers resume with the newest weights, waits for their results, and takes
the GPUs back. All other work of the training loop has the GPUs, so a save or an export needs nothing special.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hpc_rl.engines.base import Engine
from hpc_rl.stats.tracker import Tracker
from hpc_rl.trainers.ranks import Ranks
from hpc_rl.weights.lending import LendingPublisher


@dataclass
class SharedGPUs:
    """The shared GPUs on one rank. `publisher` exists on rank 0 only."""

    engines: Sequence[Engine]  # all models that hold GPU memory
    ranks: Ranks
    publisher: LendingPublisher | None
    stats: Tracker

    @contextmanager
    def lend(self, settle: Callable[[], bool]) -> Iterator[None]:
        """Give the GPUs to the servers for a block. Collective.

        `settle` waits until a publication in flight has reached the servers; it returns whether one has.
        After an exception in the block the GPUs stay with the servers, because this process ends.
        """
        with self.stats.timed("turn_s"):
            for engine in self.engines:
                engine.offload()
            self.ranks.any(False)  # all ranks have done it
            if self.publisher is not None:
                self.publisher.lend()
            is_published = settle()
            if self.publisher is not None and not is_published:
                self.publisher.resume()
        yield
        with self.stats.timed("turn_s"):
            take_back(self.ranks, self.publisher)
            for engine in self.engines:
                engine.reload()


def take_back(ranks: Ranks, publisher: LendingPublisher | None) -> None:
    """Wait until no server holds GPU memory. Collective. Raises RoleFailed."""

    def release() -> None:
        assert publisher is not None, "rank 0 has one"
        publisher.take_back()

    ranks.from_rank0(release)
