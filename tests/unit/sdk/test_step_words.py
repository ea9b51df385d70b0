"""Steps in words: a line says what came in, what was launched in which blocks, and what clients were told."""

from __future__ import annotations

from typing import Any

import pytest

from scripted.sdk import (
    Abort,
    Add,
    Answer,
    Batch,
    BatchFailed,
    BatchResult,
    FlushCache,
    Pause,
    Refused,
    Resume,
    Share,
    Stepped,
    Tokens,
)
from scripted.sdk.records import Record, Step
from scripted.sdk.script.words import step_line


def line(*events: Any, batch: Batch | None = None, error: str | None = None, **stepped: Any) -> str:
    done = None if error else Stepped(microbatch=batch, **stepped)
    return step_line(7, Record(Step(events, 0.0), done, {}, error), batch)


def test_a_step_with_everything() -> None:
    shares = (Share(rid="a", start=32, count=3, block_ids=(0, 1, 2)), Share(rid="b", start=0, count=1, block_ids=(9,)))
    said = line(
        BatchResult(batch_id=3, token_ids=((112,), ())),
        Abort(rid="c"),
        batch=Batch(id=4, shares=shares),
        replies=(Tokens(rid="a", token_ids=(112,), finish_reason="length"),),
        preempted=("d", "e"),
    )
    assert said == (
        "step 7: result of batch 3 (112, -), abort c -> preempted d e; told a 112 (length); "
        "batch 4: a[32:35] in blocks 0 1 2, b[0:1] in blocks 9"
    )


def test_a_batch_that_copies_blocks() -> None:
    shares = (Share(rid="a", start=4, count=1, block_ids=(0, 2)),)
    assert line(batch=Batch(id=4, shares=shares, copies=((9, 2),))) == (
        "step 7: nothing -> batch 4: copies block 9 to 2, a[4:5] in blocks 0 2"
    )


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Add(rid="a", prompt_ids=(1, 2), max_new_tokens=3), "start a (2 + 3 tokens)"),
        (Add(rid="a", prompt_ids=(1,), max_new_tokens=3, priority=2), "start a (1 + 3 tokens, priority 2)"),
        (FlushCache(call_id="x"), "flush"),
        (FlushCache(call_id="x", force=True), "forced flush"),
        (Pause(call_id="x", mode="keep"), "pause (keep)"),
        (Resume(call_id="x"), "continue"),
        (BatchFailed(batch_id=5, error="lost"), "batch 5 failed"),
    ],
)
def test_an_event(event: Any, words: str) -> None:
    assert line(event) == f"step 7: {words} -> nothing"


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Tokens(rid="a", token_ids=(1, 2)), "told a 1 2"),
        (Tokens(rid="a", finish_reason="abort"), "told a (abort)"),
        (Refused(rid="a", reason="full"), "refused a: full"),
        (Answer(call_id="call-1", ok=True), "answered call-1: ok"),
        (Answer(call_id="call-1", ok=False, text="busy"), "answered call-1: not ok (busy)"),
    ],
)
def test_a_reply(reply: Any, words: str) -> None:
    assert line(replies=(reply,)) == f"step 7: nothing -> {words}"


def test_the_step_that_the_scheduler_dies_in() -> None:
    assert line(Abort(rid="a"), error="KeyError: 1") == "step 7: abort a -> died of KeyError: 1"


def test_guesses_and_long_tables() -> None:
    share = Share(rid="a", start=4, count=3, block_ids=tuple(range(20)), draft_ids=(5, 6))
    assert line(batch=Batch(id=1, shares=(share,))) == (
        "step 7: nothing -> batch 1: a[4:7] with 2 guesses in blocks 0 1 2 3 4 5 6 7 8 9 10 11 and 8 more"
    )
