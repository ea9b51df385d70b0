"""Engines that a test plays, behind a router that is asked over ASGI: no process, no socket; streams as they come."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import httpx
import msgspec
from partners import IDLE_LOAD

from engine.cluster.router.engines import RouterPlan
from engine.cluster.router.operators import VERBS
from engine.cluster.router.process import Router
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.routing.placement import NO_PROMPT, Prompt, Rules
from engine.frontend.http.auth import Access
from engine.process.settings import ServerSettings

NAMES = ("http://127.0.0.1:1", "http://127.0.0.1:2")
SIZE = 16
EVENTS = {"content-type": "text/event-stream"}
# What an engine answers with: parts of a body, and what happens between them.
Parts = Sequence[bytes | Exception | asyncio.Event]


class Body(httpx.AsyncByteStream):
    """A body in parts. An event among them is waited for, an error is raised. ``left`` says that it was given up."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._is_over = False
        self.left = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            if isinstance(part, asyncio.Event):
                await part.wait()
            else:
                yield part
        self._is_over = True

    async def aclose(self) -> None:
        self.left = not self._is_over


class PlayedEngine:
    """One engine: up, down or draining. It answers with ``parts``, or raises if they are an error."""

    def __init__(self, **settings: Any) -> None:
        self.settings = ServerSettings(**settings)
        self.health = 200
        self.is_up = True
        self.status = 200
        self.headers = {"content-type": "application/json"}
        self.parts: Parts = [b"{}"]
        self.asked: list[httpx.Request] = []
        self.bodies: list[Body] = []
        # What operators change, and what an engine does with the next call of a path instead of it.
        self.paused: str | None = None
        self.weights = "embedded"
        self.sleep_level = 0
        self.alive = 0
        # What it says of itself, by path, where that is not the truth.
        self.said: dict[str, httpx.Response] = {}
        self.instead: dict[str, httpx.Response | Exception | asyncio.Event] = {}
        self.load: dict[str, Any] = msgspec.to_builtins(IDLE_LOAD)

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if not self.is_up:
            raise httpx.ConnectError("refused")
        if request.url.path == "/health":
            return httpx.Response(self.health)
        key = self.settings.api_key
        if key is not None and request.headers.get("authorization") != f"Bearer {key.get_secret_value()}":
            return httpx.Response(401, json={"error": {"type": "authentication_error", "message": "no key"}})
        if request.url.path in self.said:
            said = self.said[request.url.path]
            return httpx.Response(said.status_code, headers=said.headers, content=said.content)
        if request.url.path == "/server_info" and request.url.query == b"timeout=0":
            limits = msgspec.to_builtins(Limits.of(self.settings, EMBEDDED_FACTS, 4096))
            hidden = {"api_key", "admin_key", "gate_options", "stage_probe"}
            settings = self.settings.model_dump(mode="json", exclude=hidden)
            return httpx.Response(200, json={"settings": settings, "limits": limits, "processes": {"engine": 7}})
        if request.url.path == "/server_info" or request.url.path in VERBS:
            return await self._operated(request)
        if request.url.path == "/get_load":
            return httpx.Response(200, json=[self.load])
        self.asked.append(request)
        if isinstance(self.parts[0], Exception):
            raise self.parts[0]
        self.bodies.append(Body(self.parts))
        return httpx.Response(self.status, headers=self.headers, stream=self.bodies[-1])

    async def _operated(self, request: httpx.Request) -> httpx.Response:
        """An operator's call, or a look with counters."""
        path, body = request.url.path, json.loads(request.content or b"{}")
        self.asked.append(request)
        instead = self.instead.pop(path, None)
        if isinstance(instead, asyncio.Event):
            await instead.wait()
        elif isinstance(instead, Exception):
            raise instead
        elif instead is not None:
            return instead
        if path == "/server_info":
            stats = {"paused": self.paused, "alive": self.alive, "sleep_level": self.sleep_level}
            return httpx.Response(200, json={"stats": stats, "weights": self.weights, "open_calls": 0})
        if path == "/pause_generation":
            self.paused = body["mode"]
        elif path == "/continue_generation":
            self.paused = None
        elif path == "/update_weights_from_disk":
            self.weights, self.sleep_level = body["model_path"], min(self.sleep_level, 1)
        elif path == "/sleep":
            self.sleep_level = max(self.sleep_level, body["level"])
        elif path == "/wake":
            self.sleep_level = 0
        return httpx.Response(200, stream=Body([b"done"]))


