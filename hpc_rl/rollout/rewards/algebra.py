"""The reward `math_verify`: answers as formulas, compared by computer algebra (the library math-verify).

Only for the process of a reward (reward_process.py): importing takes a second, from a network file system
many; the library limits its time by signals, in the main thread only; and a completion may hold 9^9^9.
"""

from typing import Any

from hpc_rl.core.errors import ConfigError
from hpc_rl.rollout.rewards.answers import MAX_SEARCHED_CHARS, final_answer, find_truth

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ConfigError(
        "the reward math_verify needs the package math-verify: pip install 'hpc-rl[train]'"
    ) from error


def math_verify(prompt: Any, completion: str, **columns: Any) -> float:
    """1 if `final_answer` is 1, or if the last formula in the completion equals the row's answer; else 0."""
    if final_answer(prompt, completion, **columns):
        return 1.0
    truth = find_truth(columns)
    if truth is None:
        return 0.0
    text = completion.rpartition("</think>")[2][-MAX_SEARCHED_CHARS:]
    return float(verify(parse(f"\\boxed{{{truth}}}"), parse(text)))
