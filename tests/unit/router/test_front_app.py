"""The front of several engines, over engines that a test plays: routes, second tries, cut streams, lost clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import httpx
import msgspec
import pytest
from partners import IDLE_LOAD

from engine.cluster.router.front import OF_ALL, OF_ONE_ENGINE, PASSED_ON, front_app
from engine.cluster.router.prompt_reader import prompt_in
from engine.cluster.router.proxy import Head, Headers, PassedRequest, ReplicaLostError
from engine.core.routing.load import Load
from engine.core.routing.placement import NO_PROMPT, Prompt
from engine.frontend.schema.errors import ApiError, ErrorType
from engine.process.settings import ServerSettings

EVENTS: Headers = (("content-type", "text/event-stream"), ("x-request-id", "r-1"))
JSON: Headers = (("content-type", "application/json"),)
Play = Callable[[PassedRequest], AsyncIterator[Head | bytes]]


class PlayedEngines:
    """Engines that answer as the test says, one after the other; the last one goes on."""

    def __init__(self, *plays: Sequence[Head | bytes | Exception]) -> None:
        self.plays = list(plays)
        self.asked: list[PassedRequest] = []
        self.left = 0

    async def ask(self, request: PassedRequest) -> AsyncIterator[Head | bytes]:
        play = self.plays.pop(0) if len(self.plays) > 1 else self.plays[0]
        self.asked.append(request)
        try:
            for part in play:
                if isinstance(part, Exception):
                    raise part
                yield part
        finally:
            self.left += 1

    async def loads(self, headers: Headers) -> list[Load]:
        return [msgspec.structs.replace(IDLE_LOAD, num_reqs=count) for count in (3, 5)]


def head(status: int = 200, headers: Headers = JSON, replica: str = "a") -> Head:
    return Head(status=status, headers=headers, replica=replica)


async def prompt_of(path: str, body: bytes) -> Prompt:
    return prompt_in(path, body, 16)


def client_of(
    engines: PlayedEngines, settings: ServerSettings | None = None, host: str = "127.0.0.1"
) -> httpx.AsyncClient:
    app = front_app(engines, settings or ServerSettings(), prompt_of)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{host}:8000")


def answer_of(
    engines: PlayedEngines, method: str = "POST", path: str = "/generate", **options: object
) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with client_of(engines) as client:
            return await client.request(method, path, **options)  # type: ignore[arg-type]

    return asyncio.run(ask())


def test_a_request_goes_to_an_engine_as_it_came() -> None:
    engines = PlayedEngines([head(headers=(*JSON, ("x-other", "1"))), b'{"text":', b'"x"}'])
    body = {"text": "0123456789abcdef0123456789abcdef"}
    answer = answer_of(engines, path="/generate?x=1", json=body, headers={"authorization": "Bearer k"})
    assert answer.json() == {"text": "x"}
    assert answer.headers["x-other"] == "1"
    (asked,) = engines.asked
    assert (asked.method, asked.target, json.loads(asked.body)) == ("POST", "/generate?x=1", body)
    assert ("authorization", "Bearer k") in asked.headers
    assert asked.prompt == prompt_in("/generate", asked.body, 16)
    assert len(asked.prompt.chain) == 2


def test_a_stream_passes_through_in_whole_events() -> None:
    engines = PlayedEngines([head(headers=EVENTS), b"data: 1\n\nda", b"ta: 2\n\n", b"data: [DONE]\n\n"])
    assert answer_of(engines, json={}).text == "data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"


def test_a_stream_whose_engine_is_lost_ends_with_an_error() -> None:
    """A part of an event that had arrived is dropped, so that the error is read as what it is."""
    engines = PlayedEngines([head(headers=EVENTS), b"data: 1\n\ndata: {", ReplicaLostError("its replica is gone")])
    first, last, rest = answer_of(engines, json={}).text.split("\n\n")
    assert (first, rest) == ("data: 1", "")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["type"] == ErrorType.UNAVAILABLE
    assert error["request_id"] == "r-1"
    assert "its replica is gone" in error["message"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/responses", {"type": "error", "sequence_number": 8, "code": "503", "param": None}),
        ("/v1/messages", {"type": "error", "request_id": "r-1"}),
    ],
)
def test_a_lost_engine_ends_a_stream_by_an_event_of_its_protocol(path: str, expected: dict[str, object]) -> None:
    said = b'event: x\ndata: {"type":"x","sequence_number":7,"delta":"\\"sequence_number\\":9"}\n\n'
    engines = PlayedEngines([head(headers=EVENTS), said, ReplicaLostError("its replica is gone")])
    answer = answer_of(engines, path=path, json={}).text.removeprefix(said.decode())
    name, data, *_ = answer.split("\n")
    event = json.loads(data.removeprefix("data: "))
    assert name == "event: error"
    assert {key: event[key] for key in expected} == expected
    assert "its replica is gone" in event["error"]["message"]


def test_an_engine_that_is_lost_before_its_first_word_is_replaced_once() -> None:
    lost = [ReplicaLostError("gone")]
    engines = PlayedEngines(lost, [head(), b"{}"])
    assert answer_of(engines, json={}).status_code == 200
    # What ends two engines may be the request itself.
    engines = PlayedEngines(lost, lost, [head(), b"{}"])
    answer = answer_of(engines, json={})
    assert answer.status_code == 503
    assert "2 engines were lost" in answer.json()["error"]["message"]
    assert len(engines.asked) == 2


def test_a_whole_answer_that_is_cut_is_asked_for_again() -> None:
    engines = PlayedEngines([head(), b'{"te', ReplicaLostError("gone")], [head(), b'{"text":"x"}'])
    assert answer_of(engines, json={}).json() == {"text": "x"}


@pytest.mark.parametrize("status", [429, 503])
def test_another_engine_is_asked_when_one_refuses(status: int) -> None:
    engines = PlayedEngines([head(status, replica="a"), b"{}"], [head(replica="b"), b'{"text":"x"}'])
    assert answer_of(engines, json={}).json() == {"text": "x"}
    assert [asked.left_out for asked in engines.asked] == [(), ("a",)]


def test_the_last_refusal_is_the_answer_with_its_headers() -> None:
    refusal = [head(429, (*JSON, ("retry-after", "1"))), b'{"error":{"message":"full"}}']
    nobody = [ApiError(ErrorType.BUSY, "no other")]
    answer = answer_of(PlayedEngines(refusal, nobody), json={})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["message"] == "full"
    # A router that knows of no other engine sends it to the same one again.
    assert answer_of(PlayedEngines(refusal), json={}).status_code == 429


def test_a_refusal_of_the_router_has_the_shape_of_all_errors() -> None:
    full = PlayedEngines([ApiError(ErrorType.BUSY, "all are full")])
    answer = answer_of(full, json={}, headers={"x-request-id": "r-7"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["type"] == ErrorType.BUSY
    assert answer.json()["error"]["request_id"] == "r-7"
    # Serve's proxy adds the header itself.
    assert "x-request-id" not in answer.headers


def test_a_bug_is_answered_in_the_shape_of_all_errors() -> None:
    async def ask() -> httpx.Response:
        app = front_app(PlayedEngines([KeyError("/secret")]), ServerSettings(), prompt_of)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post("/generate", json={})

    answer = asyncio.run(ask())
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == ErrorType.ENGINE
    assert "secret" not in answer.text


def test_a_client_that_leaves_ends_its_request() -> None:
    """The engine's answer is closed as soon as the stream's task is cancelled, which is what Serve does."""
    left = asyncio.Event()

    class Endless(PlayedEngines):
        async def ask(self, request: PassedRequest) -> AsyncIterator[Head | bytes]:
            try:
                yield head(headers=EVENTS)
                while True:
                    yield b"data: 1\n\n"
                    await asyncio.sleep(0)
            finally:
                left.set()

    async def leave() -> None:
        app = front_app(Endless([]), ServerSettings(), prompt_of)
        scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b"", "headers": []}
        body = [{"type": "http.request", "body": b"{}"}]
        arrived = asyncio.Event()

        async def receive() -> dict[str, object]:
            if body:
                return dict(body.pop())
            return await asyncio.Future()

        async def send(message: Mapping[str, object]) -> None:
            if message.get("body"):
                arrived.set()

        task = asyncio.create_task(app(scope, receive, send))  # type: ignore[arg-type]
        await arrived.wait()
        assert not left.is_set()
        task.cancel()
        await asyncio.wait([task])
        async with asyncio.timeout(30):
            await left.wait()

    asyncio.run(leave())


def test_loads_are_those_of_all_engines() -> None:
    answer = answer_of(PlayedEngines([head()]), "GET", "/get_load")
    assert [(load["dp_rank"], load["num_reqs"]) for load in answer.json()] == [(0, 3), (1, 5)]


def test_what_operates_one_engine_is_refused() -> None:
    engines = PlayedEngines([head(), b"{}"])
    for path in sorted(OF_ONE_ENGINE):
        answer = answer_of(engines, path=path)
        assert answer.status_code == 404
        assert "about one engine" in answer.json()["error"]["message"]
    assert not engines.asked
    unknown = answer_of(engines, path="/nowhere")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["type"] == ErrorType.NOT_FOUND


def test_a_body_beyond_the_bound_is_refused() -> None:
    async def ask() -> httpx.Response:
        async with client_of(PlayedEngines([head()]), ServerSettings(max_body_bytes=10)) as client:
            return await client.post("/generate", content=b"x" * 11)

    assert asyncio.run(ask()).status_code == 413


def test_a_page_of_another_name_cannot_use_a_proxy_on_loopback() -> None:
    async def ask(host: str) -> int:
        async with client_of(PlayedEngines([head(), b"{}"])) as client:
            return (await client.post("/generate", json={}, headers={"host": host})).status_code

    assert asyncio.run(ask("evil.example:8000")) == 403
    assert asyncio.run(ask("localhost:8000")) == 200


def test_every_route_of_an_engine_has_its_place(engine_routes: frozenset[str]) -> None:
    """A route that an engine gets later is passed on, answered for all, or refused, and never forgotten."""
    ours = {path.replace(":path", "") for path in PASSED_ON | OF_ALL | OF_ONE_ENGINE}
    assert engine_routes == ours


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", b'{"text": "' + b"x" * 64 + b'"}'),
        ("/generate", b'{"input_ids": [' + b"1," * 40 + b"2]}"),
        ("/v1/completions", b'{"model": "m", "prompt": "' + b"x" * 64 + b'"}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "' + b"x" * 64 + b'"}]}'),
        ("/v1/responses", json.dumps({"instructions": "x" * 40, "input": "y" * 40}).encode()),
        ("/v1/messages", json.dumps({"system": "x" * 40, "messages": [{"role": "user", "content": "y"}]}).encode()),
    ],
)
def test_a_prompt_has_a_prefix_in_every_protocol(path: str, body: bytes) -> None:
    prompt = prompt_in(path, body, 16)
    assert len(prompt.chain) >= 4
    assert prompt.tokens >= 16


def test_a_conversation_that_grows_keeps_its_prefix() -> None:
    said = [{"role": "user", "content": "a" * 40}, {"role": "assistant", "content": "b" * 40}]
    before = prompt_in("/v1/chat/completions", json.dumps({"messages": said}).encode(), 16).chain
    more = {"messages": [*said, {"role": "user", "content": "c" * 40}]}
    after = prompt_in("/v1/chat/completions", json.dumps(more).encode(), 16).chain
    assert after[: len(before)] == before
    other_model = prompt_in("/v1/chat/completions", json.dumps({"model": "m", **more}).encode(), 16).chain
    assert not set(other_model) & set(after)
    other_salt = prompt_in("/v1/chat/completions", json.dumps({"cache_salt": "s", **more}).encode(), 16).chain
    assert not set(other_salt) & set(after)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"text": 7}', b'{"messages": 7}'])
def test_what_is_no_prompt_is_left_to_the_engine(body: bytes) -> None:
    assert prompt_in("/generate", body, 16).chain == ()
    assert prompt_in("/tokenize", b'{"text": "' + b"x" * 64 + b'"}', 16) == NO_PROMPT
