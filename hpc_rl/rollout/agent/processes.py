"""Runs the agents of a worker: time limits, captured output, results. host.py starts their processes."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import IO, Any

from hpc_rl.core import log
from hpc_rl.rollout.agent.episode import EpisodeFailed
from hpc_rl.rollout.agent.functions import MAX_RESULT_BYTES
from hpc_rl.rollout.agent.host import NO_PROGRAM

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 120.0  # the user's module may import large packages
END_TIMEOUT_S = 15.0  # to kill all processes of an agent
PIPE_GRACE_S = 1.0  # for the last output after an agent's end
KEPT_HEAD_CHARS, KEPT_TAIL_CHARS = 1000, 3000  # of an agent's output
MAX_OUTPUT_BYTES = 16 << 20


class OutputKeeper(asyncio.Protocol):
    """Keeps the beginning and the end of an agent's output. `flooded` is set once it is too much."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.flooded = asyncio.Event()
        self.ended = asyncio.Event()
        self._head, self._tail = b"", b""

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        # a character has at most 4 bytes
        room = 4 * KEPT_HEAD_CHARS - len(self._head)
        self._head += data[:room]
        if rest := data[room:] if room > 0 else data:
            self._tail = (self._tail + rest)[-4 * KEPT_TAIL_CHARS :]
        if self.num_bytes > MAX_OUTPUT_BYTES:
            self.flooded.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()

    def describe(self) -> str:
        """Return the output without secrets, with a note in place of a part that is left out."""
        text = log.redact((self._head + self._tail).decode(errors="replace"))
        left_out = self.num_bytes - len(self._head) - len(self._tail)
        if not left_out and len(text) <= KEPT_HEAD_CHARS + KEPT_TAIL_CHARS:
            return text
        head, tail = text[:KEPT_HEAD_CHARS], text[-KEPT_TAIL_CHARS:]
        return f"{head}\n… ({self.num_bytes} bytes of output in all) …\n{tail}"


@dataclass
class AgentEnd:
    """How an agent ended: its exit code, its output, and the result of a function."""

    code: int
    output: str
    result: dict[str, Any] = field(default_factory=dict)


