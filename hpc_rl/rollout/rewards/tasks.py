"""Rewards of tasks: a format, a length, the countdown game, and code that passes tests.

`code_tests` runs a model's code in the sandbox of the machine (hpc_rl/sandbox).
"""

import ast
import logging
import math
import operator
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal
from hpc_rl.sandbox import USE, Limits, find_problem, find_sandbox, run_python

logger = logging.getLogger(__name__)

_FORMAT = re.compile(r"\s*(?:<think>)?.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_CODE = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
MAX_EXPRESSION_CHARS = 500
CODE_TIME_SHARE = 0.8  # of rollout.reward_timeout_s, for all tests of a completion


def thinks_then_answers(prompt: Any, completion: str, **_columns: Any) -> float:
    """1 if the completion is `<think>…</think><answer>…</answer>`; the first tag may be in the prompt."""
    is_one = (
        completion.count("</think>") == 1 == completion.count("<answer>") == completion.count("</answer>")
    )
    return float(is_one and _FORMAT.fullmatch(completion) is not None)


def length(
    encode: Callable[..., Sequence[int]], max_new_tokens: int
) -> Callable[[Any, str, dict[str, Any]], Awaitable[float]]:
    """Return the reward `length`: 1 for an empty completion, 0 for one of `max_new_tokens`."""

    async def reward(prompt: Any, completion: str, columns: dict[str, Any]) -> float:
        return 1 - min(1.0, len(encode(completion, add_special_tokens=False)) / max_new_tokens)

    return reward


def no_reward(prompt: Any, completion: str, **_columns: Any) -> float:
    """0 for every completion: a teacher has the only signal."""
    return 0.0


def countdown(prompt: Any, completion: str, nums: Sequence[int], target: int, **_columns: Any) -> float:
    """1 if the completion's expression uses each of the row's `nums` once and makes its `target`.

    The expression is between <answer> and </answer>, else in the last line; text from `=` on does not count.
    """
    answers = _ANSWER.findall(completion)
    lines = [line for line in completion.splitlines() if line.strip()] or [""]
    text = (answers[-1] if answers else lines[-1]).partition("=")[0].strip()
    if len(text) > MAX_EXPRESSION_CHARS:
        return 0.0
    used: list[int] = []
    try:
        value = _compute_value(ast.parse(text.replace("×", "*").replace("÷", "/"), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    return float(value == target and Counter(used) == Counter(int(number) for number in nums))


def _compute_value(node: ast.expr, used: list[int]) -> Fraction:
    """Return the value of an expression; append its numbers to `used`. Raises ValueError."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_compute_value(node.left, used), _compute_value(node.right, used))
    raise ValueError(f"{ast.dump(node)[:40]} is not allowed")


def code_tests(prompt: Any, completion: str, tests: str | Sequence[str], **_columns: Any) -> float:
    """Return the share of the row's `tests`, Python texts with asserts, that the completion's code passes.

    The code is the last block between ``` and ```, else the whole completion. Each test runs in a new
    interpreter in a sandbox: 10 s of CPU time, 1 GiB of memory, an empty directory, no variables of the job.
    A program that ends before the test has run does not pass.
    """
    return _measure_share(completion, tests, math.inf)


def make_code_tests(timeout_s: float, sandbox: str) -> Callable[..., float]:
    """Return `code_tests` with a time limit for all tests of a completion: tests after it fail.

    Raises ConfigError if `sandbox` is `required` but this machine's protection is incomplete.
    """
    used = find_sandbox()
    if problem := find_problem(sandbox, used):
        why = f": {problem}"
        raise ConfigError(
            Refusal(option="rollout.sandbox", value=sandbox, kind=Kind.MACHINE, why=why, use=USE)
        )
    logger.info("the reward code_tests runs code in this sandbox: %s", used.describe())

    def code_tests(prompt: Any, completion: str, tests: str | Sequence[str], **_columns: Any) -> float:
        return _measure_share(completion, tests, time.monotonic() + CODE_TIME_SHARE * timeout_s)

    return code_tests


def _measure_share(completion: str, tests: str | Sequence[str], deadline: float) -> float:
    blocks = _CODE.findall(completion)
    code = blocks[-1] if blocks else completion
    all_tests = [tests] if isinstance(tests, str) else list(tests)
    return sum(_does_pass(code, test, deadline) for test in all_tests) / len(all_tests) if all_tests else 0.0


def _does_pass(code: str, test: str, deadline: float) -> bool:
    limits = Limits()
    left_s = min(limits.wall_s, deadline - time.monotonic())
    # an unusual exit code: a program can't pass by exiting early, unless it looks for this number
    passed = 64 + secrets.randbelow(32)
    program = f"{code}\n\n{test}\n\nimport sys\nsys.exit({passed})\n"
    try:
        program.encode()
    except UnicodeEncodeError:  # half a character
        return False
    return left_s > 0 and run_python(program, replace(limits, wall_s=left_s)).code == passed
