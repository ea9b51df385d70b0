"""Requests to one engine over HTTP: what is sent, what is returned, and the meaning of its silence."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable

import httpx
import msgspec
import pytest
from partners import IDLE_LOAD

from engine.cluster.router.proxy import EngineProxy, Head, PassedRequest, ReplicaLostError
from engine.frontend.http.peers import PartnerError
from engine.frontend.schema.errors import ApiError
from engine.process.settings import ServerSettings

Handler = Callable[[httpx.Request], httpx.Response]
ASKED = PassedRequest(
    method="POST",
    target="/generate?x=1",
    headers=(("authorization", "Bearer k"), ("host", "evil.example"), ("content-length", "7"), ("connection", "close")),
    body=b"{}",
)
LOAD = msgspec.to_builtins(msgspec.structs.replace(IDLE_LOAD, num_running_reqs=3, free_pages=5))


class Parts(httpx.AsyncByteStream):
    """A body that comes in parts; an error among them is raised in its place, a number is waited for in seconds."""

    def __init__(self, *parts: bytes | float | Exception, ends: bool = True) -> None:
        self._parts = parts if ends else itertools.cycle(parts)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            if isinstance(part, bytes):
                yield part
            else:
                await asyncio.sleep(part)


def proxy_of(handler: Handler, **settings: object) -> EngineProxy:
    return EngineProxy("http://127.0.0.1:1", "a", ServerSettings(**settings), httpx.MockTransport(handler))


async def parts_of(handler: Handler) -> list[Head | bytes]:
    return [part async for part in proxy_of(handler).answer(ASKED)]


def test_a_request_loses_only_what_is_the_connections() -> None:
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        headers = {"retry-after": "1", "transfer-encoding": "chunked", "connection": "close"}
        return httpx.Response(429, headers=headers, stream=Parts(b"no"))

    head, body = asyncio.run(parts_of(handle))
    (request,) = seen
    assert (request.method, request.url.raw_path, request.content) == ("POST", b"/generate?x=1", b"{}")
    assert (request.headers["authorization"], request.headers["host"]) == ("Bearer k", "127.0.0.1:1")
    assert request.headers["content-length"] == "2"
    assert isinstance(head, Head)
    assert (head.status, head.replica, head.header("retry-after")) == (429, "a", "1")
    assert head.header("transfer-encoding") is None
    assert body == b"no"


def test_an_engine_that_is_gone_is_lost_before_or_in_its_answer() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(ReplicaLostError, match="replica a is gone"):
        asyncio.run(parts_of(refuse))

    async def read() -> None:
        cut = httpx.Response(200, stream=Parts(b"data: 1\n\n", httpx.RemoteProtocolError("cut")))
        parts = proxy_of(lambda _: cut).answer(ASKED)
        assert isinstance(await anext(parts), Head)
        assert await anext(parts) == b"data: 1\n\n"
        with pytest.raises(ReplicaLostError):
            await anext(parts)

    asyncio.run(read())


def test_the_load_is_asked_for_with_the_key_of_the_server() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.headers.get("authorization") != "Bearer secret":
            detail = {"type": "authentication_error", "message": "no key", "code": 401}
            return httpx.Response(401, json={"error": detail})
        return httpx.Response(200, json=[LOAD])

    proxy = proxy_of(handle, api_key="secret")
    load = asyncio.run(proxy.load())
    assert load is not None
    assert (load.num_running_reqs, load.free_pages) == (3, 5)
    assert asyncio.run(proxy.load_for((("authorization", "Bearer secret"),))) == load
    with pytest.raises(ApiError, match="no key"):
        asyncio.run(proxy.load_for(()))


@pytest.mark.parametrize(("status", "serving"), [(200, True), (503, False)])
def test_serving_is_what_health_says(status: int, serving: bool) -> None:
    proxy = proxy_of(lambda _: httpx.Response(status))
    assert (asyncio.run(proxy.why_not_serving()) is None) is serving


@pytest.mark.parametrize("error", [httpx.ReadTimeout("late"), TimeoutError(110, "the kernel gave up")])
def test_silence_is_not_serving_and_no_load(error: Exception) -> None:
    def silent(request: httpx.Request) -> httpx.Response:
        raise error

    proxy = proxy_of(silent)
    assert asyncio.run(proxy.why_not_serving()) is not None
    for ask in (proxy.load, lambda: proxy.peer.operate("/wake")):
        with pytest.raises(PartnerError, match="is gone"):
            asyncio.run(ask())
    with pytest.raises(ApiError, match="does not report its load"):
        asyncio.run(proxy.load_for(()))


def test_a_scheduler_without_time_to_say_its_load_is_no_fault() -> None:
    assert asyncio.run(proxy_of(lambda _: httpx.Response(503, json={})).load()) is None


ODD: dict[str, Callable[[], httpx.Response]] = {
    "without end": lambda: httpx.Response(200, stream=Parts(b" " * 2**20, ends=False)),
    "a byte now and then": lambda: httpx.Response(200, stream=Parts(b" ", 0.01, ends=False)),
    "compressed": lambda: httpx.Response(200, headers={"content-encoding": "gzip"}, stream=Parts(b"no gzip")),
    "no JSON": lambda: httpx.Response(200, stream=Parts(b"<html>")),
    "other JSON": lambda: httpx.Response(500, stream=Parts(b'{"detail": "?"}')),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """C01: an address that is no engine's; httpx alone would read its answer forever."""
    monkeypatch.setattr("engine.cluster.router.proxy.PATIENCE_S", 0.1)
    proxy = proxy_of(lambda _: ODD[name]())
    if "JSON" not in name:
        assert asyncio.run(proxy.why_not_serving())
        for ask in (proxy.load, proxy.peer.about):
            with pytest.raises(PartnerError):
                asyncio.run(ask())
    with pytest.raises(ApiError, match="does not report its load"):
        asyncio.run(proxy.load_for(()))
    if name in ("without end", "compressed"):
        with pytest.raises(PartnerError) as lost:
            asyncio.run(proxy.peer.operate("/pause_generation", {"mode": "abort"}))
        assert lost.value.status is None


def test_an_operators_call_takes_its_body_and_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cluster.router.proxy.PATIENCE_S", 0.01)
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, stream=Parts(0.05, b"paused"))

    answer = asyncio.run(proxy_of(handle).peer.operate("/pause_generation", {"mode": "abort"}))
    assert (answer.status, answer.words) == (200, "paused")
    assert (seen[0].content, seen[0].headers["content-type"]) == (b'{"mode":"abort"}', "application/json")
