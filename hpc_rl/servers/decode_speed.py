"""Measures how a server's decode speed depends on its load, by sums over its requests.

A decode iteration gives each running sequence a token, and takes a + b * sequences seconds. So a request
lasts a * n + b * n * m seconds: n tokens of its longest sequence, with m running sequences on average. The
sums here belong to a least-squares fit of a and b over all requests; sums of several servers add up.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from hpc_rl.servers.wire import Part, SendParts


class _Request:
    """The sequences of one request."""

    def __init__(self, num_sequences: int) -> None:
        self.num_left = num_sequences
        self.num_tokens = 0  # of its longest sequence
        self.ended: set[int] = set()  # indexes of sequences


def count_sequences(body: dict[str, Any]) -> int:
    """Return the sequences that a request of /generate asks for, 1 if it is not valid."""
    ids, sampling = body.get("input_ids"), body.get("sampling_params")
    num_inputs = len(ids) if isinstance(ids, list) and ids and isinstance(ids[0], list) else 1
    options = sampling if isinstance(sampling, list) else [sampling] * num_inputs
    numbers = [one.get("n", 1) if isinstance(one, dict) else 1 for one in options]
    return max(1, sum(one for one in numbers if isinstance(one, int)))


class DecodeSpeed:
    """The sums of one server. Use it in the thread of its event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_running = 0  # sequences
        self._area = 0.0  # integral of the running sequences over time
        self._area_at = clock()
        # of x * x, x * y, y * y, x * s, y * s, with x = n, y = n * m, and s the seconds of a request
        self._sums = [0.0] * 5

    @contextlib.contextmanager
    def watch(self, body: dict[str, Any], send: SendParts) -> Iterator[SendParts]:
        """Measure a request of /generate; in its place use the given function, which calls `send`."""
        request = _Request(count_sequences(body))
        self._change(request.num_left)
        begun, area = self._clock(), self._area

        async def send_on(parts: list[Part]) -> None:
            for part in parts:
                request.num_tokens = max(request.num_tokens, part.num_made)
                if part.finish is not None and part.index not in request.ended and request.num_left > 1:
                    request.ended.add(part.index)
                    request.num_left -= 1
                    self._change(-1)
            await send(parts)

        try:
            yield send_on
        finally:
            self._change(-request.num_left)
            seconds = self._clock() - begun
            if request.num_tokens and seconds > 0:
                x, mean = float(request.num_tokens), (self._area - area) / seconds
                y = x * mean
                terms = (x * x, x * y, y * y, x * seconds, y * seconds)
                self._sums = [total + term for total, term in zip(self._sums, terms, strict=True)]

    @property
    def sums(self) -> list[float]:
        return [round(total, 3) for total in self._sums]

    def _change(self, by: int) -> None:
        now = self._clock()
        self._area += self._num_running * (now - self._area_at)
        self._area_at = now
        self._num_running += by
