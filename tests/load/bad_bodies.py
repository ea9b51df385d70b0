"""An attacker's bodies, seeded: most are nearly right, a few are as large as allowed or cut short.

Owns the bodies and where they go. Sends nothing and judges nothing.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from engine.frontend.http.forked_work import LONG_BODY_BYTES, is_long

Attack = tuple[str, bytes]

PATHS = (
    "/generate",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
)
OPERATORS = (
    "/abort_request",
    "/pause_generation",
    "/update_weights_from_disk",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
_CONVERSATION: dict[str, Any] = {
    "system": [{"type": "text", "text": "abc"}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}],
    "tools": [{"name": "f", "input_schema": {}}],
}
RIGHT: dict[str, dict[str, Any]] = {
    "/generate": {"text": "abc", "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "abc"}],
        "max_tokens": 2,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "abc"}]}],
        "max_output_tokens": 2,
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
    },
    "/v1/messages": {"model": "embedded", **_CONVERSATION, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "embedded", **_CONVERSATION},
    "/abort_request": {"rid": "missing"},
    "/pause_generation": {"mode": "in_place"},
    "/update_weights_from_disk": {"model_path": "no/such/folder"},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "no/such/folder"},
    "/v1/unload_lora_adapter": {"lora_name": "missing"},
}
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**31,
    2**63,
    10**400,
    1e308,
    0.5,
    "",
    "x" * 300,
    "\x00",
    "\ud800",
    "\u202e\U0001f98a",
    [],
    [[]],
    [1, "a", None],
    [-1],
    {},
    {"a": {"b": [1]}},
    {"a": {"b": {"c": None}}},
    {"\u00fc\U0001f98a": 1},
    {"99999999": 1},
    "(a",
    "a{1000000}",
    "start: start",
    {"$ref": "#"},
    {"multipleOf": 0},
    {"maxLength": -1},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}},
    [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"properties": 3, "$defs": 1}}}],
    "required",
)
KEYS = (
    "n",
    "stop",
    "rid",
    "stream",
    "seed",
    "priority",
    "logprobs",
    "max-tokens",
    "tool_choice",
    "tools",
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "json_schema",
    "regex",
    "ebnf",
    "lora_path",
    "model",
    "echo",
    "prompt_logprobs",
    "logprob_start_len",
    "return_logprob",
    "timeout_s",
    "waiting_timeout_s",
    "max_new_tokens",
    "logit_bias",
    "reasoning_effort",
    "chat_template_kwargs",
    "cache_salt",
    "system",
    "messages",
    "input",
    "instructions",
    "metadata",
    "text",
    "reasoning",
    "thinking",
    "output_config",
    "__class__",
    "",
    "k" * 500,
)


def nearly_right(seed: int, count: int) -> Iterator[Attack]:
    """Bodies of which one thing or a few are wrong: a value, a key, the JSON, the bytes."""
    chance = random.Random(seed)
    for _ in range(count):
        path = chance.choice((*PATHS, *PATHS, *OPERATORS))
        fields = json.loads(json.dumps(RIGHT[path]))
        for _ in range(chance.randint(1, 3)):
            place = chance.choice([fields, *(value for value in fields.values() if isinstance(value, dict))])
            place[chance.choice((*KEYS, *place))] = copy.deepcopy(chance.choice(VALUES))
        if path == "/pause_generation":
            fields["mode"] = copy.deepcopy(chance.choice(VALUES))
        if path == "/abort_request":
            fields.pop("abort_all", None)
        data = json.dumps(fields).encode()
        if chance.random() < 0.3:
            data = _damaged(data, chance)
        # A pause that succeeds, as one without a body does, would stop the victim.
        yield path, data or b"{"


def large_bodies(size: int) -> Iterator[Attack]:
    """Bodies of nearly ``size`` bytes, each the most expensive of its kind to read."""
    count = size - 200
    yield "/generate", b'{"text": "' + b"a" * count + b'"}'
    yield "/generate", b'{"text": "' + b"\\u0000" * (count // 6) + b'"}'
    yield "/generate", b'{"input_ids": [' + b"1," * (count // 2) + b"1]}"
    yield "/generate", b'{"input_ids": [' + b'"",' * (count // 3) + b"1]}"
    yield "/generate", b"{" + b",".join(b'"%x":1' % number for number in range(count // 10)) + b"}"
    yield "/generate", b'{"' + b"k" * count + b'": 1}'
    yield "/generate", b'{"text": ' + b"[" * count
    yield "/generate", b'{"text": "' + b"\xff" * count + b'"}'
    yield "/v1/completions", b'{"prompt": [' + b'"",1,' * (count // 5) + b"1]}"
    yield "/v1/completions", b'{"prompt": [' + b"[1]," * (count // 4) + b"[1]]}"
    yield "/v1/chat/completions", b'{"messages": [' + b'{"a":1},' * (count // 8) + b"1]}"
    kwargs = b",".join([b"{}"] * (count // 3))
    yield "/v1/chat/completions", b'{"messages": [{"role": "x"}], "chat_template_kwargs": {"x": [' + kwargs + b"]}}"
    tool = b'{"type": "function", "function": {"name": "f"}}'
    yield "/v1/chat/completions", b'{"messages": [], "tools": [' + (tool + b",") * (count // 48) + tool + b"]}"
    yield "/v1/chat/completions", b'{"messages": [{"role": "x", "tool_calls": [' + b"{}," * (count // 3) + b"{}]}]}"
    text = b'{"type": "text", "text": ""},'
    yield "/v1/messages", b'{"messages": [{"role": "user", "content": [' + text * (count // 29) + b"1]}]}"
    yield (
        "/v1/messages/count_tokens",
        b'{"model": "embedded", "messages": [{"role": "user", "content": "' + b"a" * count + b'"}]}',
    )
    numbers = b'{"type": "tool_use", "id": "c", "name": "f", "input": {"x": [' + b"1e9," * (count // 4) + b"1]}}"
    yield "/v1/messages", b'{"messages": [{"role": "assistant", "content": [' + numbers + b"]}]}"
    yield "/v1/responses", b'{"input": [' + b'{"type": "reasoning"},' * (count // 22) + b"1]}"
    yield "/v1/responses", b'{"instructions": "' + b"a" * count + b'", "input": "x"}'
    yield "/v1/responses", b'{"cache_salt": "' + b"a" * count + b'", "input": "x"}'
    yield "/pause_generation", b'{"mode": "' + b"a" * count + b'"}'


def short_bodies() -> Iterator[Attack]:
    """Return the largest body of each kind that is read in the event loop; longer ones get a process of their own."""
    user, function = {"role": "user", "content": "x"}, {"type": "function", "function": {"name": "f"}}
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    chat: dict[str, Any] = {"messages": [user], "max_tokens": 1}
    short = {"n": 128, "max_new_tokens": 1}
    kinds: list[tuple[str, Callable[[int], dict[str, Any]]]] = [
        ("/generate", lambda count: {"text": "x" * count}),
        ("/generate", lambda count: {"text": "\u20ac" * count}),
        ("/generate", lambda count: {"text": "x", "sampling_params": {"json_schema": {"enum": [0] * count}, **short}}),
        ("/v1/completions", lambda count: {"prompt": [7] * min(count, 8000), "max_tokens": 1, "n": 128}),
        ("/v1/completions", lambda count: {"prompt": "x" * min(count, 8000), "max_tokens": 1, "n": 128}),
        ("/v1/chat/completions", lambda count: chat | {"messages": [user] * count}),
        ("/v1/chat/completions", lambda count: chat | {"tools": [function] * count}),
        (
            "/v1/chat/completions",
            lambda count: chat | {"messages": [{"role": "assistant", "tool_calls": [call] * count}]},
        ),
        ("/v1/chat/completions", lambda count: chat | {"chat_template_kwargs": {"x": [1] * count}}),
        ("/v1/responses", lambda count: {"input": [user] * count, "max_output_tokens": 1}),
        ("/v1/messages", lambda count: chat | {"model": "embedded", "messages": [user] * count}),
        ("/tokenize", lambda count: {"messages": [user] * count}),
        ("/detokenize", lambda count: {"tokens": [7] * count}),
    ]
    for path, make in kinds:
        yield _largest_short(path, lambda count, make=make: json.dumps(make(count), separators=(",", ":")).encode())
    for number, (path, _) in enumerate(large_bodies(LONG_BODY_BYTES)):
        yield _largest_short(path, lambda size, number=number: list(large_bodies(200 + size))[number][1])


def _largest_short(path: str, make: Callable[[int], bytes]) -> Attack:
    is_chat = path not in ("/generate", "/v1/completions", "/detokenize")
    low, high = 0, LONG_BODY_BYTES
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_long(make(middle), is_chat=is_chat) else (middle, high)
    return path, make(low)


def _damaged(data: bytes, chance: random.Random) -> bytes:
    """The bytes with a few of them changed, or cut."""
    damaged = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
    return bytes(damaged if chance.random() < 0.7 else damaged[: chance.randrange(len(damaged))])
