"""The semantics of HTTP are honoured or refused: encodings, charsets, HEAD, types without a body."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any

import pytest

from engine.core.config import EngineConfig
from engine.core.messages import ContinueGeneration
from engine.frontend.http import description
from engine.frontend.protocols.openai.bodies import TEMPLATE_ARGUMENTS
from engine.frontend.schema.errors import ApiError
from engine.frontend.text.tokenizer import load_tokenizer

BODY = b'{"text": "x"}'


@pytest.mark.parametrize("path", ["/generate", "/tokenize", "/v1/completions", "/abort_request"])
@pytest.mark.parametrize(
    ("headers", "part"),
    [
        ({"content-encoding": "gzip"}, "without a Content-Encoding, got 'gzip'"),
        ({"content-encoding": "identity, br"}, "without a Content-Encoding"),
        ({"content-type": "application/json; charset=iso-8859-1"}, "charset is declared as 'iso-8859-1'"),
        ({"content-type": 'application/json; charset="UTF-16"'}, "charset is declared as 'utf-16'"),
        ({"content-type": b"application/json\xff"}, "application/json\xff"),
    ],
)
def test_a_body_that_would_be_read_as_another_is_refused(play, path: str, headers: dict[str, Any], part: str) -> None:
    """Its declared encoding was ignored."""

    async def scene(stage) -> None:
        headers.setdefault("content-type", "application/json")
        answer = await stage.http.post(path, content=BODY, headers=headers)
        assert answer.status_code == 415
        assert part in answer.json()["error"]["message"]

    play(scene)


@pytest.mark.parametrize("declared", ["application/json; charset=utf-8", "application/json;charset=UTF8", "text/plain"])
def test_what_clients_send_passes(play, declared: str) -> None:
    """Clients' routes accept JSON under any content type."""

    async def scene(stage) -> None:
        headers = {"content-type": declared, "content-encoding": "identity"}
        answer = await stage.http.post("/tokenize", content=b'{"prompt": "x"}', headers=headers)
        assert answer.status_code == 200

    play(scene)


@pytest.mark.parametrize("path", ["/flush_cache", "/continue_generation", "/start_profile", "/pause_generation"])
@pytest.mark.parametrize("declared", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_an_operator_s_call_of_a_type_that_pages_send_is_refused_without_a_body_too(
    play, path: str, declared: str
) -> None:
    async def scene(stage) -> None:
        answer = await stage.http.post(path, headers={"content-type": declared})
        assert (answer.status_code, answer.json()["error"]["type"]) == (415, "unsupported_media_type")

    play(scene)


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/json"}])
def test_a_call_without_a_body_needs_no_type(play, headers: dict[str, str]) -> None:
    async def scene(stage) -> None:
        answer = asyncio.create_task(stage.http.post("/continue_generation", headers=headers))
        assert isinstance(await stage.scheduler.receive(), ContinueGeneration)
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)

    play(scene)


@pytest.mark.parametrize("path", ["/wake", "/flush_cache", "/continue_generation", "/start_profile", "/stop_profile"])
def test_what_an_operator_s_call_would_not_do_is_refused_by_name(play, path: str) -> None:
    """Part of the memory, a folder, steps: it was done without them, and answered 200."""

    async def scene(stage) -> None:
        refused = await stage.http.post(path, json={"tags": ["weights"]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tags")
        assert "tags is not a field here, got ['weights']; there are no fields; leave it out" in refused.text
        refused = await stage.http.post(f"{path}?tags=weights")
        assert refused.status_code == 400
        assert "got tags" in refused.text
        answer = asyncio.create_task(stage.http.post(path, json={}))
        assert await stage.scheduler.receive()
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)

    play(scene)


@pytest.mark.parametrize("level", [True, "2", 3, 0])
def test_a_level_of_sleep_that_is_none_is_refused(play, level: object) -> None:
    async def scene(stage) -> None:
        refused = await stage.http.post("/sleep", json={"level": level})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "level")

    play(scene)


@pytest.mark.parametrize("path", ["/health", "/version", "/v1/models", "/model_info", "/openapi.json", "/docs"])
def test_head_is_answered_where_get_is(play, path: str) -> None:
    """Probes ask so; it was 405."""

    async def scene(stage) -> None:
        get, head = await stage.http.get(path), await stage.http.head(path)
        assert (head.status_code, head.headers["content-type"]) == (200, get.headers["content-type"])
        assert head.headers["content-length"] == get.headers["content-length"]
        described = (await stage.http.get("/openapi.json")).json()
        assert not [one for one, operations in described["paths"].items() if "head" in operations]

    play(scene)


def test_head_asks_for_a_key_as_get_does(play) -> None:
    async def scene(stage) -> None:
        assert (await stage.http.head("/v1/models")).status_code == 401
        assert (await stage.http.head("/generate")).status_code == 405

    play(scene, api_key="k")


def test_a_real_server_sends_no_body_with_head(server) -> None:
    answer = server.http.head("/v1/models")
    assert (answer.status_code, answer.content) == (200, b"")
    assert server.http.get("/version").status_code == 200, "the connection goes on"


def test_no_variable_of_a_template_is_an_argument_of_the_library() -> None:
    """The library's own arguments are refused; they used to be answered with an error about its method."""
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    for method in (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template):
        assert set(inspect.signature(method).parameters) - {"kwargs"} <= TEMPLATE_ARGUMENTS
    _, template = load_tokenizer(EngineConfig())
    for name in ("self", "conversations", "messages"):
        with pytest.raises(ApiError, match="but: it got multiple values for") as caught:
            template.render([{"role": "user", "content": "x"}], {name: 1})
        assert "()" not in str(caught.value)


def test_the_description_is_made_beside_the_loop(play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making it took 49 ms of the event loop, as long as 50 tokens of a stream."""
    made_in: list[threading.Thread] = []
    make = description.get_openapi

    def noted(**fields: Any) -> dict[str, Any]:
        made_in.append(threading.current_thread())
        return make(**fields)

    monkeypatch.setattr(description, "get_openapi", noted)

    async def scene(stage) -> None:
        for _ in range(2):
            answer = await stage.http.get("/openapi.json")
            assert answer.json()["paths"]["/generate"]

    play(scene)
    (maker,) = made_in
    assert maker is not threading.current_thread()
