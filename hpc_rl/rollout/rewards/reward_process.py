"""The user's reward function in a separate process, with a time limit: both ends of the pipe.

Sync functions run one after the other in the main thread, where no event loop runs; async ones run
concurrently. The clock of a call starts when the process reports that the call starts. A call over its limit
costs the process: it reports the place of the call and is killed; a new process starts, and the other open
calls are repeated.
"""

import asyncio
import contextlib
import inspect
import itertools
import json
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from hpc_rl.config.load.stored import is_secret_variable
from hpc_rl.config.snapshot import is_user_file
from hpc_rl.core import log
from hpc_rl.core.errors import ConfigError, ExitCode, HpcRlError, RoleFailed
from hpc_rl.rollout import pipes
from hpc_rl.rollout.batch_log.ledger import RejectReason
from hpc_rl.rollout.rewards import Rejection, Score, import_object, parse_score
from hpc_rl.rollout.user_errors import Raised, find_place

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0  # the user's module may import large packages
MAX_DEATHS = 3  # a call that ran when this many processes exited counts as the cause
OUTPUT_BYTES, OUTPUT_BYTES_PER_S = 1 << 20, 1 << 10  # that reach the log at first, and per second after that
RESUME_BYTES = 1 << 14  # of room before output is passed on again, else each line would have two notices
CHUNK_BYTES = 1 << 16
IDLE_GRACE_S = 1.0  # added to the time limit, for the process to report the start of a call
LATE_GRACE_S = 1.0  # added to the time limit, for the process to report the place of a call


@dataclass
class _Call:
    frame: dict[str, Any]
    answer: asyncio.Future[list[float]]
    timer: asyncio.TimerHandle | None = None  # set while the call runs
    deaths: int = 0  # processes that ended while this call ran


