"""``POST /prefill``: what a prefill engine takes from decode engines, and what it refuses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from engine.core.messages import Delivery, FinishReason, Generate, Refusal, RefusalKind, TokenOutput

ROLE = {"role": "prefill", "page_size": 4}
TO = ["unix:/tmp/x/kv-0#a1", "tcp:10.0.0.7:31000#b2"]
BODY: dict[str, Any] = {"to": TO, "transfer": 7, "page_size": 4, "prompt_ids": list(range(8))}
CLIENTS = (
    ("/generate", {"text": "a"}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/v1/embeddings", {"input": "a"}),
)


def _end(message: Generate, reason: FinishReason = FinishReason.LENGTH) -> TokenOutput:
    return TokenOutput(
        rid=message.rid, token_ids=(), finish_reason=reason, prompt_tokens=len(message.prompt_ids), cached_tokens=4
    )


def test_a_prompt_is_delivered_and_answered_when_all_is_sent(play) -> None:
    async def scene(stage) -> None:
        extra = {"first_page": 1, "weights": "/w", "priority": 3, "cache_salt": "s", "timeout_s": 9.0}
        answer = asyncio.create_task(stage.http.post("/prefill", json=BODY | extra))
        message = await stage.scheduler.receive()
        assert isinstance(message, Generate)
        assert message.deliver == Delivery(tuple(TO), 7, 1, "/w")
        assert message.prompt_ids == tuple(range(8))
        assert message.sampling.max_new_tokens == 0
        assert (message.priority, message.cache_salt, message.timeout_s) == (3, "s", 9.0)
        assert not answer.done()
        await stage.scheduler.reply(_end(message))
        response = await answer
        assert response.status_code == 200
        assert response.json() == {"prompt_tokens": 8, "cached_tokens": 4}

    play(scene, **ROLE)


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"to": []}, "to", ">= 1 entries"),
        ({"to": ["/tmp/x"]}, "to.0", "unix:PATH#RUN"),
        ({"to": ["http://10.0.0.7"]}, "to", "unix:PATH#RUN or tcp:HOST:PORT#RUN, got 'http://10.0.0.7'"),
        ({"to": ["tcp:10.0.0.7#r"]}, "to", "HOST:PORT"),
        ({"to": ["unix:x" + "y" * 600]}, "to.0", "512"),
        ({"to": ["unix:/x#r"] * 65}, "to", "64"),
        ({"transfer": 0}, "transfer", ">= 1"),
        ({"prompt_ids": []}, "prompt_ids", "full pages of 4 tokens"),
        ({"prompt_ids": [1, 2, 3, 4, 5]}, "prompt_ids", "full pages of 4 tokens"),
        ({"first_page": 2}, "prompt_ids", "more than first_page=2"),
        ({"prompt_ids": [1, 2, 3, 100_000]}, "prompt_ids", "got 100000"),
        ({"page_size": 8}, "page_size", "must be 4, the one of this engine, got 8"),
        ({"prompt_ids": "text"}, "prompt_ids", "list"),
        ({"stream": True}, "stream", "stream"),
    ],
)
def test_a_body_that_breaks_a_rule_is_refused(play, change: dict[str, Any], param: str, words: str) -> None:
    async def scene(stage) -> None:
        response = await stage.http.post("/prefill", json=BODY | change)
        error = response.json()["error"]
        assert response.status_code == 400, error
        assert error["param"].startswith(param.partition(".")[0])
        assert words in error["message"]
        assert stage.client.sessions.open_requests == 0

    play(scene, **ROLE)


def test_a_long_prompt_is_read_beside_the_event_loop(play) -> None:
    async def scene(stage) -> None:
        ids = [12] * 2_000
        body = json.dumps(BODY | {"prompt_ids": ids}, indent=16)
        sent = stage.http.post("/prefill", content=body, headers={"content-type": "application/json"})
        answer = asyncio.create_task(sent)
        message = await stage.scheduler.receive()
        assert message.prompt_ids == tuple(ids)
        assert message.deliver == Delivery(tuple(TO), 7)
        assert len(stage.long_bodies) == 1
        await stage.scheduler.reply(_end(message))
        assert (await answer).status_code == 200

    play(scene, **ROLE)


@pytest.mark.parametrize(
    ("reason", "status"), [(FinishReason.ABORT, 503), (FinishReason.TIMEOUT, 504), (FinishReason.ERROR, 500)]
)
def test_a_prompt_that_ends_before_all_is_sent_is_an_error(play, reason: FinishReason, status: int) -> None:
    async def scene(stage) -> None:
        answer = asyncio.create_task(stage.http.post("/prefill", json=BODY))
        await stage.scheduler.reply(_end(await stage.scheduler.receive(), reason))
        response = await answer
        assert response.status_code == status
        assert response.json()["error"]["message"]

    play(scene, **ROLE)


def test_the_schedulers_refusal_is_the_answer(play) -> None:
    async def scene(stage) -> None:
        answer = asyncio.create_task(stage.http.post("/prefill", json=BODY))
        message = await stage.scheduler.receive()
        words = "the KV must be computed with other weights"
        await stage.scheduler.reply(Refusal(rid=message.rid, kind=RefusalKind.UNAVAILABLE, message=words))
        response = await answer
        assert (response.status_code, response.json()["error"]["message"]) == (503, words)

    play(scene, **ROLE)


@pytest.mark.parametrize(("path", "body"), CLIENTS)
def test_clients_are_sent_to_a_decode_engine(play, path: str, body: dict[str, Any]) -> None:
    async def scene(stage) -> None:
        response = await stage.http.post(path, json=body)
        assert response.status_code == 421
        assert "decode engine" in response.json()["error"]["message"]
        assert stage.client.sessions.open_requests == 0

    play(scene, **ROLE)


def test_an_engine_that_does_all_itself_has_no_such_route(play) -> None:
    async def scene(stage) -> None:
        assert (await stage.http.post("/prefill", json=BODY)).status_code == 404

    play(scene, page_size=4)


@pytest.mark.parametrize(
    ("keys", "sent", "status"),
    [
        ({"admin_key": "boss", "api_key": "user"}, "user", 401),
        ({"admin_key": "boss"}, None, 401),
        ({"api_key": "user"}, None, 401),
        ({"admin_key": "boss"}, "boss", 200),
        ({"api_key": "user"}, "user", 200),
    ],
)
def test_it_is_an_operators_route(play, keys: dict[str, str], sent: str | None, status: int) -> None:
    async def scene(stage) -> None:
        headers = {} if sent is None else {"authorization": f"Bearer {sent}"}
        answer = asyncio.create_task(stage.http.post("/prefill", json=BODY, headers=headers))
        if status == 200:
            await stage.scheduler.reply(_end(await stage.scheduler.receive()))
        assert (await answer).status_code == status

    play(scene, **ROLE, **keys)


def test_a_page_cannot_ask_for_a_prompt(play) -> None:
    async def scene(stage) -> None:
        asked = await stage.http.post("/prefill", json=BODY, headers={"origin": "https://evil.example"})
        assert asked.status_code == 403
        plain = await stage.http.post("/prefill", content=b"{}", headers={"content-type": "text/plain"})
        assert plain.status_code == 415

    play(scene, **ROLE)


def test_a_load_says_its_role(play) -> None:
    async def scene(stage) -> None:
        assert "role" in (await stage.http.get("/openapi.json")).json()["components"]["schemas"]["Load"]["properties"]
        assert (await stage.http.get("/server_info?timeout=0")).json()["settings"]["role"] == "prefill"

    play(scene, **ROLE)
