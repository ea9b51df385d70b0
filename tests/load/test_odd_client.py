"""The odd client in its short form, and its judge. The long one is ``python tests/load/odd_client.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from odd_client import SERVERS, run_odd
from odd_judge import OddAnswer, complaint_about
from odd_requests import OddRequest, odd_requests

from engine.server.launch.preload import PreloadedParent

REQUESTS = 100
SEED = 3
HEADERS = {"x-request-id": "q"}
EVENTS = HEADERS | {"content-type": "text/event-stream"}
ERROR = {
    "message": "n must be <= 3, got 4",
    "type": "invalid_request_error",
    "param": "n",
    "code": 400,
    "request_id": "q",
}
PIECE = {"text": "ab", "meta_info": {"finish_reason": None}}
END = {"text": "c", "meta_info": {"finish_reason": "stop"}}


@pytest.mark.nightly
def test_a_server_holds_against_an_odd_client(parent: PreloadedParent, tmp_path: Path) -> None:
    """A05, C01, C02, C07: every answer is one that may be, and nothing of the requests is left."""
    result = run_odd(parent, tmp_path, seed=SEED, count=REQUESTS, **SERVERS["all"])
    assert result.complaints == []
    assert result.statuses["200"] > REQUESTS // 8
    assert result.statuses["400"] > REQUESTS // 3


def test_the_requests_are_the_same_for_the_same_seed() -> None:
    assert [one.content for one in odd_requests(3, 40)] == [one.content for one in odd_requests(3, 40)]
    assert [one.content for one in odd_requests(3, 40)] != [one.content for one in odd_requests(4, 40)]


def asked(**fields: Any) -> OddRequest:
    return OddRequest("/generate", json.dumps(fields).encode(), fields=fields, pattern="[a-c]*")


def refused(status: int = 400, **error: Any) -> OddAnswer:
    return OddAnswer(status, HEADERS, json.dumps({"error": ERROR | error}).encode())


def streamed(*events: Any) -> OddAnswer:
    return OddAnswer(200, EVENTS, events=[one if isinstance(one, str) else json.dumps(one) for one in events])


def named(path: str, *events: dict[str, Any]) -> tuple[OddRequest, OddAnswer]:
    """A stream of named events, as it was asked for."""
    lines = [line for event in events for line in (f"event: {event['type']}", json.dumps(event))]
    return OddRequest(path, b"{}", fields={"stream": True}), OddAnswer(200, EVENTS, events=lines)


STARTED, ENDED, GROWN = (
    {"type": kind, "index": 0} for kind in ("content_block_start", "content_block_stop", "content_block_delta")
)
LAST = {"type": "message_stop"}
BROKEN = {"type": "error", "error": ERROR, "request_id": "q"}
USED = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
WHOLE = {"status": "completed", "incomplete_details": None, "usage": USED, "error": None}
COMPLETED = {"type": "response.completed", "sequence_number": 1, "response": WHOLE}
CREATED = {"type": "response.created", "sequence_number": 0}


def test_the_judge_is_content_with_what_is_right() -> None:
    assert complaint_about(*named("/v1/messages", STARTED, GROWN, ENDED, LAST)) is None
    assert complaint_about(*named("/v1/messages", STARTED, BROKEN)) is None
    assert complaint_about(*named("/v1/responses", CREATED, COMPLETED)) is None
    keyed = OddRequest("/v1/messages", b"", headers={"x-api-key": "wrong"})
    unknown = ERROR | {"code": 401, "type": "authentication_error"}
    assert complaint_about(keyed, OddAnswer(401, HEADERS, json.dumps(BROKEN | {"error": unknown}).encode())) is None
    assert complaint_about(asked(n=4), refused()) is None
    assert complaint_about(asked(stream=True), streamed(PIECE, END, "[DONE]")) is None
    assert complaint_about(asked(stream=True), streamed(PIECE, {"error": ERROR})) is None
    assert complaint_about(asked(), OddAnswer(200, HEADERS, json.dumps(END).encode())) is None
    assert complaint_about(asked(timeout_s=1), refused(504, code=504, type="time_limit", param=None)) is None


@pytest.mark.parametrize(
    ("request_", "answer", "complaint"),
    [
        (asked(), refused(500, code=500, type="engine_error"), "status must be"),
        (asked(), refused(504, code=504, type="time_limit"), "status must be"),
        (asked(), OddAnswer(400, HEADERS, b"no"), "one shape"),
        (asked(), refused(type="engine_error"), "the type one of"),
        (asked(), refused(message=""), "must be there"),
        (asked(), refused(message="Traceback (most recent call last)"), "must not show"),
        (asked(n=4), refused(param=None), "param must name it"),
        (asked(), OddAnswer(400, {}, b""), "X-Request-Id"),
        (asked(), OddAnswer(cut="ReadTimeout"), "cut off"),
        (asked(), OddAnswer(200, HEADERS, json.dumps(PIECE).encode()), "reason must be"),
        (asked(), OddAnswer(200, HEADERS, json.dumps(END | {"text": "x"}).encode()), "must match"),
        (asked(), streamed(END, "[DONE]"), "where one was asked for"),
        (asked(stream=True), streamed(PIECE, END), "must end with"),
        (asked(stream=True), streamed(PIECE, "[DONE]"), "each choice must end"),
        (asked(stream=True), streamed(END, PIECE, "[DONE]"), "after its end"),
        (asked(stream=True), streamed(END, "[DONE]", "[DONE]"), "after [DONE]"),
        (asked(stream=True), streamed(PIECE, {"error": ERROR | {"code": 500}}), "must not end with 500"),
        (asked(n=4), refused(param="sampling_params.n"), "a place of the body"),
        (asked(), refused(401, code=401, type="authentication_error"), "status must be"),
        (OddRequest("/v1/messages", b""), refused(), "shape of its protocol"),
        (*named("/v1/messages", STARTED, ENDED), "the last event of its protocol"),
        (*named("/v1/messages", LAST, LAST), "and only there"),
        (*named("/v1/messages", STARTED, LAST), "each block must end"),
        (*named("/v1/messages", STARTED, STARTED, LAST), "in order"),
        (*named("/v1/messages", BROKEN | {"error": ERROR | {"code": 500}}), "must not end with 500"),
        (*named("/v1/responses", COMPLETED), "must be counted"),
        (*named("/v1/responses", CREATED, COMPLETED | {"response": WHOLE | {"status": "?"}}), "the status must be"),
        (OddRequest("/v1/messages", b"", fields={"stream": True}), streamed(PIECE, END), "its type as its name"),
    ],
)
def test_the_judge_complains(request_: OddRequest, answer: OddAnswer, complaint: str) -> None:
    assert complaint in str(complaint_about(request_, answer))
