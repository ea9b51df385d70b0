from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from race_records import LIMITS, flush_race, generate, race_traces, record_run
from scripted_lockstep.step_words import log_of
from timeline_pages import Document, cut, trace_of

from scripted.api import RecordedRun, run_script
from scripted.report.timeline import page, render_timeline, to_perfetto
from scripted.report.timeline.palette import COLOURS, colours_of
from scripted.report.trace import Trace, read_trace, write_trace


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> tuple[Trace, Trace]:
    return race_traces(monkeypatch)


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
    brought = document.one("brought")
    assert (brought.text.strip(), brought.place["x"], brought.place["n"]) == ("3: FLUSH", 2, 5)
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
