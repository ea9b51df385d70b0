"""LiteLLM: chat with a tool, a stream, and the error that its fallbacks look for."""

import json

from asked_server import asked_server

URL, MODEL = asked_server(__doc__)

import litellm

TOOL = {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object"}}}
asked = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "unused"}
asked["messages"] = [{"role": "user", "content": "17 * 23?"}]

answer = litellm.completion(**asked, tools=[TOOL])
(call,) = answer.choices[0].message.tool_calls
assert json.loads(call.function.arguments) == {"a": 17, "b": 23}
chunks = list(litellm.completion(**asked, stream=True, max_tokens=8))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
asked["messages"] = [{"role": "user", "content": "x" * 100_000}]
try:
    litellm.completion(**asked)
except litellm.ContextWindowExceededError:
    pass
else:
    raise AssertionError("a prompt beyond the context was taken")
