"""Gate: a limit on concurrent work, which may change while tasks wait."""

import asyncio
from collections import deque
from collections.abc import Callable


class Gate:
    """A limit on concurrent work, first come first served; use it with `async with`.

    Args:
        limit: The current limit, at least 1.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self.running = 0
        self._limit = limit
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def __aenter__(self) -> None:
        if self.running < self._limit() and not self._waiting:
            self.running += 1
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(admitted)
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                await self.__aexit__()
            raise

    async def __aexit__(self, *_exc: object) -> None:
        self.running -= 1
        while self._waiting and self.running < self._limit():
            admitted = self._waiting.popleft()
            if not admitted.done():
                self.running += 1
                admitted.set_result(None)
