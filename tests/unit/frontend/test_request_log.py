"""Request ids, the request log, JSON lines, and what web pages of other origins may read."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import httpx
import pytest
from real_servers import RealServer, running

from engine.core.messages import FinishReason, TokenOutput
from engine.frontend.schema.errors import MAX_MESSAGE_CHARS
from engine.frontend.sessions.sessions import Sessions
from engine.process.logs import REQUEST_LOGGER, JsonFormatter, fields_of
from engine.server.launch.preload import PreloadedParent

PAGE = "https://chat.example"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, REQUEST_LOGGER)
    return caplog


def _messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == REQUEST_LOGGER]


async def _answer(stage) -> None:
    asked = await stage.scheduler.receive()
    tokens = {"token_ids": (97,), "prompt_tokens": 2, "cached_tokens": 1, "completion_tokens": 1}
    await stage.scheduler.reply(TokenOutput(rid=asked.rid, finish_reason=FinishReason.LENGTH, **tokens))


@pytest.mark.parametrize(
    ("given", "kept"),
    [("my-id.7", True), ("a" * 128, True), ("a" * 129, False), ("two words", False), ('"; x="', False), (None, False)],
)
def test_id_is_taken_or_made_and_sent_back(play, given: str | None, kept: bool) -> None:
    """C06: an id that could forge a line of a log is not taken."""

    async def scene(stage) -> None:
        headers = {} if given is None else {"x-request-id": given}
        first, second = [await stage.http.get("/model_info", headers=headers) for _ in range(2)]
        ids = [response.headers["x-request-id"] for response in (first, second)]
        assert (ids == [given, given]) is kept
        assert kept or len({*ids, given}) == 3

    play(scene)


@pytest.mark.parametrize("path", ["/generate", "/nowhere", "/v1/models/other"])
def test_id_is_in_every_error(play, path: str) -> None:
    async def scene(stage) -> None:
        method = "POST" if path == "/generate" else "GET"
        response = await stage.http.request(method, path, headers={"x-request-id": "mine"}, json={"text": 5})
        assert response.headers["x-request-id"] == response.json()["error"]["request_id"] == "mine"

    play(scene)


def test_id_is_in_the_error_of_a_stream_and_of_a_bug(play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage) -> None:
        headers = {"x-request-id": "mine"}
        body = {"text": "x", "rid": "r", "stream": True}
        answer = asyncio.create_task(stage.http.post("/generate", json=body, headers=headers))
        await stage.scheduler.receive()
        await stage.scheduler.reply(TokenOutput(rid="r", token_ids=(97,)))
        await stage.scheduler.reply(TokenOutput(rid="r", finish_reason=FinishReason.ERROR, error="stage 1: boom"))
        last = json.loads((await answer).text.strip().splitlines()[-1].removeprefix("data: "))
        assert (last["error"]["message"], last["error"]["request_id"]) == ("stage 1: boom", "mine")

        def bug(*_: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(Sessions, "start", bug)
        transport = httpx.ASGITransport(stage.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=stage.http.base_url) as http:
            response = await http.post("/generate", json={"text": "x"}, headers=headers)
        assert response.status_code == 500
        assert response.headers["x-request-id"] == response.json()["error"]["request_id"] == "mine"

    play(scene)


def test_line_of_an_answer_and_of_a_refusal(play, lines) -> None:
    """C06: id, route, status, tokens and times; never the text."""

    async def scene(stage) -> None:
        body = {"prompt": "secret words", "n": 2, "rid": "r"}
        answer = asyncio.create_task(stage.http.post("/v1/completions", json=body, headers={"x-request-id": "mine"}))
        for _ in range(2):
            await _answer(stage)
        assert (await answer).status_code == 200
        await stage.http.get("/model_info?x=%0Aforged")
        await stage.http.post("/v1/completions", json={"prompt": "x", "temperature": -1})

    play(scene)
    good, plain, refused = _messages(lines)
    assert good.startswith("POST /v1/completions request_id=mine status=200 rid=r-0,r-1 prompt_tokens=4 ")
    assert " cached_tokens=2 " in good
    assert "completion_tokens=2 finish_reason=length first_token_s=0." in good
    assert "total_s=" in good
    assert "secret" not in good
    assert plain.startswith("GET /model_info request_id=")
    assert "rid=" not in plain.replace("request_id=", "")
    assert " status=400 total_s=" in refused
    assert "error='temperature must be >= 0, got -1'" in refused
    assert not any("\n" in line for line in (good, plain, refused))


def test_path_cannot_forge_a_line(play, lines) -> None:
    async def scene(stage) -> None:
        await stage.http.get("/no%0AINFO%20forged")

    play(scene)
    (line,) = _messages(lines)
    assert line.startswith("GET /no%0AINFO%20forged request_id=")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("method", "path", "remedy"),
    [
        ("GET", "/" + "a" * 15_000, "; /docs lists the routes"),
        ("M" * 5_000, "/generate", "; it takes POST"),
        ("GET", "/v1/models/" + "m" * 15_000, "see /v1/models"),
    ],
)
def test_a_long_request_line_makes_a_bounded_line_and_an_error_with_its_remedy(
    play, lines, method: str, path: str, remedy: str
) -> None:
    async def scene(stage) -> None:
        answer = await stage.http.request(method, path)
        assert answer.json()["error"]["message"].endswith(remedy)

    play(scene)
    (line,) = _messages(lines)
    assert len(line) < MAX_MESSAGE_CHARS + 1024
    assert (path[:100] in line, method[:30] in line) == (True, True)


def test_probes_are_logged_when_they_fail_only(play, lines) -> None:
    async def scene(stage) -> None:
        await stage.http.get("/health")
        assert _messages(lines) == []
        stage.state.serving = False
        await stage.http.get("/health")

    play(scene)
    (line,) = _messages(lines)
    assert "status=503" in line


def test_json_line_has_the_fields_apart() -> None:
    record = logging.LogRecord("engine.x", logging.ERROR, "f", 1, "two\nlines %s", ("\u20ac",), None)
    vars(record).update(fields_of(status=200, odd=object))
    line = JsonFormatter().format(record)
    assert "\n" not in line
    assert json.loads(line) | {"time": ""} == {
        "time": "",
        "level": "error",
        "process": "MainProcess",
        "logger": "engine.x",
        "message": "two\nlines \u20ac",
        "status": 200,
        "odd": repr(object),
    }
    assert json.loads(line)["time"].endswith("Z")


def test_json_line_has_the_exception() -> None:
    failure = (ValueError, ValueError("why"), None)
    record = logging.LogRecord("engine.x", logging.ERROR, "f", 1, "failed", (), failure)
    assert json.loads(JsonFormatter().format(record))["exception"].endswith("ValueError: why")


def test_real_server_logs_json_and_answers_pages(parent: PreloadedParent, tmp_path: Path) -> None:
    """C06, C09: the settings reach the process that answers."""
    settings = {"log_format": "json", "log_requests": True, "cors_origins": f"{PAGE}/, http://b", "api_key": "k"}
    with running(parent, tmp_path, **settings) as server:
        answer = server.http.post(
            "/v1/completions",
            json={"prompt": "hello", "max_tokens": 3},
            headers={"x-request-id": "mine", "authorization": "Bearer k", "origin": PAGE},
        )
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-expose-headers"] == "x-request-id"
        _check_preflight(server)
        lines = [json.loads(line) for line in server.log.splitlines()]
    logged = next(line for line in lines if line.get("request_id") == "mine")
    assert (logged["method"], logged["path"], logged["status"], logged["process"]) == (
        "POST",
        "/v1/completions",
        200,
        "frontend",
    )
    assert (logged["prompt_tokens"], logged["completion_tokens"], logged["finish_reason"]) == (5, 3, "length")


def _check_preflight(server: RealServer) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    allowed = server.http.options("/v1/chat/completions", headers={"origin": PAGE, **asked})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert allowed.headers["access-control-allow-headers"] == "authorization,content-type"
    refused = server.http.options("/v1/chat/completions", headers={"origin": "https://elsewhere", **asked})
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers


def test_without_the_setting_no_page_may_read(play) -> None:
    async def scene(stage) -> None:
        response = await stage.http.get("/v1/models", headers={"origin": PAGE})
        assert not [name for name in response.headers if name.startswith("access-control")]

    play(scene)


def test_any_origin(play) -> None:
    async def scene(stage) -> None:
        response = await stage.http.get("/v1/models", headers={"origin": PAGE})
        assert response.headers["access-control-allow-origin"] == "*"

    play(scene, cors_origins="*")
