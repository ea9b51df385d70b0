"""Labels of the page: every request and chunk can be told apart, found and filtered."""

from __future__ import annotations

import pytest
from race_records import generate, race_traces, record_run
from timeline_pages import Document, trace_of

from scripted.report.step_log import Note, ShownBatch, ShownShare, ShownStep, StepLog
from scripted.report.timeline import render_timeline
from scripted.report.timeline.layout import Layout
from scripted.report.timeline.palette import Palette, labels_of
from scripted.report.timeline.view import Box, Stripe, column_width, fits
from scripted.report.trace import Trace, TraceHeader


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> tuple[Trace, Trace]:
    return race_traces(monkeypatch)


def names_of(*rids: str) -> Document:
    return Document(
        render_timeline(
            [trace_of(record_run(lambda step, _: [generate(rids[step - 1], tokens=4)] if step <= len(rids) else []))]
        )
    )


def test_a_chunk_keeps_its_range_beside_a_rid_that_the_harness_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    document = Document(render_timeline(race_traces(monkeypatch, rid="scripted-1")))
    box = next(e for e in document.of_class("box", "stage") if e.text == "#1scripted-1[64:125]")
    spans = {e.text for e in document.elements if e.tag == "span" and not e.classes}
    assert "scripted-1" in spans, "the label has an element of its own and can shrink by itself"
    assert "scripted-1[64:125]" not in spans
    assert "scripted-1[64:125]" in str(box.attributes["title"])


def test_long_rids_have_distinct_labels_and_stand_in_full_in_the_tooltip() -> None:
    rids = [f"conversation-of-alice-{number}-turn-one" for number in range(3)]
    document = names_of(*rids, "another-long-name-of-a-request")
    arrived = document.of_class("chip", "event")
    assert [e.text.split()[1] for e in arrived] == ["con..0", "con..1", "con..2", "ano..quest"]
    assert all(rid in str(e.attributes["title"]) for rid, e in zip(rids, arrived, strict=False))
    assert all(f"generate {rid} (4 tokens)" in e.text for rid, e in zip(rids, document.of_class("state"), strict=False))


@pytest.mark.parametrize(
    "rids",
    [
        ("a" * 20 + "b" * 20, "a" * 21 + "b" * 19, "a" * 22 + "b" * 18),
        ("abc-0000000001-1-xyzzy", "abc-0000000001-2-xyzzy", "abc..1"),
        ("x" * 30, "x" * 31, "x" * 32),
        ("one two three four", "one\ttwo three four"),
    ],
)
def test_no_two_labels_are_alike(rids: tuple[str, ...]) -> None:
    labels = labels_of(rids)
    assert list(labels) == list(rids)
    assert len(set(labels.values())) == len(rids)
    assert all(len(label) <= 14 and label.isprintable() for label in labels.values())


def test_a_box_that_would_be_cut_off_names_its_requests_and_leaves_the_ranges_to_the_tooltip() -> None:
    one = Stripe("scripted-1", 0, "[64:125]")
    assert fits("#1", [one])
    assert not fits("#1", [one, one])
    wide = column_width([Box(0, 0, "#1", "stage", (Stripe("scripted-1", 0, "[1024:2048]"),), "")])
    assert column_width([]) < column_width([Box(0, 0, "#1", "stage", (one,), "")]) < wide


@pytest.mark.parametrize("width", [5, 14, 40])
def test_no_box_of_a_page_cuts_a_label(width: int) -> None:
    """For a full microbatch it names as many requests as it can show uncut, and counts the others."""
    rids = [f"{'r' * width}{number}" for number in range(6)]
    shares = tuple(ShownShare(rid, "[1024:2048]") for rid in rids)
    launched = ShownBatch(id=123, kind="prefill", shares=shares, tokens=6144)
    steps = (
        ShownStep(step=1, launched=launched, waiting=tuple(rids), in_flight=(123,)),
        ShownStep(step=2, running=tuple(rids[:3]), in_flight=(123,)),
    )
    trace = Trace(TraceHeader(title="full", outcome="passed"), StepLog(2, 2, steps))
    run = Layout(trace, 0, Palette.of([trace]), 0, 2)
    assert run.boxes
    for box in run.boxes:
        assert fits(box.label, box.stripes), box
        more = [int(stripe.text) for stripe in box.stripes if stripe.text.startswith("+")]
        assert len(box.stripes) - len(more) + sum(more) == len(box.requests)


def test_no_chip_of_a_page_breaks_a_word_or_loses_a_line(race: tuple[Trace, Trace]) -> None:
    notes = (Note(3, "flush = t.flush_cache()", "/x/test_it.py", 19),)
    trace = Trace(race[0].header, race[0].log, notes)
    run = Layout(trace, 0, Palette.of([trace]), 0, len(trace.log.steps))
    assert "19 flush = t.flush_cache()" in {chip.text for chip in run.chips}
    assert column_width(run.boxes, run.chips) >= 6.4 * len("t.flush_cache()") + 16


def test_the_lines_that_acted_stand_above_their_step() -> None:
    steps = (ShownStep(step=1), ShownStep(step=2))
    notes = (Note(1, "r = start(t)", "/x/helpers.py", 7), Note(2, "t.flush_cache()", "/x/test_it.py", 19))
    trace = Trace(TraceHeader(title="lines", outcome="passed"), StepLog(1, 1, steps), notes)
    chips = Layout(trace, 0, Palette.of([trace]), 0, 2).chips
    assert [(chip.x, chip.text) for chip in chips] == [(0, "helpers.py:7 r = start(t)"), (1, "19 t.flush_cache()")]


def test_the_page_can_be_searched_and_filtered_by_the_keyboard(race: tuple[Trace, Trace]) -> None:
    document = Document(render_timeline(race))
    by_id = {e.attributes["id"]: e for e in document.elements if "id" in e.attributes}
    assert (by_id["find"].tag, by_id["only"].tag, by_id["panel"].tag) == ("input", "select", "button")
    assert by_id["panel"].attributes["aria-controls"] == "states"
    options = [e for e in document.elements if e.tag == "option"]
    assert [(e.attributes["value"], e.text) for e in options] == [("", "all requests"), ("0", "a")]
    mine = [e for e in document.elements if e.attributes.get("data-q") == "0"]
    assert {e.tag for e in mine} == {"span", "i", "polyline"}
    flush = next(e for e in document.of_class("chip") if e.text == "FLUSH")
    assert "data-q" not in flush.attributes, "what is no request's stays lit"
