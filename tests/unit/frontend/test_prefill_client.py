"""A decode engine's front end as a client of prefill engines, which the tests play over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fake_scheduler import PATIENCE_S, FakeScheduler
from partners import IDLE_LOAD, damaged

from engine.core.messages import (
    FinishReason,
    Generate,
    PrefillDropped,
    PrefillFailed,
    PrefillWanted,
    SamplingParams,
    TokenOutput,
)
from engine.core.routing.prefills import LONGEST_RETRY_S, Prefills
from engine.frontend.http.engine_client import EngineClient
from engine.frontend.http.prefill_client import MAX_CALLS, PrefillClient
from engine.frontend.schema.errors import ApiError
from engine.process.settings import ServerSettings

AT = "http://127.0.0.1:1"
TO = ("unix:/x/kv-0#r",)
PAGE = 4
LOAD: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(IDLE_LOAD, role="prefill", page_size=PAGE))
Answer = httpx.Response | Exception
json_bytes = msgspec.json.encode


class PlayedPrefill(httpx.AsyncBaseTransport):
    """A prefill engine that answers when the test lets it."""

    def __init__(self) -> None:
        self.asked: list[httpx.Request] = []
        self.answers: list[asyncio.Future[Answer]] = []
        self.left = 0
        self.load: Answer = httpx.Response(200, json=[LOAD])
        self.health: Answer = httpx.Response(200)
        self.came = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        if request.method == "GET":
            answer = self.load if request.url.path == "/get_load" else self.health
        else:
            self.asked.append(request)
            future = asyncio.get_running_loop().create_future()
            self.answers.append(future)
            self.came.set()
            try:
                answer = await future
            except asyncio.CancelledError:
                self.left += 1
                raise
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer.status_code, content=answer.content, headers=answer.headers)

    async def next_ask(self, number: int) -> httpx.Request:
        while len(self.asked) < number:
            self.came.clear()
            await self.came.wait()
        return self.asked[number - 1]


class Scene:
    def __init__(self, folder: Path, **settings: Any) -> None:
        self.settings = ServerSettings(role="decode", prefill_engines=AT, **settings)
        self.engine = PlayedPrefill()
        self.scheduler = FakeScheduler(folder)
        self.now = 0.0
        self.prefills = Prefills((AT,), PAGE, 100, lambda: self.now)
        self.client = EngineClient(folder, prefills=self.prefills)
        self.asking = self.client.prefill_client = PrefillClient(
            self.prefills, self.settings, PAGE, lambda: TO, self.client.sessions.send, self.engine
        )
        self.took: list[float] = []
        self.asking.observe = self.took.append

    def want(self, transfer: int, **fields: Any) -> PrefillWanted:
        return PrefillWanted(
            rid=f"r{transfer}", transfer=transfer, at=AT, ids=tuple(range(8)), first_page=1, weights="/w", **fields
        )


Play = Callable[[Scene], Awaitable[None]]


@pytest.fixture
def act(tmp_path: Path):
    """Run a scene between a scheduler and a prefill engine that a test plays; it must end in time."""

    @asynccontextmanager
    async def staged(settings: dict[str, Any]) -> AsyncIterator[Scene]:
        scene = Scene(tmp_path, **settings)
        await scene.asking.look(AT)
        delivering = asyncio.create_task(scene.client.deliver_replies())
        try:
            yield scene
        finally:
            delivering.cancel()
            await asyncio.gather(delivering, return_exceptions=True)
            await scene.asking.close()
            scene.client.close()
            scene.scheduler.close()

    def run(play: Play, **settings: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(PATIENCE_S), staged(settings) as scene:
                await play(scene)

        asyncio.run(bounded())

    return run


def test_a_request_is_placed_and_what_is_wanted_is_asked_for(act) -> None:
    async def play(scene: Scene) -> None:
        scene.client.sessions.start(Generate(rid="r1", prompt_ids=(1,) * 9, sampling=SamplingParams()), lambda _: None)
        message = await scene.scheduler.receive()
        assert isinstance(message, Generate)
        assert message.prefill_at == AT
        await scene.scheduler.reply(scene.want(1, priority=2, cache_salt="s"))
        request = await scene.engine.next_ask(1)
        assert str(request.url) == f"{AT}/prefill"
        assert request.headers["content-type"] == "application/json"
        assert json.loads(request.content) == {
            "to": list(TO),
            "transfer": 1,
            "first_page": 1,
            "weights": "/w",
            "page_size": PAGE,
            "prompt_ids": list(range(8)),
            "priority": 2,
            "cache_salt": "s",
            "timeout_s": 7.0,
        }
        scene.now += 2.5
        scene.engine.answers[0].set_result(httpx.Response(200, json={"prompt_tokens": 8, "cached_tokens": 0}))
        while not scene.took:
            await asyncio.sleep(0)
        assert scene.took == [2.5]
        assert scene.prefills.open_calls == 1, "an answer is no success before the request goes on"
        await scene.scheduler.reply(TokenOutput(rid="r1", token_ids=(1,), finish_reason=None))
        while scene.prefills.open_calls:
            await asyncio.sleep(0)
        assert (scene.prefills.counts.asked, scene.prefills.counts.answered) == (1, 1)

    act(play, prefill_timeout_s=7)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.ReadError("reset"), "is gone (ReadError)"),
        (httpx.ConnectTimeout("late"), "is gone (ConnectTimeout)"),
        (httpx.Response(503, json={"error": {"message": "it sleeps"}}), "refused a prompt (503): it sleeps"),
        (httpx.Response(502, text="<html>"), "refused a prompt (502): <html>"),
        (httpx.Response(404, json=[]), "refused a prompt (404): []"),
    ],
)
def test_the_scheduler_is_told_of_a_failure_with_its_cause(act, answer: Answer, words: str) -> None:
    async def play(scene: Scene) -> None:
        await scene.scheduler.reply(scene.want(1))
        await scene.engine.next_ask(1)
        scene.engine.answers[0].set_result(answer)
        assert await scene.scheduler.receive() == PrefillFailed(transfer=1, error=f"{AT} {words}")
        assert scene.prefills.counts.failed == 1
        await scene.scheduler.reply(scene.want(2))
        refused = await scene.scheduler.receive()
        assert isinstance(refused, PrefillFailed)
        assert refused.transfer == 2
        assert len(scene.engine.asked) == 1, "it is left out for a while"

    act(play)


def test_what_is_dropped_is_left_at_once(act) -> None:
    async def play(scene: Scene) -> None:
        await scene.scheduler.reply(scene.want(1), scene.want(2))
        await scene.engine.next_ask(2)
        await scene.scheduler.reply(PrefillDropped(transfer=1))
        while not scene.engine.left:
            await asyncio.sleep(0)
        assert not scene.engine.answers[1].done()
        assert (scene.prefills.open_calls, scene.prefills.counts.dropped) == (1, 1)
        assert scene.prefills.why_not(AT) == ""

    act(play)


def test_a_drop_that_comes_before_the_call_has_begun_leaves_it_too(act) -> None:
    async def play(scene: Scene) -> None:
        scene.asking.take(scene.want(1))
        scene.asking.take(PrefillDropped(transfer=1, is_late=True))
        await asyncio.sleep(0.01)
        assert not scene.engine.asked
        assert scene.prefills.open_calls == 0
        assert "did not send" in scene.prefills.why_not(AT)

    act(play)


def test_all_is_left_when_the_engine_is_gone(act) -> None:
    async def play(scene: Scene) -> None:
        await scene.scheduler.reply(*[scene.want(number) for number in range(1, 4)])
        await scene.engine.next_ask(3)
        scene.client.break_off(ApiError.unavailable("gone"))
        while scene.engine.left < 3:
            await asyncio.sleep(0)
        assert scene.prefills.open_calls == 0

    act(play)


def test_more_than_one_engine_takes_at_a_time_wait_and_can_be_dropped(act) -> None:
    async def play(scene: Scene) -> None:
        await scene.scheduler.reply(*[scene.want(number) for number in range(1, MAX_CALLS + 3)])
        await scene.engine.next_ask(MAX_CALLS)
        await asyncio.sleep(0.01)
        assert len(scene.engine.asked) == MAX_CALLS
        await scene.scheduler.reply(PrefillDropped(transfer=MAX_CALLS + 1))
        while not scene.prefills.counts.dropped:
            await asyncio.sleep(0)
        scene.engine.answers[0].set_result(httpx.Response(200, json={}))
        request = await scene.engine.next_ask(MAX_CALLS + 1)
        assert json.loads(request.content)["transfer"] == MAX_CALLS + 2

    act(play)


@pytest.mark.parametrize(
    ("load", "health", "words"),
    [
        (httpx.ConnectError("refused"), httpx.Response(200), "is gone (ConnectError)"),
        (httpx.Response(200, json=[LOAD | {"role": "both"}]), httpx.Response(200), "--role prefill"),
        (httpx.Response(200, json=[LOAD | {"sleep_level": 1}]), httpx.Response(200), "is asleep"),
        (httpx.Response(200, json={"a": 1}), httpx.Response(200), "not an engine of this version"),
        (httpx.Response(200, json=[{"role": "prefill"}]), httpx.Response(200), "not an engine of this version"),
        (httpx.Response(200, text="<html>"), httpx.Response(200), "not an engine of this version"),
        (httpx.Response(200, content=b"[" * 200_000), httpx.Response(200), "not an engine of this version"),
        (httpx.Response(500, content=b'{"a":' * 40_000), httpx.Response(200), "does not report its load (500)"),
        (httpx.Response(200, json=[LOAD | {"free_pages": None}]), httpx.Response(200), "not an engine of this version"),
        (httpx.Response(401, json={"error": {"message": "a key"}}), httpx.Response(200), "(401): a key"),
        (httpx.Response(503, text="down"), httpx.Response(503), "(503): down"),
        (httpx.Response(503, text="busy"), httpx.Response(200), ""),
    ],
)
def test_a_look_says_who_can_be_asked(act, load: Answer, health: Answer, words: str) -> None:
    async def play(scene: Scene) -> None:
        scene.engine.load, scene.engine.health = load, health
        await scene.asking.look(AT)
        why = scene.prefills.why_not(AT)
        assert words in why
        assert bool(words) == bool(why)
        scene.engine.load = httpx.Response(200, json=[LOAD])
        await scene.asking.look(AT)
        assert scene.prefills.why_not(AT) == ""

    act(play)


@pytest.mark.parametrize("status", [200, 500])
def test_a_prefill_engine_that_answers_strangely_ends_no_look_at_another(act, status: int) -> None:
    """C01: the looks share a task group, which an error out of one of them would end, and the server with it."""

    async def play(scene: Scene) -> None:
        watching = asyncio.create_task(scene.asking.watch())
        for answer in damaged([LOAD], json_bytes, 300):
            scene.engine.load = httpx.Response(status, content=answer)
            await scene.asking.look(AT)
        assert not watching.done()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    act(play)


@pytest.mark.parametrize("status", [400, 503])
def test_a_prefill_engine_that_refuses_strangely_has_failed_and_no_more(act, status: int) -> None:
    async def play(scene: Scene) -> None:
        for number, answer in enumerate(damaged({"error": {"message": "no"}}, json_bytes, 100), start=1):
            scene.asking.take(scene.want(number))
            await scene.engine.next_ask(number)
            scene.engine.answers[-1].set_result(httpx.Response(status, content=answer))
            failed = await scene.scheduler.receive()
            assert isinstance(failed, PrefillFailed)
            assert failed.transfer == number
            assert len(failed.error) < 1000
            scene.now += LONGEST_RETRY_S

    act(play)


def test_an_engine_that_does_not_answer_is_logged_with_its_cause(act, caplog: pytest.LogCaptureFixture) -> None:
    async def play(scene: Scene) -> None:
        scene.engine.load = httpx.ConnectError("refused")
        with caplog.at_level(logging.INFO):
            watching = asyncio.create_task(scene.asking.watch())
            while not caplog.records:
                await asyncio.sleep(0)
            watching.cancel()
        (record,) = [one for one in caplog.records if one.name == "engine.frontend.http.prefill_client"]
        assert record.levelno == logging.WARNING
        assert f"{AT} is gone (ConnectError)" in record.getMessage()

    act(play)


@pytest.mark.parametrize(
    ("keys", "client", "operator"),
    [
        ({}, None, None),
        ({"api_key": "user"}, "Bearer user", "Bearer user"),
        ({"admin_key": "boss"}, "Bearer boss", "Bearer boss"),
        ({"api_key": "user", "admin_key": "boss"}, "Bearer user", "Bearer boss"),
    ],
)
def test_it_asks_with_its_own_keys(act, keys: dict[str, str], client: str | None, operator: str | None) -> None:
    async def play(scene: Scene) -> None:
        seen: list[httpx.Request] = []
        handle = scene.engine.handle_async_request

        async def note(request: httpx.Request) -> httpx.Response:
            seen.append(request)
            return await handle(request)

        scene.engine.handle_async_request = note  # type: ignore[method-assign]
        await scene.asking.look(AT)
        await scene.scheduler.reply(scene.want(1))
        await scene.engine.next_ask(1)
        assert [request.headers.get("authorization") for request in seen] == [client, operator]

    act(play, **keys)


def test_a_request_that_has_an_output_is_no_load_of_its_prefill_engine(act) -> None:
    async def play(scene: Scene) -> None:
        for rid in ("a", "b"):
            message = Generate(rid=rid, prompt_ids=(1,) * 9, sampling=SamplingParams())
            scene.client.sessions.start(message, lambda _: None)
        fleet = scene.prefills._placement.fleet
        assert fleet.in_flight(AT) == 2
        await scene.scheduler.reply(TokenOutput(rid="a", token_ids=(1,), finish_reason=None))
        while fleet.in_flight(AT) != 1:
            await asyncio.sleep(0)
        await scene.scheduler.reply(TokenOutput(rid="b", token_ids=(), finish_reason=FinishReason.ABORT))
        while fleet.in_flight(AT):
            await asyncio.sleep(0)

    act(play)
