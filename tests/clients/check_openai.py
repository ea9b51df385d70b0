"""The OpenAI client: chat with a tool, whole and as a stream, completions, responses."""

import json

from asked_server import asked_server

URL, MODEL = asked_server(__doc__)

import openai

QUESTION = [{"role": "user", "content": "17 * 23?"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "multiply", "parameters": PARAMETERS}}

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="unused")
answer = client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[TOOL])
(call,) = answer.choices[0].message.tool_calls
assert json.loads(call.function.arguments) == {"a": 17, "b": 23}
result = {"role": "tool", "tool_call_id": call.id, "content": "391"}
following = [*QUESTION, answer.choices[0].message, result]
with client.chat.completions.stream(model=MODEL, messages=following, tools=[TOOL]) as stream:
    assert stream.get_final_completion().choices[0].message.content == "It is 391."
assert client.completions.create(model=MODEL, prompt="x", max_tokens=3).usage.completion_tokens <= 3
tool = {"type": "function", "name": "multiply", "parameters": PARAMETERS}
first = client.responses.create(model=MODEL, input=QUESTION, tools=[tool])
(call,) = first.output
result = {"type": "function_call_output", "call_id": call.call_id, "output": "391"}
with client.responses.stream(model=MODEL, input=[*QUESTION, call, result], tools=[tool]) as stream:
    for _ in stream:
        continue
    assert stream.get_final_response().output_text == "It is 391."
