"""Questions to the tokenizer: a long body is worked on elsewhere, as an order's is, and answered as a short one."""

from __future__ import annotations

import json

import pytest

from engine.frontend.http.forked_work import LONG_BODY_BYTES, WorkLostError
from engine.frontend.http.request_log import REQUEST_ID_HEADER

TEXT = "x" * 6000
SPACES = b" " * LONG_BODY_BYTES
ONE_ID = {REQUEST_ID_HEADER: "one"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": TEXT, "return_token_strs": True}),
        ("/tokenize", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/detokenize", {"tokens": list(TEXT.encode())}),
        ("/tokenize", {"prompt": TEXT, "model": "other"}),
        ("/tokenize", {}),
        ("/detokenize", {"tokens": [9999]}),
    ],
)
def test_a_long_body_is_worked_on_elsewhere_and_answered_as_a_short_one(play, path: str, body: dict) -> None:
    """16 MB of it kept the interpreter, and with it every stream, for as long as they took to parse."""

    async def scene(stage) -> None:
        short = json.dumps(body).encode()
        assert len(short) <= LONG_BODY_BYTES
        here = await stage.http.post(path, content=short, headers=ONE_ID)
        assert stage.long_bodies == []
        there = await stage.http.post(path, content=short + SPACES, headers=ONE_ID)
        assert [question.partition(b"\n")[0].decode() for question in stage.long_bodies] == [path.removeprefix("/")]
        assert (there.status_code, there.json()) == (here.status_code, here.json())
        assert there.headers["content-type"] == here.headers["content-type"] == "application/json"

    play(scene)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_a_lost_worker_of_a_question_is_503(play, path: str) -> None:
    async def scene(stage) -> None:
        async def lost(_: bytes) -> bytes:
            raise WorkLostError("it ended")

        stage.work_elsewhere = lost
        answer = await stage.http.post(path, content=b"{}" + SPACES)
        assert answer.status_code == 503
        assert "it ended; try again" in answer.json()["error"]["message"]

    play(scene)


def test_a_real_server_answers_long_questions(server) -> None:
    """The process that it forks for long bodies knows these too."""
    ids = server.http.post("/tokenize", content=json.dumps({"prompt": TEXT}).encode() + SPACES).json()["tokens"]
    assert bytes(ids) == TEXT.encode()
    text = server.http.post("/detokenize", content=json.dumps({"tokens": ids}).encode() + SPACES)
    assert text.json() == {"prompt": TEXT}
