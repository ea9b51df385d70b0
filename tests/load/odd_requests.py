"""An odd client's requests: random mixtures of all features, valid and invalid, and damaged bodies.

Owns the requests of a seed, in their order. Sends nothing and judges nothing.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

NATIVE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
GENERATING = (NATIVE, COMPLETIONS, CHAT, RESPONSES, MESSAGES)
JSON = "application/json"
TYPES = ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "", "application/JSON;")
# One in so many requests: changed in places, with bytes changed, as another type, left by its client.
CHANGED, DAMAGED, RETYPED, LEFT = 5, 25, 40, 8
# One in so many: padded, so that a process of its own reads it; a question instead of a body.
PADDED, ASKED, KEYED = 20, 16, 12
PADDING = b" " * 33_000
QUESTIONS = ("/v1/models", "/model_info", "/get_load", "/version", "/health", "/metrics", "/docs", "/generate", "/nope")
MOST_NEW_TOKENS = 12

TEXTS = (
    "hello",
    " ",
    "\x00",
    "a\x00b",
    "caf\u00e9 \u20ac",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u202eright to left",
    "e" + "\u0301" * 40,
    "\ufeff\ufffe",
    "<|im_end|>",
    "<|im_start|>assistant\n<think>",
    "</think>",
    "<tool_call>{",
    "[TOOL_CALLS]",
    "{{ messages }}{% for x in y %}",
    "%s %d {} ../../etc/passwd",
    "x" * 400,
    "\r\n\r\ndata: [DONE]\n\n",
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    -(2**31),
    2**63,
    2**64,
    10**400,
    0.5,
    -0.0,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    *TEXTS,
    "",
    "\ud800",
    "1",
    "true",
    "x" * 3000,
    [],
    [[]],
    [None],
    [1, "a", None],
    [-1],
    [2**70],
    ["\ud800"],
    [0] * 300,
    {},
    {"": ""},
    {"a": {"b": {"c": [1]}}},
    {"$ref": "#"},
    {"type": "function"},
    {"__proto__": {}, "\x00": 1},
)
# What an output must be, as a regular expression that Python reads alike, or None where that cannot be said.
REGEXES = (
    "[a-c]{2}",
    "(yes|no)",
    "[0-9]+x?",
    "",
    "(a",
    "(?=a)b",
    "a{1000000}",
    "[^\\x00-\\xff]",
    "\\p{Greek}",
    "a*" * 20,
    "(a|b)*c{3}",
    ".*",
    "\x00",
    "\u20ac{2}",
    "((((((((((a))))))))))?",
)
GRAMMARS = (
    'start: "a" | "b"',
    'root ::= "a" num\nnum ::= [0-9]',
    "start: start",
    "start: /[a-d]{3}/ MORE\nMORE: /x/ & /y/",
    'start: "abc" MORE\nMORE: /x/ & /y/',
    'start: e\ne: e e | "x"',
    "start: <[3]>",
    "start: <[99999]>",
    "start: <|im_end|>",
    "start: /[a-d]{4}/ t\nt: "
    + " | ".join(f"r{i}" for i in range(2100))
    + "".join(f'\nr{i}: "x" s{i}\ns{i}: "c"' for i in range(2100)),
    "start: %json {}",
    'start: %json {"type": "nope"}',
    'start: "a"* %regex {"x": 1}',
    'start: x[max_tokens=3] "b"\nx: /a*/',
    "\x00",
    "root ::= ",
    "%llguidance {}",
    '%llguidance {"no_forcing": true}\nstart: "a"',
    'start: "\ud800"',
    "start: " + "(" * 300 + '"a"' + ")" * 300,
)
SCHEMAS: tuple[Any, ...] = (
    {},
    True,
    False,
    {"type": "object"},
    {"type": "integer", "minimum": 3, "maximum": 2},
    {"type": "string", "pattern": "^(a"},
    {"type": "string", "maxLength": 10**9},
    {"type": "string", "format": "date-time"},
    {"type": "string", "minLength": 5000},
    {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    {"$ref": "http://example.com/x"},
    {"enum": [1, "two", None, {"a": []}]},
    {"enum": []},
    {"const": "\ud800"},
    {"const": "\x00\u20ac"},
    {"type": ["string", "null"]},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b"], "additionalProperties": False},
    {"type": "object", "properties": {f"k{i}": {"type": "boolean"} for i in range(100)}},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"allOf": [{"minimum": 3}, {"type": "integer"}]},
    {"not": {}},
    {"type": "number", "multipleOf": 0},
    {"type": "number", "multipleOf": 1e-300},
    {"x-guidance": {"whitespace_flexible": 3}},
    {"x-guidance": {"item_separator": ""}},
    {"type": 3},
    {"properties": 3, "$defs": 1},
    "{",
    '{"type": "integer"}',
    "[" * 5000,
    '{"a":' * 3000,
    "true",
    "nonsense",
)
ARGUMENTS = ("{}", "", "{", '{"a": 1}', "[1]", "null", '"x"', "[" * 3000, '{"a": "\ud800"}', "\x00", "1e999", "NaN")
NAMES = ("f", "get weather", "f.g", "x" * 200, "\x00", "\u20ac", '"', "</function>", "<tool_call>", "a\nb", "=")
BIASES = ({"97": 100}, {"97": -100, "98": 100}, {str(i): 1.5 for i in range(300)}, {"999999": 1}, {"a": 1}, {"-1": 0})
RIDS = ("r", "same", "same", "\x00", "\ud800", "x" * 256, "x" * 257, "r-0", "")
SALTS = ("u", "v", "\x00", "\ud800", "", "x" * 2000)
# That of a server that asks for one, and others.
RIGHT_KEY = "k"
KEYS = (RIGHT_KEY, "", "wrong", "x" * 5000)
MODELS = ("embedded", "x", "y", "nope", "", "\x00", "embedded\n")


@dataclass(frozen=True)
class OddRequest:
    """One request. ``leaves_after`` is the number of stream events after which the client leaves; None: it stays.

    ``fields`` are those of its body, None where the bytes are damaged. ``pattern`` is what a text matches that ends by
    itself, where that can be said.
    """

    path: str
    content: bytes
    headers: dict[str, str] = field(default_factory=dict)
    fields: dict[str, Any] | None = None
    leaves_after: int | None = None
    method: str = "POST"
    pattern: str | None = None

    @property
    def has_limit(self) -> bool:
        """True when it names a limit of its time."""
        return b"timeout_s" in self.content


def odd_requests(seed: int, count: int) -> Iterator[OddRequest]:
    """The first requests of a seed."""
    made = _Maker(random.Random(f"{seed}/odd"))
    for _ in range(count):
        yield made.next_request()


class _Maker:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._routes: list[tuple[str, Callable[[], dict[str, Any]], int]] = [
            (NATIVE, self._native, 8),
            (COMPLETIONS, self._completion, 8),
            (CHAT, self._chat, 10),
            (RESPONSES, self._response, 8),
            (MESSAGES, self._message, 8),
            (f"{MESSAGES}/count_tokens", self._conversation, 3),
            ("/tokenize", self._tokenize, 2),
            ("/detokenize", self._detokenize, 1),
            ("/v1/embeddings", lambda: {"input": "x"}, 1),
            ("/abort_request", self._abort, 2),
            ("/flush_cache", dict, 1),
            ("/continue_generation", dict, 1),
            ("/v1/load_lora_adapter", self._load, 2),
            ("/v1/unload_lora_adapter", self._unload, 1),
            ("/update_weights_from_disk", self._update, 1),
            ("/stop_profile", dict, 1),
        ]

    def next_request(self) -> OddRequest:
        chance = self._chance
        if self._one_in(ASKED):
            return self._question()
        path, make, _ = chance.choices(self._routes, [weight for *_, weight in self._routes])[0]
        fields = make()
        changed = self._one_in(CHANGED)
        if changed:
            for _ in range(chance.randint(1, 2)):
                fields = self._changed(fields)
        content, streams = json.dumps(fields).encode(), fields.get("stream") is True
        known: dict[str, Any] | None = fields
        if self._one_in(DAMAGED):
            content, known = self._damaged(content), None
        content += PADDING if self._one_in(PADDED) else b""
        headers = {"content-type": chance.choice(TYPES) if self._one_in(RETYPED) else JSON}
        if self._one_in(KEYED):
            headers["x-api-key"] = chance.choice(KEYS)
        return OddRequest(
            path if path != "/flush_cache" or self._one_in(2) else f"{path}?timeout={self._in_query()}",
            content,
            headers,
            known,
            leaves_after=chance.randint(0, 4) if streams and self._one_in(LEFT) else None,
            pattern=None if changed or known is None else _pattern_of(fields),
        )

    def _question(self) -> OddRequest:
        paths = (*QUESTIONS, f"/v1/models/{self._in_query()}", f"/server_info?timeout={self._in_query()}")
        method = self._chance.choice(("GET", "GET", "GET", "HEAD", "PUT", "DELETE", "PROPFIND"))
        return OddRequest(self._chance.choice(paths), b"", method=method)

    def _in_query(self) -> str:
        return quote(str(self._chance.choice(VALUES)).encode(errors="surrogatepass"))[:500]

    # -- bodies --

    def _native(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"sampling_params": self._sampling(self._native_sampling())}
        fields |= {"input_ids": self._ids()} if self._one_in(3) else {"text": self._text()}
        self._maybe(fields, "return_logprob", True)
        if fields.get("return_logprob"):
            self._maybe(fields, "top_logprobs_num", 0, 1, 20)
            self._maybe(fields, "logprob_start_len", -1, 0, 0, 500)
        self._maybe(fields, "lora_path", *MODELS, rare=True)
        return self._shared(fields)

    def _completion(self) -> dict[str, Any]:
        several = [[self._text() for _ in range(2)], [self._ids(), self._ids()]]
        prompt = self._chance.choice([self._text(), self._text(), self._ids(), *several])
        fields = {"prompt": prompt} | self._sampling(self._openai_sampling())
        self._maybe(fields, "logprobs", 0, 1, 5, 20)
        self._maybe(fields, "echo", True)
        self._maybe(fields, "n", 1, 2, 3)
        self._maybe(fields, "prompt_logprobs", 0, 2, 20, rare=True)
        return self._openai(fields)

    def _chat(self) -> dict[str, Any]:
        fields = {"messages": self._messages()} | self._sampling(self._openai_sampling())
        self._maybe(fields, "logprobs", True)
        if fields.get("logprobs"):
            self._maybe(fields, "top_logprobs", 0, 1, 20)
        self._maybe(fields, "n", 1, 2, 3)
        self._maybe(fields, "reasoning_effort", "low", "none", "very", rare=True)
        variables = ({"enable_thinking": False}, {"x": [{}]}, {"tools": 1}, {"\ud800": 1})
        self._maybe(fields, "chat_template_kwargs", *variables, rare=True)
        if self._one_in(2):
            fields["tools"] = [self._tool() for _ in range(self._chance.randint(1, 3))]
            named = {"type": "function", "function": {"name": fields["tools"][0]["function"]["name"]}}
            self._maybe(fields, "tool_choice", "auto", "none", "required", "required", named, named, "nope")
            self._maybe(fields, "parallel_tool_calls", False, True)
        return self._openai(fields)

    def _messages(self) -> list[dict[str, Any]]:
        chance = self._chance
        messages: list[dict[str, Any]] = [{"role": "system", "content": self._text()}] if self._one_in(3) else []
        messages.append({"role": "user", "content": self._text()})
        if self._one_in(4):
            call = {"name": chance.choice(NAMES), "arguments": chance.choice(ARGUMENTS)}
            calls = [{"id": "c1", "type": "function", "function": call}]
            messages.append({"role": "assistant", "content": chance.choice([None, "x", ""]), "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": "c1", "content": self._text()})
        if self._one_in(6):
            messages.append({"role": chance.choice(["assistant", "tool", "developer", "?"]), "content": self._text()})
        if self._one_in(6):
            messages[-1]["content"] = [{"type": "text", "text": self._text()}, {"type": "text", "text": "y"}]
        if self._one_in(10):
            messages[-1]["reasoning_content"] = self._text()
        return messages

    def _tool(self) -> dict[str, Any]:
        chance = self._chance
        function: dict[str, Any] = {"name": chance.choice(("f", *NAMES)) + chance.choice(("", "1", "2"))}
        if not self._one_in(4):
            objects = {"type": "object", "properties": {chance.choice(NAMES): chance.choice(SCHEMAS) for _ in "ab"}}
            function["parameters"] = objects if chance.random() < 0.7 else chance.choice(SCHEMAS)
        self._maybe(function, "strict", True)
        self._maybe(function, "description", self._text())
        return {"type": "function", "function": function}

    def _response(self) -> dict[str, Any]:
        chance = self._chance
        fields: dict[str, Any] = {"input": self._text() if self._one_in(3) else self._items()}
        fields |= self._sampling({"max_output_tokens": chance.randint(1, MOST_NEW_TOKENS)})
        self._maybe(fields, "instructions", self._text())
        self._maybe(fields, "metadata", {"k": "v"}, {"\x00": self._text()}, {str(i): "v" for i in range(17)}, rare=True)
        self._maybe(fields, "reasoning", {"effort": "low"}, {"effort": "none", "summary": "auto"}, {}, rare=True)
        self._maybe(fields, "chat_template_kwargs", {"enable_thinking": False}, {"x": [{}]}, rare=True)
        stored = {"store": [True, False], "background": [False, True], "previous_response_id": ["resp_1", None]}
        for name, values in stored.items():
            self._maybe(fields, name, *values, rare=True)
        self._maybe(fields, "include", ["reasoning.encrypted_content"], ["x"], rare=True)
        if self._one_in(4):
            schema = {"type": "json_schema", "name": "x", "schema": chance.choice(SCHEMAS)}
            fields["text"] = {"format": chance.choice((schema, schema, {"type": "json_object"}, {"type": "text"}, {}))}
        if self._one_in(3):
            functions = [self._tool()["function"] for _ in range(chance.randint(1, 3))]
            fields["tools"] = [{"type": "function", **function} for function in functions]
            named = {"type": "function", "name": functions[0]["name"]}
            self._maybe(fields, "tool_choice", "auto", "none", "required", named, named, {"type": "web_search"})
            self._maybe(fields, "parallel_tool_calls", False, True)
        return self._named(fields)

    def _items(self) -> list[dict[str, Any]]:
        chance = self._chance
        items: list[dict[str, Any]] = [{"role": "user", "content": self._text()}]
        if self._one_in(3):
            items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": [self._part("reasoning_text")]})
        if self._one_in(3):
            call = {"call_id": "c1", "name": chance.choice(NAMES), "arguments": chance.choice(ARGUMENTS)}
            items.append({"type": "function_call", **call})
            items.append({"type": "function_call_output", "call_id": "c1", "output": self._text()})
        if self._one_in(4):
            items.append({"role": "assistant", "content": [self._part("output_text") | {"annotations": []}]})
        if self._one_in(4):
            role = chance.choice(["user", "system", "developer", "tool"])
            items.append({"type": "message", "role": role, "content": [self._part("input_text") for _ in "ab"]})
        return items

    def _message(self) -> dict[str, Any]:
        fields = self._conversation() | {"max_tokens": self._chance.randint(1, MOST_NEW_TOKENS)}
        self._maybe(fields, "temperature", 0, 0, 1e-9, 0.7, 1)
        self._maybe(fields, "top_k", 1, 5, 2**31 - 1)
        self._maybe(fields, "stop_sequences", ["e"], ["a", "\u20ac"], [""], ["\ud800"], ["x"] * 17, rare=True)
        self._maybe(fields, "metadata", {"user_id": self._text()}, {}, {"x": 1}, rare=True)
        return self._named(fields)

    def _conversation(self) -> dict[str, Any]:
        chance = self._chance
        fields: dict[str, Any] = {"model": "embedded", "messages": [{"role": "user", "content": self._text()}]}
        if self._one_in(3):
            call = {
                "type": "tool_use",
                "id": "c1",
                "name": chance.choice(NAMES),
                "input": chance.choice(({}, {"a": [1]})),
            }
            thinking = [{"type": "thinking", "thinking": self._text()}] if self._one_in(2) else []
            result = {"type": "tool_result", "tool_use_id": "c1", "content": [self._part("text")]}
            fields["messages"].append({"role": "assistant", "content": [*thinking, self._part("text"), call]})
            fields["messages"].append({"role": "user", "content": [result, self._part("text")]})
        if self._one_in(4):
            fields["messages"].append({"role": chance.choice(["assistant", "system"]), "content": self._text()})
        self._maybe(fields, "system", self._text(), [self._part("text") | {"cache_control": {"type": "ephemeral"}}], [])
        self._maybe(fields, "thinking", {"type": "disabled"}, {"type": "enabled", "budget_tokens": 9}, {"type": "x"})
        if self._one_in(3):
            fields["tools"] = [self._messages_tool() for _ in range(chance.randint(1, 3))]
            named = {"type": "tool", "name": fields["tools"][0]["name"]}
            self._maybe(fields, "tool_choice", {"type": "auto"}, {"type": "any"}, {"type": "none"}, named, named, "any")
        elif self._one_in(4):
            asked = {"type": "json_schema", "schema": chance.choice(SCHEMAS)}
            fields["output_config"] = chance.choice(({"format": asked}, {"format": asked}, {"effort": "low"}, {}))
        return fields

    def _messages_tool(self) -> dict[str, Any]:
        function = self._tool()["function"]
        function["input_schema"] = function.pop("parameters", {"type": "object"})
        return function

    def _part(self, kind: str) -> dict[str, Any]:
        return {"type": kind, "text": self._text()}

    def _named(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._maybe(fields, "model", *MODELS, rare=True)
        return self._shared(fields)

    def _tokenize(self) -> dict[str, Any]:
        fields = {"messages": self._messages()} if self._one_in(2) else {"prompt": self._text()}
        self._maybe(fields, "return_token_strs", True)
        self._maybe(fields, "add_special_tokens", True, False)
        return fields

    def _detokenize(self) -> dict[str, Any]:
        return {"tokens": self._ids()}

    def _abort(self) -> dict[str, Any]:
        return {"abort_all": True} if self._one_in(8) else {"rid": self._chance.choice(RIDS)}

    def _load(self) -> dict[str, Any]:
        loras = [f"embedded-lora:{seed}" for seed in "12x"]
        paths = (*loras, "no/such", "/", "", "\x00", "\ud800", "x" * 5000)
        return {"lora_name": self._chance.choice(("y", "z", *MODELS)), "lora_path": self._chance.choice(paths)}

    def _unload(self) -> dict[str, Any]:
        fields = {"lora_name": self._chance.choice(("y", "z", *MODELS))}
        self._maybe(fields, "timeout", 0, 0.01, -1)
        return fields

    def _update(self) -> dict[str, Any]:
        fields = {"model_path": self._chance.choice(("no/such", "", "\x00", "/", "embedded:x", "\ud800"))}
        self._maybe(fields, "timeout", 0, 0.01, -1)
        return fields

    # -- fields --

    def _shared(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._maybe(fields, "stream", True, True, False)
        self._maybe(fields, "rid", *RIDS, rare=True)
        self._maybe(fields, "priority", -5, 0, 5, 2**31 - 1)
        self._maybe(fields, "timeout_s", 1e-6, 0.02, 60, 0, rare=True)
        self._maybe(fields, "waiting_timeout_s", 1e-6, 0.02, 60, rare=True)
        self._maybe(fields, "cache_salt", *SALTS)
        return fields

    def _openai(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._maybe(fields, "model", *MODELS, rare=True)
        fields = self._shared(fields)
        if fields.get("stream"):
            self._maybe(fields, "stream_options", {"include_usage": True}, {}, None)
        self._maybe(fields, "user", self._text(), rare=True)
        return fields

    def _native_sampling(self) -> dict[str, Any]:
        sampling: dict[str, Any] = {"max_new_tokens": self._chance.randint(0, MOST_NEW_TOKENS)}
        self._maybe(sampling, "min_new_tokens", 0, 1, sampling["max_new_tokens"], 50, rare=True)
        return sampling | self._grammar(("json_schema", SCHEMAS), ("regex", REGEXES), ("ebnf", GRAMMARS))

    def _openai_sampling(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"max_tokens": self._chance.randint(1, MOST_NEW_TOKENS)}
        self._maybe(fields, "min_tokens", 0, 1, fields["max_tokens"], 50, rare=True)
        choices = [
            ["yes", "no"],
            ["a"],
            [""],
            [],
            ["\x00", "\u20ac"],
            ["\ud800"],
            ["a" * 500] * 3,
            [str(i) for i in range(99)],
        ]
        formats = [{"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in SCHEMAS]
        formats += [{"type": "json_object"}, {"type": "text"}, {"type": "yaml"}, {}]
        newer: list[dict[str, Any]] = [{"regex": regex} for regex in REGEXES]
        newer += [{"grammar": text} for text in GRAMMARS] + [{"json": schema} for schema in SCHEMAS]
        newer += [{"choice": choice} for choice in choices] + [{"json_object": True}, {}, {"structural_tag": "{}"}]
        return fields | self._grammar(
            ("guided_json", SCHEMAS),
            ("guided_regex", REGEXES),
            ("guided_choice", choices),
            ("guided_grammar", GRAMMARS),
            ("response_format", formats),
            ("structured_outputs", newer),
        )

    def _grammar(self, *fields: tuple[str, Any]) -> dict[str, Any]:
        if not self._one_in(3):
            return {}
        name, values = self._chance.choice(fields)
        return {name: copy.deepcopy(self._chance.choice(values))}

    def _sampling(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._maybe(fields, "temperature", 0, 0, 1e-9, 0.7, 2, 1e308)
        self._maybe(fields, "top_p", 1, 1e-9, 0.5)
        self._maybe(fields, "top_k", -1, 1, 5, 2**31 - 1)
        self._maybe(fields, "min_p", 0, 0.1, 1)
        self._maybe(fields, "frequency_penalty", -2, 2, 0.5)
        self._maybe(fields, "presence_penalty", -2, 2)
        self._maybe(fields, "repetition_penalty", 1e-320, 0.5, 2)
        self._maybe(fields, "seed", 0, 2**63 - 1, 7)
        self._maybe(fields, "stop", "e", ["a", "\u20ac"], "\x00", [], "", "\ud800", ["x"] * 17, rare=True)
        self._maybe(fields, "stop_token_ids", [], [97, 98], [-1], [10**6], rare=True)
        self._maybe(fields, "ignore_eos", True)
        self._maybe(fields, "logit_bias", *BIASES, rare=True)
        return fields

    def _text(self) -> str:
        chance = self._chance
        return "".join(chance.choice(TEXTS) for _ in range(chance.choices((1, 2, 4), (6, 2, 1))[0]))

    def _ids(self) -> list[int]:
        ids = [self._chance.choice((0, 1, 97, 98, 255, 256)) for _ in range(self._chance.randint(1, 40))]
        return ids if not self._one_in(12) else self._chance.choice([[], [-1], [*ids, 10**6]])

    def _maybe(self, fields: dict[str, Any], name: str, *values: Any, rare: bool = False) -> None:
        if self._one_in(24 if rare else 4):
            fields[name] = copy.deepcopy(self._chance.choice(values))

    def _one_in(self, number: int) -> bool:
        return self._chance.randrange(number) == 0

    # -- what is wrong with them --

    def _changed(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The same with a value, a key or a place somewhere inside of it replaced, added, taken out or nested."""
        chance = self._chance
        changed = copy.deepcopy(fields)
        places: list[Any] = [changed]
        for place in places:
            inside = place.values() if isinstance(place, dict) else place
            places += [value for value in inside if isinstance(value, dict | list) and len(places) < 200]
        place = chance.choice(places)
        key: Any = chance.randrange(len(place)) if isinstance(place, list) and place else None
        if isinstance(place, dict):
            key = chance.choice([*place, "odd", "", "\ud800", "x" * 500, "__class__"])
        if key is None:
            place.append(copy.deepcopy(chance.choice(VALUES)))
            return changed
        act = chance.randrange(6)
        if act == 0 and (isinstance(place, list) or key in place):
            del place[key]
        elif act == 1 and (isinstance(place, list) or key in place):
            for _ in range(chance.choice((1, 30, 300))):
                place[key] = [place[key]] if chance.random() < 0.5 else {"a": place[key]}
        else:
            place[key] = copy.deepcopy(chance.choice(VALUES))
        return changed

    def _damaged(self, content: bytes) -> bytes:
        chance = self._chance
        damaged = bytearray(content)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        kind = chance.randrange(5)
        if kind == 0:
            return bytes(damaged[: chance.randrange(len(damaged))])
        if kind == 1:
            return b"\xef\xbb\xbf" + content
        if kind == 2:
            return content.decode().encode("utf-16")
        if kind == 3:
            return content[:-1] + b"," + content[1:] if len(content) > 2 else b"[]"  # Each key twice.
        return bytes(damaged)


def _pattern_of(fields: dict[str, Any]) -> str | None:
    """Return the pattern that a text must match when its grammar ends it; None when something else may end it first."""
    sampling = fields.get("sampling_params", fields)
    if any(sampling.get(name) for name in ("stop", "stop_token_ids")) or fields.get("echo") or "tools" in fields:
        return None
    regex = sampling.get("regex") or sampling.get("guided_regex")
    return regex if regex in ("[a-c]{2}", "(yes|no)", "[0-9]+x?", "(a|b)*c{3}") else None
