"""The routes against a fake scheduler over real sockets: statuses, bodies, streams, messages to the scheduler."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted_lockstep.actions import BeginProfile, EngineCall, all_actions

from engine.core.messages import (
    Abort,
    AbortAll,
    CallAnswer,
    ContinueGeneration,
    FinishReason,
    FlushCache,
    Generate,
    GetStats,
    PauseGeneration,
    PauseMode,
    PromptLogprob,
    Refusal,
    RefusalKind,
    SamplingParams,
    StatsAnswer,
    TokenLogprob,
    TokenOutput,
    UpdateWeights,
)
from engine.core.stats import EngineStats
from engine.frontend.schema.errors import ApiError
from scripted.core.placed_action import parse_placed


def _events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def _output(rid: str, text: bytes, *, done: int, reason: FinishReason | None = None, **more: Any) -> TokenOutput:
    ids = tuple(text)
    return TokenOutput(rid=rid, token_ids=ids, finish_reason=reason, prompt_tokens=2, completion_tokens=done, **more)


def test_answer_in_one(play) -> None:
    async def scene(stage) -> None:
        request = {"text": "hi", "rid": "r", "sampling_params": {"max_new_tokens": 3, "temperature": 0}, "priority": 4}
        answer = asyncio.create_task(stage.http.post("/generate", json=request))
        assert await stage.scheduler.receive() == Generate(
            rid="r", prompt_ids=(104, 105), sampling=SamplingParams(max_new_tokens=3, temperature=0.0), priority=4
        )
        hits = {"cached_tokens": 3, "cached_tokens_host": 2}
        await stage.scheduler.reply(_output("r", b"\xe2\x82", done=2))
        await stage.scheduler.reply(_output("r", b"\xac", done=3, reason=FinishReason.LENGTH, **hits))
        response = await answer
        assert response.status_code == 200
        assert response.json() == {
            "text": "\u20ac",
            "output_ids": [0xE2, 0x82, 0xAC],
            "meta_info": {
                "id": "r",
                "finish_reason": "length",
                "prompt_tokens": 2,
                "completion_tokens": 3,
                "cached_tokens": 3,
                "cached_tokens_details": {"device": 1, "host": 2},
            },
        }
        assert stage.client.sessions.open_requests == 0

    play(scene)


def test_stream_of_deltas(play) -> None:
    async def scene(stage) -> None:
        answer = asyncio.create_task(stage.http.post("/generate", json={"input_ids": [1], "rid": "r", "stream": True}))
        await stage.scheduler.receive()
        await stage.scheduler.reply(_output("r", b"ab", done=2))
        await stage.scheduler.reply(_output("r", b"\xe2\x82", done=4, reason=FinishReason.LENGTH))
        response = await answer
        assert response.headers["content-type"].startswith("text/event-stream")
        first, last, end = _events(response.text)
        assert (first["text"], first["output_ids"], first["meta_info"]["finish_reason"]) == ("ab", [97, 98], None)
        assert (last["text"], last["output_ids"], last["meta_info"]["finish_reason"]) == (
            "\ufffd",
            [0xE2, 0x82],
            "length",
        )
        assert end == "[DONE]"

    play(scene)


def test_logprobs_go_with_their_tokens(play) -> None:
    async def scene(stage) -> None:
        request = {"input_ids": [1], "rid": "r", "return_logprob": True, "top_logprobs_num": 1}
        answer = asyncio.create_task(stage.http.post("/generate", json=request))
        message = await stage.scheduler.receive()
        assert (message.return_logprob, message.top_logprobs_num) == (True, 1)
        for number, reason in ((1, None), (2, FinishReason.LENGTH)):
            logprobs = (TokenLogprob(-0.5 * number, ((7, -0.25),)),)
            await stage.scheduler.reply(_output("r", b"a", done=number, reason=reason, logprobs=logprobs))
        assert (await answer).json()["meta_info"]["output_logprobs"] == [
            {"token_id": 97, "logprob": -0.5, "top": [[7, -0.25]]},
            {"token_id": 97, "logprob": -1.0, "top": [[7, -0.25]]},
        ]

    play(scene)


def test_logprobs_of_the_prompt_come_in_parts(play) -> None:
    """C02: null in front; the tokens of a stream's event follow those of the one before it."""

    async def scene(stage) -> None:
        request = {
            "input_ids": [1, 2, 3, 4],
            "rid": "r",
            "return_logprob": True,
            "logprob_start_len": 1,
            "stream": True,
        }
        answer = asyncio.create_task(stage.http.post("/generate", json=request))
        message = await stage.scheduler.receive()
        assert (message.prompt_logprobs_from, message.prompt_top_logprobs_num) == (1, 0)
        for value in (-0.5, -1.5):
            part = (PromptLogprob(value, 3),)
            await stage.scheduler.reply(TokenOutput(rid="r", prompt_tokens=4, prompt_logprobs=part))
        await stage.scheduler.reply(_output("r", b"a", done=1, reason=FinishReason.LENGTH))
        first, second, last, _ = _events((await answer).text)
        assert first["meta_info"]["input_token_logprobs"] == [[None, 2, None], [-0.5, 3, None]]
        assert second["meta_info"]["input_token_logprobs"] == [[-1.5, 4, None]]
        assert second["meta_info"]["input_token_ranks"] == [3]
        assert (last["output_ids"], last["meta_info"]["input_token_logprobs"]) == ([97], [])
        late = await stage.http.post("/generate", json=request | {"logprob_start_len": 4})
        assert (late.status_code, late.json()["error"]["param"]) == (400, "logprob_start_len")

    play(scene)


