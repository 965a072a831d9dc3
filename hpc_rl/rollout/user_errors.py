"""Exceptions of the user's reward or workflow: their text, and the limit at which the role fails."""

import inspect
import logging
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpc_rl.config.snapshot import is_user_file
from hpc_rl.core.errors import DataUnusable, RoleFailed, UserCodeFailed
from hpc_rl.core.log import redact
from hpc_rl.rollout.batch_log.ledger import OF_USER_CODE, RejectReason

logger = logging.getLogger(__name__)
MAX_ERROR_CHARS = 400  # of an exception's message
MAX_SHOWN_CHARS = 600  # of the newest exception in status
MAX_TRACE_CHARS = 20_000
# bugs that a retry does not fix; a ValueError may concern one input only
MISTAKES = (NameError, AttributeError, TypeError, ImportError, SyntaxError, KeyError)
OF_REWARD = (RejectReason.REWARD_EXCEPTION, RejectReason.REWARD_TIMEOUT)
NO_FAULT = (RejectReason.STALE, RejectReason.WORKFLOW_NONE)


class Raised(NamedTuple):
    """An exception of user code."""

    text: str  # one line: kind, message and place
    place: str  # kind, and the user's file, line and function: the same for the same fault
    trace: str  # in Python's format

    @classmethod
    def from_error(cls, error: BaseException, called: Any = None) -> "Raised":
        """Describe an exception of `called`; if it has no frame, name the definition of `called`."""
        where = find_user_frame(error) or _find_definition(called)
        frames = traceback.extract_tb(error.__traceback__)
        if not where and frames:
            where = _format_place(frames[-1])
        kind = type(error).__name__
        where = f" ({where})" if where else ""
        shown = redact(str(error))[:MAX_ERROR_CHARS]
        text = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in shown)
        trace = redact("".join(traceback.format_exception(error)))
        return cls(f"{kind}: {text}{where}", f"{kind}{where}", trace[-MAX_TRACE_CHARS:])


def find_user_frame(error: BaseException) -> str:
    """Return `file:line, in function` of the innermost frame in the user's code, or ""."""
    return _find_user_place(traceback.extract_tb(error.__traceback__))


def find_place(stack: Sequence[traceback.FrameSummary]) -> str:
    """Return `file:line, in function` of the user's innermost frame, else of any; "" for no frame."""
    return _find_user_place(stack) or (_format_place(stack[-1]) if stack else "")


def _find_user_place(stack: Sequence[traceback.FrameSummary]) -> str:
    own = [frame for frame in stack if is_user_file(Path(frame.filename))]
    return _format_place(own[-1]) if own else ""


def _find_definition(function: Any) -> str:
    """Return `file:line, name` of a function in the user's code, or ""."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    file = Path(code.co_filename) if code else None
    return (
        f"{_shorten(file)}:{code.co_firstlineno}, {code.co_name}"
        if code and file and is_user_file(file)
        else ""
    )


def _format_place(frame: traceback.FrameSummary) -> str:
    return f"{_shorten(Path(frame.filename))}:{frame.lineno}, in {frame.name}"


def _shorten(file: Path) -> str:
    here = Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file.name)


class Faults:
    """The rejections of an incarnation: the newest, and whether all recent prompts were rejected.

    `most` limits the rejections in a row. Rejections without a fault are limited by the number of prompts.
    """

    def __init__(self, most: int, num_prompts: int) -> None:
        self.last_reason = ""
        self.last_error = ""
        self._most, self._num_prompts = most, num_prompts
        self._in_a_row = 0  # only rejections with a fault
        self._last_op = ""
        self._logged: set[str] = set()  # places

    def note(self, frame: Mapping[str, Any]) -> None:
        """Remember a worker's report on a prompt; log a traceback once for each place that raises."""
        self._last_op = frame["op"]
        self.last_error = str(frame.get("error") or self.last_error)[:MAX_SHOWN_CHARS]
        place = str(frame.get("place") or "")
        if place and place not in self._logged:
            self._logged.add(place)
            logger.warning(
                "user code failed (each place is shown once, later failures are only counted): %s\n%s",
                place,
                frame.get("trace"),
            )

    def count_rejection(self, reason: str, in_a_row: int, rejections: Counter[str]) -> RoleFailed | None:
        """Count a rejection, the latest in a row; return the error that ends the role, or None."""
        self.last_reason = reason
        self._in_a_row = 0 if in_a_row <= 1 else self._in_a_row
        self._in_a_row += reason not in NO_FAULT
        if self._in_a_row < self._most and in_a_row < max(self._most, self._num_prompts):
            return None
        counts = ", ".join(f"{name} {count}" for name, count in rejections.most_common())
        story = f"the last {in_a_row} prompts were rejected: {reason} (so far: {counts})"
        if reason not in OF_USER_CODE:
            return DataUnusable(story)
        what = "the reward" if reason in OF_REWARD else "the workflow"
        return UserCodeFailed(f"{what} fails: {self.last_error}; {story}" if self.last_error else story)

    def make_unscored_error(self, left_out: int) -> RoleFailed:
        """Return the error for an evaluation in which no prompt had a reward."""
        story = f"no held-out prompt could be scored, all {left_out} were left out"
        story += f"; the last exception: {self.last_error}" if self.last_error else ""
        # after an exception a server may come back; a rejection happens again
        return RoleFailed(story) if self._last_op == "failed" else UserCodeFailed(story)
