from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import pytest
from race_records import LIMITS, flush_race, generate, race_traces, record_run
from scripted_lockstep.step_words import log_of

from engine.core.limits import Limits
from engine.core.messages import Event, PauseGeneration
from engine.core.scheduler.ports import StepRecord
from scripted.report.step_log import Note, StepLog
from scripted.report.table import AROUND_STEPS, render_text, step_table

WIDTH = 110


def text_of(records: Sequence[StepRecord] | StepLog, limits: Limits = LIMITS, **options: int) -> str:
    log = records if isinstance(records, StepLog) else log_of(records, limits)
    return render_text(step_table(log, **options), WIDTH)


def row_of(text: str, step: int) -> str:
    """The table's row of one step, continuation lines joined, runs of blanks folded."""
    lines = text.split("\n\n#n is")[0].splitlines()
    width = next(line.index("step") for line in lines if "step" in line) + len("step")
    first = next(i for i, line in enumerate(lines) if line[:width].split()[-1:] == [str(step)])
    rest = lines[first + 1 :]
    until = next((i for i, line in enumerate(rest) if line[:width].strip()), len(rest))
    return " ".join(" ".join(lines[first : first + 1 + until]).split())


def test_a_row_names_the_lines_that_acted_and_the_helpers_file() -> None:
    log = log_of(flush_race(), LIMITS)
    notes = [
        Note(1, "the window"),
        Note(1, "start(t)", "/x/helpers.py", 7),
        Note(3, "t.flush_cache()", "/x/test_it.py", 19),
    ]
    text = render_text(step_table(log, notes=notes), WIDTH)
    assert "step line arrived" in " ".join(text.split())
    assert row_of(text, 1).startswith("1 helpers.py:7 generate a")
    assert row_of(text, 3).startswith("* 3 19 FLUSH")
    assert "A line is the script's that acted." in " ".join(text.split())
    assert "line" not in text_of(flush_race()).splitlines()[1]


def test_the_table_says_which_steps_it_leaves_out() -> None:
    assert "left out" not in text_of(flush_race())
    text = text_of(flush_race(), last=2)
    rows = text.partition("\n\n#n is")[0].splitlines()
    shown = [int(line.split()[0]) for line in rows if line.strip()[:1].isdigit()]
    assert f"Steps before {min(shown)} are left out." in text


def test_the_healthy_race_reads_as_a_story() -> None:
    text = text_of(flush_race())
    assert "generate a (125" in row_of(text, 1)
    assert "#0 prefill a[0:64]" in row_of(text, 1)
    assert "chunked a" in row_of(text, 1)
    assert row_of(text, 3) == "* 3 FLUSH . #1 #0 . all clear flush -> refused 400: in_flight=2"
    assert "result #1 -> " in row_of(text, 8)
    assert "#2 decode a@125 #2 . . . 1 running a -> token" in row_of(text, 8)
    assert "ends: length" in " ".join(text.split())
    assert "* the window" in text


def test_what_receives_or_delivers_is_no_clear_queue() -> None:
    records = [msgspec.structs.replace(record, transferring=("a", "b")) for record in flush_race()]
    assert "2 transferring" in row_of(text_of(records), 3)
    assert "all clear" not in text_of(records)


def test_a_microbatch_moves_one_stage_a_step_and_its_result_waits() -> None:
    rows = [row_of(text_of(flush_race()), step) for step in (2, 3, 4, 5, 6)]
    assert "#1 #0 . . all clear" in rows[0]
    assert [row.partition(" all clear")[0] for row in rows[1:]] == [
        "* 3 FLUSH . #1 #0 .",
        "* 4 . . #1 #0",
        "* 5 . . . #1 #0",
        "* 6 . . . . #0 #1",
    ]


def test_the_step_that_died_is_marked_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    _, broken = race_traces(monkeypatch)
    text = text_of(broken.log)
    died = broken.log.steps[-1].step
    assert row_of(text, died).startswith("X")
    assert row_of(text, died).endswith("DIED HERE")
    assert f"X step {died} failed: IntegrityError: This request holds the node from another tree" in " ".join(
        text.split()
    )
    assert "flush -> 200: flushed 0" in row_of(text, 3)


