"""Messages between parent and child over pipes: a 4-byte big-endian length, then the encoded dict.

The rollout role sends RunPrompt, NoteKept and CancelPrompt to an executor worker. The worker answers `{"op":
"ready"}`, or `{"op": "ends", "error"}` if it can't start or continue; then for each ticket notes, and one
outcome.
"""

import asyncio
import contextlib
import ctypes
import os
import queue
import signal
import struct
import sys
import threading
from collections.abc import Mapping
from typing import Any, BinaryIO, Literal, NotRequired, TypedDict

from hpc_rl.core.types import decode, encode


class RunPrompt(TypedDict):
    """Run the workflow on a prompt."""

    op: Literal["run"]
    ticket: int  # negative for an evaluation
    index: int  # of the prompt; in an evaluation its position in the file
    epoch: int
    row: int
    columns: dict[str, Any]
    input_ids: list[int]
    version: str  # minimum version of the weights
    evaluate: bool
    held_out_set: str  # its name, in an evaluation; "" for valid_dataset
    notes: dict[str, bytes]  # encoded values from earlier runs of its workflow, by key


class CancelPrompt(TypedDict):
    """The answer to this ticket is not wanted any more."""

    op: Literal["cancel"]
    ticket: int


class NoteMade(TypedDict):
    """A value that a workflow made once for its prompt, encoded; the workflow waits for NoteKept.

    It also counts after its ticket was cancelled: a later ticket of the prompt gets it.
    """

    op: Literal["note"]
    ticket: int
    index: int
    version: str  # the same as in RunPrompt
    key: str
    value: bytes


class NoteKept(TypedDict):
    """A note is on disk."""

    op: Literal["kept"]
    ticket: int
    key: str
    value: bytes  # the valid one: the first under its key


class GroupMade(TypedDict):
    """A finished group, encoded, and its record for the ledger."""

    op: Literal["group"]
    ticket: int
    record: list[Any]  # the fields of GroupRecord
    newest_lineage: int
    group: bytes


class PromptScored(TypedDict):
    """The result of one prompt of an evaluation."""

    op: Literal["scored"]
    ticket: int
    rewards: list[float]  # of its trajectories
    num_tokens: int
    versions: list[str]  # of the weights that made its tokens
    stats: dict[str, float]  # means over its trajectories
    group: bytes  # encoded, if its completions are stored; else empty


class EndpointState(TypedDict):
    """A worker's view of an external pool has changed."""

    op: Literal["endpoint"]
    pool: str
    problem: str  # "" once the endpoint answers again


class LoopBlocked(TypedDict):
    """One call of the user's code blocks the worker; its place is "" once it has returned."""

    op: Literal["blocked"]
    place: str  # file:line, in function
    trace: str  # its stack


class NoGroup(TypedDict):
    """A permanently rejected prompt; or an exception, after which it is retried a few times.

    `unavailable`: an endpoint is gone; the service ends, and its next incarnation issues the prompt again.
    """

    op: Literal["rejected", "failed", "unavailable"]
    ticket: int
    reason: str  # a RejectReason
    error: str
    place: NotRequired[str]  # of an exception of user code, as in Raised
    trace: NotRequired[str]


Request = RunPrompt | NoteKept | CancelPrompt
Outcome = GroupMade | PromptScored | NoGroup

_LENGTH = struct.Struct(">I")
PR_SET_PDEATHSIG = 1
EXIT_GRACE_S = 2.0


def pack(frame: Mapping[str, Any]) -> bytes:
    data = encode(frame)
    return _LENGTH.pack(len(data)) + data


async def receive_frame(reader: asyncio.StreamReader) -> Any:
    """Return the next message, or None at the end of the pipe, even in the middle of a message."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def receive_frame_blocking(file: BinaryIO) -> dict[str, Any] | None:
    """Return the next message in a process without an event loop, as receive_frame does."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = file.read(length)
    return decode(data) if len(data) == length else None


def reserve_stdout() -> int:
    """Return a copy of standard output for messages; user code then prints to standard error."""
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return own


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, even if user code never looks at its pipe.

    Linux only.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


async def wait_for_exit(process: asyncio.subprocess.Process) -> int:
    """Return the exit code of a child that closed its pipe; after `EXIT_GRACE_S` the child is killed."""
    try:
        async with asyncio.timeout(EXIT_GRACE_S):
            return await process.wait()
    except TimeoutError:
        kill(process)
        return await process.wait()


def kill(process: asyncio.subprocess.Process) -> None:
    """Kill without `process.kill()`, which polls first and takes the exit code away from the event loop."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


async def open_stdin() -> asyncio.StreamReader:
    """Return standard input as a stream of this event loop."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


class PipeWriter:
    """Writes messages to a pipe, from any thread and without waiting, even while the event loop is blocked.

    Messages queue while the reader is slow. The other pipe reports a dead reader.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="pipe-writer")
        self._thread.start()

    def write(self, data: bytes) -> None:
        self._waiting.put(data)

    def close(self) -> None:
        """Wait a while for the queue to be written."""
        self._waiting.put(None)
        self._thread.join(EXIT_GRACE_S)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while (data := self._waiting.get()) is not None:
                left = memoryview(data)
                while left:
                    left = left[os.write(self._fd, left) :]
