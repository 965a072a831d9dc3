"""A watch on the event loop of a worker: reports a call that blocks it, with its place.

User code that blocks, such as time.sleep in an async workflow, stops all prompts of the worker. A busy loop
is not blocked: its calls are many and short. So the watch reports a call only if it sees the same one in
several looks in a row, each a second of this thread's own time after the previous one.
"""

import asyncio
import faulthandler
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType

from hpc_rl.core.log import redact
from hpc_rl.rollout.user_errors import find_place

LOOK_S = 1.0
MIN_LOOKS = 5  # looks that see the same call
# A call that holds the lock of the interpreter also stops this thread. After this time Python itself writes
# all stacks to standard error.
STACKS_AFTER_S = 60.0

# place (file:line, in function) and stack of the blocking call; both empty after its return
Tell = Callable[[str, str], None]


class LoopWatch(threading.Thread):
    """Watches the event loop that runs in this thread. `tell` is called in the thread of the watch."""

    def __init__(self, tell: Tell, look_s: float = LOOK_S) -> None:
        super().__init__(daemon=True, name="loop-watch")
        self._watched = threading.get_ident()
        self._tell, self._look_s = tell, look_s
        self._stopping = threading.Event()

    def run(self) -> None:
        last: FrameType | None = None
        num_looks, reported = 0, False
        while not self._stopping.wait(self._look_s):
            faulthandler.dump_traceback_later(STACKS_AFTER_S, exit=False)
            innermost = sys._current_frames().get(self._watched)
            call = _find_loop_call(innermost)
            if call is None or call is not last:
                if reported:
                    self._tell("", "")
                last, num_looks, reported = call, 0, False
                continue
            num_looks += 1
            if num_looks >= MIN_LOOKS and not reported and innermost is not None:
                stack = traceback.extract_stack(innermost)
                own = stack[_count_frames(call) :]
                self._tell(find_place(own), redact("".join(traceback.format_list(own))))
                reported = True
        faulthandler.cancel_dump_traceback_later()

    def stop(self) -> None:
        self._stopping.set()


def _find_loop_call(frame: FrameType | None) -> FrameType | None:
    """Return the frame in which the event loop runs a callback; None while it runs none."""
    while frame is not None:
        if frame.f_code is asyncio.Handle._run.__code__:
            return frame
        frame = frame.f_back
    return None


def _count_frames(frame: FrameType) -> int:
    """Return how many frames lead to one, itself included."""
    depth, outer = 1, frame.f_back
    while outer is not None:
        depth, outer = depth + 1, outer.f_back
    return depth
