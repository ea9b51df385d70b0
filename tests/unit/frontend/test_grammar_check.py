"""Checks of grammars in processes of their own: the error for a lost check, and that checks end with their client."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from real_servers import RealServer
from starlette.requests import ClientDisconnect, Request

from engine.frontend.http.body_reader import unless_gone
from engine.frontend.http.forked_work import WorkLostError, WorkTooLargeError

PATIENCE_S = 30.0
LEAVES_AFTER = httpx.Timeout(PATIENCE_S, read=3)
# Takes seconds to compile.
HARD = "a?" * 15_000


def asked(regex: str) -> dict[str, Any]:
    return {"text": "say", "sampling_params": {"regex": regex, "max_new_tokens": 4}}


@pytest.mark.parametrize(
    ("lost", "status", "said"),
    [
        (WorkTooLargeError("x"), 400, "regex must be a regex that can be compiled within 20 s and 768 MB"),
        (WorkLostError("no process is left"), 503, "checked in its own process, but no process is left; try again"),
    ],
)
def test_a_check_that_was_lost_is_told(play, lost: WorkLostError, status: int, said: str) -> None:
    async def scene(stage) -> None:
        async def lose(*_: bytes, is_check: bool) -> bytes:
            assert is_check
            raise lost

        stage.ask_elsewhere = lose
        answer = await stage.http.post("/generate", json=asked("a"))
        assert answer.status_code == status
        assert said in answer.json()["error"]["message"]

    play(scene)


def test_work_ends_with_its_client() -> None:
    """A05: six grammars of 100 KB grew to 1.6 GB after their clients had left."""
    ended = []

    async def work() -> str:
        try:
            await asyncio.sleep(0 if answers else PATIENCE_S)
            return "answer"
        finally:
            ended.append(answers)

    async def receive() -> dict[str, str]:
        await asyncio.sleep(PATIENCE_S if answers else 0)
        return {"type": "http.disconnect"}

    async def scene() -> str:
        return await unless_gone(Request({"type": "http"}, receive), work())

    answers = True
    assert asyncio.run(scene()) == "answer"
    answers = False
    with pytest.raises(ClientDisconnect):
        asyncio.run(scene())
    assert ended == [True, False]


def test_a_small_grammar_overtakes_large_ones_which_end_with_their_clients(server: RealServer) -> None:
    """A05: eight bodies of 32 KB kept another client's small regex unanswered for 60 s."""
    (reader,) = [
        one for one in psutil.Process(server.serving.pids["frontend"]).children() if one.name() == "engine-reader"
    ]

    def ask_and_leave(number: int) -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{server.url}/generate", json=asked(f"{HARD}{number}"), timeout=httpx.Timeout(PATIENCE_S, read=3)
            )

    with ThreadPoolExecutor(8) as pool:
        large = [pool.submit(ask_and_leave, number) for number in range(8)]
        while not reader.children():
            time.sleep(0.01)
        # Behind them it would wait for up to 20 s each; `test_small_checks_overtake_large_ones` has the order.
        small = httpx.post(f"{server.url}/generate", json=asked("b{2}"), timeout=PATIENCE_S)
        assert small.json()["text"] == "bb"
        for one in large:
            one.result(PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while left := reader.children():
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
