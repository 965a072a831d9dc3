"""Calls the user's callbacks on rank 0. Their exceptions are logged and counted; training continues."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_rl.core.callbacks import POINTS, Event
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.core.trial import Attempt
from hpc_rl.rollout.rewards import import_object
from hpc_rl.rollout.user_errors import Raised

logger = logging.getLogger(__name__)
OPTION = "callbacks"
DOING = "callback"  # activity of the trainer: with a space and the name of the callback
ERRORS, LAST_ERROR = "callback_errors", "callback_error"  # metrics of a step


def create_callback(path: str) -> Any:
    """Return a new object of the class `package.module:Class`.

    Raises ConfigError, with the place of an error in the user's code.
    """

    def refuse(why: str) -> ConfigError:
        return ConfigError(Refusal(option=OPTION, value=path, kind=Kind.FILE, why=why))

    made = import_object(OPTION, path)
    if not callable(made):
        raise refuse("is not a class")
    try:
        one = made()
    except (Exception, SystemExit) as error:
        raised = Raised.from_error(error, getattr(made, "__init__", made))
        raise refuse(f"can't be created without arguments: {raised.text}") from error
    known = [point for point in POINTS if callable(getattr(one, point, None))]
    if not known:
        raise refuse(f"has none of the methods {', '.join(POINTS)}")
    for point in known:
        method = getattr(one, point)
        if inspect.iscoroutinefunction(method):
            raise refuse(f"has an `async def {point}`, which nothing awaits: write `def {point}`")
        try:
            inspect.signature(method).bind(object())
        except TypeError as error:
            use = f"define it as `def {point}(self, event)`"
            raise refuse(
                f"has a method {point} that can't be called with one event: {error}; {use}"
            ) from error
    return one


class Callbacks:
    """The callbacks of a trainer incarnation. Rank 0 only.

    `note` gets the activity and its step, for the supervisor: the trainer of a callback that hangs is ended,
    and the reason has the callback's name.
    """

    def __init__(self, paths: Sequence[str], attempt: Attempt, note: Callable[[str, int], object]) -> None:
        self._objects = [(path, create_callback(path)) for path in paths]
        self._attempt, self._note = attempt, note
        self.num_errors = 0
        self.last_error = ""
        self._logged: set[tuple[str, str]] = set()  # callback and place

    def call(
        self,
        point: str,
        step: int,
        metrics: Mapping[str, Any] | None = None,
        *,
        total_steps: int | None = None,
        path: Path | None = None,
        is_done: bool = False,
    ) -> None:
        """Call a method of every callback that has it."""
        event = Event(
            step=step,
            metrics=dict(metrics or {}),
            total_steps=total_steps,
            trial_dir=self._attempt.trial.dir,
            path=path,
            is_done=is_done,
            job_id=self._attempt.job_id,
        )
        for name, one in self._objects:
            method = getattr(one, point, None)
            if method is None:
                continue
            self._note(f"{DOING} {name}", step)
            try:
                method(event)
            except (Exception, SystemExit) as error:
                self._report(name, point, step, error)

    def list_metrics(self) -> dict[str, int | str]:
        """Return what a step's line has of errors; nothing without one."""
        return {ERRORS: self.num_errors, LAST_ERROR: self.last_error} if self.num_errors else {}

    def _report(self, name: str, point: str, step: int, error: BaseException) -> None:
        raised = Raised.from_error(error)
        self.num_errors += 1
        self.last_error = f"{point} of {name} at step {step} raised {raised.text}"
        known = (name, raised.place)
        logger.error("CALLBACK FAILED: %s", self.last_error)
        if known not in self._logged:  # the traceback once for each place
            self._logged.add(known)
            logger.error("%s", raised.trace)
