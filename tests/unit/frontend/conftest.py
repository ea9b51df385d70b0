"""A front end with a fake scheduler over real sockets, in one event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import httpx
import pytest
from byte_tokenizer import ByteTokenizer
from fake_scheduler import PATIENCE_S, FakeScheduler
from jinja2.exceptions import TemplateError
from real_servers import RealServer, running

from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.frontend.http.app import body_works, build_app
from engine.frontend.http.auth import Access
from engine.frontend.http.engine_client import EngineClient
from engine.frontend.http.forked_work import Ask, LongBodies, body_work
from engine.frontend.http.routes.information import ServerState
from engine.frontend.sessions.requests import ServedModel
from engine.frontend.text.dialect import PLAIN, Dialect
from engine.frontend.text.tokenizer import ChatTemplate
from engine.process.settings import ServerSettings
from engine.server.launch.preload import PreloadedParent

_signatures: dict[CodeType, inspect.Signature] = {}


@pytest.fixture(autouse=True, scope="module")
def _signatures_are_read_once() -> Iterator[None]:
    """FastAPI reads those of forty routes for each application, and compiles their types: for half of a test's time."""
    read = inspect.signature

    def signature(call: Any, *, eval_str: bool = False, **how: Any) -> inspect.Signature:
        if not eval_str or how or type(call) is not FunctionType or call.__defaults__ or call.__kwdefaults__:
            return read(call, eval_str=eval_str, **how)
        if call.__code__ not in _signatures:
            _signatures[call.__code__] = read(call, eval_str=True)
        return _signatures[call.__code__]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "signature", signature)
        yield


class TemplateSource:
    """A tokenizer's template: each message in brackets."""

    chat_template: str | None = "brackets"

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> str:
        if conversation[-1]["role"] == "assistant":
            raise TemplateError("the last message must be the user's")
        return "".join(f"[{message['role']}:{message['content']}]" for message in conversation)


class Stage:
    """Everything that a test of the front end needs."""

    def __init__(self, private_dir: Path, *, address: str = "127.0.0.1", **settings: object) -> None:
        self.scheduler = FakeScheduler(private_dir)
        self.settings = ServerSettings(**settings)
        self.limits = Limits.of(self.settings, EMBEDDED_FACTS)
        self.client = EngineClient(private_dir)
        self.tokenizer = ByteTokenizer()
        self.template_source = TemplateSource()
        # What a process of its own does in a server.
        self.long_bodies: list[bytes] = []
        self.state = ServerState(dict(self.limits.loras), serving=True)
        self.ask_elsewhere: Ask = self._work_on_long_body
        self._access = Access(self.settings, address)
        self.serve(PLAIN)

    def serve(self, dialect: Dialect) -> None:
        """Have a front end that knows a dialect."""
        template, name = ChatTemplate(self.template_source), self.settings.model_name
        self.served = ServedModel(self.tokenizer, template, self.limits, name, dialect)
        self.work_elsewhere = body_work(body_works(self.served))
        long_bodies = LongBodies(lambda *parts, is_check: self.ask_elsewhere(*parts, is_check=is_check))
        self.app = build_app(self.settings, self.served, self.client, self._access, long_bodies, self.state)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://127.0.0.1")

    async def _work_on_long_body(self, *parts: bytes, is_check: bool) -> bytes:
        question = b"".join(parts)
        if not is_check:
            self.long_bodies.append(question)
        answer = self.work_elsewhere(question)
        return await answer if isinstance(answer, Awaitable) else answer


Scene = Callable[[Stage], Awaitable[None]]


@asynccontextmanager
async def _staged(private_dir: Path, **settings: object) -> AsyncIterator[Stage]:
    stage = Stage(private_dir, **settings)
    delivering = asyncio.create_task(stage.client.deliver_replies())
    try:
        yield stage
    finally:
        delivering.cancel()
        await asyncio.gather(delivering, return_exceptions=True)
        await stage.http.aclose()
        stage.client.close()
        stage.scheduler.close()


@pytest.fixture
def play(tmp_path: Path):
    """Run an async scene against a front end; it must end in time."""

    def run(scene: Scene, **settings: object) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(PATIENCE_S), _staged(tmp_path, **settings) as stage:
                await scene(stage)

        asyncio.run(bounded())

    return run


@pytest.fixture
def byte_tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture(scope="module")
def server(parent: PreloadedParent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One server of the embedded model a module."""
    with running(parent, tmp_path_factory.mktemp("s")) as started:
        yield started
