"""Operators' calls of all engines, through a router's routes: done by all, or by none with the one at fault named."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest
from played_engines import EVENTS, NAMES, PlayedEngine, Scene, play

UPDATE = "/update_weights_from_disk"
NEW = {"model_path": "embedded:2"}
REFUSAL = httpx.Response(400, json={"error": {"message": "no such folder"}})


async def told(stage: Scene, path: str, body: object = None) -> tuple[int, str]:
    asked = stage.ask(path, body)
    words = (await asked.end()).decode()
    return asked.status, words


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.005)


def states(stage: Scene) -> list[tuple[str | None, str]]:
    return [(engine.paused, engine.weights) for engine in (stage.one, stage.other)]


def test_a_pause_a_continue_a_flush_and_an_update_are_of_all_engines() -> None:
    async def scene(stage: Scene) -> None:
        assert await told(stage, "/pause_generation", {"mode": "in_place"}) == (200, "pause done by 2 engines")
        assert states(stage) == [("in_place", "embedded")] * 2
        assert await told(stage, UPDATE, NEW) == (200, "weight update done by 2 engines")
        # They were paused before, and so they are after it.
        assert states(stage) == [("in_place", "embedded:2")] * 2
        assert await told(stage, "/continue_generation") == (200, "continue done by 2 engines")
        assert await told(stage, "/flush_cache") == (200, "flush done by 2 engines")
        for path in ("/flush_cache", "/continue_generation"):
            status, said = await told(stage, path, {"tags": ["kv"]})
            assert (status, "tags is not a field here" in said) == (400, True)
        assert states(stage) == [(None, "embedded:2")] * 2
        assert [request.url.path for request in stage.one.asked].count("/flush_cache") == 1

    play(scene)


def test_a_sleep_and_a_wake_are_of_all_engines_and_one_that_cannot_wake_keeps_all_asleep() -> None:
    async def scene(stage: Scene) -> None:
        def levels() -> list[int]:
            return [engine.sleep_level for engine in (stage.one, stage.other)]

        assert await told(stage, "/sleep", {"level": 2, "mode": "abort"}) == (200, "sleep done by 2 engines")
        assert levels() == [2, 2]
        assert json.loads(stage.one.asked[-1].content) == {"level": 2, "mode": "abort"}
        assert await told(stage, UPDATE, NEW) == (200, "weight update done by 2 engines")
        assert levels() == [1, 1]
        stage.other.instead["/wake"] = httpx.Response(400, json={"error": {"message": "no memory is free"}})
        status, said = await told(stage, "/wake")
        assert status == 400
        assert f"{NAMES[1]} refused: no memory is free" in said
        assert levels() == [1, 1], "one engine woke alone"
        assert await told(stage, "/wake") == (200, "wake done by 2 engines")
        assert levels() == [0, 0]
        assert "in_place" in (await told(stage, "/sleep", {"mode": "in_place"}))[1]
        stage.other.is_up = False
        await stage.look()
        assert (await told(stage, "/sleep"))[0] == 503
        assert levels() == [0, 0]

    play(scene)


@pytest.mark.parametrize("fault", ["refuses", "dies", "is slow"])
def test_one_engine_at_fault_is_named_and_the_other_is_put_back(fault: str) -> None:
    async def scene(stage: Scene) -> None:
        slow = asyncio.Event()
        what = {"refuses": REFUSAL, "dies": httpx.ConnectError("refused"), "is slow": slow}[fault]
        words = {"refuses": "no such folder", "dies": "is gone", "is slow": "did not answer within 0.2 s"}[fault]
        stage.other.instead[UPDATE] = what
        status, said = await told(stage, UPDATE, NEW)
        assert status == (400 if fault == "refuses" else 503)
        assert f"{NAMES[1]} " in said
        assert words in said
        assert NAMES[0] not in said
        assert states(stage)[0] == (None, "embedded")
        if fault != "refuses":
            asked = stage.ask()
            await asked.end()
            assert asked.headers["x-engine"] == NAMES[0]
            assert "must take requests" in (await told(stage, UPDATE, NEW))[1]
        # The one that was slow has done it after all, and is put back too.
        slow.set()
        await stage.look()
        await until(lambda: states(stage)[1] == (None, "embedded"))
        await until(lambda: not stage.router.engines.operators.why_not(NAMES[1]))
        await stage.look()
        assert await told(stage, UPDATE, NEW) == (200, "weight update done by 2 engines")

    play(scene)


def test_requests_wait_at_the_router_while_weights_are_updated() -> None:
    async def scene(stage: Scene) -> None:
        end, slow = asyncio.Event(), asyncio.Event()
        stage.one.headers, stage.one.parts = EVENTS, [b"data: 1\n\n", end]
        running = stage.ask()
        await running.part()
        assert "did not finish within 0 s" in (await told(stage, UPDATE, NEW))[1]
        updating = stage.ask(UPDATE, {**NEW, "timeout": 5})
        await until(lambda: stage.router.engines.operators.is_draining)
        waiting = stage.ask()
        await until(lambda: stage.router.engines.held == 1)
        assert stage.router.engines.sent == 1
        alone = stage.ask("/continue_generation", headers={"x-engine": NAMES[0]})
        assert "call to all engines" in await alone.error()
        stage.one.instead[UPDATE] = slow
        end.set()
        await running.end()
        await until(lambda: stage.other.weights == "embedded:2")
        assert stage.router.engines.held == 1, "a request was sent while engines had two versions of the weights"
        slow.set()
        await updating.end()
        assert updating.status == 200
        stage.one.parts = [b"data: 2\n\n"]
        await waiting.end()
        assert waiting.status == 200
        assert (stage.router.engines.held, stage.router.engines.sent) == (0, 0)

    play(scene)


def test_requests_that_did_not_come_through_the_router_refuse_an_update() -> None:
    async def scene(stage: Scene) -> None:
        stage.other.alive = 3
        status, said = await told(stage, UPDATE, NEW)
        assert status == 400
        assert f"{NAMES[1]} refused: has 3 requests that did not come through this router" in said
        assert states(stage) == [(None, "embedded")] * 2

    play(scene)


def test_operators_need_their_key_and_a_whole_body() -> None:
    async def scene(stage: Scene) -> None:
        refused = stage.ask(UPDATE, NEW)
        await refused.end()
        assert refused.status == 401
        headers = {"authorization": "Bearer secret"}
        bad = stage.ask(UPDATE, {"path": 1}, headers=headers)
        assert "path" in await bad.error()
        page = stage.ask(UPDATE, NEW, headers=headers | {"origin": "http://evil.example"})
        await page.end()
        assert page.status == 403
        assert not stage.one.asked
        done = stage.ask(UPDATE, NEW, headers=headers)
        assert await done.end() == b"weight update done by 2 engines"
        assert stage.one.asked[-1].headers["authorization"] == "Bearer secret"

    play(scene, PlayedEngine(), PlayedEngine(), admin_key="secret")
