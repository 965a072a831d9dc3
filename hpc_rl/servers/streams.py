"""Streamed requests of SGLang and vLLM: their new tokens in parts, each with the version that sampled it.

These servers report the versions of tokens only when a request ends. So a token that comes earlier is passed
on only if no update has met its request: then it is from the weights that were loaded when the request began.
The tokens of other requests are held until the end. To keep such requests rare, a backend interrupts running
requests before an update: they end with their tokens so far, and the client sends the rest as a new request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from hpc_rl.servers.base import Answer
from hpc_rl.servers.wire import PART_S, Part, SendParts, Span, cut_spans, parse_spans

FIRST_INTERVAL = 8  # tokens between two events of a sample, before the server's speed is known
MAX_INTERVAL = 64
END_S = 5.0  # time for interrupted requests to end
# A request with other sampling parameters can't be continued as a new one: penalties and grammars depend on
# the tokens before.
_CONTINUABLE = {
    *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("stop_token_ids", "ignore_eos", "sampling_seed", "n", "logit_bias", "stream_interval"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
}


def is_continuable(sampling: dict[str, Any] | None) -> bool:
    """Return whether a request with these parameters may be interrupted and continued as a new one."""
    return {name for name, value in (sampling or {}).items() if value is not None} <= _CONTINUABLE


@dataclass
class StreamedSample:
    """The unsent tokens of one sample."""

    rid: str
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_sent: int = 0
    num_announced: int = 0
    end: dict[str, Any] | None = None  # the server's meta_info at the end; its spans cover all tokens
    end_is_sent: bool = False

    @property
    def num_made(self) -> int:
        return self.num_sent + len(self.ids)

    def has_news(self, label: str | None) -> bool:
        if self.end is not None:
            return not self.end_is_sent
        return self.num_made > (self.num_announced if label is None else self.num_sent)

    def take(self, index: int, label: str | None) -> Part:
        """Return the unsent tokens. `label` is the version of a running sample, if known."""
        ids, logprobs, spans, finish = self.ids, self.logprobs, [(label or "", 0, len(self.ids))], None
        if self.end is not None:
            spans = cut_spans(self._list_spans(self.end, label), self.num_sent)
            finish, self.end_is_sent = self.end["finish_reason"], True
        elif label is None:
            ids, logprobs, spans = [], [], []
        self.num_announced = self.num_made
        if ids is self.ids:
            self.num_sent, self.ids, self.logprobs = self.num_made, [], []
        return Part(index, ids, logprobs, spans, finish, self.num_announced)

    def _list_spans(self, meta: dict[str, Any], label: str | None) -> list[Span]:
        if meta.get("weight_versions") or not label:
            return parse_spans(meta, self.num_made)
        return [(label, 0, self.num_made)]


@dataclass(eq=False)
class Stream:
    """A running request. `label` is the version of all its tokens so far; None: an update has met it."""

    samples: list[StreamedSample]
    continuable: bool
    label: str | None
    is_waiting: bool  # sent to a paused server: it has no token before the server continues
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self) -> list[Part]:
        """Return the new tokens of the samples that have some."""
        return [
            sample.take(index, self.label)
            for index, sample in enumerate(self.samples)
            if sample.has_news(self.label)
        ]

    def count_tokens(self) -> int:
        return sum(sample.num_made for sample in self.samples)

    def list_running(self) -> list[str]:
        return [sample.rid for sample in self.samples if sample.end is None]


class Streams:
    """The streamed requests of one server. The backend reports pauses and updates to it."""

    def __init__(self) -> None:
        self._label: str | None = None  # of the loaded weights
        self._running: set[Stream] = set()
        self._is_paused = self._is_updating = False
        self._opens = asyncio.Event()
        self._opens.set()
        self._tokens_per_s = 0.0  # of one sample, lately
        self._has_adapters = False

    @property
    def interval(self) -> int:
        """The number of tokens between two events of a sample: a quarter of a second."""
        if not self._tokens_per_s:
            return FIRST_INTERVAL
        return max(1, min(MAX_INTERVAL, int(self._tokens_per_s * PART_S / 2)))

    @contextlib.asynccontextmanager
    async def open(self, rids: list[str], continuable: bool) -> AsyncIterator[Stream]:
        """Open a stream for a new request, with a sample for each id; wait while a pause begins."""
        await self._opens.wait()
        label = None if self._is_updating else self._label
        stream = Stream([StreamedSample(rid) for rid in rids], continuable, label, self._is_paused)
        self._running.add(stream)
        try:
            yield stream
        finally:
            self._running.discard(stream)
            stream.ended.set()

    async def relay(self, stream: Stream, request: Awaitable[Answer], send: SendParts) -> Answer:
        """Send the parts of a stream until its request ends; return the rest of each sample, or its error."""
        task = asyncio.ensure_future(request)
        try:
            while not task.done():
                num_before, begun = stream.count_tokens(), time.monotonic()
                await asyncio.wait({task}, timeout=PART_S)
                num_running = len(stream.list_running())
                if num_running and (made := stream.count_tokens() - num_before):
                    self._tokens_per_s = made / num_running / (time.monotonic() - begun)
                if not task.done() and (parts := stream.take()):
                    await send(parts)
            status, answer = task.result()
        finally:
            task.cancel()
        if status != 200:
            if parts := stream.take():
                await send(parts)
            return status, answer
        return 200, [sample.take(index, stream.label) for index, sample in enumerate(stream.samples)]

    # pauses and updates
    def start(self, label: str) -> None:
        self._label = label

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """Let new streams wait while the server is being paused."""
        self._opens.clear()
        try:
            yield
        finally:
            if not (self._has_adapters and self._is_paused):
                self._opens.set()

    def pause(self) -> None:
        """Note that the server has paused."""
        self._is_paused = True

    def resume(self) -> None:
        """Note that the server is about to continue."""
        self._is_paused = False
        self._opens.set()
        for stream in self._running:
            stream.is_waiting = False

    def enter_adapter(self, label: str) -> None:
        """Note the label of an adapter for new requests; running ones keep theirs.

        From now on, a request to a paused server waits, because its adapter is chosen when it begins.
        """
        self._label, self._has_adapters = label, True

    def list_continuable(self) -> list[Stream]:
        return [stream for stream in self._running if stream.continuable and not stream.is_waiting]

    def begin_update(self) -> None:
        self._is_updating = True
        for stream in self._running:
            if not stream.is_waiting:
                stream.label = None

    def end_update(self, label: str | None) -> None:
        """Note the label of the loaded weights, None if it is unknown."""
        self._is_updating, self._label = False, label
        for stream in self._running:
            if stream.is_waiting:
                stream.label = label


async def wait_for_ends(streams: Collection[Stream], timeout_s: float) -> bool:
    """Return whether all streams have ended within the time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for stream in streams:
                await stream.ended.wait()
            return True
    return False
