"""One call of a tool in a separate process: limited in time, memory and files, without the job's secrets.

The process is `python -m hpc_rl.rollout.tool_call package.module:name`, with the keyword arguments as JSON on
its standard input. It keeps failures away from the rollout role; it does not shut the network off.
"""

import asyncio
import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from typing import Any

MAX_MEMORY_BYTES = 4 << 30
MAX_FILE_BYTES = 64 << 20
MAX_RESULT_CHARS = 8192
KEPT_VARIABLES = ("PATH", "PYTHONPATH", "HOME", "LANG", "LC_ALL", "VIRTUAL_ENV", "TMPDIR")


class ToolFailed(Exception):
    """A call without a result; the message is for the model, `frames` of the exception for the log."""

    def __init__(self, message: str, frames: str = "") -> None:
        super().__init__(message)
        self.frames = frames


async def call_tool(path: str, arguments: dict[str, Any], timeout_s: float) -> str:
    """Return the text of a tool's result. Raises ToolFailed."""
    environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory(prefix="hpc-rl-tool-") as folder:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hpc_rl.rollout.tool_call", path, str(timeout_s),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )  # fmt: skip
        try:
            asked = json.dumps(arguments).encode()
            output, _ = await asyncio.wait_for(process.communicate(asked), timeout_s)
        except TimeoutError:
            raise ToolFailed(f"it took more than {timeout_s:g} s") from None
        finally:
            # kill the tool's child processes too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    try:
        answer = json.loads(output.splitlines()[-1])
        result, error, frames = answer["result"], answer["error"], answer["frames"]
    except (ValueError, LookupError, TypeError):
        raise ToolFailed(f"it ended without a result (exit code {process.returncode})") from None
    if error:
        raise ToolFailed(str(error)[:MAX_RESULT_CHARS], str(frames)[-MAX_RESULT_CHARS:])
    return str(result)[:MAX_RESULT_CHARS]


def main(path: str, timeout_s: float) -> None:
    """Call the tool and print its result as one line of JSON."""
    seconds = int(timeout_s) + 1
    for limit, most in (
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    arguments = json.loads(sys.stdin.read())
    # the tool's output must not be taken for its result
    answer_fd = os.dup(1)
    os.dup2(2, 1)
    result, error, frames = "", "", ""
    try:
        module, _, name = path.partition(":")
        result = str(getattr(importlib.import_module(module), name)(**arguments))
    except (Exception, SystemExit) as failure:
        error = f"{type(failure).__name__}: {failure}"
        frames = "".join(traceback.format_tb(failure.__traceback__))
    outcome = {"result": result[:MAX_RESULT_CHARS], "error": error[:MAX_RESULT_CHARS], "frames": frames}
    with os.fdopen(answer_fd, "w") as answer:
        answer.write(json.dumps(outcome))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
