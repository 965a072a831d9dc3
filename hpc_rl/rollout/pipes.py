"""Frames: what parent and child say over pipes. A frame is a 4-byte big-endian length and `types.encode` of a dict."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from hpc_rl.types import decode, encode

_LENGTH = struct.Struct(">I")
PR_SET_PDEATHSIG = 1
EXIT_GRACE_S = 2.0


def pack(frame: dict[str, Any]) -> bytes:
    data = encode(frame)
    return _LENGTH.pack(len(data)) + data


async def read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next frame, or None at the end of the pipe, also in the middle of a frame."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def read_blocking(file: BinaryIO) -> dict[str, Any] | None:
    """As read, for a process without an event loop."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = file.read(length)
    return decode(data) if len(data) == length else None


def take_stdout() -> int:
    """Keep standard output for frames: returns its descriptor; what user code prints goes to standard error from now on."""
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return own


def die_with_parent() -> None:
    """Be killed when the parent dies, even in the middle of user code that never looks at its pipe. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


async def exit_code(process: asyncio.subprocess.Process) -> int:
    """Of a child that closed its end of the pipe; one that lives on is killed after `EXIT_GRACE_S`."""
    try:
        async with asyncio.timeout(EXIT_GRACE_S):
            return await process.wait()
    except TimeoutError:
        kill(process)
        return await process.wait()


def kill(process: asyncio.subprocess.Process) -> None:
    """Not by `process.kill()`: that polls first, and takes the exit code away from the event loop, which then reports 255."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


async def stdin_reader() -> asyncio.StreamReader:
    """Standard input as a stream of this event loop."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


async def pipe_writer(fd: int) -> Callable[[bytes], None]:
    """Writes to a pipe without blocking this event loop; what the reader is slow to take is kept."""
    transport, _ = await asyncio.get_running_loop().connect_write_pipe(
        asyncio.BaseProtocol, os.fdopen(fd, "wb", 0)
    )
    return transport.write
