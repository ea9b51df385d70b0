"""Requests that a web page can make a browser send to loopback are refused by Host, Origin, type and method."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.core.messages import Abort, CallAnswer

OPERATORS = [
    ("/flush_cache", None),
    ("/update_weights_from_disk", {"model_path": "embedded:1"}),
    ("/abort_request", {"rid": "r"}),
    ("/pause_generation", {"mode": "abort"}),
    ("/continue_generation", None),
    ("/start_profile", None),
    ("/stop_profile", None),
]
EVIL = "http://evil.example"


async def answered(stage: Any, call: Any) -> Any:
    """The answer to an operator's call that reaches the scheduler."""
    task = asyncio.ensure_future(call)
    asked = await stage.scheduler.receive()
    await stage.scheduler.reply(CallAnswer(call_id=asked.call_id, ok=True, message="done"))
    return await task


@pytest.mark.parametrize(("path", "body"), OPERATORS)
def test_no_page_operates_a_server(play, path: str, body: dict[str, str] | None) -> None:
    """A page of any origin could pause, abort, flush, profile and change the weights, without a key."""

    async def scene(stage) -> None:
        for origin in (EVIL, "null", "http://127.0.0.1:1", "https://[", ""):
            answer = await stage.http.post(path, json=body, headers={"origin": origin})
            assert answer.status_code == 403, origin
            assert "--operator-origins" in answer.json()["error"]["message"]
        for method in ("GET", "PUT", "DELETE", "OPTIONS"):
            assert (await stage.http.request(method, path)).status_code == 405
        # Nothing of it reached the scheduler: the first that does is this one.
        assert (await answered(stage, stage.http.post(path, json=body))).status_code == 200
        own = {"origin": "http://127.0.0.1"}
        assert (await answered(stage, stage.http.post(path, json=body, headers=own))).status_code == 200

    play(scene)


@pytest.mark.parametrize(("path", "body"), [entry for entry in OPERATORS if entry[1]])
@pytest.mark.parametrize("declared", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_body_that_a_page_may_send_unasked_is_415(play, path: str, body: dict[str, str], declared: str) -> None:
    async def scene(stage) -> None:
        answer = await stage.http.post(path, content=b'{"rid": "r"}', headers={"content-type": declared})
        assert answer.status_code == 415
        assert "application/json" in answer.json()["error"]["message"]

    play(scene)


def test_json_may_say_its_charset_and_no_body_needs_no_type(play) -> None:
    async def scene(stage) -> None:
        typed = {"content-type": "Application/JSON; charset=utf-8"}
        call = asyncio.create_task(stage.http.post("/abort_request", content=b'{"rid": "r"}', headers=typed))
        asked = await stage.scheduler.receive()
        assert isinstance(asked, Abort)
        await stage.scheduler.reply(CallAnswer(call_id=asked.call_id, ok=True, message="done"))
        assert (await call).status_code == 200
        assert (await answered(stage, stage.http.post("/pause_generation"))).status_code == 200

    play(scene)


def test_named_origins_may(play) -> None:
    async def scene(stage) -> None:
        call = stage.http.post("/continue_generation", headers={"origin": "https://ops.example"})
        assert (await answered(stage, call)).status_code == 200
        assert (await stage.http.post("/continue_generation", headers={"origin": EVIL})).status_code == 403

    play(scene, operator_origins="https://ops.example/, https://other.example")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:30000", 200),
        ("127.0.0.2:30000", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("localhost.", 200),
        ("[::1]:30000", 200),
        ("gpu-7.example:30000", 200),
        ("evil.example", 403),
        ("evil.example:30000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("evil.example@localhost", 403),
        ("localhost#.evil.example", 403),
        ("localhost?.evil.example", 403),
        ("localhost/.evil.example", 403),
        ("10.0.0.1", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_host_on_loopback(play, host: str, status: int) -> None:
    """DNS rebinding: a page whose name leads to 127.0.0.1 is of one origin with the server, and could read it all."""

    async def scene(stage) -> None:
        for path in ("/health", "/v1/models", "/openapi.json", "/nothing"):
            answer = await stage.http.get(path, headers={"host": host})
            assert answer.status_code == (status if path != "/nothing" or status == 403 else 404), path
            assert status == 200 or "--allowed-hosts" in answer.json()["error"]["message"]

    play(scene, allowed_hosts="gpu-7.example")


def test_elsewhere_any_host_will_do(play) -> None:
    """Such a server has names that it cannot know, and its operators need a key."""

    async def scene(stage) -> None:
        assert (await stage.http.get("/health", headers={"host": "gpu-7.example"})).status_code == 200

    play(scene, address="0.0.0.0")