class PlainReader:
    """Reads ``input_ids`` alone, and takes any model."""

    async def learn(self, settings: ServerSettings, limits: Limits) -> None:
        assert limits.page_size == SIZE, settings

    async def prompt_of(self, path: str, body: bytes) -> Prompt:
        with contextlib.suppress(ValueError):
            return Prompt.of_ids(tuple(json.loads(body).get("input_ids", ())), SIZE)
        return NO_PROMPT


class Asked:
    """A request of one client, part by part. ``leave`` ends it from the client's side."""

    def __init__(self, app: Any, path: str, body: bytes, method: str, headers: dict[str, str]) -> None:
        target, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "method": method,
            "path": target,
            "raw_path": target.encode(),
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "server": ("127.0.0.1", 8000),
            "scheme": "http",
            "root_path": "",
            "http_version": "1.1",
        }
        self._gone = asyncio.Event()
        self._body: list[bytes] = [body]
        self._sent: asyncio.Queue[bytes] = asyncio.Queue()
        self._begun = asyncio.Event()
        self.status = 0
        self.headers: dict[str, str] = {}
        self._task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            self._begun.set()
        elif message.get("body"):
            await self._sent.put(message["body"])

    async def part(self) -> bytes:
        """The next part of the answer."""
        return await self._sent.get()

    async def end(self) -> bytes:
        """Wait for the end of the answer and return its rest."""
        await self._task
        return b"".join([self._sent.get_nowait() for _ in range(self._sent.qsize())])

    async def error(self) -> str:
        return str(json.loads(await self.end())["error"]["message"])

    async def leave(self) -> None:
        self._gone.set()
        await asyncio.wait([self._task], timeout=0.2)
        # What was left is closed in the turns that follow.
        for _ in range(20):
            await asyncio.sleep(0)


class Scene:
    """A router over two engines, each looked at when ``look`` is called."""

    def __init__(self, settings: ServerSettings, engines: Sequence[PlayedEngine], rules: Rules) -> None:
        self.engines = dict(zip(NAMES, engines, strict=True))
        self.one, self.other = engines
        self.router = Router(
            settings,
            RouterPlan(urls=NAMES, rules=rules, answer_s=0.2, change_s=0.2),
            Access(settings, "127.0.0.1"),
            reader=PlainReader(),
            transport_of=lambda name: httpx.MockTransport(self.engines[name].answer),
        )
        self.fleet = self.router.engines.placement.fleet

    async def look(self) -> None:
        for watch in self.router.watches:
            await watch.look()

    def ask(
        self, path: str = "/generate", body: Any = None, method: str = "POST", headers: dict[str, str] | None = None
    ) -> Asked:
        data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        return Asked(self.router.app, path, data, method, {"content-type": "application/json"} | (headers or {}))

    @property
    def in_flight(self) -> list[int]:
        return [self.fleet.in_flight(name) for name in NAMES]


def play(
    scene: Callable[[Scene], Awaitable[None]],
    *engines: PlayedEngine,
    rules: Rules | None = None,
    met: bool = True,
    **settings: Any,
) -> None:
    """Play a scene with two engines that were met, unless a test meets them itself."""

    async def bounded() -> None:
        stage = Scene(ServerSettings(**settings), engines or (PlayedEngine(), PlayedEngine()), rules or Rules())
        async with asyncio.timeout(30):
            if met:
                await stage.look()
            await scene(stage)
            await stage.router.close()

    asyncio.run(bounded())
