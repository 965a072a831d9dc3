"""Fetches the next batch while the trainer trains on this one, for training on data of older weights.

The batch then costs the trainer no request, no write of the batch log and no decoding. A batch that is not
ready in time is fetched as usual: the trainer's request also tells the rollout role the new version.
"""

import logging
import queue
import threading
from dataclasses import dataclass

from hpc_rl.core.errors import HpcRlError
from hpc_rl.core.types import Batch, decode
from hpc_rl.rollout.batch_client import RolloutClient

logger = logging.getLogger(__name__)


@dataclass
class FetchedBatch:
    """A batch as the rollout role sent it, and decoded."""

    body: bytes
    batch: Batch


@dataclass
class _Fetch:
    step: int
    lineage: int
    is_wanted: bool = True
    found: FetchedBatch | None = None


class BatchPrefetch:
    """Used by rank 0. Only its thread uses `client`."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._stopping = threading.Event()
        self._newest: _Fetch | None = None
        self._asked: queue.SimpleQueue[_Fetch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="batch-prefetch")
        self._thread.start()

    def begin(self, step: int, lineage: int) -> None:
        """Fetch the batch of `step`, for a trainer that begins the step before it."""
        self._newest = _Fetch(step, lineage)
        self._asked.put(self._newest)

    def take(self, step: int) -> FetchedBatch | None:
        """Return the batch of a step if it is here; otherwise the trainer fetches it."""
        fetch, self._newest = self._newest, None
        if fetch is None:
            return None
        fetch.is_wanted = False
        return fetch.found if fetch.step == step else None

    def close(self) -> None:
        self._stopping.set()
        self._asked.put(None)
        self._thread.join(2 * self._client.poll_s)
        self._client.close()

    def _run(self) -> None:
        while (fetch := self._asked.get()) is not None and not self._stopping.is_set():
            try:
                body = self._client.batch_bytes(
                    fetch.step, fetch.lineage, self._stopping, version=fetch.step - 2
                )
            except HpcRlError as error:  # the trainer's own request decides
                logger.info(
                    "batch %d can't be fetched ahead of time, so its step fetches it: %s", fetch.step, error
                )
                continue
            if body is not None and fetch.is_wanted:
                fetch.found = FetchedBatch(body, decode(body))
