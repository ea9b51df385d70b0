"""Orders: a long body is read elsewhere and comes to the same, and a text that cannot fit is refused by its length."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi import Request

from engine.core.config import EngineConfig
from engine.core.errors import CheckpointError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import FinishReason, Generate, SamplingParams, TokenOutput
from engine.frontend.http.body_reader import BodyReader
from engine.frontend.http.forked_work import LONG_BODY_BYTES, LongBodies, WorkLostError, body_work
from engine.frontend.http.process import sampling_defaults_of
from engine.frontend.http.routes.generation import order_works, orders_of
from engine.frontend.schema.errors import ApiError
from engine.frontend.schema.native import GenerateBody
from engine.frontend.sessions.requests import Order, ServedModel, request_of, sampling_of, unpacked
from engine.frontend.text.dialect import Dialect
from engine.frontend.text.tokenizer import load_tokenizer
from engine.model.embedded import embedded_folder
from engine.process.settings import ServerSettings

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"\u20ac": {}}}}}]
NATIVE, COMPLETION, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
# Long in bytes, while the text fits into the context.
LONG_CHARS = 6000
LONG = "\\u0078" * LONG_CHARS
assert len(LONG) > LONG_BODY_BYTES


@pytest.fixture(scope="module")
def served() -> ServedModel:
    config = EngineConfig()
    tokenizer, template = load_tokenizer(config)
    dialect = Dialect.of(ServerSettings(reasoning_parser="qwen3"), template.text)
    return ServedModel(tokenizer, template, Limits.of(config, EMBEDDED_FACTS), "embedded", dialect)


def inline(served: ServedModel, kind: str, body: bytes) -> Order | ApiError:
    try:
        return orders_of(served)[kind](body)
    except ApiError as exc:
        return exc


def elsewhere(served: ServedModel, kind: str, body: bytes) -> Order | ApiError:
    work = body_work(order_works(served))

    async def ask(*parts: bytes, is_check: bool) -> bytes:
        assert not is_check
        return work(b"".join(parts))

    async def order() -> Order:
        return await unpacked(await LongBodies(ask).work_on(kind, body))

    try:
        return asyncio.run(order())
    except ApiError as exc:
        return exc


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (NATIVE, {"text": "abc", "rid": "r", "sampling_params": {"stop": ["x"], "seed": 3}, "stream": True}),
        (NATIVE, {"input_ids": [1, 2], "rid": "r", "return_logprob": True, "top_logprobs_num": 2}),
        (COMPLETION, {"prompt": ["a", "bc", "d"], "rid": "r", "n": 2, "seed": 1, "logprobs": 1}),
        (COMPLETION, {"prompt": ["a", "bc", [5]], "rid": "r", "n": 2}),
        (CHAT, {"messages": [{"role": "user", "content": "a\nb"}], "rid": "r", "n": 3, "logprobs": True}),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "\u20ac"}],
                "rid": "r",
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        ),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "rid": "r", "tools": TOOLS, "n": 2}),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "a"}],
                "rid": "r",
                "tools": TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "parallel_tool_calls": False,
            },
        ),
        (NATIVE, {"text": "abc", "max-tokens": 1}),
        (NATIVE, {"input_ids": [9999]}),
        (COMPLETION, {"prompt": "a", "model": "other"}),
        (COMPLETION, {"prompt": "\ud800"}),
    ],
)
def test_a_body_comes_to_the_same_wherever_it_is_read(served: ServedModel, kind: str, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    here, there = inline(served, kind, data), elsewhere(served, kind, data)
    if isinstance(here, ApiError):
        assert isinstance(there, ApiError)
        assert there.body == here.body
    else:
        assert there == here


def test_a_prompt_is_packed_once_for_all_its_choices(served: ServedModel) -> None:
    def size(n: int) -> int:
        body = {"prompt": [[255] * 4000], "n": n, "max_tokens": 1}
        return len(order_works(served)[COMPLETION](json.dumps(body).encode()))

    assert size(100) < 8 * size(1)


def test_seeds_of_choices_stay_seeds() -> None:
    """A seed has 63 bits, and the choice after the last one takes the first."""
    sampling = SamplingParams(seed=2**63 - 1)
    assert [sampling_of(sampling, choice).seed for choice in range(3)] == [2**63 - 1, 0, 1]


def test_tokens_are_those_of_the_tokenizer_in_full(served: ServedModel) -> None:
    """Without offsets it is a faster function of the library, and the same ids."""
    text = "The quick \u20ac brown\n\n fox \U0001f98a <|im_end|> x" * 20
    message = request_of(GenerateBody(text=text), served)
    assert message.prompt_ids == tuple(served.tokenizer.encode(text).ids)


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(play) -> None:
    """4 MB of text kept the interpreter for 3.3 s. No token is longer than the longest, so its length says enough."""

    async def scene(stage) -> None:
        tokenized: list[int] = []
        encode = stage.tokenizer.encode
        stage.tokenizer.encode = lambda text, special=True: tokenized.append(len(text)) or encode(text, special)
        longest = len("<0x00>") * stage.limits.context_length
        for path, body in [
            ("/generate", {"text": "a" * (longest + 1)}),
            ("/v1/completions", {"prompt": "a" * (longest + 1)}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * longest}]}),
        ]:
            answer = await stage.http.post(path, json=body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert f"at most {longest} can fit" in error["message"]
            assert error["param"] == next(iter(body))
        assert tokenized == []
        answer = await stage.http.post("/generate", json={"text": "a" * longest})
        assert "tokens, but context_length" in answer.json()["error"]["message"]
        assert tokenized == [longest]

    play(scene)


@pytest.mark.parametrize("kind", [NATIVE, COMPLETION, CHAT])
def test_a_long_body_is_read_elsewhere_and_answered_as_a_short_one(play, kind: str) -> None:
    body = {
        NATIVE: '{"rid": "r", "text": "%s"%s}',
        COMPLETION: '{"rid": "r", "prompt": "%s"%s}',
        CHAT: '{"rid": "r", "messages": [{"role": "user", "content": "%s"}]%s}',
    }[kind]

    async def scene(stage) -> None:
        answer = asyncio.create_task(stage.http.post(kind, content=body % (LONG, "")))
        message = await stage.scheduler.receive()
        assert isinstance(message, Generate)
        assert bytes(message.prompt_ids).count(b"x") == LONG_CHARS
        assert [question.partition(b"\n")[0].decode() for question in stage.long_bodies] == [kind]
        await stage.scheduler.reply(TokenOutput(rid="r", token_ids=(97,), finish_reason=FinishReason.LENGTH))
        assert (await answer).status_code == 200
        refused = await stage.http.post(kind, content=body % (LONG, ', "max-tokens": 1'))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max-tokens")
        assert len(stage.long_bodies) == 2

    play(scene)


def test_a_lost_worker_is_503_and_says_what_to_do(play) -> None:
    async def scene(stage) -> None:
        async def lost(_: bytes) -> bytes:
            raise WorkLostError("it ended")

        stage.work_elsewhere = lost
        answer = await stage.http.post("/generate", json={"text": "x" * LONG_BODY_BYTES})
        assert answer.status_code == 503
        assert "it ended; try again" in answer.json()["error"]["message"]

    play(scene)


def test_large_bodies_together_are_bounded_and_small_ones_pass(play) -> None:
    """16 MB from each of a thousand connections would be all of the memory."""

    async def scene(stage) -> None:
        release = asyncio.Event()

        async def slow(_: bytes) -> bytes:
            await release.wait()
            raise WorkLostError("late")

        stage.work_elsewhere = slow
        body = json.dumps({"text": "a" * 90_000}).encode()
        tasks = [asyncio.create_task(stage.http.post("/generate", content=body)) for _ in range(40)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        answer = done.pop().result()
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert "may be processed at once" in answer.json()["error"]["message"]
        assert (await stage.http.post("/generate", json={"text": ""})).status_code == 400
        release.set()
        statuses = {answer.status_code for answer in await asyncio.gather(*tasks)}
        assert statuses == {429, 503}
        # The earlier bodies no longer count.
        assert (await stage.http.post("/generate", content=body)).status_code == 503

    play(scene, max_body_bytes=100_000)


USER = [{"role": "user", "content": "x"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": (NATIVE, {"text": "x"}),
    "completions": (COMPLETION, {"prompt": "x"}),
    "chat": (CHAT, {"messages": USER}),
    "responses": ("/v1/responses", {"input": "x"}),
    "messages": ("/v1/messages", {"model": "embedded", "messages": USER, "max_tokens": 5}),
}


@pytest.mark.parametrize("kind", BODIES)
def test_what_a_request_leaves_out_of_sampling_is_as_the_checkpoint_says(served: ServedModel, kind: str) -> None:
    """C02: null leaves out too; what a client says counts."""
    recommended = dataclasses.replace(served, sampling_defaults={"temperature": 0.6, "top_k": 20, "top_p": 0.9})
    name, body = BODIES[kind]
    plain, with_null, own = {}, {"top_p": None}, {"temperature": 0.25, "top_p": 1.0}
    for fields, expected in ((plain, (0.6, 20, 0.9)), (with_null, (0.6, 20, 0.9)), (own, (0.25, 20, 1.0))):
        if kind == "messages" and None in fields.values():
            continue  # The protocol has no nulls.
        sent = body | ({"sampling_params": fields} if kind == "generate" else fields)
        order = orders_of(recommended)[name](json.dumps(sent).encode())
        sampling = order.messages[0].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == expected
        if kind == "responses":
            assert json.loads(order.shown_request)["temperature"] == expected[0]
    assert orders_of(served)[name](json.dumps(body).encode()).messages[0].sampling.temperature == 1.0


def test_sampling_defaults_are_read_from_the_folder_and_judged(tmp_path: Path) -> None:
    """A08: what no request may say is refused at the start; the setting leaves the file alone."""
    folder = Path(shutil.copytree(embedded_folder(0), tmp_path / "model"))
    path = folder / "generation_config.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"temperature": 0.6, "top_k": 20, "do_sample": True, "min_p": None}))
    settings = ServerSettings(model=str(folder))
    assert sampling_defaults_of(settings) == {"temperature": 0.6, "top_k": 20}
    path.write_text(json.dumps(said | {"top_p": 1.5}))
    with pytest.raises(CheckpointError, match=r"generation_config.json .*top_p must be <= 1, got 1.5; correct it, or"):
        sampling_defaults_of(settings)
    assert sampling_defaults_of(ServerSettings(model=str(folder), sampling_defaults="openai")) == {}


def test_one_choice_asks_for_the_logprobs_of_a_shared_prompt(served: ServedModel) -> None:
    """In a stream each choice does: none waits for another."""
    body, whole, each = {"prompt": [[1, 2], [3]], "n": 2}, [0, -1, 0, -1], [0] * 4
    echo = {"echo": True, "logprobs": 2}
    for fields, starts in (({"prompt_logprobs": 1}, whole), (echo, whole), (echo | {"stream": True}, each)):
        order = orders_of(served)[COMPLETION](json.dumps(body | fields).encode())
        assert [message.prompt_logprobs_from for message in order.messages] == starts


def test_a_truncated_prompt_keeps_its_end(served: ServedModel) -> None:
    body = {"prompt": [1, 2, 3, 4], "max_tokens": 1}
    for most, kept in ((3, (2, 3, 4)), (9, (1, 2, 3, 4)), (-1, (1, 2, 3, 4))):
        order = orders_of(served)[COMPLETION](json.dumps(body | {"truncate_prompt_tokens": most}).encode())
        assert order.messages[0].prompt_ids == kept


@pytest.mark.parametrize("room", [{}, {"max_tokens": 1}, {"max_tokens": 100}, {"min_tokens": 7, "max_tokens": 9}])
def test_a_prompt_cut_to_what_fits_leaves_room_for_the_requested_tokens(
    served: ServedModel, room: dict[str, Any]
) -> None:
    prompt = [number % 200 for number in range(served.limits.context_length + 50)]
    body = {"prompt": prompt, "truncate_prompt_tokens": -1} | room
    (message,) = orders_of(served)[COMPLETION](json.dumps(body).encode()).messages
    kept = served.limits.context_length - room.get("max_tokens", 1)
    assert message.prompt_ids == tuple(prompt[-kept:])
    assert message.sampling.max_new_tokens == room.get("max_tokens", 1)


@pytest.mark.parametrize("tokens", [32, 64, 4096])
def test_the_default_limit_of_a_chat_is_the_room_that_is_left(served: ServedModel, tokens: int) -> None:
    """The KV of the very last token is never written, so a pool of 64 tokens takes a prompt and its output of 65."""
    limits = msgspec.structs.replace(served.limits, total_pages=tokens // served.limits.page_size)
    small = dataclasses.replace(served, limits=limits)
    chat = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
    (message,) = orders_of(small)[CHAT](chat).messages
    whole = len(message.prompt_ids) + message.sampling.max_new_tokens
    assert whole == min(tokens + 1, limits.context_length)


@pytest.mark.parametrize("body", [{"prompt": [1]}, {"prompt": [[1], [2, 3]]}])
def test_the_default_limit_is_never_below_the_least(served: ServedModel, body: dict[str, Any]) -> None:
    """A client that leaves the limit out is refused for no number that it sent."""
    for least in (0, *range(14, 20), 100):
        for message in orders_of(served)[COMPLETION](json.dumps(body | {"min_tokens": least}).encode()).messages:
            assert message.sampling.min_new_tokens == least <= message.sampling.max_new_tokens


@pytest.mark.parametrize("is_shown", [True, False])
def test_special_tokens_and_stop_strings_are_shown_as_asked(served: ServedModel, is_shown: bool) -> None:
    sampling = {"skip_special_tokens": not is_shown, "no_stop_trim": is_shown, "max_new_tokens": 1}
    fields = {"skip_special_tokens": not is_shown, "include_stop_str_in_output": is_shown}
    chat = [{"role": "user", "content": "a"}]
    bodies = {
        NATIVE: {"input_ids": [1], "sampling_params": sampling},
        COMPLETION: {"prompt": [1]} | fields,
        CHAT: {"messages": chat} | fields,
    }
    for kind, body in bodies.items():
        order = orders_of(served)[kind](json.dumps(body).encode())
        assert (order.shows_special, order.shows_stop) == (is_shown, is_shown), kind


def test_a_large_body_is_not_copied_when_its_last_part_is_here() -> None:
    """To join 16 MB took 11 ms of the event loop, and twice the memory of the body."""
    part, parts = 65_536, 64

    async def receive() -> dict[str, Any]:
        nonlocal parts
        parts -= 1
        return {"type": "http.request", "body": bytes([parts]) * part, "more_body": parts > 0}

    async def most_bytes() -> int:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}
        tracemalloc.start()
        try:
            async with BodyReader(2**26).body_of(Request(scope, receive)) as body:
                assert (len(body), body[0], body[-1]) == (64 * part, 63, 0)
                return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert asyncio.run(most_bytes()) < 1.5 * 64 * part
