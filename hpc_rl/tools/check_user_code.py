"""Check the user's rewards, workflow, algorithm and callbacks in a separate process, before a submission.

Reads the configuration as JSON from standard input. It prints each attempt (trials/user_code.py has the kinds
of lines) and each finding at once, as lines of JSON to standard output, because user code may end the process
or never return. The stack follows. It imports the same modules as the job, calls each reward once, with the
first row, each part of a teacher's reward and each method of a callback with an example, and each function of
the algorithm with made-up rows.
"""

import asyncio
import faulthandler
import inspect
import json
import os
import sys
from collections.abc import Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hpc_rl.config.algorithm_defaults import list_algorithms
from hpc_rl.config.load.stored import from_dict
from hpc_rl.config.options.experiment import ABSENT, Config, GRPOConfig, get_value, list_datasets
from hpc_rl.config.row_shapes import load_named_rows
from hpc_rl.core.callbacks import POINTS, Event
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal, make_note
from hpc_rl.rollout import pipes
from hpc_rl.rollout.rewards import Rejection, import_object
from hpc_rl.rollout.rewards.reward_process import call_function, is_batched, parse_scores
from hpc_rl.rollout.teacher.reward import Lesson, compute_values, load_parts
from hpc_rl.rollout.user_errors import MISTAKES, Raised
from hpc_rl.rollout.workflow import make_reward_arguments
from hpc_rl.rollout.workflows import load_workflow
from hpc_rl.trainers.callbacks import create_callback
from hpc_rl.trials.user_code import (
    CALLBACKS,
    CALLS,
    DONE,
    FOUND,
    IMPORTS,
    REWARD_PARTS,
    START_S,
    find_call_limit_s,
    find_reward_parts,
    find_workflow_code,
)

Loaded = TypeVar("Loaded")
COMPLETION = "The answer is 1."
EXAMPLE_LESSON = Lesson(
    baseline=0.25, taught=0.75, teaching="Count first.", num_tokens=4, leaks=False, has_answer=True
)
EXAMPLES = {  # point -> metrics of the example
    "on_step": {"step": 1, "reward": 0.5, "loss": 0.1, "step_s": 1.0},
    "on_evaluation": {"eval_reward": 0.5, "eval_loss": 0.1},
}


@dataclass(frozen=True)
class Attempt:
    """The import or the call of an object that an option names."""

    kind: str
    option: str
    value: str


def check_user_code(config: Config) -> Iterator[Attempt | Refusal]:
    """Yield each attempt, and the problems in the user's code."""
    if isinstance(config, GRPOConfig):
        yield from _check_completions_code(config)
    for path in config.callbacks:
        yield from _check_callback(path)


def _check_callback(path: str) -> Iterator[Attempt | Refusal]:
    """Yield the problems of a callback: each of its methods is called with an example."""
    one = yield from _load_code(CALLBACKS, path, lambda: create_callback(path))
    if one is None:
        return
    here = Path.cwd()
    for point in POINTS:
        method = getattr(one, point, None)
        if method is None:
            continue
        event = Event(
            step=1, metrics=EXAMPLES.get(point, {}), total_steps=1, trial_dir=here, path=here, is_check=True
        )
        yield Attempt(CALLS, CALLBACKS, path)
        try:
            method(event)
        except (Exception, SystemExit) as error:
            why = f", called as {point}(event) with event.is_check, raises {_describe_error(error)}"
            yield Refusal(option=CALLBACKS, value=path, kind=Kind.FILE, why=why)


def _check_completions_code(config: GRPOConfig) -> Iterator[Attempt | Refusal]:
    rollout = config.rollout
    option, value = find_workflow_code(config)
    if ":" in value:
        refuse = partial(Refusal, option=option, value=value, kind=Kind.FILE)
        yield Attempt(IMPORTS, option, value)
        try:
            run = load_workflow(config)
            inspect.signature(run).bind({}, object())
            if inspect.isfunction(run) and not inspect.iscoroutinefunction(run):
                yield refuse(why="is not `async def`, but the job awaits its result", is_note=True)
        except ConfigError as error:
            yield from error.refusals or [refuse(why=f": {error}")]
        except TypeError as error:
            yield refuse(why=f"must accept the call run(prompt, generate): {error}")
        except Exception as error:  # raised by the user's class
            yield refuse(why=f"can't be created, because it raises {_describe_error(error)}")
    for option, one in list_algorithms(config):
        if ":" in one.actor.algorithm:
            yield from _check_algorithm(one, option)
    read = {
        name: load_named_rows(dataset.path, dataset.columns)
        for name, dataset in list_datasets(config)
        if dataset.path
    }
    first = {name: rows[0] for name, rows in read.items() if rows}
    for path in rollout.reward_functions:
        if ":" in path:
            yield from _check_reward(path, first)
    for path in find_reward_parts(config):
        yield from _check_reward_part(path)


