from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from every_case import every_case
from race_records import LIMITS, PP4, flush_race, generate, race_traces, record_run
from scripted_lockstep.configs import config_values
from scripted_lockstep.step_words import EngineWords, event_text, log_of

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
from engine.core.scheduler.ports import StepRecord
from scripted.api import RecordedRun, run_script
from scripted.core.phrases import short_rid
from scripted.report.difference import first_difference
from scripted.report.step_log import Note, ShownBatch, ShownShare, ShownStep, StepLog
from scripted.report.timeline import page, render_timeline, to_perfetto
from scripted.report.timeline.layout import Layout
from scripted.report.timeline.palette import COLOURS, Palette, colours_of, labels_of
from scripted.report.timeline.view import Box, Stripe, column_width, fits
from scripted.report.trace import Trace, TraceHeader, read_trace, write_trace

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Element(msgspec.Struct):
    tag: str
    attributes: dict[str, str | None]
    text: str = ""

    @property
    def classes(self) -> set[str]:
        return set((self.attributes.get("class") or "").split())

    @property
    def place(self) -> dict[str, float]:
        """The numbers of the style's variables, by name."""
        return {
            name: float(value) for name, value in re.findall(r"--(\w+):([\d.]+)", self.attributes.get("style") or "")
        }


class Document(HTMLParser):
    """The elements of a page in order; fails when tags do not nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(html)
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice in {tag}: {attrs}"
        element = Element(tag, dict(attrs))
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def of_class(self, *names: str) -> list[Element]:
        return [element for element in self.elements if element.classes >= set(names)]

    def one(self, *names: str) -> Element:
        (element,) = self.of_class(*names)
        return element


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> tuple[Trace, Trace]:
    return race_traces(monkeypatch)


def trace_of(records: Sequence[StepRecord], **header: object) -> Trace:
    fields = {"title": "t", "config": config_values(PP4), "outcome": "passed"} | header
    return Trace(TraceHeader(**fields), log_of(records, LIMITS))


def cut(trace: Trace, steps: Sequence[ShownStep]) -> Trace:
    return Trace(trace.header, msgspec.structs.replace(trace.log, steps=tuple(steps)), trace.notes)


# -- where microbatches are --


def test_a_microbatch_is_one_stage_further_each_step() -> None:
    log = log_of(flush_race(), LIMITS)
    at = [log.pipeline_at(step, log.launches()) for step in log.steps[:7]]
    assert [p.stages for p in at[:5]] == [
        (0, None, None, None),
        (1, 0, None, None),
        (None, 1, 0, None),
        (None, None, 1, 0),
        (None, None, None, 1),
    ]
    assert [p.results for p in at[3:]] == [(), (0,), (0, 1), (1,)]
    assert [step.in_window for step in log.steps[:8]] == [False] + 6 * [True] + [False]


# -- the page --


def test_the_page_needs_nothing_from_outside(race: tuple[Trace, Trace]) -> None:
    html = render_timeline(race)
    document = Document(html)
    policy = next(e for e in document.elements if e.attributes.get("http-equiv") == "Content-Security-Policy")
    assert (policy.attributes["content"] or "").startswith("default-src 'none'")
    assert not [e for e in document.elements if {"src", "href", "srcset"} & set(e.attributes)]
    assert "http://" not in html
    assert "https://" not in html
    assert "url(" not in html
    assert "@import" not in html
    assert "prefers-color-scheme: dark" in html
    assert "width=device-width" in html


def test_both_runs_are_there_with_their_ends(race: tuple[Trace, Trace]) -> None:
    document = Document(render_timeline(race))
    assert [e.text for e in document.of_class("verdict")] == ["passed", "died"]
    assert document.one("mutant").text == "mutant: idle-ignores-in-flight"
    assert [e.text.split() for e in document.of_class("config")] == 2 * [
        ["pp_size=4", "pp_async_depth=2", "chunked_prefill_size=64"]
    ]
    assert "This request holds the node from another tree" in document.one("outcome").text


def test_microbatches_move_diagonally_and_their_results_wait(race: tuple[Trace, Trace]) -> None:
    document = Document(render_timeline(race[:1]))
    boxes = [e for e in document.of_class("box", "stage") if e.text.startswith("#0")]
    assert [box.place["x"] for box in boxes] == [0, 1, 2, 3]
    first = boxes[0].place["y"]
    assert [box.place["y"] - first for box in boxes] == pytest.approx([0, 1, 2, 3])
    assert boxes[0].text == "#0a[0:64]"
    waiting = [e.place["x"] for e in document.of_class("box", "result") if e.text.startswith("#0")]
    assert waiting == [4, 5]
    ways = [str(e.attributes["points"]).split() for e in document.elements if e.tag == "polyline"]
    # Four stages, two steps of waiting, and the step that takes the result.
    assert [len(way) for way in ways] == [7, 7, 7]


def test_the_window_is_shaded_and_says_what_it_is(race: tuple[Trace, Trace]) -> None:
    document = Document(render_timeline(race[:1]))
    assert document.one("band", "window").place == {"x": 1, "n": 6}
    assert [e.text for e in document.of_class("step", "window")] == ["2", "3", "4", "5", "6", "7"]
    assert document.one("says").text == "every queue is empty, yet results are in flight"
    assert not document.of_class("band", "failed")


def test_the_failing_step_is_lit_with_its_error(race: tuple[Trace, Trace]) -> None:
    document = Document(render_timeline(race))
    died = len(race[1].log.steps) - 1
    assert document.one("band", "failed").place["x"] == died
    assert document.one("step", "failed").text == str(race[1].log.steps[-1].step)
    callout = document.one("callout")
    assert f"died in step {died + 1}" in callout.text
    assert str(race[1].log.steps[-1].error) in callout.text
    timeline = next(e for e in document.elements if e.attributes.get("id") == "timeline")
    assert timeline.place["columns"] == len(race[0].log.steps)
    assert callout.place["x"] < timeline.place["columns"]


def test_a_run_that_died_without_writing_its_last_step_is_lit_too(race: tuple[Trace, Trace]) -> None:
    broken = cut(race[1], race[1].log.steps[:-1])
    document = Document(render_timeline([broken]))
    assert document.one("band", "failed").place["x"] == len(broken.log.steps) - 1
    assert f"died after step {broken.log.steps[-1].step}" in document.one("callout").text
    assert broken.header.outcome in document.one("callout").text


def test_a_broken_promise_opens_the_page_at_its_step_and_names_what_led_to_it(race: tuple[Trace, Trace]) -> None:
    header = msgspec.structs.replace(race[0].header, outcome="a is told nothing")
    document = Document(render_timeline([Trace(header, race[0].log.failing("Violation: a is told nothing", 8))]))
    assert document.one("step", "failed", "here").text == "8"
    assert document.one("verdict").text == "failed"
    assert document.one("band", "failed").place["x"] == 7
    assert "failed after step 8" in document.one("callout").text
    timeline = next(e for e in document.elements if e.attributes.get("id") == "timeline")
    assert timeline.attributes["data-cause"] == "2", "the flush of step 3"
    (pane,) = [e for e in document.of_class("state") if "hidden" not in e.attributes and "ended" not in e.classes]
    words = " ".join(pane.text.split())
    assert words.startswith(
        "step 8: the run failed after this step failed Violation: a is told nothing "
        "before step 1: generate a (125 tokens)step 3: FLUSH"
    ), words


def test_a_failure_at_the_end_has_room_for_its_text_and_no_more(race: tuple[Trace, Trace]) -> None:
    """Blank columns after the last step pushed the cause out of view."""
    timeline = next(e for e in Document(render_timeline(race[1:])).elements if e.attributes.get("id") == "timeline")
    assert timeline.place["columns"] == len(race[1].log.steps)
    assert timeline.place["callout"] == 250


def test_the_first_difference_is_marked_and_opened(race: tuple[Trace, Trace]) -> None:
    document = Document(render_timeline(race))
    assert document.one("apart").place["x"] == 2
    assert [e.text for e in document.of_class("step", "differs")] == ["3"]
    words = " ".join(document.one("parts").text.split())
    assert words == (
        "First difference to run 1: step 3, answered: flush -> refused 400: in_flight=2 there, "
        "flush -> 200: flushed 0 cached pages here."
    )
    shown = [e for e in document.of_class("state") if "hidden" not in e.attributes]
    assert [(e.attributes["data-run"], e.attributes["data-x"]) for e in shown] == [("0", "2"), ("1", "2")]


def test_every_step_has_its_full_state(race: tuple[Trace, Trace]) -> None:
    document = Document(render_timeline(race))
    states = [e for e in document.of_class("state") if "ended" not in e.classes]
    assert len(states) == len(race[0].log.steps) + len(race[1].log.steps)
    text = " ".join(states[1].text.split())
    for part in (
        "step 2: the window: every queue is empty, 2 microbatches in flight",
        "the window is open",
        "#1 prefill, 61 tokens",
        "a[64:125] in row 0, new pages 4 to 7, samples a token",
        "stage 0: #1 prefill of a, launched in step 2",
        "waiting, chunked and running are empty",
        race[0].log.steps[1].digest,
    ):
        assert part in text
    assert "waiting=0 chunked=0 running=0 in_flight=2" in states[2].text


def test_events_and_answers_are_marks_in_their_step(race: tuple[Trace, Trace]) -> None:
    document = Document(render_timeline(race[:1]))
    marks = {(e.text, e.place["x"]) for e in document.of_class("chip")}
    assert {("FLUSH", 2), ("generate a (125 tokens)", 0), ("flush -> refused 400: in_flight=2", 2)} <= marks
    assert ("the window is open", 1) in marks
    assert ("#0 (chunk)", 6) in marks


HOSTILE = "\"><script>alert(1)</script><style>'{{7*7}}</style><!--\x1b\n"


def test_hostile_names_cannot_inject(monkeypatch: pytest.MonkeyPatch) -> None:
    evil, tame = race_traces(monkeypatch, rid=HOSTILE), race_traces(monkeypatch, rid="tame")
    header = msgspec.structs.replace(evil[1].header, title=HOSTILE, outcome=HOSTILE, mutant=HOSTILE)
    evil_page = render_timeline([evil[0], msgspec.structs.replace(evil[1], header=header)])
    tags = [element.tag for element in Document(evil_page).elements]
    assert tags == [element.tag for element in Document(render_timeline(tame)).elements]
    assert tags.count("script") == 1
    assert "<script>alert" not in evil_page
    assert "\x1b" not in evil_page
    assert evil_page.count("49") == evil_page.replace("{{7*7}}", "").count("49")


def test_the_same_traces_give_the_same_page(race: tuple[Trace, Trace]) -> None:
    again = msgspec.json.decode(msgspec.json.encode(race), type=tuple[Trace, Trace])
    assert render_timeline(race) == render_timeline(again)


def test_a_request_has_one_colour_in_all_runs(race: tuple[Trace, Trace]) -> None:
    many = trace_of(record_run(lambda step, _: [generate(f"r{i}", tokens=4) for i in range(10)] if step == 1 else []))
    other = trace_of(record_run(lambda step, _: [generate("r3", tokens=4), generate("new")] if step == 1 else []))
    colours = colours_of([many, other])
    assert [colours[f"r{i}"] for i in range(10)] == [i % COLOURS for i in range(10)]
    assert colours["new"] == 1, "the second request of a run that made up its own rids"
    document = Document(render_timeline([many, other]))
    named = [e for e in document.elements if e.tag == "i" and e.text == "r3[0:4]"]
    assert named
    assert all("r3" in element.classes for element in named)


def test_many_of_a_kind_are_counted_not_dropped() -> None:
    trace = trace_of(record_run(lambda step, _: [generate(f"r{i}", tokens=4) for i in range(10)] if step == 1 else []))
    document = Document(render_timeline([trace]))
    more = next(e for e in document.of_class("chip", "more") if e.place["x"] == 0)
    assert more.text == "+7 more"
    assert "generate r9 (4 tokens)" in str(more.attributes["title"])
    assert document.of_class("box", "stage")[0].text == "#0r0r1r2+7"
    assert "r9[0:4]" in str(document.of_class("box", "stage")[0].attributes["title"])


def test_a_long_run_shows_the_steps_that_matter(race: tuple[Trace, Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_COLUMNS", 4)
    died = race[1]
    document = Document(render_timeline([died]))
    steps = [e.text for e in document.of_class("step") if e.tag == "button"]
    assert steps == [str(record.step) for record in died.log.steps[-4:]]
    assert "Steps 4 to 7 of 7; scripted view --step N shows others." in document.one("legend").text
    assert document.one("band", "failed").place["x"] == 3
    assert "#0" in {e.text[:2] for e in document.of_class("box")}, "launches before the first column are known"


def test_a_step_can_be_asked_for(race: tuple[Trace, Trace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_COLUMNS", 4)
    document = Document(render_timeline(race, step=9))
    steps = [e for e in document.of_class("step") if e.tag == "button"]
    assert [e.text for e in steps] == ["7", "8", "9", "10", "7"]
    assert [e.text for e in steps if e.attributes.get("aria-current") == "step"] == ["9"]
    (shown,) = [e for e in document.of_class("state") if "hidden" not in e.attributes and "ended" not in e.classes]
    assert shown.text.split()[:4] == ["run", "1,", "step", "9"]
    assert [("hidden" in e.attributes) for e in document.of_class("ended")] == [True, False]
    with pytest.raises(ValueError, match=r"step must be a step of the traces, got 99; they have the steps 1 to 14"):
        render_timeline(race, step=99)
    with pytest.raises(ValueError, match="got 1; they have no steps"):
        render_timeline([trace_of([])], step=1)


def test_the_list_of_requests_names_those_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_COLUMNS", 4)
    begins = {1: [generate("early")], 12: [generate("late")]}
    document = Document(render_timeline([trace_of(record_run(lambda step, _: begins.get(step, [])))], step=23))
    assert [e.text for e in document.elements if e.tag == "option"] == ["all requests", "late"]


def test_the_picture_is_for_eyes_and_the_details_for_every_reader(race: tuple[Trace, Trace]) -> None:
    """Parts hidden from a screen reader take no focus, and the details repeat them."""
    document = Document(render_timeline(race))
    hidden = [e for e in document.elements if e.attributes.get("aria-hidden") == "true"]
    assert [e.classes for e in hidden] == 2 * [{"labels"}, {"picture"}]
    assert all("<button" not in e.text and "died in step" not in e.text for e in hidden)
    assert document.one("callout").attributes["role"] == "note", "an alert would be read out at each opening"
    assert [e.attributes["aria-label"] for e in document.of_class("ruler")] == ["steps of run 1", "steps of run 2"]
    assert [e.place["x"] for e in document.of_class("cursor")] == [2, 2], "a move restyles a cursor, not the timeline"


def test_a_page_that_fits_is_printed_as_wide_as_the_paper(race: tuple[Trace, Trace]) -> None:
    def is_fitted(*traces: Trace) -> bool:
        return "fits" in next(e for e in Document(render_timeline(traces)).elements if e.tag == "main").classes

    assert is_fitted(*race)
    assert not is_fitted(trace_of(record_run(lambda step, _: [generate("a", new=9)] if step == 1 else [])))


def test_the_smallest_inputs() -> None:
    with pytest.raises(ValueError, match="at least one trace"):
        render_timeline([])
    assert not Document(render_timeline([trace_of([])])).of_class("box")
    assert Document(render_timeline([trace_of(flush_race()[-1:])])).of_class("chip")


# -- names, search and filter --


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


# -- Perfetto --


def test_the_perfetto_export_has_a_track_a_stage(race: tuple[Trace, Trace]) -> None:
    text = to_perfetto(race[1])
    assert text == to_perfetto(race[1])
    events = json.loads(text)["traceEvents"]
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert list(tracks)[:5] == ["scheduler", "stage 0", "stage 1", "stage 2", "stage 3"]
    first = {e["tid"]: e["ts"] for e in events if e["ph"] == "X" and e["name"].startswith("#0")}
    assert [first[tracks[f"stage {stage}"]] for stage in range(4)] == [1000, 2000, 3000, 4000]
    marks = [e["name"] for e in events if e["ph"] == "i"]
    assert "FLUSH" in marks
    assert marks[-1].startswith("DIED: IntegrityError")
    sizes = [e["args"] for e in events if e["ph"] == "C"]
    assert len(sizes) == len(race[1].log.steps)
    assert sizes[1] == {"waiting": 0, "chunked": 0, "running": 0, "in_flight": 2}


# -- a fleet --


def _fleet_run() -> RecordedRun:
    return run_script("tests/registered/fleets/test_fleets_of_engines.py::test_a_prefill_engine_dies_in_the_middle")


def test_a_page_has_the_engines_of_a_fleet_with_what_they_say_to_each_other(tmp_path: Path) -> None:
    trace = _fleet_run().trace
    assert trace is not None
    write_trace(tmp_path / "run.jsonl", trace)
    assert read_trace(tmp_path / "run.jsonl") == trace
    elements = Document(render_timeline([trace])).elements
    names = [one.text.strip() for one in elements if "engine" in one.classes]
    assert names == ["p0", "p1", "d0"]
    said = {one.attributes["data-m"]: one for one in elements if "data-m" in one.attributes}
    heard = {one.attributes["data-heard"]: one for one in elements if "data-heard" in one.attributes}
    lost = {number for number, one in said.items() if "lost" in one.classes}
    assert len(lost) == 2, "what was on its way to and from a dead engine"
    assert said.keys() - lost == heard.keys()
    for number, place in heard.items():
        assert place.place["x"] > said[number].place["x"], "a message arrives in a later step"
    assert sum("KILLED" in (one.attributes.get("title") or "") for one in elements) == 1
    with pytest.raises(ValueError, match="the run of a fleet is shown alone, got 2 runs"):
        render_timeline([trace, trace])
    processes = [one for one in json.loads(to_perfetto(trace))["traceEvents"] if one["name"] == "process_name"]
    assert [one["args"]["name"].partition(",")[0] for one in processes] == ["p0", "p1", "d0"]


def test_a_report_has_the_last_messages_between_engines() -> None:
    run = run_script(
        "tests/registered/fleets/test_fleets_of_engines.py::test_an_abort_during_bootstrap",
        mutant="abort-untold-to-the-prefill-engine",
    )
    assert run.error is not None
    said = run.error.report.render().partition("The last messages between the engines:\n")[2].splitlines()
    assert said[0] == "  step 1: d0 -> p0: wants 48 tokens of d0-1, transfer 1, on its way"