class LimitedOutput:
    """Passes the output of user code on to the log, as much as a disk has room for.

    Each line begins with `reward| `, so that none looks like one of our records.
    """

    def __init__(self, write: Callable[[bytes], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._left, self._at = float(OUTPUT_BYTES), clock()
        self._left_out = 0
        self._line = b""  # beginning of an incomplete line

    def take(self, data: bytes) -> None:
        now = self._clock()
        self._left = min(OUTPUT_BYTES, self._left + (now - self._at) * OUTPUT_BYTES_PER_S)
        self._at = now
        if max(len(data), RESUME_BYTES if self._left_out else 0) > self._left:
            if not self._left_out:
                self._show("the reward writes too much: the log omits the next output")
            self._left_out += len(data)
            return
        if self._left_out:
            self._show(f"{self._left_out} bytes of output were omitted")
            self._left_out, self._line = 0, b""
        *whole, self._line = (self._line + data).split(b"\n")
        if len(self._line) > CHUNK_BYTES:
            whole, self._line = [*whole, self._line], b""
        for line in whole:
            self._show(line.decode(errors="backslashreplace"))

    def close(self) -> None:
        if self._line:
            self._show(self._line.decode(errors="backslashreplace"))
        if self._left_out:
            self._show(f"{self._left_out} bytes of output were omitted")

    def _show(self, line: str) -> None:
        data = f"reward| {log.escape_controls(log.redact(line))}\n".encode(errors="backslashreplace")
        self._left -= len(data)
        self._write(data)


class RewardProcess:
    """The executor's end: `path` names the function, or with `options` a factory that takes them.

    `argv` starts the other end, None for this module.
    """

    def __init__(
        self,
        path: str,
        timeout_s: float,
        argv: list[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.timeout_s = timeout_s
        self.num_restarts = 0
        self.batched = False  # the function takes all completions of a prompt at once
        self._argv = argv or [sys.executable, "-m", __spec__.name, path, f"{timeout_s}", json.dumps(options)]
        self._process: asyncio.subprocess.Process | None = None
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count()
        self._reading: asyncio.Task[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None  # set while calls are open and none runs
        self._printing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start the process. Raises ConfigError for a path that can't be imported, RoleFailed otherwise."""
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._argv, stdin=pipe, stdout=pipe, stderr=pipe
        )
        assert self._process.stdout and self._process.stderr
        printing = asyncio.create_task(_forward_output(self._process.stderr))
        self._printing.add(printing)
        printing.add_done_callback(self._printing.discard)
        first, answer = None, f"no answer within {START_TIMEOUT_S:.0f} s"
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                first = await pipes.receive_frame(self._process.stdout)
                if first is None or "error" in first:  # the process ends, and its exit code gives the reason
                    answer = f"it ended with code {await self._process.wait()}"
        except TimeoutError:
            pass
        if first is None or "error" in first:
            await self._kill()
            answer = first["error"] if first else answer
            if self._process.returncode == ExitCode.BAD_CONFIG:
                raise ConfigError(answer)
            raise RoleFailed(f"the process of reward {self.path!r} did not start: {answer}")
        self.batched = bool(first.get("batched"))
        self._reading = asyncio.create_task(self._receive_answers(self._process), name="reward-process")
        for call in self._calls.values():
            self._send(call)

    async def rewards(self, prompt: Any, completions: list[str], columns: dict[str, Any]) -> list[float]:
        """Call the function for the completions of a prompt: once if it is batched. Raises Rejection."""
        if self.batched:
            return await self._ask(prompt, completions, columns)
        calls = (self._ask(prompt, [completion], columns) for completion in completions)
        return [completion for scores in await asyncio.gather(*calls) for completion in scores]

    async def reward(self, prompt: Any, completion: str, columns: dict[str, Any]) -> float:
        """Call the function for one completion. Raises Rejection."""
        return (await self._ask(prompt, [completion], columns))[0]

    async def _ask(self, prompt: Any, completions: list[str], columns: dict[str, Any]) -> list[float]:
        number = next(self._ids)
        frame = {"id": number, "prompt": prompt, "completions": completions, "columns": columns}
        call = _Call(frame, asyncio.get_running_loop().create_future())
        self._calls[number] = call
        self._send(call)
        try:
            return await call.answer
        finally:
            self._calls.pop(number, None)
            if call.timer:
                call.timer.cancel()

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})  # it may be in the middle of a restart
        await self._kill()
        await self._finish_printing()

    def _send(self, call: _Call) -> None:
        process = self._process
        stdin = process.stdin if process is not None and process.returncode is None else None
        # otherwise the restart sends it
        if stdin is not None and not stdin.is_closing():
            stdin.write(pipes.pack(call.frame))
            if self._idle_timer is None:
                self._watch()

    async def _receive_answers(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout
        while (frame := await pipes.receive_frame(process.stdout)) is not None:
            call = self._calls.get(frame["id"])
            if call is None or call.answer.done():
                continue
            if "started" in frame:
                delay_s = self.timeout_s + LATE_GRACE_S
                call.timer = asyncio.get_running_loop().call_later(delay_s, self._expire, frame["id"])
            elif "late" in frame:
                self._expire(frame["id"], *frame["late"])
                return  # the process is killed
            elif "error" in frame:
                call.answer.set_exception(Rejection(RejectReason.REWARD_EXCEPTION, *frame["error"]))
            else:
                call.answer.set_result([Score.of(value, parts) for value, parts in frame["scores"]])
            self._watch()
        await self._restart(process)

    def _watch(self) -> None:
        """Limit the wait of calls while none runs: user code may read the pipe, as after a fork."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = None
        open_calls = [number for number, call in self._calls.items() if not call.answer.done()]
        if open_calls and all(self._calls[number].timer is None for number in open_calls):
            delay_s = self.timeout_s + IDLE_GRACE_S
            self._idle_timer = asyncio.get_running_loop().call_later(delay_s, self._expire, open_calls[0])

    def _expire(self, number: int, place: str = "", trace: str = "") -> None:
        """End a call, with the process; `place` and `trace` locate it, if known."""
        self._idle_timer = None
        call = self._calls.get(number)
        if call is None or call.answer.done():
            self._watch()
            return
        what = "took more than" if call.timer else "was not started within"
        where = f": it was at {place}" if place else ""
        message = f"the reward {what} {self.timeout_s:g} s (rollout.reward_timeout_s){where}"
        logger.warning("%s, so the reward process is killed and started again", message)
        known_as = f"reward over its time limit ({place})" if place else ""
        call.answer.set_exception(Rejection(RejectReason.REWARD_TIMEOUT, message, known_as, trace))
        if self._process is None:
            return
        pipes.kill(self._process)
        # not at the end of the pipe: a child of the process may keep that open
        if self._reading is not None:
            self._reading.cancel()
        self._reading = asyncio.create_task(self._restart(self._process), name="reward-process")

    async def _restart(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        self.num_restarts += 1
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        for call in self._calls.values():
            if call.timer is None:
                continue
            call.timer.cancel()
            call.timer = None
            call.deaths += 1
            if call.deaths >= MAX_DEATHS and not call.answer.done():
                call.answer.set_exception(
                    Rejection(RejectReason.REWARD_EXCEPTION, f"the reward process ended with code {code}")
                )
        for number in [number for number, call in self._calls.items() if call.answer.done()]:
            del self._calls[number]
        try:
            await self.start()
        except HpcRlError as error:
            logger.error("%s", error)
            await self._finish_printing()
            # the executor worker can't work without it; the worker's parent starts another
            os._exit(error.exit_code)

    async def _kill(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            pipes.kill(process)
            await process.wait()

    async def _finish_printing(self) -> None:
        """Let its last output reach the log; a child that it left running may keep the pipe open."""
        if self._printing:
            await asyncio.wait(self._printing, timeout=1.0)
        for task in self._printing:
            task.cancel()


async def _forward_output(printed: asyncio.StreamReader) -> None:
    output = LimitedOutput(partial(os.write, 2))
    try:
        while data := await printed.read(CHUNK_BYTES):
            output.take(data)
    finally:
        output.close()


class CallWatch(threading.Thread):
    """Reports calls over the time limit, with their stacks at that moment.

    `tell` gets the number of a call, its place and its stack, in the thread of the watch.
    """

    def __init__(self, timeout_s: float, tell: Callable[[int, str, str], None]) -> None:
        super().__init__(daemon=True, name="call-watch")
        self._timeout_s, self._tell = timeout_s, tell
        self._main = threading.main_thread().ident or 0
        self._calls: dict[int, tuple[float, asyncio.Task[Any] | None]] = {}  # the oldest first
        self._changed = threading.Condition()

    def begin(self, number: int, task: asyncio.Task[Any] | None = None) -> None:
        """Watch a call: the task of an async function, or else the main thread."""
        with self._changed:
            self._calls[number] = (time.monotonic() + self._timeout_s, task)
            self._changed.notify()

    def end(self, number: int) -> None:
        with self._changed:
            self._calls.pop(number, None)

    def run(self) -> None:
        while True:
            with self._changed:
                while not self._calls:
                    self._changed.wait()
                number, (deadline, task) = next(iter(self._calls.items()))
                left_s = deadline - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                    continue
                del self._calls[number]
            stack = self._extract_stack(task)
            self._tell(number, find_place(stack), log.redact("".join(traceback.format_list(stack))))

    def _extract_stack(self, task: asyncio.Task[Any] | None) -> list[traceback.FrameSummary]:
        frame = sys._current_frames().get(self._main)
        now = [*traceback.extract_stack(frame)] if frame else []
        # a waiting task has no frame in the main thread, unless another one blocks that
        if task is None or any(is_user_file(Path(one.filename)) for one in now):
            return now
        return extract_awaiting_stack(task)


def extract_awaiting_stack(task: asyncio.Task[Any]) -> list[traceback.FrameSummary]:
    """Return the stack of a waiting task, from its own coroutine to the innermost awaited one."""
    frames: list[tuple[FrameType, int]] = []
    waits_for: Any = task.get_coro()
    while (frame := getattr(waits_for, "cr_frame", None)) is not None:
        frames.append((frame, frame.f_lineno))
        waits_for = getattr(waits_for, "cr_await", None)
    return [*traceback.StackSummary.extract(iter(frames))]


def serve(path: str, timeout_s: float, options: Mapping[str, Any] | None = None) -> None:
    """Answer calls until the input ends. Raises ConfigError for a path that can't be imported."""
    out = pipes.reserve_stdout()
    writing = threading.Lock()
    own = os.getpid()
    os.register_at_fork(after_in_child=pipes.die_with_parent)

    def answer(frame: dict[str, Any]) -> None:
        if os.getpid() != own:  # user code forked, and returned in the child too
            os._exit(0)
        with writing:
            data = memoryview(pipes.pack(frame))
            while data:
                data = data[os.write(out, data) :]

    try:
        function = import_object("rollout.reward_fn", path)
        if options is not None:
            function = function(**options)
    except Exception as error:  # the exception of the user's module becomes the reason for the trial's end
        reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        answer({"error": reason})
        raise
    answer({"ready": True, "batched": is_batched(function)})
    watch = CallWatch(timeout_s, lambda number, *late: answer({"id": number, "late": late}))
    watch.start()
    calls = _Calls(function, answer, watch)
    loop = asyncio.new_event_loop()
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))

    def listen() -> None:
        while (frame := pipes.receive_frame_blocking(sys.stdin.buffer)) is not None:
            if is_async:
                asyncio.run_coroutine_threadsafe(calls.call_async(frame), loop)
            else:
                waiting.put(frame)
        os._exit(0)

    threading.Thread(target=listen, daemon=True, name="calls").start()
    if is_async:
        loop.run_forever()
    # The result of a sync function may also be awaitable.
    threading.Thread(target=loop.run_forever, daemon=True, name="awaiting").start()
    while True:
        if (unfinished := calls.call(waiting.get())) is not None:
            asyncio.run_coroutine_threadsafe(unfinished, loop)


class _Calls:
    """The calls of a reward function; each answer has the number of its call."""

    def __init__(
        self, function: Callable[..., Any], answer: Callable[[dict[str, Any]], None], watch: CallWatch
    ) -> None:
        self._function, self._answer, self._watch = function, answer, watch

    def call(self, frame: dict[str, Any]) -> Coroutine[Any, Any, None] | None:
        """Make a call. If the function returned an awaitable, return the coroutine that finishes the call."""
        self._answer({"id": frame["id"], "started": True})
        self._watch.begin(frame["id"])
        value = None
        with self._answer_errors(frame):
            value = call_function(self._function, frame["prompt"], frame["completions"], frame["columns"])
            if not inspect.isawaitable(value):
                self._send(frame, value)
        return self._finish(frame, value) if inspect.isawaitable(value) else None

    async def call_async(self, frame: dict[str, Any]) -> None:
        self._answer({"id": frame["id"], "started": True})
        await self._finish(
            frame, call_function(self._function, frame["prompt"], frame["completions"], frame["columns"])
        )

    async def _finish(self, frame: dict[str, Any], value: Awaitable[Any]) -> None:
        self._watch.begin(frame["id"], asyncio.current_task())
        with self._answer_errors(frame):
            self._send(frame, await value)

    def _send(self, frame: dict[str, Any], value: Any) -> None:
        scores = parse_scores(value, is_batched(self._function), len(frame["completions"]))
        self._answer({"id": frame["id"], "scores": [(float(score), dict(score.parts)) for score in scores]})

    @contextlib.contextmanager
    def _answer_errors(self, frame: dict[str, Any]) -> Iterator[None]:
        """Answer with an exception, if one is raised."""
        try:
            yield
        except Rejection as error:
            self._answer({"id": frame["id"], "error": [error.message]})
        except Exception as error:  # any exception of user code is the outcome of this call
            self._answer({"id": frame["id"], "error": list(Raised.from_error(error, self._function))})
        finally:
            self._watch.end(frame["id"])


def is_batched(function: Callable[..., Any]) -> bool:
    """Return whether a reward function takes all completions of a prompt at once."""
    return bool(getattr(function, "batched", False))


def call_function(
    function: Callable[..., Any], prompt: Any, completions: list[str], columns: dict[str, Any]
) -> Any:
    """Call a reward function, with one completion if it is not batched; return its result.

    The result may be awaitable; `parse_scores` reads the final value.
    """
    return function(prompt, completions if is_batched(function) else completions[0], **columns)


def parse_scores(value: Any, batched: bool, num: int) -> list[Score]:
    """Return the scores in the result of a reward function. Raises Rejection for anything else."""
    return [parse_score(entry) for entry in (_check_list(value, num) if batched else [value])]


def _check_list(value: Any, num: int) -> list[Any]:
    """Return the result of a batched function. Raises Rejection unless it has `num` entries."""
    try:
        entries = list(value)
    except TypeError:
        entries = []
    if len(entries) != num or isinstance(value, str | bytes | Mapping):
        what = f"the batched reward returned {value!r:.60} ({type(value).__name__}) for {num} completions"
        message = f"{what}; allowed: a list of {num} rewards"
        raise Rejection(RejectReason.REWARD_EXCEPTION, message)
    return entries


def main() -> int:
    pipes.die_with_parent()
    log.configure("reward", secrets=[os.environ[name] for name in os.environ if is_secret_variable(name)])
    try:
        serve(sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return ExitCode.BAD_CONFIG
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