def test_stop_string_ends_the_request_by_a_message_and_never_leaks(play) -> None:
    """Stop text never leaks, wherever text is cut (C03)."""

    async def scene(stage) -> None:
        request = {"input_ids": [1], "rid": "r", "sampling_params": {"stop": ["END"]}}
        answer = asyncio.create_task(stage.http.post("/generate", json=request))
        await stage.scheduler.receive()
        await stage.scheduler.reply(_output("r", b"oneE", done=4))
        await stage.scheduler.reply(_output("r", b"ND.", done=7))
        assert await stage.scheduler.receive() == Abort(rid="r", finish_reason=FinishReason.STOP)
        await stage.scheduler.reply(_output("r", b"late", done=11))
        await stage.scheduler.reply(_output("r", b"", done=11, reason=FinishReason.STOP))
        body = (await answer).json()
        assert (body["text"], bytes(body["output_ids"])) == ("one", b"oneEND")
        meta = body["meta_info"]
        assert (meta["finish_reason"], meta["matched_stop"], meta["completion_tokens"]) == ("stop", "END", 6)

    play(scene)


def test_stop_string_in_the_last_output_counts_as_a_stop(play) -> None:
    async def scene(stage) -> None:
        request = {"input_ids": [1], "rid": "r", "sampling_params": {"stop": "b", "min_new_tokens": 1}}
        answer = asyncio.create_task(stage.http.post("/generate", json=request))
        await stage.scheduler.receive()
        await stage.scheduler.reply(_output("r", b"ab", done=2, reason=FinishReason.LENGTH))
        body = (await answer).json()
        assert (body["text"], body["meta_info"]["finish_reason"]) == ("a", "stop")

    play(scene)


def test_stop_token_has_an_id_but_no_text_and_held_text_is_given_out(play) -> None:
    async def scene(stage) -> None:
        request = {"input_ids": [1], "rid": "r", "sampling_params": {"stop": ["xyz"], "stop_token_ids": [33]}}
        answer = asyncio.create_task(stage.http.post("/generate", json=request))
        await stage.scheduler.receive()
        await stage.scheduler.reply(_output("r", b"ax!", done=3, reason=FinishReason.STOP, stop_token_id=33))
        body = (await answer).json()
        assert (body["text"], bytes(body["output_ids"])) == ("ax", b"ax!")
        assert body["meta_info"]["matched_stop"] == 33

    play(scene)