class AgentProcesses:
    """The agents of this worker. `function` is the import path of an agent function, "" for commands."""

    def __init__(self, function: str = "") -> None:
        self._function = function
        self._numbers = itertools.count()
        self._host: asyncio.subprocess.Process | None = None
        self._connection: socket.socket | None = None
        self._ends: dict[int, asyncio.Future[int]] = {}
        self._ready: asyncio.Future[None] | None = None
        self._received = b""
        self._outgoing: deque[tuple[bytes, list[int]]] = deque()
        self._starting = asyncio.Lock()

    async def run(
        self,
        argv: list[str],
        environment: dict[str, str],
        row: dict[str, Any],
        options: dict[str, str],
        timeout_s: float,
        broken: Awaitable[Any],
    ) -> AgentEnd:
        """Return the end of an agent.

        Raises EpisodeFailed over a limit, if the agent can't be started, or as `broken` raises it.
        """
        work = {"argv": argv, "environment": environment, "row": row, "options": options}
        await self._open()
        with tempfile.TemporaryFile() as exchange:
            exchange.write(json.dumps(work, default=str).encode(errors="replace"))
            exchange.seek(0)
            number, ended = next(self._numbers), asyncio.get_running_loop().create_future()
            self._ends[number] = ended
            keeper, transport = await self._start(number, exchange)
            try:
                await self._wait(ended, keeper, timeout_s, broken)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(keeper.ended.wait(), PIPE_GRACE_S)
                result = _load_result(exchange) if self._function else {}
                return AgentEnd(ended.result(), keeper.describe(), result)
            except EpisodeFailed as error:
                await self._stop(number)
                raise EpisodeFailed(str(error), keeper.describe()) from None
            finally:
                self._send_stop(number)
                transport.close()

    async def close(self) -> None:
        """End all agents."""
        if self._connection is not None:
            self._lose_host("the worker ends")
        if self._host is not None:
            await self._host.wait()

    async def _wait(
        self, ended: asyncio.Future[int], keeper: OutputKeeper, timeout_s: float, broken: Awaitable[Any]
    ) -> None:
        flooded = asyncio.ensure_future(keeper.flooded.wait())
        watched = asyncio.ensure_future(broken)
        try:
            awaited: set[asyncio.Future[Any]] = {ended, flooded, watched}
            done, _ = await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            flooded.cancel()
        if watched in done:
            watched.result()
        if flooded in done:
            raise EpisodeFailed(f"the agent wrote more than {MAX_OUTPUT_BYTES >> 20} MiB of output")
        if ended not in done:
            raise EpisodeFailed(f"the agent took more than {timeout_s:g} s (timeout_s)")
        ended.result()

    async def _start(self, number: int, exchange: IO[bytes]) -> tuple[OutputKeeper, asyncio.ReadTransport]:
        read_end, write_end = os.pipe()
        self._send({"id": number}, [os.dup(exchange.fileno()), write_end])
        file = os.fdopen(read_end, "rb", buffering=0)
        transport, keeper = await asyncio.get_running_loop().connect_read_pipe(OutputKeeper, file)
        return keeper, transport

    async def _stop(self, number: int) -> None:
        """End an agent, and wait until none of its processes is left."""
        self._send_stop(number)
        if (ended := self._ends.get(number)) is not None:
            await asyncio.wait({ended}, timeout=END_TIMEOUT_S)

    def _send_stop(self, number: int) -> None:
        ended = self._ends.get(number)
        if ended is not None and not ended.done():
            self._send({"id": number, "stop": True}, [])

    def _send(self, message: dict[str, Any], fds: list[int]) -> None:
        """Send a message with file descriptors, which are closed then. It waits while the socket is full."""
        self._outgoing.append((json.dumps(message).encode() + b"\n", fds))
        self._flush()

    def _flush(self) -> None:
        while self._outgoing:
            data, fds = self._outgoing[0]
            if self._connection is not None:
                try:
                    socket.send_fds(self._connection, [data], fds)
                except BlockingIOError:
                    asyncio.get_running_loop().add_writer(self._connection, self._flush)
                    return
                except OSError:  # reading reports that the host is gone
                    pass
            self._outgoing.popleft()
            for fd in fds:
                os.close(fd)
        if self._connection is not None:
            asyncio.get_running_loop().remove_writer(self._connection)

    async def _open(self) -> None:
        """Start the host if there is none. Raises EpisodeFailed."""
        async with self._starting:
            if self._connection is not None:
                return
            own, other = socket.socketpair()
            argv = [sys.executable, "-m", "hpc_rl.rollout.agent.host", str(other.fileno())]
            argv += [self._function] if self._function else []
            try:
                self._host = await asyncio.create_subprocess_exec(
                    *argv, stdin=asyncio.subprocess.DEVNULL, stdout=2, pass_fds=[other.fileno()]
                )
            finally:
                other.close()
            own.setblocking(False)
            self._connection, self._received = own, b""
            self._ready = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().add_reader(own, self._receive)
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await self._ready
            except TimeoutError:
                self._lose_host("its start took too long")
                raise EpisodeFailed(f"the agent was not imported within {START_TIMEOUT_S:g} s") from None

    def _receive(self) -> None:
        assert self._connection is not None
        try:
            data = self._connection.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._lose_host("it ended")
            return
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "error" in message and self._ready is not None:
                self._ready.set_exception(EpisodeFailed(message["error"]))
            elif "ready" in message and self._ready is not None:
                self._ready.set_result(None)
            elif (ended := self._ends.pop(message["id"], None)) is not None and not ended.done():
                ended.set_result(message["code"])

    def _lose_host(self, reason: str) -> None:
        """Forget the host and its episodes."""
        assert self._connection is not None
        asyncio.get_running_loop().remove_reader(self._connection)
        asyncio.get_running_loop().remove_writer(self._connection)
        self._connection.close()
        self._connection = None
        self._flush()
        error = EpisodeFailed(f"the process that starts agents is gone: {reason}")
        for waiting in (self._ready, *self._ends.values()):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # an ended episode does not wait for it
        self._ends.clear()


def _load_result(exchange: IO[bytes]) -> dict[str, Any]:
    """Return the result of a function; {} for a command, or if there is none."""
    exchange.seek(0)
    data = exchange.read(MAX_RESULT_BYTES + 1)
    with contextlib.suppress(ValueError):
        found = json.loads(data)
        if isinstance(found, dict) and found.keys() <= {"value", "error"}:
            return found
    return {}


def describe_code(code: int) -> str:
    """Return how an agent ended, as a sentence without its subject."""
    if code == NO_PROGRAM:
        return "can't be started (exit code 127)"
    return f"was killed by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
