"""The front end's decisions without a server: owners of rids, ends by messages, and clients' answers."""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from connections import Connection

import engine.frontend
from engine.core.messages import (
    Abort,
    AbortAll,
    ClientMessage,
    FinishReason,
    Generate,
    PauseGeneration,
    PauseMode,
    PromptLogprob,
    Refusal,
    RefusalKind,
    SamplingParams,
    TokenOutput,
    ended_by,
)
from engine.frontend.schema.errors import ApiError
from engine.frontend.sessions.requests import Order, rids_of
from engine.frontend.sessions.sessions import VALUES_A_TURN, NativeShape, Session, Sessions, _split

FRONTEND = str(Path(engine.frontend.__file__).parent)
# The connection (``connection.py``) hands over to the application; a route is reached from there.
MOST_FILES = 12


class Front:
    """A front end whose scheduler is the test."""

    def __init__(self, decoder: Any) -> None:
        self.sent: list[ClientMessage] = []
        self.sessions = Sessions(self.sent.append)
        self._decoder = decoder

    def open(self, rid: str = "r", *, stop: tuple[str, ...] = ()) -> Session:
        message = Generate(rid=rid, prompt_ids=(1,), sampling=SamplingParams(stop=stop))
        session = Session(self.sessions, Order(rid=rid, messages=(message,), stream=True), NativeShape(), self._decoder)
        assert not session.send_some()
        return session

    def open_choices(self, rid: str, n: int) -> Session:
        """Return the number of choices that one turn sends."""
        messages = tuple(Generate(rid=one, prompt_ids=(1,), sampling=SamplingParams()) for one in rids_of(rid, n))
        order = Order(rid=rid, messages=messages, stream=True, n=n)
        session = Session(self.sessions, order, NativeShape(n), self._decoder)
        session.send_some()
        return session


@pytest.fixture
def front(byte_tokenizer) -> Front:
    return Front(byte_tokenizer)


def output(text: str = "", *, rid: str = "r", end: FinishReason | None = None) -> TokenOutput:
    return TokenOutput(rid=rid, token_ids=tuple(text.encode()), finish_reason=end)


def test_a_rid_is_free_once_its_request_is_being_ended_and_each_life_gets_its_own_replies(front: Front) -> None:
    """B05: the scheduler sees the abort before the new request, and answers both in that order."""
    first = front.open()
    with pytest.raises(ApiError, match="which is live; wait for its end"):
        front.open()
    first.abort()
    second = front.open()
    front.sessions.take(output("x", end=FinishReason.ABORT))
    front.sessions.take(output("y"))
    assert b'"text":"x"' in first.part()
    assert first.is_told
    assert b'"text":"y"' in second.part()
    first.abort()
    assert [type(message) for message in front.sent] == [Generate, Abort, Generate]


def test_a_refusal_passes_the_requests_before_its_own(front: Front) -> None:
    first = front.open()
    front.sessions.send(AbortAll(call_id="c"))
    second = front.open()
    front.sessions.take(Refusal(rid="r", kind=RefusalKind.BUSY, message="full", behind=1))
    with pytest.raises(ApiError, match="full"):
        second.part()
    front.sessions.take(output(end=FinishReason.ABORT))
    assert b"[DONE]" in first.part()
    assert front.sessions.open_requests == 0


def test_a_refusal_ends_the_request_that_was_refused(front: Front) -> None:
    """One that was called off before its refusal came, and was then sent again and admitted."""
    first = front.open()
    front.sessions.send(Abort(rid="r", call_id="c"))
    second = front.open()
    front.sessions.take(Refusal(rid="r", kind=RefusalKind.BUSY, message="full"))
    with pytest.raises(ApiError, match="full"):
        first.part()
    front.sessions.take(output("y", end=FinishReason.LENGTH))
    assert b'"text":"y"' in second.part()
    assert front.sessions.open_requests == 0


def test_requests_of_one_rid_may_all_be_refused(front: Front) -> None:
    """One that was called off before the scheduler refused it: if it stayed, it would get a later one's replies."""
    first = front.open()
    first.abort()
    second = front.open()
    for _ in range(2):
        front.sessions.take(Refusal(rid="r", kind=RefusalKind.BUSY, message="full"))
    with pytest.raises(ApiError, match="full"):
        second.part()
    assert front.sessions.open_requests == 0
    third = front.open()
    front.sessions.take(output("z"))
    assert b'"text":"z"' in third.part()


