"""A router over engines that a test plays: what it passes on, and what it does when engines die, drain or refuse."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from played_engines import EVENTS, NAMES, PlayedEngine, Scene, play

from engine.cluster.router.engines import RouterPlan
from engine.core.errors import ConfigError
from engine.core.routing.placement import Rules

GONE = httpx.ConnectError("refused")
CUT = httpx.RemoteProtocolError("cut")


def test_a_request_is_passed_on_without_what_is_the_connections() -> None:
    async def scene(stage: Scene) -> None:
        stage.one.headers |= {"connection": "x-hop", "x-hop": "1", "x-other": "2"}
        headers = {"authorization": "Bearer k", "connection": "x-mine", "x-mine": "1", "te": "trailers", "x-kept": "3"}
        asked = stage.ask("/generate?x=1", {"text": "a"}, headers=headers)
        assert await asked.end() == b"{}"
        (request,) = stage.one.asked
        assert (request.method, request.url.raw_path, json.loads(request.content)) == (
            "POST",
            b"/generate?x=1",
            {"text": "a"},
        )
        assert request.headers["authorization"] == "Bearer k"
        assert request.headers["x-kept"] == "3"
        assert not {"x-mine", "te"} & set(request.headers)
        assert (asked.status, asked.headers["x-other"], asked.headers["x-engine"]) == (200, "2", NAMES[0])
        assert "x-hop" not in asked.headers
        assert asked.headers["x-request-id"] == request.headers["x-request-id"]
        assert stage.in_flight == [0, 0]

    play(scene)


def test_a_stream_comes_part_by_part() -> None:
    async def scene(stage: Scene) -> None:
        more = asyncio.Event()
        stage.one.headers, stage.one.parts = EVENTS, [b"data: 1\n\n", more, b"data: 2\n\n"]
        asked = stage.ask()
        assert await asked.part() == b"data: 1\n\n"
        assert stage.in_flight == [1, 0]
        more.set()
        assert await asked.end() == b"data: 2\n\n"
        assert stage.in_flight == [0, 0]

    play(scene)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_ends_its_request_in_the_engine(streams: bool) -> None:
    async def scene(stage: Scene) -> None:
        if streams:
            stage.one.headers = EVENTS
        stage.one.parts = [b"data: 1\n\n", asyncio.Event()]
        asked = stage.ask()
        while not stage.one.bodies:
            await asyncio.sleep(0)
        if streams:
            await asked.part()
        assert stage.in_flight == [1, 0]
        await asked.leave()
        assert stage.one.bodies[0].left, "the engine goes on with a request that its client has left"
        assert stage.in_flight == [0, 0], "a request that its client has left is counted forever"

    play(scene)


def test_a_request_whose_engine_dies_before_the_first_byte_is_sent_once_more() -> None:
    async def scene(stage: Scene) -> None:
        stage.one.parts = [GONE]
        asked = stage.ask()
        assert await asked.end() == b"{}"
        assert asked.headers["x-engine"] == NAMES[1]
        assert stage.router.engines.engines[NAMES[0]].why_not
        # Until a look finds it back, nothing goes there.
        for _ in range(3):
            await stage.ask().end()
        assert (len(stage.one.asked), len(stage.other.asked)) == (1, 4)
        stage.one.parts = [b"{}"]
        await stage.look()
        assert not stage.router.engines.engines[NAMES[0]].why_not
        stage.one.parts = stage.other.parts = [GONE]
        lost = stage.ask()
        assert "2 engines were lost" in await lost.error()
        assert (lost.status, lost.headers["retry-after"]) == (503, "1")
        assert stage.in_flight == [0, 0]

    play(scene)


def test_after_the_first_byte_a_stream_ends_with_an_error_and_is_not_sent_again() -> None:
    async def scene(stage: Scene) -> None:
        stage.one.headers, stage.one.parts = EVENTS, [b"data: 1\n\nda", CUT]
        asked = stage.ask()
        said = await asked.end()
        assert not stage.other.asked, "a request was sent again after the first byte of its answer"
        first, last, rest = said.decode().split("\n\n")
        assert (first, rest) == ("data: 1", "")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["type"] == "server_unavailable"
        assert error["request_id"] == asked.headers["x-request-id"]
        assert stage.in_flight == [0, 0]

    play(scene)


def test_nothing_alive_is_said_with_its_causes() -> None:
    async def scene(stage: Scene) -> None:
        asked = stage.ask()
        assert f"{NAMES[0]} has not answered yet; {NAMES[1]} has not answered yet" in await asked.error()
        stage.one.is_up, stage.other.health = False, 503
        await stage.look()
        asked = stage.ask()
        words = await asked.error()
        assert f"{NAMES[0]} is gone (ConnectError); {NAMES[1]} is draining or starting (503)" in words
        assert (asked.status, asked.headers["retry-after"]) == (503, "1")
        health = stage.ask("/health", method="GET")
        said = json.loads(await health.end())
        assert health.status == 503
        assert [engine["why_not"] for engine in said["engines"]] == [
            "is gone (ConnectError)",
            "is draining or starting (503)",
        ]
        stage.other.health = 200
        await stage.look()
        asked = stage.ask()
        assert await asked.end() == b"{}"
        assert asked.headers["x-engine"] == NAMES[1]

    play(scene, met=False)


def test_one_that_refuses_is_passed_over_and_its_refusal_is_the_last_word() -> None:
    async def scene(stage: Scene) -> None:
        stage.one.status = 429
        assert (await _answered(stage))[:2] == (200, NAMES[1])
        stage.other.status = 429
        assert (await _answered(stage))[0] == 429
        assert stage.in_flight == [0, 0]

    play(scene)


async def _answered(stage: Scene) -> tuple[int, str]:
    asked = stage.ask()
    await asked.end()
    return asked.status, asked.headers["x-engine"]


def test_a_prompt_goes_where_its_beginning_was() -> None:
    """Also without KV events: then by what was sent."""

    async def scene(stage: Scene) -> None:
        prompts = [[kind] * 64 for kind in range(4)]
        first = [await _engine_of(stage, prompt) for prompt in prompts]
        assert sorted(first) == sorted(NAMES * 2)
        assert [await _engine_of(stage, [*prompt, 9]) for prompt in reversed(prompts)] == first[::-1]

    play(scene)


async def _engine_of(stage: Scene, ids: list[int]) -> str:
    asked = stage.ask(body={"input_ids": ids})
    await asked.end()
    return asked.headers["x-engine"]


def test_round_robin_knows_no_prompts() -> None:
    async def scene(stage: Scene) -> None:
        assert [await _engine_of(stage, [1] * 64) for _ in range(4)] == [*NAMES, *NAMES]

    play(scene, rules=Rules(by_prefix=False))


def test_keys_are_asked_for_and_passed_on() -> None:
    async def scene(stage: Scene) -> None:
        for path, method in (("/generate", "POST"), ("/get_load", "GET"), ("/metrics", "GET"), ("/v1/models", "GET")):
            refused = stage.ask(path, method=method)
            await refused.end()
            assert (path, refused.status) == (path, 401)
        allowed = stage.ask(headers={"authorization": "Bearer secret"})
        await allowed.end()
        assert allowed.status == 200
        assert stage.one.asked[0].headers["authorization"] == "Bearer secret"
        operator = stage.ask("/flush_cache", headers={"authorization": "Bearer secret", "x-engine": NAMES[0]})
        assert "must be valid for this route" in await operator.error()

    engines = (PlayedEngine(api_key="secret"), PlayedEngine(api_key="secret"))
    play(scene, *engines, api_key="secret", admin_key="other")


def test_an_engine_that_asks_the_router_for_a_key_is_named() -> None:
    async def scene(stage: Scene) -> None:
        assert "asks the router for a key; set ENGINE_API_KEY" in stage.router.engines.engines[NAMES[0]].why_not
        assert (await _answered(stage))[1] == NAMES[1]

    play(scene, PlayedEngine(api_key="secret"), PlayedEngine())


def test_what_is_about_one_engine_must_name_it() -> None:
    async def scene(stage: Scene) -> None:
        unnamed = stage.ask("/start_profile")
        assert "must name it in the header x-engine" in await unnamed.error()
        assert unnamed.status == 400
        named = stage.ask("/flush_cache", headers={"x-engine": NAMES[1]})
        await named.end()
        assert (named.status, len(stage.one.asked), len(stage.other.asked)) == (200, 0, 1)
        wrong = stage.ask("/flush_cache", headers={"x-engine": "http://127.0.0.1:3"})
        assert f"must be one of {', '.join(NAMES)}, got 'http://127.0.0.1:3'" in await wrong.error()
        assert wrong.status == 404
        stage.other.instead["/flush_cache"] = GONE
        dead = stage.ask("/flush_cache", headers={"x-engine": NAMES[1]})
        assert "is gone" in await dead.error()
        assert not stage.one.asked, "an operator's call went to another engine"

    play(scene)


def test_a_body_is_bounded_and_a_host_is_checked() -> None:
    async def scene(stage: Scene) -> None:
        large = stage.ask(body=b"x" * 2000)
        await large.end()
        assert large.status == 413
        rebound = stage.ask(headers={"host": "evil.example"})
        await rebound.end()
        assert rebound.status == 403
        assert not stage.one.asked

    play(scene, max_body_bytes=1024)


def test_loads_and_metrics_are_of_all_engines() -> None:
    async def scene(stage: Scene) -> None:
        await stage.ask().end()
        loads = json.loads(await stage.ask("/get_load", method="GET").end())
        assert [load["dp_rank"] for load in loads] == [0, 1]
        text = (await stage.ask("/metrics", method="GET").end()).decode()
        assert f'engine_router_requests_total{{engine="{NAMES[0]}"}} 1.0' in text
        assert f'engine_router_engine_up{{engine="{NAMES[1]}"}} 1.0' in text

    play(scene)


def test_another_model_is_not_one_of_the_fleet() -> None:
    async def scene(stage: Scene) -> None:
        assert (await _answered(stage))[1] == NAMES[0]
        assert "cannot be used" in stage.router.engines.engines[NAMES[1]].why_not

    class Other(PlayedEngine):
        async def answer(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/server_info":
                return httpx.Response(200, json={"settings": {"model": 3}, "limits": {}, "processes": {}})
            return await super().answer(request)

    play(scene, PlayedEngine(), Other())


def test_a_prefill_engine_is_refused_by_name() -> None:
    """A prefill engine answers no client."""

    async def scene(stage: Scene) -> None:
        assert (await _answered(stage))[1] == NAMES[0]
        why = stage.router.engines.engines[NAMES[1]].why_not
        assert "role='prefill'" in why
        assert "--prefill-engines" in why
        assert not stage.other.asked

    play(scene, PlayedEngine(), PlayedEngine(role="prefill"))


def test_an_engine_that_became_a_prefill_engine_sends_clients_on() -> None:
    """The engine was restarted in another role, and the router has not looked at it yet."""

    async def scene(stage: Scene) -> None:
        stage.one.status = stage.other.status = 421
        assert (await _answered(stage))[0] == 421
        stage.other.status = 200
        assert await _answered(stage) == (200, NAMES[1])

    play(scene)


@pytest.mark.parametrize(
    ("urls", "words"),
    [
        (("https://x:1",), "an engine's URL must be http://HOST:PORT, got 'https://x:1'"),
        (("127.0.0.1:1",), "must be http://HOST:PORT"),
        (("http://a:1/v1",), "must be http://HOST:PORT"),
        (("http://a:1", "http://a:1"), "each engine must be given once"),
    ],
)
def test_wrong_urls_are_refused(urls: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RouterPlan(urls=urls, rules=Rules())