def _check_algorithm(config: GRPOConfig, option: str) -> Iterator[Attempt | Refusal]:
    """Yield the problems of an algorithm and its options, and call its functions once."""
    name = config.actor.algorithm
    yield Attempt(IMPORTS, option, name)
    from hpc_rl.trainers.algorithm_checks import try_algorithm  # imports torch
    from hpc_rl.trainers.algorithm_options import load_algorithm

    try:
        algorithm, options = load_algorithm(config, option)
    except ConfigError as error:
        yield from error.refusals
        return
    for section in sorted(algorithm.needs):
        if get_value(config, section) in (ABSENT, None):
            why = f"needs a section {section}"
            yield Refusal(option=option, value=name, kind=Kind.MISSING, why=why, related=(section,))
    try:
        try_algorithm(algorithm, options, name, option)
    except ConfigError as error:
        yield from error.refusals
    except Exception as error:  # raised by the user's functions
        why = f"raises {_describe_error(error)} when it is tried with made-up rows: the job may fail there"
        yield make_note(option, why, Kind.FILE, value=name, is_warning=True)


def _check_reward(path: str, first: dict[str, dict[str, Any]]) -> Iterator[Attempt | Refusal]:
    """Yield the problems of a reward with the first row of each dataset."""
    option = "rollout.reward_fn"
    refuse = partial(Refusal, option=option, value=path, kind=Kind.FILE)
    function = yield from _load_code(option, path, lambda: _import_reward(option, path))
    if function is None:
        return
    for name, row in first.items():
        prompt, columns = make_reward_arguments(row)
        try:
            signature = inspect.signature(function)
            signature.bind(prompt, [], **columns)
        except TypeError as error:
            takes = "completions" if is_batched(function) else "completion"
            given = ", ".join(["prompt", takes, *columns])
            why = f"can't take the arguments ({given}) of rows of {name}: {error}"
            form = f"a reward is reward(prompt, {takes}, **columns); this is {_describe_function(function)}"
            hint = ""
            if not is_batched(function) and "completions" in signature.parameters:
                name = path.partition(":")[2]
                hint = (
                    ". To score all completions of a prompt at once, return a list, and write "
                    f"`{name}.batched = True` below the function"
                )
            yield refuse(why=why, use=form + hint)
            return
        except ValueError:  # a function without a signature
            pass
    if not first:
        return
    prompt, columns = make_reward_arguments(next(iter(first.values())))
    completions = [COMPLETION] * (2 if is_batched(function) else 1)

    def score() -> None:
        value = call_function(function, prompt, completions, columns)
        value = asyncio.run(_await_result(value)) if inspect.isawaitable(value) else value
        parse_scores(value, is_batched(function), len(completions))

    call = f", for the first row and the completion {COMPLETION!r},"
    yield from _try_call(option, path, call, "a reward", score)


def _import_reward(option: str, path: str) -> Callable[..., Any]:
    """Return a reward. Raises ConfigError if it is no function."""
    function = import_object(option, path)
    if not callable(function):
        why = f"is {_describe_kind(function)}, not a function"
        raise ConfigError(Refusal(option=option, value=path, kind=Kind.FILE, why=why))
    return function


def _check_reward_part(path: str) -> Iterator[Attempt | Refusal]:
    """Yield the problems of a part of a teacher's reward with an example lesson."""
    parts = yield from _load_code(REWARD_PARTS, path, lambda: load_parts([path]))
    if parts is not None:
        call = ", for an example lesson,"
        yield from _try_call(
            REWARD_PARTS, path, call, "a number", lambda: compute_values(parts, EXAMPLE_LESSON)
        )


def _load_code(
    option: str, path: str, load: Callable[[], Loaded]
) -> Generator[Attempt | Refusal, None, Loaded | None]:
    """Yield the problems of an import; return the user's object, None if it can't be imported."""
    yield Attempt(IMPORTS, option, path)
    try:
        return load()
    except ConfigError as error:
        yield from error.refusals
    except OSError as error:
        yield Refusal(option=option, value=path, kind=Kind.FILE, why=f": {error}")
    return None


def _try_call(
    option: str, path: str, call: str, expected: str, run: Callable[[], object]
) -> Iterator[Attempt | Refusal]:
    """Yield the problems of a call of the user's code, which should return what is `expected`."""
    refuse = partial(Refusal, option=option, value=path, kind=Kind.FILE)
    yield Attempt(CALLS, option, path + call)
    try:
        run()
    except Rejection as rejection:
        yield refuse(why=f"{call} does not return {expected}: {rejection.message}")
    except (*MISTAKES, SystemExit, KeyboardInterrupt) as error:
        yield refuse(why=f"{call} raises {_describe_error(error)}")
    except Exception as error:
        why = f"{call} raises {_describe_error(error)}: the job rejects a prompt where that happens"
        yield refuse(why=why, is_note=True)


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
    limits_s = {IMPORTS: START_S, CALLS: find_call_limit_s(config)}
    for found in check_user_code(config):
        if isinstance(found, Attempt):
            print(json.dumps([found.kind, [found.option, found.value]]), file=out)
            faulthandler.dump_traceback_later(limits_s[found.kind], exit=True, file=out)
        else:
            print(json.dumps([FOUND, found.to_json()]), file=out)
    print(json.dumps([DONE, ""]), file=out)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # User code may have left threads behind.
    os._exit(code)
