"""An agent: the model calls tools until it can answer.

engine serve --model /models/qwen3 &
python examples/agent/agent.py "What is 17 times 23, plus 4?"
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import openai

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    }
    for name, description in (("add", "Add two numbers."), ("multiply", "Multiply two numbers."))
]
FUNCTIONS: dict[str, Callable[..., object]] = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b}
MOST_TURNS = 8
# Of each turn: a model that never ends its turn, such as the embedded one with random weights, would use its context.
MOST_TOKENS = 512
BASE_URL = "http://127.0.0.1:30000/v1"


def answer(
    client: openai.OpenAI, model: str, question: str, functions: Mapping[str, Callable[..., object]] = FUNCTIONS
) -> str:
    """Ask a question and let the model call functions until it says something."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MOST_TURNS):
        choice = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, max_completion_tokens=MOST_TOKENS
        ).choices[0]
        messages.append(choice.message)
        if not choice.message.tool_calls:
            return choice.message.content or ""
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": outcome(call.function, functions)}
            for call in choice.message.tool_calls
        ]
    raise RuntimeError(f"the model must answer within {MOST_TURNS} turns, and it still calls tools; ask less")


def outcome(called: Any, functions: Mapping[str, Callable[..., object]]) -> str:
    """Call a function and return its result, or the error, which the model can correct in its next turn."""
    try:
        return json.dumps(functions[called.name](**json.loads(called.arguments)))
    except (KeyError, TypeError, ValueError) as exc:
        return f"{type(exc).__name__}: {exc}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer the question on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="+", help="question for the model; its words are joined")
    question = " ".join(parser.parse_args(arguments).question)
    client = openai.OpenAI(base_url=BASE_URL, api_key="unused")
    try:
        sys.stdout.write(answer(client, client.models.list().data[0].id, question) + "\n")
    except openai.APIStatusError as exc:
        sys.exit(f"the server refuses the question: {exc.message}")
    except openai.APIConnectionError as exc:
        sys.exit(f"no server answers at {BASE_URL} ({exc}); start one: engine serve --model /models/qwen3")


if __name__ == "__main__":
    main()
