"""Steps of any scheduler in words: events, launches with their blocks, and replies to clients."""

from __future__ import annotations

from typing import Any

import pytest

from scripted.report.step_log import ShownStep
from scripted.sdk import (
    Abort,
    Add,
    Answer,
    Batch,
    BatchFailed,
    BatchResult,
    FlushCache,
    Limits,
    Pause,
    Refused,
    Resume,
    Share,
    Stepped,
    Tokens,
)
from scripted.sdk.messages import Record, Step
from scripted.sdk.step_words import log_of

LIMITS = Limits(block_size=4, blocks=40, batch_tokens=64, batch_requests=8, context_tokens=128, depth=2)
SHARES = (Share(rid="a", start=32, count=3, block_ids=(0, 1, 2)), Share(rid="b", start=0, count=1, block_ids=(9,)))


def record(*events: Any, batch: Batch | None = None, error: str | None = None, **stepped: Any) -> Record:
    return Record(Step(events, 0.0), None if error else Stepped(microbatch=batch, **stepped), {"free": 3}, error)


def shown(*records: Record) -> ShownStep:
    return log_of(records, LIMITS).steps[-1]


def said(*events: Any, **stepped: Any) -> list[str]:
    step = shown(record(*events, **stepped))
    return [one.text for one in (*step.arrived, *step.answered)]


def test_a_step_with_everything() -> None:
    step = shown(
        record(Add(rid="a", prompt_ids=tuple(range(40)), max_new_tokens=2), batch=Batch(id=3, shares=SHARES)),
        record(
            BatchResult(batch_id=3, token_ids=((112,), ())),
            Abort(rid="c"),
            batch=Batch(id=4, shares=SHARES[:1]),
            replies=(Tokens(rid="a", token_ids=(112,), finish_reason="length"),),
            preempted=("d",),
        ),
    )
    assert [one.text for one in step.arrived] == ["result #0 (112, -)", "abort c"]
    assert [one.text for one in step.answered] == ["preempted d", "a -> token 112, ends: length"]
    assert step.launched is not None
    assert step.launched.text == "#1 prefill a[32:35] in blocks 0 1 2"
    assert (step.in_flight, step.memory) == ((1,), {"free": 3})


def test_what_waits_and_what_runs() -> None:
    adds = [Add(rid=rid, prompt_ids=(1, 2), max_new_tokens=2) for rid in "ab"]
    first = record(*adds, batch=Batch(id=1, shares=(Share(rid="a", start=0, count=2, block_ids=(0,)),)))
    assert (shown(first).waiting, shown(first).running) == (("b",), ("a",))
    assert shown(first, record(preempted=("a",))).waiting == ("a", "b")


def chunk(start: int, count: int, **stepped: Any) -> Record:
    return record(batch=Batch(id=start, shares=(Share(rid="a", start=start, count=count, block_ids=(0,)),)), **stepped)


def test_a_prompt_that_is_launched_in_part_is_chunked_and_its_last_token_is_no_decode() -> None:
    """The chunk of one token that ends a prompt was called a decode, and the row of chunks was empty."""
    add = record(Add(rid="a", prompt_ids=tuple(range(9)), max_new_tokens=2))
    assert (shown(add, chunk(0, 8)).chunked, shown(add, chunk(0, 8)).running) == ("a", ())
    last = shown(add, chunk(0, 8), chunk(8, 1))
    assert last.launched is not None
    assert (last.launched.kind, last.chunked, last.running) == ("prefill", None, ("a",))
    decode = shown(add, chunk(0, 8), chunk(8, 1), chunk(9, 1))
    assert decode.launched is not None
    assert decode.launched.kind == "decode"
    again = shown(add, chunk(0, 8), chunk(8, 1), record(preempted=("a",)), chunk(0, 8))
    assert (again.chunked, again.running) == ("a", ())


def test_a_batch_that_copies_blocks() -> None:
    shares = (Share(rid="a", start=4, count=1, block_ids=(0, 2)),)
    launched = shown(record(batch=Batch(id=4, shares=shares, copies=((9, 2),)))).launched
    assert launched is not None
    assert launched.text == "#0 prefill, copies block 9 to 2 a[4:5] in blocks 0 2"


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Add(rid="a", prompt_ids=(1, 2), max_new_tokens=3), "start a (2 + 3 tokens)"),
        (Add(rid="a", prompt_ids=(1,), max_new_tokens=3, priority=2), "start a (1 + 3 tokens, priority 2)"),
        (FlushCache(call_id="x"), "flush"),
        (FlushCache(call_id="x", force=True), "forced flush"),
        (Pause(call_id="x", mode="keep"), "pause (keep)"),
        (Resume(call_id="x"), "continue"),
    ],
)
def test_an_event(event: Any, words: str) -> None:
    assert said(event) == [words]


def test_a_batch_that_failed() -> None:
    step = shown(record(batch=Batch(id=5, shares=SHARES)), record(BatchFailed(batch_id=5, error="lost\n")))
    assert [(one.text, one.kind) for one in step.arrived] == [("result #0 FAILED: lost\\n", "bad")]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Tokens(rid="a", token_ids=(1, 2)), "a -> token 1 2"),
        (Tokens(rid="a", finish_reason="abort"), "a -> ends: abort"),
        (Refused(rid="a", reason="full"), "a -> refused: full"),
        (Answer(call_id="call-1", ok=True), "call -> ok"),
        (Answer(call_id="call-1", ok=False, text="busy"), "call -> not ok (busy)"),
    ],
)
def test_a_reply(reply: Any, words: str) -> None:
    assert said(replies=(reply,)) == [words]


def test_an_answer_names_its_call() -> None:
    assert said(FlushCache(call_id="x"), replies=(Answer(call_id="x", ok=True),)) == ["flush", "flush -> ok"]


def test_the_step_that_the_scheduler_dies_in() -> None:
    assert shown(record(Abort(rid="a"), error="KeyError: 1")).error == "KeyError: 1"


def test_guesses_and_long_tables() -> None:
    share = Share(rid="a", start=4, count=3, block_ids=tuple(range(20)), draft_ids=(5, 6))
    launched = shown(record(batch=Batch(id=1, shares=(share,)))).launched
    assert launched is not None
    assert launched.text == ("#0 prefill a[4:7] with 2 guesses in blocks 0 1 2 3 4 5 6 7 8 9 10 11 and 8 more")
