"""An agent with the openai client and a loop of tools. It knows nothing of training.

    rollout:
      workflow: agent
      workflow_args: {function: "hpc_rl.examples.agents.calculator:solve"}

As a command it reads the row from standard input, and `rollout.reward_fn` scores its last answer:
`workflow_args: {command: "python -m hpc_rl.examples.agents.calculator"}`. Needs `pip install openai`.
"""

import json
import sys
from typing import Any

from openai import OpenAI

from hpc_rl.examples.environments.calculator import calculate

MAX_TURNS = 4
EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
ABOUT = "The value of an expression of numbers with + - * / and brackets."
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "calculate", "description": ABOUT, "parameters": EXPRESSION}}
]
SYSTEM = "Solve the problem. You may use the calculator. End with the number alone."


def ask(question: str) -> str:
    """Return the model's last answer to a question."""
    client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY of the episode
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        made = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message: Any = made.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": use(call.function.arguments)}
            )
    return message.content or ""


def use(arguments: str) -> str:
    """Return the calculator's answer to the arguments of a call, or an error for the model to read."""
    try:
        return f"{calculate(json.loads(arguments)['expression']):g}"
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


def solve(row: dict[str, Any]) -> float:
    """Return 1 if the answer ends with the row's, else 0."""
    return float(ask(row["prompt"]).strip().endswith(str(row["answer"])))


if __name__ == "__main__":
    print(ask(json.load(sys.stdin)["prompt"]))