@pytest.mark.parametrize(
    ("kind", "status"),
    [(RefusalKind.INVALID, 400), (RefusalKind.DUPLICATE, 409), (RefusalKind.BUSY, 429), (RefusalKind.UNAVAILABLE, 503)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusal_has_its_status_also_for_a_stream(play, kind: RefusalKind, status: int, stream: bool) -> None:
    """A full or draining engine refuses at once, and keeps nothing (C07)."""

    async def scene(stage) -> None:
        answer = asyncio.create_task(stage.http.post("/generate", json={"text": "x", "rid": "r", "stream": stream}))
        await stage.scheduler.receive()
        await stage.scheduler.reply(Refusal(rid="r", kind=kind, message="because 5 > 4"))
        response = await answer
        assert response.status_code == status
        assert response.json()["error"]["message"] == "because 5 > 4"
        assert response.headers.get("retry-after") == ("1" if status == 429 else None)
        assert stage.client.sessions.open_requests == 0

    play(scene)


def test_live_rid_is_refused_at_once_and_free_again_after_its_end(play) -> None:
    """A client that leaves costs no more steps, and a live rid is refused (C05)."""

    async def scene(stage) -> None:
        body = {"text": "x", "rid": "r"}
        first = asyncio.create_task(stage.http.post("/generate", json=body))
        await stage.scheduler.receive()
        second = await stage.http.post("/generate", json=body)
        assert second.status_code == 409
        assert second.json()["error"]["param"] == "rid"
        await stage.scheduler.reply(_output("r", b"a", done=1, reason=FinishReason.LENGTH))
        assert (await first).status_code == 200
        third = asyncio.create_task(stage.http.post("/generate", json=body))
        assert (await stage.scheduler.receive()).rid == "r"
        await stage.scheduler.reply(_output("r", b"", done=0, reason=FinishReason.ABORT))
        assert (await third).json()["meta_info"]["finish_reason"] == "abort"

    play(scene)


def test_engine_error_is_500_and_an_event_without_done(play) -> None:
    async def scene(stage) -> None:
        for stream in (False, True):
            body = {"text": "x", "rid": "r", "stream": stream}
            answer = asyncio.create_task(stage.http.post("/generate", json=body))
            await stage.scheduler.receive()
            await stage.scheduler.reply(_output("r", b"a", done=1))
            error = "stage 1: division by zero\nTraceback (most recent call last):\n  secret"
            failed = TokenOutput(rid="r", finish_reason=FinishReason.ERROR, error=error)
            await stage.scheduler.reply(failed)
            response = await answer
            error = (_events(response.text)[-1] if stream else response.json())["error"]
            assert response.status_code == (200 if stream else 500)
            told = "stage 1: division by zero; the server's log says why"
            assert (error["message"], error["type"]) == (told, "engine_error")

    play(scene)


def test_death_ends_streams_and_calls_with_an_error_and_turns_health(play) -> None:
    """A06, C06, G28: after a death nothing ends normally and nothing is silent."""

    async def scene(stage) -> None:
        assert (await stage.http.get("/health")).status_code == 200
        stream = asyncio.create_task(stage.http.post("/generate", json={"text": "x", "rid": "r", "stream": True}))
        await stage.scheduler.receive()
        await stage.scheduler.reply(_output("r", b"a", done=1))
        call = asyncio.create_task(stage.http.post("/flush_cache"))
        await stage.scheduler.receive()
        stage.client.break_off(ApiError.unavailable("the stage-2 process died: killed"))
        events = _events((await stream).text)
        assert "stage-2 process died: killed" in events[-1]["error"]["message"]
        assert (await call).status_code == 503
        for response in (await stage.http.get("/health"), await stage.http.post("/generate", json={"text": "x"})):
            assert response.status_code == 503
            assert "stage-2" in response.text
        assert (await stage.http.get("/model_info")).status_code == 200

    play(scene)


def test_health_waits_for_all_processes(play) -> None:
    """Operators see and do what the routes promise (C06)."""

    async def scene(stage) -> None:
        stage.state.serving = False
        assert (await stage.http.get("/health")).status_code == 503

    play(scene)


@pytest.mark.parametrize(
    ("body", "param", "parts"),
    [
        ({"text": "x", "sampling_params": {"logit_bias": {"264": 1}}}, "sampling_params.logit_bias", ["0 to 263"]),
        ({"text": ""}, "text", ["the prompt is empty"]),
        ({"input_ids": []}, "input_ids", ["the prompt is empty"]),
        ({"input_ids": [264]}, "input_ids", ["from 0 to 263", "264"]),
        ({"input_ids": [-1]}, "input_ids", ["-1"]),
        ({"text": "x", "sampling_params": {"stop_token_ids": [999]}}, "sampling_params.stop_token_ids", ["999"]),
        ({"text": "x" * 64}, "text", ["64 tokens", "context_length is 64"]),
        ({"text": "x" * 40, "sampling_params": {"max_new_tokens": 20}}, "text", ["4 pages of 16", "has 2"]),
    ],
)
def test_what_never_fits_does_not_reach_the_scheduler(play, body: Any, param: str, parts: list[str]) -> None:
    """A request that can never fit is refused at admission, with its numbers (B09)."""

    async def scene(stage) -> None:
        response = await stage.http.post("/generate", json=body)
        error = response.json()["error"]
        too_long = param == "text" and body["text"]
        code = "context_length_exceeded" if too_long else 400
        assert (response.status_code, error["param"], error["code"]) == (400, param, code)
        assert all(part in error["message"] for part in parts), error["message"]
        assert stage.client.sessions.open_requests == 0

    play(scene, context_length=64, max_total_tokens=32)


def test_body_over_the_limit_is_413_declared_or_not(play) -> None:
    """A full or draining engine refuses at once, and keeps nothing (C07)."""

    async def chunks():
        for _ in range(3):
            yield b"x" * 50

    async def scene(stage) -> None:
        for content in (b"x" * 101, chunks()):
            response = await stage.http.post("/generate", content=content)
            assert response.status_code == 413
            assert "at most 100 bytes" in response.json()["error"]["message"]

    play(scene, max_body_bytes=100)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/flush_cache", None, FlushCache(call_id="call-0")),
        ("/flush_cache?timeout=2.5", None, FlushCache(call_id="call-0", timeout_s=2.5)),
        (
            "/update_weights_from_disk",
            {"model_path": "/there", "timeout": 2},
            UpdateWeights(call_id="call-0", model_path="/there", timeout_s=2.0),
        ),
        ("/abort_request", {"rid": "a"}, Abort(rid="a", call_id="call-0")),
        ("/abort_request", {"abort_all": True}, AbortAll(call_id="call-0")),
        ("/pause_generation", {"mode": "in_place"}, PauseGeneration(call_id="call-0", mode=PauseMode.IN_PLACE)),
        ("/continue_generation", None, ContinueGeneration(call_id="call-0")),
    ],
)
@pytest.mark.parametrize("ok", [True, False])
def test_administrative_call(play, path: str, body: Any, message: msgspec.Struct, ok: bool) -> None:
    async def scene(stage) -> None:
        answer = asyncio.create_task(stage.http.post(path, json=body))
        assert await stage.scheduler.receive() == message
        await stage.scheduler.reply(CallAnswer(call_id="call-0", ok=ok, message="in_flight=2"))
        response = await answer
        if ok:
            assert (response.status_code, response.text) == (200, "in_flight=2")
            assert response.headers["content-type"].startswith("text/plain")
            return
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["type"]) == (400, 400, "invalid_request_error")
        assert (error["message"], error["param"]) == ("in_flight=2", None)

    play(scene)


