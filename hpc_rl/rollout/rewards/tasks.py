"""Rewards of tasks: a format, a length, the countdown game, and code that passes tests.

`code_tests` runs what a model wrote: in a process of its own with limits, which keep it from using up the
node, not from reading what the account can read.
"""

import ast
import operator
import re
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from fractions import Fraction
from typing import Any

_FORMAT = re.compile(r"\s*(?:<think>)?.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_CODE = re.compile(r"```(?:python|py)?\s*\n(.*?)```", re.DOTALL)
_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip
MAX_EXPRESSION_CHARS = 500
CODE_CPU_S = 10
CODE_MEMORY_BYTES = 1 << 30
CODE_FILE_BYTES = 1 << 20


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


def countdown(prompt: Any, completion: str, nums: Sequence[int], target: int, **_columns: Any) -> float:
    """1 if the completion's expression uses each of the row's `nums` once and makes its `target`.

    It is what stands between <answer> and </answer>, else the last line; a part from `=` on does not count.
    """
    found = _ANSWER.findall(completion)
    lines = [line for line in completion.splitlines() if line.strip()] or [""]
    text = (found[-1] if found else lines[-1]).partition("=")[0].strip()
    if len(text) > MAX_EXPRESSION_CHARS:
        return 0.0
    used: list[int] = []
    try:
        value = _value(ast.parse(text.replace("×", "*").replace("÷", "/"), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    return float(value == target and Counter(used) == Counter(int(one) for one in nums))


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Return the value of an expression; append its numbers to `used`. Raises ValueError."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError(f"{ast.dump(node)[:40]} is not allowed")


def code_tests(prompt: Any, completion: str, tests: str | Sequence[str], **_columns: Any) -> float:
    """Return the share of the row's `tests`, Python texts with asserts, that the completion's code passes.

    The code is the last block between ``` and ```, else the whole completion. Each test runs in an
    interpreter of its own: 10 s of CPU time, 1 GiB of memory, an empty directory, no variables of the job.
    """
    blocks = _CODE.findall(completion)
    code = blocks[-1] if blocks else completion
    all_tests = [tests] if isinstance(tests, str) else list(tests)
    return sum(_passes(f"{code}\n\n{test}\n") for test in all_tests) / len(all_tests) if all_tests else 0.0


def _passes(program: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="hpc-rl-code-") as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", program],
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=_limit,
                timeout=2 * CODE_CPU_S,
                start_new_session=True,
            )
        except (subprocess.TimeoutExpired, OSError, ValueError):  # ValueError: a NUL in the program
            return False
    return done.returncode == 0


def _limit() -> None:
    for what, most in (
        (resource.RLIMIT_CPU, CODE_CPU_S),
        (resource.RLIMIT_AS, CODE_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, CODE_FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
