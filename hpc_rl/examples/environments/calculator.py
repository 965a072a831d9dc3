"""Word problems with a calculator that the model may call, in several turns."""

import ast
import json
import operator
import random
import re
from collections.abc import Callable
from typing import Any

from hpc_rl.atropos import Environment
from hpc_rl.rollout.conversation import Conversation

MAX_TURNS = 4
SYSTEM = (
    "Solve the problem. You may use a calculator: write "
    '<tool_call>{"name": "calculator", "arguments": {"expression": "12*(3+4)"}}</tool_call> '
    "and wait for its result. Write the final number as <answer>42</answer>."
)
TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
ANSWER = re.compile(r"<answer>\s*(-?[\d.]+)\s*</answer>")
OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> float:
    """Return the value of numbers with + - * / and brackets. Raises ValueError for anything else."""

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.operand))
        raise ValueError("only numbers, + - * / and brackets are allowed")

    if len(expression) > 200:
        raise ValueError("the expression is longer than 200 characters")
    try:
        return value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None


def call_tool(call: str) -> str:
    """Return the answer to a tool call of the model, or an error text for the model."""
    try:
        return f"{calculate(json.loads(call)['arguments']['expression']):g}"
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


class Calculator(Environment):
    """The score is 1 for the right number within MAX_TURNS replies, else 0; 0.1 less without a tool call."""

    async def setup(self) -> None:
        draw = random.Random(0)
        items = [_make_problem(draw) for _ in range(1000)]
        self.eval_items, self.items = items[:100], items[100:]

    async def episode(self, item: Any, conversation: Conversation) -> float:
        called = False
        for _ in range(MAX_TURNS):
            reply = await conversation.reply()
            if match := ANSWER.search(reply):
                is_right = abs(float(match[1].rstrip(".") or "nan") - item["answer"]) < 1e-6
                return float(is_right) - (0.1 if is_right and not called else 0.0)
            call = TOOL_CALL.search(reply)
            if call is None or conversation.was_cut_off:
                return 0.0
            called = True
            conversation.say(call_tool(call[1]), role="tool")
        return 0.0


def _make_problem(draw: random.Random) -> dict[str, Any]:
    boxes, per_box, eaten = draw.randint(12, 99), draw.randint(12, 99), draw.randint(1, 99)
    question = f"{boxes} boxes hold {per_box} apples each. {eaten} apples are eaten. How many are left?"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {"messages": messages, "answer": boxes * per_box - eaten}
