"""Agent functions: their import, which all episodes share, and one call."""

import asyncio
import contextlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpc_rl.config.snapshot import is_user_file
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.rollout.rewards import import_object
from hpc_rl.rollout.user_errors import Raised

OPTION = "rollout.workflow_args"
MAX_RESULT_BYTES = 1 << 20
# the variables of an episode, as long as there is none: a module may make its client at its import
PLACEHOLDERS = {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1", "OPENAI_API_KEY": "no-episode"}


class AgentFunction:
    """The agent that an import path names: a function, or the `run` of an object or a class.

    Raises ConfigError if it can't be imported, or can't be called.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        with _watch_variables() as read:
            self._function = self._import()
        # then each episode imports the user's modules again, with its own variables
        self._reads_variables = bool(read)

    def _import(self) -> Callable[..., Any]:
        found = import_object(OPTION, self._path)
        if isinstance(found, type):
            found = found()
        function = getattr(found, "run", found)
        if not callable(function):
            why = f"is {type(found).__name__}; an agent is a function, or has a method run(row)"
            raise ConfigError(Refusal(option=OPTION, value=repr(self._path), kind=Kind.FILE, why=why))
        return function

    def _import_again(self) -> None:
        """Import the user's modules again; installed packages stay."""
        top = self._path.partition(":")[0].partition(".")[0]
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            is_own = name.partition(".")[0] == top and top != "hpc_rl"
            if name != "__main__" and (is_own or (file and is_user_file(Path(file)))):
                del sys.modules[name]
        self._function = self._import()

    def call(self, row: dict[str, Any], options: dict[str, str]) -> str:
        """Call the agent in its episode; return `{"value"}` or `{"error": fields of Raised}` as JSON.

        The function gets the options for which it has parameters.
        """
        try:
            if self._reads_variables:
                self._import_again()
            known = inspect.signature(self._function).parameters
            takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
            given = {name: one for name, one in options.items() if takes_all or name in known}
            value = self._function(row, **given)
            if inspect.isawaitable(value):
                value = asyncio.run(_wait_for(value))
            text = json.dumps({"value": value}, default=_convert_number)
            if len(text) > MAX_RESULT_BYTES:
                raise ValueError(
                    f"the agent returned {len(text)} characters; allowed are at most {MAX_RESULT_BYTES}"
                )
            return text
        except (Exception, SystemExit) as error:
            return json.dumps({"error": list(Raised.from_error(error, self._function))})


@contextlib.contextmanager
def _watch_variables() -> Iterator[set[str]]:
    """Set placeholders for the variables of an episode; yield the names of variables that are read."""
    read: set[str] = set()
    names = {os.fsencode(name): name for name in PLACEHOLDERS}

    class Watched(dict[bytes, bytes]):
        def __getitem__(self, key: bytes) -> bytes:
            if key in names:
                read.add(names[key])
            return super().__getitem__(key)

    before = {name: os.environ.get(name) for name in PLACEHOLDERS}
    os.environ.update(PLACEHOLDERS)
    environ: Any = os.environ
    environ._data = Watched(environ._data)
    try:
        yield read
    finally:
        environ._data = dict(environ._data)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _convert_number(value: Any) -> float:
    """Return a number of another type, as NumPy's. Raises TypeError for other values."""
    try:
        return float(value)
    except (TypeError, ValueError):
        allowed = "a number, a dict of numbers with `reward`, a text, or None"
        kind = type(value).__name__
        raise TypeError(f"the agent returned {value!r:.60} ({kind}); allowed: {allowed}") from None


async def _wait_for(value: Any) -> Any:
    return await value
