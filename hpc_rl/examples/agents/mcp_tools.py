"""An agent with the tools of a server of the Model Context Protocol, started for each episode.

    rollout:
      workflow: agent
      workflow_args: {function: "hpc_rl.examples.agents.mcp_tools:solve"}

The server is this file, `python -m hpc_rl.examples.agents.mcp_tools`; put the command of another one into
SERVER. Needs `pip install openai 'mcp>=2'`.
"""

import json
import sys
from typing import Any

from mcp import Client, StdioServerParameters
from openai import AsyncOpenAI

MAX_TURNS = 4
SERVER = StdioServerParameters(command=sys.executable, args=["-m", "hpc_rl.examples.agents.mcp_tools"])


async def solve(row: dict[str, Any]) -> float:
    """Return 1 if the answer contains the row's, else 0."""
    model = AsyncOpenAI()
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    async with Client(SERVER) as server:
        tools: list[Any] = [describe(tool) for tool in (await server.list_tools()).tools]
        for _ in range(MAX_TURNS):
            made = await model.chat.completions.create(model="policy", messages=messages, tools=tools)
            message: Any = made.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = await use(server, call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return float(str(row["answer"]) in (message.content or ""))


def describe(tool: Any) -> dict[str, Any]:
    """Return a tool of the server as OpenAI's API describes tools."""
    about = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": about}


async def use(server: Client, name: str, arguments: str) -> str:
    """Return the text of a tool's result, or an error for the model to read."""
    try:
        result = await server.call_tool(name, json.loads(arguments))
    except Exception as error:  # of arguments that are no JSON, or from the server
        return f"error: {error}"
    return "\n".join(part.text for part in result.content if part.type == "text")


def serve() -> None:
    """Serve one tool on standard input and output."""
    from mcp.server import MCPServer

    server = MCPServer("words")

    @server.tool()
    def count_letters(word: str, letter: str) -> int:
        """Count how often a letter is in a word."""
        return word.lower().count(letter.lower())

    server.run()


if __name__ == "__main__":
    serve()