@pytest.mark.parametrize(
    ("path", "body", "fault", "param"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "y", "lora_path": "/y"}, "path", "lora_path"),
        ("/v1/load_lora_adapter", {"lora_name": "y", "lora_path": "/y"}, "name", "lora_name"),
        ("/v1/unload_lora_adapter", {"lora_name": "y"}, "name", "lora_name"),
        ("/update_weights_from_disk", {"model_path": "/y"}, "model_path", "model_path"),
    ],
)
def test_a_refused_call_names_the_field(play, path: str, body: Any, fault: str, param: str) -> None:
    """C02: as the client spells it."""

    async def scene(stage) -> None:
        answer = asyncio.create_task(stage.http.post(path, json=body))
        await stage.scheduler.receive()
        await stage.scheduler.reply(CallAnswer(call_id="call-0", ok=False, message="not a folder here", fault=fault))
        response = await answer
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)

    play(scene)


CALLS = [parse_placed(f"1 {text}", all_actions()).action for kind in all_actions() for text in kind.examples]


@pytest.mark.parametrize("call", [call for call in CALLS if isinstance(call, EngineCall)], ids=str)
def test_a_scripts_call_arrives_as_its_message(play, call: EngineCall) -> None:
    """D09: what the sim tier makes of a verb is what the route makes of its HTTP call."""

    async def scene(stage) -> None:
        answer = asyncio.create_task(stage.http.post(call.path, json=call.body))
        message = await stage.scheduler.receive()
        assert call.is_sent_as(message)
        if not isinstance(call, BeginProfile):  # The front end gives the folder its name.
            assert message == call.message(message.call_id)
        await stage.scheduler.reply(CallAnswer(call_id=message.call_id, ok=True, message="done"))
        assert (await answer).status_code == 200

    play(scene)