def test_it_fits_a_ci_log_and_is_plain_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    for trace in race_traces(monkeypatch, rid="0123456789abcdef" * 4):
        text = text_of(trace.log)
        assert max(map(len, text.splitlines())) <= WIDTH
        assert text.isascii()
        assert "\x1b" not in text
        assert "01234..9abcdef" in text


def test_last_and_around_choose_rows_but_not_what_is_known() -> None:
    records = flush_race()
    text = text_of(records, last=3)
    assert row_of(text, 12).startswith("12 . . . . #2")
    assert "FLUSH" not in text
    text = text_of(records, around=3)
    assert row_of(text, 3).startswith("*> 3 FLUSH")
    assert [AROUND_STEPS + step for step in (3, 4) if re.search(rf"^ *{AROUND_STEPS + step} ", text, re.MULTILINE)] == [
        AROUND_STEPS + 3
    ]
    assert text_of(records, last=0) == text_of(())
    with pytest.raises(ValueError, match="last or around, got last=2 and around=3"):
        step_table(log_of(records, LIMITS), last=2, around=3)


def test_records_that_lost_their_launches_still_show_what_is_in_flight() -> None:
    """A flight recorder keeps only the newest steps."""
    text = text_of(flush_race()[3:])
    assert row_of(text, 4).startswith("4 . . . . #0 #1")
    # Nothing but results met the window: it is not what these steps are about.
    assert "the window" not in text


def test_many_stages_share_a_column() -> None:
    wide = msgspec.structs.replace(LIMITS, pp_size=32)
    text = text_of(flush_race(), wide)
    assert "0:#1 1:#0" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_every_request_of_a_long_batch_is_counted() -> None:
    rids = [f"r{i}" for i in range(7)]

    def messages(step: int, previous: StepRecord | None) -> Sequence[Event]:
        return [generate(rid, tokens=4) for rid in rids] if step == 1 else []

    text = text_of(record_run(messages))
    assert "r3[0:4] +3 more" in row_of(text, 1)


def test_a_refused_request_and_a_pause_are_told() -> None:
    def messages(step: int, previous: StepRecord | None) -> Sequence[Event]:
        return [generate("a"), generate("a"), PauseGeneration(call_id="p")] if step == 1 else []

    row = row_of(text_of(record_run(messages, max_steps=2)), 1)
    assert "pause (retract)" in row
    assert "a -> refused" in row
    assert "(duplicate)" in row
    assert "1 waiting" in row


def test_what_a_client_sent_cannot_control_the_terminal() -> None:
    def messages(step: int, previous: StepRecord | None) -> Sequence[Event]:
        return [generate("\x1b[2J[red]\n")] if step == 1 else []

    text = text_of(record_run(messages))
    assert "\x1b" not in text
    assert "\\x1b[2J[red]\\n" in text


def test_steps_that_show_the_same_are_counted() -> None:
    """D07: sixteen equal rows say nothing that three do not."""
    start = flush_race()[0]
    record = msgspec.structs.replace(start, events=(), microbatch=None, replies=())
    records = [start, *(msgspec.structs.replace(record, step=step) for step in range(100, 130))]
    text = text_of(records, last=16)
    assert "28 steps like these" in text
    assert row_of(text, 100)
    assert row_of(text, 129)
    assert "  115 " not in text
    assert "generate a" in text, "what came before the long run is still shown"


def test_a_broken_promise_is_marked_at_its_step() -> None:
    """A scheduler that survives its mistake is marked as one that dies is."""
    log = log_of(flush_race(), LIMITS)
    text = text_of(log.failing("Violation: a is told nothing", 8))
    assert row_of(text, 8).startswith("X 8 result #1 -> ")
    assert row_of(text, 8).endswith("FAILED HERE")
    assert "X step 8 failed: Violation: a is told nothing" in text
    assert "X" not in row_of(text, 7)
    assert log.failing("why").steps[-1].broken == "why"
    assert log.failing("why", 99) == log
