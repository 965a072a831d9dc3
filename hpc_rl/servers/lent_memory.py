"""The memory of a server that shares its GPUs with the trainer: it has it only while the trainer lends it.

It begins in state `released`, without a running backend. POST /resume_memory_occupation starts the backend,
or takes the memory again, with the newest published weights. POST /release_memory_occupation interrupts
running requests and gives up weights and KV cache; requests are then held until the server resumes. Nothing
here expires: after the end of a trainer the server stays as it is until the next trainer calls.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from hpc_rl.servers.base import Answer
from hpc_rl.servers.proxy import RELEASED, UP, Proxy
from hpc_rl.servers.wire import make_refusal

logger = logging.getLogger(__name__)


class LentMemory:
    """Answers the two calls for one replica. `find_weights` returns the record of the newest weights."""

    def __init__(self, proxy: Proxy, find_weights: Callable[[], dict[str, Any] | None]) -> None:
        self._proxy, self._find_weights = proxy, find_weights
        self._lent = asyncio.Event()  # set when the backend may start
        self.problem = ""  # why the server can't go on
        proxy.calls |= {
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
        }

    async def wait_for_start(self) -> None:
        """Wait until the backend may start; the caller enters another state at once."""
        self._proxy.enter(RELEASED)
        await self._lent.wait()

    async def _release(self, _body: dict[str, Any]) -> Answer:
        proxy = self._proxy
        if proxy.lifecycle == RELEASED:
            if not proxy.version:
                self._lent.clear()  # the backend has not started yet
            return 200, {"state": RELEASED}
        if proxy.lifecycle not in UP:  # it starts: the trainer asks again
            return 503, make_refusal(f"the server is {proxy.lifecycle}")
        begun = time.monotonic()
        proxy.enter(RELEASED)
        # a running request continues after the resume
        status, answer = await proxy.backend.request("/pause_generation", {"mode": "retract"})
        if status == 200:
            status, answer = await proxy.backend.request("/release_memory_occupation", {})
        if status == 200:
            logger.info("the server has released its memory in %.3f s", time.monotonic() - begun)
        return self._check("release its memory", status, answer)

    async def _resume(self, _body: dict[str, Any]) -> Answer:
        proxy = self._proxy
        if proxy.lifecycle != RELEASED:
            return 200, {"state": proxy.lifecycle}
        weights = await asyncio.to_thread(self._find_weights)
        if weights is None:
            return 503, make_refusal("no weights are published yet")
        if not proxy.version:
            self._lent.set()
            return 200, {"state": proxy.lifecycle}
        begun = time.monotonic()
        # weights first: while they are loaded, the memory of the KV cache is still free
        calls: list[tuple[str, dict[str, Any]]] = [
            ("/resume_memory_occupation", {"tags": ["weights"]}),
            # the cache was flushed with the release
            (
                "/update_weights_from_disk",
                {"model_path": weights["path"], "weight_version": weights["label"], "flush_cache": False},
            ),
            ("/resume_memory_occupation", {"tags": ["kv_cache"]}),
            ("/continue_generation", {}),
        ]
        for path, body in calls:
            status, answer = await proxy.backend.request(path, body)
            if status != 200:
                return self._check(f"resume with weights {weights['label']}", status, answer)
        logger.info("the server has its memory again after %.3f s", time.monotonic() - begun)
        return proxy.note_update(weights["label"], 200, {"state": "serving"})

    def _check(self, what: str, status: int, answer: Any) -> Answer:
        """Return an answer. After a failure the state of the memory is unknown, so the server must end."""
        if status != 200:
            self.problem = f"the server can't {what}: {answer}"
            return 503, make_refusal(self.problem)
        return 200, {"state": self._proxy.lifecycle}