def test_what_came_before_a_failure_is_shown_before_it(front: Front) -> None:
    """C05: also where both arrive before the client reads."""
    session = front.open()
    front.sessions.take(output("ab"))
    front.sessions.take(TokenOutput(rid="r", token_ids=(), finish_reason=FinishReason.ERROR, error="stage 1 failed"))
    assert b'"text":"ab"' in session.part()
    assert not session.is_told
    assert b"stage 1 failed" in session.part()
    assert session.is_told


def test_a_choice_without_time_is_shown_with_the_first_piece_of_another(front: Front) -> None:
    session = front.open_choices("r", 2)
    front.sessions.take(output(rid="r-0", end=FinishReason.TIMEOUT))
    assert session.part() == b""
    front.sessions.take(output("x", rid="r-1", end=FinishReason.LENGTH))
    told = session.part()
    assert told.count(b'"finish_reason":"timeout"') == 1
    assert session.is_told


def test_an_answer_that_is_left_while_it_is_sent_is_forgotten(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of its choices was sent, and ends: an answer that stays is kept forever."""
    monkeypatch.setattr("engine.frontend.sessions.sessions.TOKENS_A_TURN", 1)
    session = front.open_choices("r", 3)
    session.abort()
    assert front.sessions._answers
    front.sessions.take(output(rid="r-0", end=FinishReason.ABORT))
    assert not front.sessions._answers


def test_many_prompt_logprobs_come_in_parts_and_whole() -> None:
    scores = tuple(PromptLogprob(-float(number), 1) for number in range(2500))
    whole = TokenOutput(rid="r", token_ids=(5,), finish_reason=FinishReason.LENGTH, prompt_logprobs=scores)
    *first, last = _split(whole, VALUES_A_TURN)
    assert tuple(one for part in (*first, last) for one in part.prompt_logprobs) == scores
    assert [(part.token_ids, part.finish_reason) for part in first] == [((), None)] * len(first) != []
    assert (last.token_ids, last.finish_reason) == ((5,), FinishReason.LENGTH)


def test_every_life_of_a_rid_ends_with_the_engine(front: Front) -> None:
    """B05: also the one whose terminal reply is still on its way."""
    first = front.open()
    front.sessions.send(AbortAll(call_id="c"))
    lives = first, front.open()
    front.sessions.break_off(ApiError.unavailable("stage 1 died"))
    for life in lives:
        with pytest.raises(ApiError, match="stage 1 died"):
            life.part()
    assert front.sessions.open_requests == 0


def test_a_choice_that_cannot_be_sent_ends_those_before_it(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.frontend.sessions.sessions.TOKENS_A_TURN", 1)
    session = front.open_choices("r", 3)
    front.sessions.close(ApiError.unavailable("the server drains"))
    with pytest.raises(ApiError, match="the server drains"):
        session.send_some()
    assert front.sent[1:] == [Abort(rid="r-0")]


def test_a_stop_string_that_comes_after_its_client_left_sends_nothing_more(front: Front) -> None:
    """The second abort reached the scheduler in whichever step it came, and could end the rid's next request."""
    session = front.open(stop=("b",))
    session.abort()
    front.sessions.take(output("ab"))
    session.part()
    assert front.sent[1:] == [Abort(rid="r")]


def test_an_error_is_a_status_before_the_first_piece_and_the_last_event_after_it(front: Front) -> None:
    early, late = front.open("early"), front.open("late")
    front.sessions.take(output("a", rid="late"))
    assert b'"text":"a"' in late.part()
    front.sessions.break_off(ApiError.unavailable("stage 1 died"))
    with pytest.raises(ApiError, match="stage 1 died"):
        early.part()
    assert b'"error"' in (last := late.part())
    assert b"[DONE]" not in last
    assert late.is_told


@pytest.mark.parametrize(
    ("message", "ended"),
    [
        (Abort(rid="a"), ("a",)),
        (Abort(rid="c"), ()),
        (AbortAll(call_id="c"), ("a", "b")),
        (PauseGeneration(call_id="c", mode=PauseMode.ABORT), ("a", "b")),
        (PauseGeneration(call_id="c", mode=PauseMode.RETRACT), ()),
        (Generate(rid="a", prompt_ids=(1,), sampling=SamplingParams()), ()),
    ],
)
def test_what_a_message_ends_is_said_in_one_place(message: ClientMessage, ended: tuple[str, ...]) -> None:
    assert ended_by(message, ["a", "b"]) == ended


def test_an_abort_by_the_rid_of_an_answer_ends_all_its_choices(front: Front) -> None:
    """B05: the rid that a client was given stands for each of them, until the last has ended; then it is free."""
    session = front.open_choices("r", 3)
    for rid in ("r", "r-1"):
        with pytest.raises(ApiError, match="which is live; wait for its end"):
            front.open(rid)
    front.sessions.take(output("x", rid="r-0", end=FinishReason.LENGTH))
    front.sent.clear()
    front.sessions.send(Abort(rid="r", call_id="c"))
    assert front.sent == [Abort(rid="r-1"), Abort(rid="r-2", call_id="c")]
    again = front.open("r")
    front.sessions.send(Abort(rid="r", call_id="d"))
    assert front.sent[-1] == Abort(rid="r", call_id="d")
    for rid in ("r-1", "r-2"):
        front.sessions.take(output("x", rid=rid, end=FinishReason.ABORT))
    assert session.part().endswith(b"[DONE]\n\n")
    assert not again.has_more
    assert front.sessions._answers == {}


def test_choices_that_are_not_sent_yet_are_aborted_with_the_others(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.frontend.sessions.sessions.TOKENS_A_TURN", 1)
    session = front.open_choices("r", 2)
    front.sessions.send(Abort(rid="r", call_id="c"))
    assert not session.send_some()
    assert [m.rid for m in front.sent if isinstance(m, Abort)] == ["r-0", "r-1"]


def test_a_streamed_request_goes_through_few_files(play) -> None:
    """A newcomer can follow it: from the application to the last byte, the connection not counted."""

    async def scene(stage) -> None:
        files: set[str] = set()

        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(FRONTEND):
                files.add(frame.f_code.co_filename.removeprefix(FRONTEND + "/"))

        body = {"text": "x", "rid": "r", "stream": True, "sampling_params": {"stop": ["c"]}}
        connection = Connection(stage.app, body, "/generate")
        gc.collect()  # What other tests left is not counted.
        gc.disable()
        sys.setprofile(note)
        try:
            request = asyncio.create_task(connection.run())
            await stage.scheduler.receive()
            await stage.scheduler.reply(output("a"))
            await stage.scheduler.reply(output("b", end=FinishReason.LENGTH))
            await request
        finally:
            sys.setprofile(None)
            gc.enable()
        assert len(files) <= MOST_FILES, ", ".join(sorted(files))

    play(scene)


def test_the_first_reason_of_the_end_is_told_to_everybody(front: Front) -> None:
    """Every process that dies after the first dies because of it."""
    before = front.open("before")
    first, second = ApiError.unavailable("stage 1 died"), ApiError.unavailable("the scheduler died")
    front.sessions.break_off(first)
    front.sessions.break_off(second)
    for one in (front.sessions.broken, front.sessions.closed):
        assert one is first
    with pytest.raises(ApiError, match="stage 1 died"):
        before.part()
    with pytest.raises(ApiError, match="stage 1 died"):
        front.open("after")


@pytest.mark.parametrize("closes_first", [True, False])
def test_a_death_is_told_although_the_server_closes(front: Front, closes_first: bool) -> None:
    died, drains = ApiError.unavailable("stage 1 died"), ApiError.unavailable("the server drains")
    ends = [lambda: front.sessions.close(drains), lambda: front.sessions.break_off(died)]
    for end in ends if closes_first else reversed(ends):
        end()
    assert front.sessions.closed is died


def test_nothing_is_kept_of_a_whole_reply_whose_client_has_left(front: Front) -> None:
    """Its outputs may have a million logprobs."""
    session = front.open()
    front.sessions.take(output("a"))
    assert not session.collect()
    assert [len(pieces) for pieces in session._kept] == [1]
    session.leave()
    front.sessions.take(output("b", end=FinishReason.ABORT))
    assert session.collect()
    assert [len(pieces) for pieces in session._kept] == [1]
    assert list(session.body()) == []
