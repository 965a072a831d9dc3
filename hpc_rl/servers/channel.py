"""The channel: one WebSocket between a client of the trial and a server, for all generation requests.

Other programs POST JSON to /generate. For short completions that costs more than the tokens: a channel has no
HTTP per request, and no numbers as text. Its messages are binary:

    4 bytes   length of the header, little-endian
    header    JSON; `id` names the request
    arrays    int32 token ids, then float32 log-probabilities

A request has `rids`, `inputs` with the length of each input and its number of samples, `sampling` for all
samples, `each` with the parameters that differ between samples, and `least` and `exact`, the version. Or it
has only `cancel`. A message back has `parts` (wire.Part); the last one also has `status`, or `status` and
`error`. A lost connection cancels its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_rl.core.auth import parse_json_object
from hpc_rl.servers.base import Answer
from hpc_rl.servers.wire import Part, SendParts, make_refusal

if TYPE_CHECKING:  # see client.py
    import aiohttp
    from aiohttp import web

logger = logging.getLogger(__name__)
CHANNEL = "/channel"
_LENGTH = struct.Struct("<I")
# json.dumps would make an encoder for each call
_encode_json = json.JSONEncoder(separators=(",", ":")).encode
CLOSE_S = 1.0  # time for the other side to answer a close


@dataclass(frozen=True, slots=True)
class ChannelRequest:
    """Samples for inputs. `body` is SGLang's for /generate, with a list of samples."""

    body: dict[str, Any]
    least: str = ""  # version of the weights
    exact: bool = False


def encode_request(number: int, request: ChannelRequest) -> bytes:
    several = request.body["sampling_params"]
    inputs = [(ids, len([*same])) for ids, same in itertools.groupby(request.body["input_ids"])]
    sizes = [(len(ids), num_samples) for ids, num_samples in inputs]
    header = {"id": number, "rids": request.body["rid"], "inputs": sizes}
    if all(one.keys() == several[0].keys() for one in several[1:]):
        columns = {name: [one[name] for one in several] for name in several[0]}
        each = {name: values for name, values in columns.items() if any(one != values[0] for one in values)}
        header["each"] = each
        header["sampling"] = {name: values[0] for name, values in columns.items() if name not in each}
    else:
        header["sampling"] = several
    if request.least:
        header |= {"least": request.least, "exact": request.exact}
    return _pack(header, [token for ids, _ in inputs for token in ids])


def decode_request(header: dict[str, Any], numbers: memoryview) -> ChannelRequest:
    """Return the request of a message. Raises LookupError, TypeError, ValueError for another message."""
    rids, sampling = header["rids"], header["sampling"]
    lengths, counts = [length for length, _ in header["inputs"]], [count for _, count in header["inputs"]]
    if not rids or min(counts, default=0) < 1 or sum(counts) != len(rids):
        raise ValueError(f"the inputs have {counts} samples, but the request has {len(rids)}")
    different = _split(np.frombuffer(numbers, np.int32, sum(lengths)).tolist(), lengths)
    inputs = [ids for ids, count in zip(different, counts, strict=True) for _ in range(count)]
    if isinstance(sampling, dict):
        each = header["each"]
        rows = zip(*each.values(), strict=True) if each else itertools.repeat((), len(rids))
        sampling = [{**sampling, **dict(zip(each, row, strict=True))} for row in rows]
    body = {"input_ids": inputs, "sampling_params": sampling, "rid": rids, "return_logprob": True}
    return ChannelRequest(body, header.get("least", ""), header.get("exact", False))


def encode_parts(number: int, parts: list[Part], status: int | None = None) -> bytes:
    """Return the message with parts; with a status it is the last one of its request."""
    rows = [
        [one.index, len(one.ids), len(one.logprobs), one.spans, one.finish, one.num_made] for one in parts
    ]
    header: dict[str, Any] = {"id": number, "parts": rows}
    if status is not None:
        header["status"] = status
    ids = [token for one in parts for token in one.ids]
    return _pack(header, ids, [value for one in parts for value in one.logprobs])


def decode_parts(header: dict[str, Any], numbers: memoryview) -> list[Part]:
    rows = header.get("parts", ())
    num_ids, num_logprobs = sum(row[1] for row in rows), sum(row[2] for row in rows)
    ids = np.frombuffer(numbers, np.int32, num_ids).tolist()
    logprobs = np.frombuffer(numbers, np.float32, num_logprobs, 4 * num_ids).tolist()
    ids = _split(ids, [row[1] for row in rows])
    logprobs = _split(logprobs, [row[2] for row in rows])
    return [
        Part(index, own_ids, own_logprobs, [tuple(one) for one in spans], finish, num_made)
        for (index, _, _, spans, finish, num_made), own_ids, own_logprobs in zip(
            rows, ids, logprobs, strict=True
        )
    ]


def _pack(header: dict[str, Any], ids: list[int], logprobs: list[float] | None = None) -> bytes:
    text = _encode_json(header).encode()
    arrays = np.array(ids, np.int32).tobytes() + np.array(logprobs or (), np.float32).tobytes()
    return _LENGTH.pack(len(text)) + text + arrays


