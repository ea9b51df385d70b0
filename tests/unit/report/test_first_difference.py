"""The first difference of two runs, and the words of events and replies."""

from __future__ import annotations

import msgspec
import pytest
from every_case import every_case
from race_records import LIMITS, flush_race, generate, race_traces
from scripted_lockstep.step_words import EngineWords, event_text, log_of
from timeline_pages import Document, cut

from engine.core.messages import (
    Abort,
    AbortAll,
    CallAnswer,
    Completion,
    ContinueGeneration,
    Event,
    FinishReason,
    FlushCache,
    Generate,
    GetStats,
    PauseGeneration,
    PipelineFailed,
    Refusal,
    RefusalKind,
    Reply,
    TokenOutput,
)
from scripted.core.phrases import short_rid
from scripted.report.difference import first_difference
from scripted.report.timeline import render_timeline
from scripted.report.trace import Trace


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> tuple[Trace, Trace]:
    return race_traces(monkeypatch)


# -- the first difference --


def test_equal_runs_have_no_difference(race: tuple[Trace, Trace]) -> None:
    assert first_difference(race[0].log, race[0].log) is None
    renamed = [
        msgspec.structs.replace(
            record,
            now=record.now + 9,
            events=tuple(FlushCache(call_id="other") if type(e) is FlushCache else e for e in record.events),
            replies=tuple(
                msgspec.structs.replace(r, call_id="other") if type(r) is CallAnswer else r for r in record.replies
            ),
        )
        for record in flush_race()
    ]
    log = log_of(renamed, LIMITS)
    assert first_difference(race[0].log, log) is None, "time and call ids are not what a run did"
    found = first_difference(race[0].log, log, exactly=True)
    assert found is not None
    assert (found.index, found.field) == (0, "now")


def test_what_a_text_leaves_out_differs_too(race: tuple[Trace, Trace]) -> None:
    records = list(flush_race())
    first = records[0].events[0]
    assert isinstance(first, Generate)
    other = msgspec.structs.replace(first, prompt_ids=(*first.prompt_ids[:-1], 201))
    found = first_difference(
        race[0].log, log_of([msgspec.structs.replace(records[0], events=(other,)), *records[1:]], LIMITS)
    )
    assert found is not None
    assert (found.index, found.field) == (0, "arrived")


def test_the_field_that_differs_is_named(race: tuple[Trace, Trace]) -> None:
    found = first_difference(race[0].log, race[1].log)
    assert found is not None
    assert (found.index, found.field) == (2, "answered")
    records = list(flush_race())
    records[5] = msgspec.structs.replace(records[5], pages_free=3)
    found = first_difference(race[0].log, log_of(records, LIMITS))
    assert found is not None
    assert (found.index, found.field, found.right[:7]) == (5, "memory", "3 free,")


def test_a_run_that_ends_early_differs_there(race: tuple[Trace, Trace]) -> None:
    short = cut(race[0], race[0].log.steps[:9])
    found = first_difference(race[0].log, short.log)
    assert found is not None
    assert (found.index, found.field, found.left, found.right) == (9, "length", "goes on", "ends")
    assert Document(render_timeline([race[0], short])).one("apart").place["x"] == 9


# -- words --


@every_case(
    ("event", "words"),
    [
        (generate("a", tokens=1), "generate a (1 token)"),
        (Abort(rid="a"), "abort a"),
        (Abort(rid="a", finish_reason=FinishReason.STOP), "end a (stop)"),
        (AbortAll(), "abort all"),
        (FlushCache(call_id="f"), "FLUSH"),
        (FlushCache(call_id="f", timeout_s=2.5), "FLUSH, waits up to 2.5 s"),
        (PauseGeneration(call_id="p"), "pause (retract)"),
        (ContinueGeneration(call_id="c"), "continue"),
        (GetStats(call_id="s"), "get stats"),
        (Completion(microbatch_id=3), "result #3 (chunk)"),
        (Completion(microbatch_id=3, token_ids=(5, 6)), "result #3 -> 5 6"),
        (Completion(microbatch_id=3, token_ids=tuple(range(9))), "result #3 -> 0 1 2 3 +5 more"),
        (Completion(microbatch_id=3, error="no\nmemory"), "result #3 FAILED: no\\nmemory"),
        (PipelineFailed(process="stage 2", cause="signal 9"), "stage 2 DIED: signal 9"),
    ],
)
def test_every_event_has_words(event: Event, words: str) -> None:
    assert event_text(event) == words


@every_case(
    ("reply", "words"),
    [
        (TokenOutput(rid="a", token_ids=(5,)), "a -> token 5"),
        (TokenOutput(rid="a", token_ids=(5,), finish_reason=FinishReason.LENGTH), "a -> token 5, ends: length"),
        (TokenOutput(rid="a", finish_reason=FinishReason.ERROR, error="x"), "a -> ends: error, x"),
        (Refusal(rid="a", kind=RefusalKind.BUSY, message="9 wait"), "a -> refused (busy): 9 wait"),
        (CallAnswer(call_id="f", ok=True, message="done"), "flush -> 200: done"),
        (CallAnswer(call_id="f", ok=False, message="busy: waiting=0 in_flight=2"), "flush -> refused 400: in_flight=2"),
        (CallAnswer(call_id="f", ok=False, message="another waits"), "flush -> refused 400: another waits"),
        (CallAnswer(call_id="unknown", ok=True, message="m"), "call -> 200: m"),
    ],
)
def test_every_reply_has_words(reply: Reply, words: str) -> None:
    assert EngineWords(calls={"f": "flush"}).reply(reply).text == words


def test_long_rids_keep_head_and_tail() -> None:
    assert short_rid("a" * 14) == "a" * 14
    assert short_rid("0123456789abcdef") == "01234..9abcdef"
    assert short_rid("a\x1b\u4f60") == "a\\x1b\\u4f60"
