"""Check the rewards and the workflow of a configuration, in a separate process, before it is submitted.

Reads the configuration as JSON from standard input. It prints each attempt (trials/user_code.py has the kinds
of lines) and each finding at once, as lines of JSON to standard output, because user code may end the process
or never return. The stack follows. It imports the same modules as the job, and calls each reward once, with
the first row.
"""

import asyncio
import faulthandler
import inspect
import json
import os
import sys
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

from hpc_rl.config.load.stored import from_dict
from hpc_rl.config.options.experiment import GRPOConfig
from hpc_rl.config.row_shapes import load_named_rows
from hpc_rl.core.errors import ConfigError
from hpc_rl.rollout import pipes
from hpc_rl.rollout.rewards import Rejection, import_object
from hpc_rl.rollout.rewards.reward_process import call_function, is_batched, parse_scores
from hpc_rl.rollout.user_errors import MISTAKES, Raised
from hpc_rl.rollout.workflow import make_reward_arguments
from hpc_rl.rollout.workflows import load_workflow
from hpc_rl.trials.user_code import CALLS, DONE, IMPORTS, START_S

COMPLETION = "The answer is 1."


def check_user_code(config: GRPOConfig) -> Iterator[tuple[str, str]]:
    """Yield each attempt, and (`refusals` or `notes`, text) for each problem in the user's code."""
    rollout = config.rollout
    if ":" in rollout.workflow:
        yield IMPORTS, f"rollout.workflow {rollout.workflow}"
        try:
            run = load_workflow(config)
            inspect.signature(run).bind({}, object())
            if inspect.isfunction(run) and not inspect.iscoroutinefunction(run):
                yield (
                    "notes",
                    f"rollout.workflow {rollout.workflow} is not `async def`: the job awaits its result",
                )
        except ConfigError as error:
            yield "refusals", str(error)
        except TypeError as error:
            yield "refusals", f"rollout.workflow {rollout.workflow} must be run(prompt, generate): {error}."
        except Exception as error:  # raised by the user's class
            yield "refusals", f"rollout.workflow {rollout.workflow} can't be made: {_describe_error(error)}"
    datasets = {"train_dataset": config.train_dataset, "valid_dataset": config.valid_dataset}
    read = {
        name: load_named_rows(dataset.path, dataset.columns)
        for name, dataset in datasets.items()
        if dataset and dataset.path
    }
    first = {name: rows[0] for name, rows in read.items() if rows}
    for path in rollout.reward_functions:
        if ":" in path:
            yield from _check_reward(path, first)


def _check_reward(path: str, first: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the problems of a reward with the first row of each dataset."""
    yield IMPORTS, f"rollout.reward_fn {path}"
    try:
        function = import_object("rollout.reward_fn", path)
    except (ConfigError, OSError) as error:
        yield "refusals", str(error)
        return
    if not callable(function):
        yield "refusals", f"rollout.reward_fn {path} is {_describe_kind(function)}, not a function."
        return
    for name, row in first.items():
        prompt, columns = make_reward_arguments(row)
        try:
            signature = inspect.signature(function)
            signature.bind(prompt, [], **columns)
        except TypeError as error:
            takes = "completions" if is_batched(function) else "completion"
            given = ", ".join(["prompt", takes, *columns])
            problem = f"{path} can't take the arguments ({given}) of rows of {name}: {error}."
            form = f"A reward is reward(prompt, {takes}, **columns); this is {_describe_function(function)}."
            hint = ""
            if not is_batched(function) and "completions" in signature.parameters:
                name = path.partition(":")[2]
                hint = (
                    " To score all completions of a prompt at once, take (prompt, completions, **columns), "
                    f"return a list, and write `{name}.batched = True` below the function."
                )
            yield "refusals", f"rollout.reward_fn {problem} {form}{hint}"
            return
        except ValueError:  # a function without a signature
            pass
    if not first:
        return
    prompt, columns = make_reward_arguments(next(iter(first.values())))
    completions = [COMPLETION] * (2 if is_batched(function) else 1)
    what = f"rollout.reward_fn {path}, for the first row and the completion {COMPLETION!r},"
    yield CALLS, what
    try:
        value = call_function(function, prompt, completions, columns)
        value = asyncio.run(_await_result(value)) if inspect.isawaitable(value) else value
        parse_scores(value, is_batched(function), len(completions))
    except Rejection as rejection:
        yield "refusals", f"{what} does not return a reward: {rejection.message}."
    except (*MISTAKES, SystemExit, KeyboardInterrupt) as error:
        yield "refusals", f"{what} raises {_describe_error(error)}"
    except Exception as error:
        yield "notes", f"{what} raises {_describe_error(error)}: the job rejects a prompt where that happens"


async def _await_result(value: Awaitable[Any]) -> Any:
    return await value


def _describe_kind(value: Any) -> str:
    shown = repr(value)
    return f"{shown if len(shown) < 40 else 'an object'} of type {type(value).__name__}"


def _describe_error(error: BaseException) -> str:
    return Raised.from_error(error).text


def _describe_function(function: Any) -> str:
    """Return the signature of a function, and its place."""
    shown = f"{getattr(function, '__name__', function)}{inspect.signature(function)}"
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{shown} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else shown


def main() -> int:
    out = os.fdopen(pipes.reserve_stdout(), "w", buffering=1)
    faulthandler.enable(out)
    sys.dont_write_bytecode = True  # a check writes nothing next to the user's files
    config = from_dict(json.load(sys.stdin))
    assert isinstance(config, GRPOConfig)
    limits_s = {IMPORTS: START_S, CALLS: config.rollout.reward_timeout_s}
    for kind, text in check_user_code(config):
        print(json.dumps([kind, text]), file=out)
        if kind in limits_s:
            faulthandler.dump_traceback_later(limits_s[kind], exit=True, file=out)
    print(json.dumps([DONE, ""]), file=out)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # User code may have left threads behind.
    os._exit(code)