def unpack(message: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the header and the arrays of a message. Raises ValueError, struct.error."""
    (length,) = _LENGTH.unpack_from(message)
    end = _LENGTH.size + length
    return parse_json_object(message[_LENGTH.size : end]), memoryview(message)[end:]


def _split(values: list[Any], lengths: list[int]) -> list[list[Any]]:
    ends = list(itertools.accumulate(lengths))
    return [values[end - length : end] for length, end in zip(lengths, ends, strict=True)]


class ChannelLost(Exception):
    """The connection broke before the last message of a request."""


class ChannelClosed(ChannelLost):
    """The server closed the connection when it had no request of it: it has not begun this one."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request without its last message."""

    socket: aiohttp.ClientWebSocketResponse
    take: Callable[[list[Part]], None]
    done: asyncio.Future[Answer]


class Channel:
    """The client's side. It connects with the first request, and again after a loss."""

    def __init__(self, session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> None:
        self._session, self._url, self._headers = session, url + CHANNEL, headers
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._connecting = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}

    async def ask(self, request: ChannelRequest, take: Callable[[list[Part]], None]) -> Answer:
        """Send a request; call `take` with each list of parts; return the status, and the body of an error.

        Raises ChannelLost or ChannelClosed; aiohttp.ClientError or OSError without a connection; what `take`
        raises.
        """
        socket = await self._connect()
        number, done = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = _Waiting(socket, take, done)
        try:
            await socket.send_bytes(encode_request(number, request))
            return await done
        except ConnectionError as error:  # of the write
            raise ChannelLost(str(error)) from error
        finally:
            del self._waiting[number]
            if not done.done() or done.cancelled():
                with contextlib.suppress(ConnectionError):
                    await socket.send_bytes(_pack({"id": number, "cancel": True}, []))

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._socket is not None:
            await self._socket.close()

    async def _connect(self) -> aiohttp.ClientWebSocketResponse:
        import aiohttp

        async with self._connecting:
            if self._socket is None or self._socket.closed:
                self._socket = await self._session.ws_connect(
                    self._url,
                    headers=self._headers,
                    max_msg_size=0,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
                )
                self._reader = asyncio.create_task(self._receive(self._socket), name="channel")
            return self._socket

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        import aiohttp

        lost = ChannelLost("broke off its answer before the end")
        try:
            async for message in socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    self._take(message.data)
            if socket.close_code == aiohttp.WSCloseCode.GOING_AWAY:
                lost = ChannelClosed("closed the connection before it began the request")
        except (ValueError, LookupError, TypeError, struct.error) as error:
            lost = ChannelLost(f"sent a message that can't be read: {type(error).__name__}: {error}")
        finally:
            # a later request connects again; `closed` is true from here on
            await socket.close()
            for one in self._waiting.values():
                if one.socket is socket and not one.done.done():
                    one.done.set_exception(lost)

    def _take(self, message: bytes) -> None:
        header, numbers = unpack(message)
        waiting = self._waiting.get(header["id"])
        if waiting is None or waiting.done.done():  # it was cancelled
            return
        parts = decode_parts(header, numbers)
        try:
            waiting.take(parts)
        except Exception as error:  # of the client, not of the message: `ask` raises it
            waiting.done.set_exception(error)
            return
        if "status" in header:
            waiting.done.set_result((header["status"], header.get("error")))


class ChannelServer:
    """The server's side: a handler of GET CHANNEL.

    `generate` answers a request with status 200 and the parts that it has not sent, or with an error. A
    ConnectionError of it ends the connection.
    """

    def __init__(
        self, generate: Callable[[ChannelRequest, SendParts], Awaitable[Answer]], max_message_bytes: int
    ) -> None:
        self._generate, self._max_message_bytes = generate, max_message_bytes
        self._connections: dict[web.WebSocketResponse, dict[int, asyncio.Task[None]]] = {}

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        import aiohttp
        from aiohttp import web

        socket = web.WebSocketResponse(timeout=CLOSE_S, compress=False, max_msg_size=self._max_message_bytes)
        await socket.prepare(request)
        running = self._connections[socket] = {}
        try:
            async for message in socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    self._begin(request, socket, running, message.data)
        except (ValueError, LookupError, TypeError, struct.error) as error:
            logger.warning("a client sent a message that can't be read: %s: %s", type(error).__name__, error)
            await socket.close(code=aiohttp.WSCloseCode.INVALID_TEXT)
        finally:
            del self._connections[socket]
            for task in running.values():
                task.cancel()
        return socket

    async def close(self, timeout_s: float) -> None:
        """Give running requests some time to end, then close all connections."""
        import aiohttp

        running = [task for tasks in self._connections.values() for task in tasks.values()]
        if running:
            await asyncio.wait(running, timeout=timeout_s)
        idle, busy = aiohttp.WSCloseCode.GOING_AWAY, aiohttp.WSCloseCode.OK
        ends = [socket.close(code=busy if tasks else idle) for socket, tasks in self._connections.items()]
        await asyncio.gather(*ends)

    def _begin(
        self,
        request: web.Request,
        socket: web.WebSocketResponse,
        running: dict[int, asyncio.Task[None]],
        message: bytes,
    ) -> None:
        header, numbers = unpack(message)
        number = header["id"]
        if "cancel" in header:
            if number in running:
                running[number].cancel()
            return
        asked = decode_request(header, numbers)
        running[number] = task = asyncio.create_task(self._answer(request, socket, number, asked))
        task.add_done_callback(lambda _task: running.pop(number, None))

    async def _answer(
        self, request: web.Request, socket: web.WebSocketResponse, number: int, asked: ChannelRequest
    ) -> None:
        async def send(parts: list[Part]) -> None:
            await socket.send_bytes(encode_parts(number, parts))

        try:
            try:
                status, answer = await self._generate(asked, send)
            except ConnectionError:
                raise
            except Exception as error:  # as aiohttp answers an error of a handler
                logger.exception("a request failed; its client gets the error")
                status, answer = 500, make_refusal(f"{type(error).__name__}: {error}")
            if status == 200:
                await socket.send_bytes(encode_parts(number, answer, status))
            else:
                await socket.send_bytes(_pack({"id": number, "status": status, "error": answer}, []))
        except ConnectionError:
            if request.transport is not None:
                request.transport.abort()