@pytest.mark.parametrize("query", ["timeout=soon", "timeout=-1", "timeout=inf", "timeout=nan", "timeot=1"])
def test_flush_with_a_bad_timeout(play, query: str) -> None:
    async def scene(stage) -> None:
        response = await stage.http.post(f"/flush_cache?{query}")
        assert response.status_code == 400
        assert "timeout" in response.json()["error"]["message"]

    play(scene)


def test_server_info_with_and_without_a_running_loop(play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators see and do what the routes promise (C06); loopback by default, and no key is shown (C08)."""
    monkeypatch.setattr("engine.frontend.http.routes.information.STATS_TIMEOUT_S", 0.01)

    async def scene(stage) -> None:
        frozen = (await stage.http.get("/server_info")).json()
        assert frozen["stats"] is None
        assert frozen["settings"]["pp_size"] == 1
        assert "secret-option" not in str(frozen)
        assert isinstance(await stage.scheduler.receive(), GetStats)
        unasked = (await stage.http.get("/server_info?timeout=0")).json()
        assert (unasked["stats"], unasked["open_requests"], unasked["open_calls"]) == (None, 0, 0)
        refused = await stage.http.get("/server_info?timeout=61")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "timeout")
        monkeypatch.setattr("engine.frontend.http.routes.information.STATS_TIMEOUT_S", 5.0)
        call = asyncio.create_task(stage.http.post("/continue_generation"))
        # The next message: what asked for no counters sent none.
        answered = await stage.scheduler.receive()
        assert isinstance(answered, ContinueGeneration)
        assert (await stage.http.get("/server_info?timeout=0")).json()["open_calls"] == 1
        await stage.scheduler.reply(CallAnswer(call_id=answered.call_id, ok=True, message="done"))
        assert (await call).status_code == 200
        assert (await stage.http.get("/server_info?timeout=0")).json()["open_calls"] == 0
        answer = asyncio.create_task(stage.http.get("/server_info"))
        asked = await stage.scheduler.receive()
        numbers = {name: 3 for name in EngineStats.__struct_fields__ if name != "paused"}
        await stage.scheduler.reply(StatsAnswer(call_id=asked.call_id, stats=EngineStats(paused=None, **numbers)))
        assert (await answer).json()["stats"]["waiting"] == 3

    play(scene, gate_options="secret-option")


def test_load_is_of_this_moment(play, monkeypatch: pytest.MonkeyPatch) -> None:
    """C06: SGLang's fields, from the scheduler's own counters; without a scheduler there is no load to tell."""
    monkeypatch.setattr("engine.frontend.http.routes.information.STATS_TIMEOUT_S", 0.01)

    async def scene(stage) -> None:
        silent = await stage.http.get("/get_load")
        assert (silent.status_code, "did not answer" in silent.text) == (503, True)
        assert isinstance(await stage.scheduler.receive(), GetStats)
        monkeypatch.setattr("engine.frontend.http.routes.information.STATS_TIMEOUT_S", 5.0)
        answer = asyncio.create_task(stage.http.get("/get_load"))
        asked = await stage.scheduler.receive()
        numbers = dict.fromkeys(EngineStats.__struct_fields__, 0) | {
            "paused": None, "step": 9, "alive": 7, "waiting": 3, "running": 2, "pages_total": 50, "pages_free": 20,
            "pages_cached": 10, "pages_held": 20, "page_size": 16, "pending_prefill_tokens": 100, "weights_version": 2,
        }  # fmt: skip
        await stage.scheduler.reply(StatsAnswer(call_id=asked.call_id, stats=EngineStats(**numbers)))
        (load,) = (await answer).json()
        version = load.pop("version")
        assert version == (await stage.http.get("/version")).json()["version"]
        assert load == {
            "dp_rank": 0, "num_reqs": 7, "num_waiting_reqs": 3, "num_running_reqs": 4, "num_tokens": 420,
            "num_pending_tokens": 100, "free_pages": 20, "cached_pages": 10, "total_pages": 50, "page_size": 16,
            "step": 9, "weights_version": 2, "role": "both",
            "sleep_level": 0, "kv_origin": "",
        }  # fmt: skip

    play(scene)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("timeout_s", 0, "> 0"),
        ("timeout_s", 86_401, "<= 86400"),
        ("waiting_timeout_s", -1, "> 0"),
        ("waiting_timeout_s", "soon", "number"),
    ],
)
def test_time_limit_out_of_range(play, path: str, name: str, value: object, part: str) -> None:
    prompts = {"/generate": {"text": "x"}, "/v1/completions": {"prompt": "x"}}
    chat = {"messages": [{"role": "user", "content": "x"}]}

    async def scene(stage) -> None:
        response = await stage.http.post(path, json=prompts.get(path, chat) | {name: value})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == name
        assert part in response.json()["error"]["message"]

    play(scene)


def test_routes_describe_themselves(play) -> None:
    """C01: bodies and answers of every protocol are typed, every reference leads somewhere, and the page is served."""

    async def scene(stage) -> None:
        description = (await stage.http.get("/openapi.json")).json()
        schemas = description["components"]["schemas"]
        named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(description)))
        assert named <= schemas.keys()
        generating = {
            "/generate": "GenerateBody",
            "/v1/completions": "CompletionBody",
            "/v1/chat/completions": "ChatBody",
        }
        for path, body in generating.items():
            operation = description["paths"][path]["post"]
            assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(f"/{body}")
            assert operation["responses"]["200"]["content"].keys() == {"application/json", "text/event-stream"}
        assert schemas["ChatBody"]["required"] == ["messages"]
        assert "prompt" in schemas["CompletionBody"]["required"]
        page = (await stage.http.get("/docs")).text
        named = re.findall(r"""(?:src|href)=["']([^"']+)""", page)
        assert [name for name in named if not name.startswith("/")] == []
        assert sum([len((await stage.http.get(name)).raise_for_status().content) for name in named]) > 1_000_000

    play(scene)


def test_every_route_is_on_the_page_of_serving(play) -> None:
    page = (Path(__file__).parents[3] / "docs/serving.md").read_text(encoding="utf-8")

    async def scene(stage) -> None:
        paths = (await stage.http.get("/openapi.json")).json()["paths"]
        assert [path for path in paths if f"{path}`" not in page] == []

    play(scene)


def test_unknown_routes_and_methods_have_the_same_error_body(play) -> None:
    async def scene(stage) -> None:
        assert (await stage.http.get("/nowhere")).json()["error"]["code"] == 404
        assert (await stage.http.get("/generate")).json()["error"]["code"] == 405

    play(scene)


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/chat/completions", "did you mean '/v1/chat/completions'?"),
        ("/v1/v1/completions", "did you mean '/v1/completions'?"),
        ("/v1/generate", "did you mean '/generate'?"),
        ("/api/chat", "did you mean '/v1/chat/completions'?"),
        ("/v1/assistants", "/docs lists the routes"),
    ],
)
def test_an_unknown_route_names_the_one_that_was_meant(play, path: str, remedy: str) -> None:
    async def scene(stage) -> None:
        answer = await stage.http.post(path, json={})
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == f"POST {path}: Not Found; {remedy}"

    play(scene)


def test_frame_that_is_no_reply_is_dropped(play) -> None:
    """A failure stays alone and never ends the process (A05)."""

    async def scene(stage) -> None:
        answer = asyncio.create_task(stage.http.post("/flush_cache"))
        await stage.scheduler.receive()
        await stage.scheduler.send_garbage(b"\xc1")
        await stage.scheduler.reply(CallAnswer(call_id="call-0", ok=True, message="flushed"))
        assert (await answer).text == "flushed"

    play(scene)
