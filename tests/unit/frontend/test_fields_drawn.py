"""Fields of bodies at and beyond their bounds, and what bodies drawn with a seed come to, from tables of rules."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import msgspec
import pytest
from every_case import every_case

from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import Generate
from engine.frontend.http.routes.generation import orders_of
from engine.frontend.protocols.openai.bodies import ChatBody, CompletionBody
from engine.frontend.schema.errors import ApiError
from engine.frontend.schema.native import GenerateBody, parse_body
from engine.frontend.sessions.requests import Order, ServedModel
from engine.frontend.text.dialect import PLAIN
from engine.frontend.text.tokenizer import load_tokenizer

NATIVE, COMPLETION, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    NATIVE: (GenerateBody, {"text": "x"}),
    COMPLETION: (CompletionBody, {"prompt": "x"}),
    CHAT: (ChatBody, {"messages": [{"role": "user", "content": "x"}]}),
}
DAY = 86_400
MOST = 2**31 - 1
# Sampling fields: what is accepted, and what is refused.
SAMPLING: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 0.5, 100], [-0.001, "1", True]),
    "top_p": ([0.001, 1], [0, 1.001]),
    "top_k": ([-1, 0, 1, MOST], [-2, MOST + 1, 1.5]),
    "min_p": ([0, 1], [-0.001, 1.001]),
    "frequency_penalty": ([-2, 2], [-2.001, 2.001]),
    "presence_penalty": ([-2, 2], [-2.001, 2.001]),
    "repetition_penalty": ([0.001, 2], [0, 2.001]),
    "seed": ([0, 2**63 - 1], [-1, 2**63]),
    "stop": (["x", ["x"] * 16, "x" * 1024, ["x" * 1024], []], ["", ["x"] * 17, "x" * 1025, ["x" * 1025], [""], [1]]),
    "stop_token_ids": ([[], [0], [1] * 256], [[1] * 257, ["1"], 1]),
    "ignore_eos": ([True, False], [1, "true"]),
    "logit_bias": ([{}, {"0": -100, "9": 100}], [{"0": -100.1}, {"9": 100.1}, {"-1": 1}, {"1.0": 1}, {str(10**10): 1}]),
}
# Fields of the body.
SHARED: dict[str, tuple[list[Any], list[Any]]] = {
    "stream": ([True, False], [1]),
    "rid": (["r", "r" * 256], ["", "r" * 257]),
    "priority": ([-MOST, MOST], [-MOST - 1, MOST + 1, 0.5]),
    "timeout_s": ([0.001, DAY], [0, DAY + 1]),
    "waiting_timeout_s": ([0.001, DAY], [0, DAY + 1]),
    "cache_salt": (["s", "s" * 256], ["", "s" * 257]),
}
OF_OPENAI: dict[str, tuple[list[Any], list[Any]]] = {
    "n": ([1, 128], [0, 129, True]),
    "min_tokens": ([0, 1], [-1]),
    "user": (["", "u" * 256], ["u" * 257, 1]),
    "metadata": ([{}, {"k": "v" * 512}, dict.fromkeys("abcdefghijklmnop", "")],
                 [{"k": "v" * 513}, {"k": 1}, dict.fromkeys("abcdefghijklmnopq", "")]),
    "service_tier": (["auto", "default"], ["flex"]),
    "store": ([False], [True, 0]),
    "truncate_prompt_tokens": ([-1, 1, MOST], [-2, 0, MOST + 1]),
    "prompt_logprobs": ([0, 20], [-1, 21]),
    "request_id": (["q", "q" * 256], ["", "q" * 257]),
    "stream_options": ([None], [{"include_usage": True}, {}]),
    "skip_special_tokens": ([True, False], [0]),
    "guided_choice": ([["a"], ["a"] * 1024], [[], [""], ["a"] * 1025, [1]]),
    "guided_json": ([{}, True, '{"type": "null"}'], ["{", 1]),
    "guided_regex": (["a"], [""]),
    "response_format": ([{"type": "text"}, {"type": "json_object"}], [{"type": "xml"}, {"type": "json_schema"}, {}]),
    "structured_outputs": ([{"regex": "a"}, {"json_object": True}],
                           [{}, {"regex": "a", "choice": ["a"]}, {"json_object": False}]),
}  # fmt: skip
FIELDS: dict[str, dict[str, tuple[list[Any], list[Any]]]] = {
    NATIVE: SHARED
    | {
        "top_logprobs_num": ([0], [1, -1]),
        "logprob_start_len": ([-1], [0, -2]),
        "input_ids": ([], [[1]]),
        "lora_path": (["a"], [""]),
    },
    COMPLETION: SHARED | SAMPLING | OF_OPENAI | {
        "prompt": (["", "x", [1], ["x"] * 128, [[1], [2]]], [["x"] * 129, [], [True], 1, [["x"]], ["x", 1]]),
        "logprobs": ([0, 20], [-1, 21, True]),
        "max_tokens": ([0, MOST], [-1, MOST + 1]),
        "best_of": ([1], [0, 2, 129]),
        "echo": ([True], [1]),
        "suffix": (["", None], ["x"]),
    },
    CHAT: SHARED | SAMPLING | OF_OPENAI | {
        "messages": ([], [[], [{"role": "nobody", "content": "x"}], "x"]),
        "max_tokens": ([1, MOST], [0, MOST + 1]),
        "max_completion_tokens": ([1, MOST], [0, MOST + 1]),
        "logprobs": ([True, False], [0, 1]),
        "top_logprobs": ([0], [1, -1]),
        "tool_choice": (["none", "auto"], ["required", "any", {"type": "function", "function": {"name": "f"}}]),
        "functions": ([[]], [[{"name": "f"}]]),
        "modalities": ([["text"]], [[], ["text", "audio"], ["audio"]]),
        "reasoning_effort": (["none", "max"], ["most"]),
        "chat_template_kwargs": ([{"x": 1}], [{"messages": []}, {"x": 1, "tokenize": True}]),
        "audio": ([None], [{}]),
    },
}  # fmt: skip
# Fields together: what is accepted, and what is refused.
TOGETHER: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    NATIVE: (
        [
            {"return_logprob": True, "top_logprobs_num": 20, "logprob_start_len": 0},
            {"sampling_params": {"max_new_tokens": 3, "min_new_tokens": 3}},
            {"sampling_params": {"max_new_tokens": 0}},
            {"sampling_params": None},
        ],
        [
            {"return_logprob": True, "top_logprobs_num": 21},
            {"sampling_params": {"max_new_tokens": 3, "min_new_tokens": 4}},
            {"sampling_params": {"min_new_tokens": 129}},
            {"sampling_params": {"regex": "a", "ebnf": 'start: "a"'}},
            {"input_ids": [1]},
            {"sampling_params": {"n": 129}},
        ],
    ),
    COMPLETION: (
        [
            {"stream": True, "stream_options": {"include_usage": True}},
            {"n": 3, "best_of": 3},
            {"n": 3, "best_of": 1},
            {"prompt": ["x", "y"], "n": 64},
            {"rid": "a", "request_id": "a"},
            {"max_tokens": 2, "min_tokens": 2},
            {"min_tokens": 20},
            {"guided_regex": "a", "response_format": {"type": "text"}},
        ],
        [
            {"stream": False, "stream_options": {"include_usage": True}},
            {"n": 3, "best_of": 2},
            {"prompt": ["x", "y"], "n": 65},
            {"rid": "a", "request_id": "b"},
            {"max_tokens": 2, "min_tokens": 3},
            {"max_tokens": 0, "min_tokens": 1},
            {"stream": True, "prompt_logprobs": 0},
            {"echo": True, "truncate_prompt_tokens": 1},
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            {"guided_regex": "a", "structured_outputs": {"regex": "a"}},
            {"guided_json": {}, "guided_choice": ["a"]},
        ],
    ),
    CHAT: (
        [
            {"logprobs": True, "top_logprobs": 20},
            {"max_tokens": 3, "max_completion_tokens": 3},
            {"max_completion_tokens": 2, "min_tokens": 2},
            {"continue_final_message": True, "add_generation_prompt": False},
            {"continue_final_message": False, "add_generation_prompt": True},
        ],
        [
            {"logprobs": True, "top_logprobs": 21},
            {"max_tokens": 3, "max_completion_tokens": 4},
            {"max_completion_tokens": 2, "min_tokens": 3},
            {"continue_final_message": True, "add_generation_prompt": True},
        ],
    ),
}
TRIED = [
    (path, more, is_accepted)
    for path in BODIES
    for is_accepted in (True, False)
    for more in (
        *({name: value} for name, tried in FIELDS[path].items() for value in tried[0 if is_accepted else 1]),
        *({"sampling_params": {name: value}} for name, tried in SAMPLING.items() if path == NATIVE
          for value in tried[0 if is_accepted else 1]),
        *TOGETHER[path][0 if is_accepted else 1],
    )
]  # fmt: skip


@every_case(("path", "more", "is_accepted"), TRIED)
def test_a_field_is_accepted_up_to_its_bounds(path: str, more: dict[str, Any], is_accepted: bool) -> None:
    """C01, C02: a parameter is honoured, or refused by its name."""
    model, least = BODIES[path]
    data = json.dumps(least | more).encode()
    if is_accepted:
        parse_body(model, data)
        return
    with pytest.raises(ApiError) as caught:
        parse_body(model, data)
    assert caught.value.status == 400
    assert any(name in str(caught.value) for name in (*more, *more.get("sampling_params", ())))


@pytest.fixture(scope="module")
def served() -> ServedModel:
    config = EngineConfig()
    tokenizer, template = load_tokenizer(config)
    return ServedModel(
        tokenizer, template, Limits.of(config, EMBEDDED_FACTS), "embedded", PLAIN, {"top_k": 7, "top_p": 0.5}
    )


# For sampling fields of all protocols, the values to draw; the model has defaults for two of them.
DRAWN: dict[str, list[Any]] = {
    "temperature": [0, 0.7],
    "top_p": [0.9],
    "top_k": [3],
    "min_p": [0.1],
    "frequency_penalty": [1],
    "presence_penalty": [-1],
    "repetition_penalty": [1.5],
    "seed": [5, 2**63 - 1],
    "stop": ["x", ["y", "z"]],
    "stop_token_ids": [[3, 4]],
    "ignore_eos": [True],
    "logit_bias": [{"9": 1, "2": -0.5}],
}
OF_ALL: dict[str, list[Any]] = {
    "rid": ["r"],
    "priority": [4],
    "timeout_s": [2.5],
    "waiting_timeout_s": [1.5],
    "cache_salt": ["s"],
    "stream": [True],
}
SHOWN = {
    "return_cached_tokens_details": "cached_tokens_details",
    "return_token_ids": "token_ids",
    "include_stop_str_in_output": "shows_stop",
}


def drawn(draw: random.Random, fields: dict[str, list[Any]], share: float = 0.4) -> dict[str, Any]:
    return {name: draw.choice(values) for name, values in fields.items() if draw.random() < share}


def require_sampling(message: Generate, given: dict[str, Any], choice: int, limits: tuple[int, int]) -> None:
    """What was drawn reaches the scheduler, and what was not has the model's or the engine's default."""
    sampling = message.sampling
    plain = {"temperature": 1.0, "top_p": 0.5, "top_k": 7, "min_p": 0.0, "frequency_penalty": 0.0,
             "presence_penalty": 0.0, "repetition_penalty": 1.0, "ignore_eos": False}  # fmt: skip
    for name, default in plain.items():
        assert getattr(sampling, name) == given.get(name, default), name
    stops = given.get("stop", [])
    assert sampling.stop == ((stops,) if isinstance(stops, str) else tuple(stops))
    assert sampling.stop_token_ids == tuple(given.get("stop_token_ids", ()))
    assert sampling.logit_bias == (((2, -0.5), (9, 1)) if "logit_bias" in given else ())
    assert sampling.seed == (None if "seed" not in given else (given["seed"] + choice) % 2**63)
    assert (sampling.max_new_tokens, sampling.min_new_tokens) == limits


def require_shared(order: Order, given: dict[str, Any]) -> None:
    for message in order.messages:
        assert message.priority == given.get("priority", 0)
        assert (message.timeout_s, message.waiting_timeout_s) == (
            given.get("timeout_s"),
            given.get("waiting_timeout_s"),
        )
        assert message.cache_salt == given.get("cache_salt")
    assert order.stream is given.get("stream", False)
    rids = [message.rid for message in order.messages]
    assert rids == ([order.rid] if len(rids) == 1 else [f"{order.rid}-{number}" for number in range(len(rids))])
    assert order.rid == given["rid"] if "rid" in given else order.rid


def test_a_completion_comes_to_the_requests_of_its_fields(served: ServedModel) -> None:
    """C02: one for each choice of each prompt, in their order."""
    draw = random.Random(10)
    prompts: list[Any] = ["abc", ["a", "bcd"], [5, 6, 7], [[5], [6, 7]]]
    each = [[b"abc"], [b"a", b"bcd"], [bytes([5, 6, 7])], [bytes([5]), bytes([6, 7])]]
    for _ in range(300):
        number = draw.randrange(4)
        given = drawn(draw, DRAWN) | drawn(draw, OF_ALL) | drawn(draw, {field: [True] for field in SHOWN})
        given |= drawn(
            draw, {"n": [2, 3], "logprobs": [0, 2], "max_tokens": [0, 9], "echo": [True], "model": ["embedded"]}
        )
        given |= drawn(draw, {"min_tokens": [2]}) if given.get("max_tokens", 9) else {}
        given |= {} if given.get("stream") else drawn(draw, {"prompt_logprobs": [0, 3]})
        given |= {} if given.get("echo") else drawn(draw, {"truncate_prompt_tokens": [1, 2]})
        given |= (
            drawn(draw, {"stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}]})
            if given.get("stream")
            else {}
        )
        order = orders_of(served)[COMPLETION](json.dumps({"prompt": prompts[number]} | given).encode())
        n, kept = given.get("n", 1), given.get("truncate_prompt_tokens", 99)
        require_shared(order, given)
        assert [bytes(one.prompt_ids) for one in order.messages] == [
            one[-kept:] for one in each[number] for _ in range(n)
        ]
        asked = [given.get("prompt_logprobs"), given.get("logprobs") if given.get("echo") else None]
        top = max((one for one in asked if one is not None), default=None)
        for at, message in enumerate(order.messages):
            most = given.get("max_tokens", max(16, given.get("min_tokens", 0)))
            require_sampling(message, given, at % n, (most, given.get("min_tokens", 0)))
            assert (message.return_logprob, message.top_logprobs_num) == ("logprobs" in given, given.get("logprobs", 0))
            asks = top is not None and (given.get("stream") or at % n == 0)
            assert message.prompt_logprobs_from == (0 if asks else -1)
            assert message.prompt_top_logprobs_num == (top if asks else 0)
        assert (order.n, order.logprobs, order.top_logprobs) == (n, "logprobs" in given, given.get("logprobs", 0))
        assert order.prompt_logprobs == given.get("prompt_logprobs")
        assert order.echo == (tuple(one.decode() for one in each[number]) if given.get("echo") else ())
        options = given.get("stream_options", {})
        assert order.include_usage is options.get("include_usage", False)
        assert order.continuous_usage is options.get("continuous_usage_stats", False)
        for field, name in SHOWN.items():
            assert getattr(order, name) is given.get(field, False)


def test_a_native_body_comes_to_the_requests_of_its_fields(served: ServedModel) -> None:
    draw = random.Random(11)
    for _ in range(200):
        prompt, ids = draw.choice([({"text": "abc"}, b"abc"), ({"input_ids": [5, 6]}, bytes([5, 6]))])
        sampling = drawn(draw, DRAWN) | drawn(draw, {"n": [2], "max_new_tokens": [5, 9], "min_new_tokens": [1, 5]})
        shows = drawn(draw, {"no_stop_trim": [True], "skip_special_tokens": [False]})
        given = drawn(draw, OF_ALL) | drawn(draw, {"return_logprob": [True]})
        given |= (
            drawn(draw, {"top_logprobs_num": [3], "logprob_start_len": [0, 1]}) if "return_logprob" in given else {}
        )
        body = prompt | given | {"sampling_params": sampling | shows}
        order = orders_of(served)[NATIVE](json.dumps(body).encode())
        require_shared(order, given)
        assert len(order.messages) == order.n == sampling.get("n", 1)
        start = given.get("logprob_start_len", -1)
        for choice, message in enumerate(order.messages):
            assert bytes(message.prompt_ids) == ids
            limits = sampling.get("max_new_tokens", 128), sampling.get("min_new_tokens", 0)
            require_sampling(message, sampling, choice, limits)
            assert message.return_logprob is ("return_logprob" in given)
            assert message.top_logprobs_num == given.get("top_logprobs_num", 0)
            assert message.prompt_logprobs_from == start
            assert message.prompt_top_logprobs_num == (given.get("top_logprobs_num", 0) if start >= 0 else 0)
        assert order.shows_stop is ("no_stop_trim" in shows)
        assert order.shows_special is ("skip_special_tokens" in shows)


def is_taken(served: ServedModel, path: str, body: dict[str, Any]) -> bool:
    try:
        orders_of(served)[path](json.dumps(body).encode())
    except ApiError:
        return False
    return True


def test_what_has_no_room_is_refused(served: ServedModel) -> None:
    """To the token: prompt and output fill the context, and not one more."""
    room = served.limits.context_length
    for prompt in (1, 7, room - 1):
        for tokens, fits in ((room - prompt, True), (room - prompt + 1, False)):
            ids = [5] * prompt
            chat = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": room}
            assert is_taken(served, COMPLETION, {"prompt": ids, "max_tokens": tokens}) is fits
            assert is_taken(served, COMPLETION, {"prompt": ids, "min_tokens": tokens}) is fits
            # The native protocol cuts the output to the room.
            assert is_taken(served, NATIVE, {"input_ids": ids, "sampling_params": {"max_new_tokens": tokens}})
            assert not is_taken(served, CHAT, chat)
    for prompt, tokens, fits in ((room, 0, True), (room, 1, False), (room + 1, 0, False), (0, 1, False)):
        assert is_taken(served, COMPLETION, {"prompt": [[5] * prompt], "max_tokens": tokens}) is fits
        body = {"input_ids": [5] * prompt, "sampling_params": {"max_new_tokens": tokens}}
        assert is_taken(served, NATIVE, body) is fits
    for ids, fits in (([served.limits.vocab_size - 1], True), ([served.limits.vocab_size], False), ([-1], False)):
        assert is_taken(served, NATIVE, {"input_ids": ids}) is fits
        assert is_taken(served, NATIVE, {"text": "x", "sampling_params": {"stop_token_ids": ids}}) is fits
        assert is_taken(served, COMPLETION, {"prompt": ids}) is fits
        assert is_taken(served, COMPLETION, {"prompt": "x", "stop_token_ids": ids}) is fits
    for start, fits in ((1, True), (2, False)):
        body = {"input_ids": [5, 6], "return_logprob": True, "logprob_start_len": start}
        assert is_taken(served, NATIVE, body) is fits


def test_a_lora_is_taken_where_the_server_holds_some(served: ServedModel) -> None:
    holding = dataclasses.replace(served, limits=msgspec.structs.replace(served.limits, max_loras=1))
    for path, body in ((NATIVE, {"text": "x", "lora_path": "a"}), (COMPLETION, {"prompt": "x", "model": "a"})):
        assert not is_taken(served, path, body)
        (message,) = orders_of(holding)[path](json.dumps(body).encode()).messages
        assert message.lora == "a"
