"""The Anthropic client: a message with a tool, its result as a stream, and the count of tokens."""

from asked_server import asked_server

URL, MODEL = asked_server(__doc__)

import anthropic

QUESTION = {"role": "user", "content": "17 * 23?"}
TOOL = {"name": "multiply", "input_schema": {"type": "object"}}

client = anthropic.Anthropic(base_url=URL, api_key="unused")
message = client.messages.create(model=MODEL, max_tokens=100, messages=[QUESTION], tools=[TOOL])
(call,) = message.content
assert (message.stop_reason, call.name, call.input) == ("tool_use", "multiply", {"a": 17, "b": 23})
result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "391"}]}
said = [QUESTION, {"role": "assistant", "content": message.content}, result]
with client.messages.stream(model=MODEL, max_tokens=100, messages=said, tools=[TOOL]) as stream:
    assert "".join(stream.text_stream) == "It is 391."
    assert stream.get_final_message().stop_reason == "end_turn"
assert client.messages.count_tokens(model=MODEL, messages=[QUESTION], tools=[TOOL]).input_tokens > 10
refused = None
try:
    client.messages.create(model=MODEL, max_tokens=100, messages=[])
except anthropic.BadRequestError as exc:
    refused = str(exc)
assert "messages must have >= 1" in str(refused)
