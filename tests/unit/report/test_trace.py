from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from race_records import LIMITS, PP4, race_traces

from lockstep.errors import LockstepError
from scripted.cli.main import main
from scripted.report.rerun import Rerun
from scripted.report.step_log import EngineLog, FleetLog, ShownStep, StepLog
from scripted.report.timeline.page import render_timeline
from scripted.report.trace import Trace, TraceError, read_trace, write_trace


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Trace:
    return race_traces(monkeypatch)[1]


def test_a_trace_survives_the_way_through_a_file(trace: Trace, tmp_path: Path) -> None:
    write_trace(tmp_path / "a.jsonl", trace)
    again = read_trace(tmp_path / "a.jsonl")
    assert again == trace
    assert again.header.died
    assert again.log.steps[-1].error is not None
    assert (again.log.stages, again.log.depth) == (LIMITS.pp_size, LIMITS.depth)
    assert again.header.config["pp_async_depth"] == PP4.pp_async_depth
    assert again.log.steps[0].arrived[0].text == "generate a (125 tokens)"


def test_the_same_trace_gives_the_same_bytes(trace: Trace, tmp_path: Path) -> None:
    write_trace(tmp_path / "a.jsonl", trace)
    write_trace(tmp_path / "b.jsonl", read_trace(tmp_path / "a.jsonl"))
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_a_line_is_a_step_so_that_a_log_tool_can_read_it(trace: Trace, tmp_path: Path) -> None:
    write_trace(str(tmp_path / "a.jsonl"), trace)
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert len(lines) == 1 + len(trace.log.steps) + len(trace.notes)
    assert lines[0].startswith('{"format":"lockstep-trace-2"')


def _replace_line(number: int, text: str) -> object:
    def damage(lines: list[str]) -> list[str]:
        return [*lines[: number - 1], text, *lines[number:]]

    return damage


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda lines: [], "line 1: not the header of a trace"),
        (lambda lines: lines[1:], "line 1: not the header of a trace"),
        (
            lambda lines: [lines[0].replace("lockstep-trace-2", "lockstep-trace-9"), *lines[1:]],
            "got 'lockstep-trace-9'",
        ),
        (_replace_line(3, "{"), "line 3: not a step or a note"),
        (_replace_line(3, "{}"), "line 3: must hold one step, note, engine or message"),
        (_replace_line(3, '{"step":{"step":"two"}}'), r"\$\.step\.step"),
        (_replace_line(3, '{"stepp":1}'), "line 3: .*stepp"),
        (lambda lines: [*lines, lines[1]], "steps must grow, got step 1 after"),
        # A page has a row for each stage, and its formats have 64 bits.
        (lambda lines: [lines[0].replace('"stages":4', f'"stages":{10**12}'), *lines[1:]], "line 1: .*stages"),
        (lambda lines: [lines[0].replace('"stages":4', '"stages":0'), *lines[1:]], "line 1: .*stages"),
        (lambda lines: [lines[0].replace('"depth":', '"depth":999'), *lines[1:]], "line 1: .*depth"),
        (_replace_line(3, '{"step":{"step":9223372036854775807}}'), r"line 3: .*\$\.step\.step"),
        (lambda lines: [lines[0], lines[1][: len(lines[1]) // 2]], "line 2: not a step or a note"),
    ],
)
def test_a_damaged_file_is_refused_with_its_name_and_line(trace: Trace, tmp_path: Path, damage, says: str) -> None:
    path = tmp_path / "damaged.jsonl"
    write_trace(path, trace)
    path.write_text("\n".join(damage(path.read_text().splitlines())))
    with pytest.raises(TraceError, match=says) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, LockstepError)


def test_a_fleet_that_skips_steps_has_a_page_of_those_it_took(trace: Trace, tmp_path: Path) -> None:
    """46.3: it had a column for each number between the first step and the last: two steps took all memory."""
    steps = tuple(ShownStep(step=number) for number in (1, 2**50))
    fleet = FleetLog((EngineLog("a", StepLog(1, 1, steps)), EngineLog("b", StepLog(1, 1))))
    write_trace(tmp_path / "a.jsonl", Trace(trace.header, StepLog(1, 1), fleet=fleet))
    assert str(2**50) in render_timeline([read_trace(tmp_path / "a.jsonl")])


def test_the_text_of_a_file_does_not_command_a_terminal(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """46.5: the title of a shown trace, and the name of a field in a refusal, were printed as they were."""
    commands = "\x1b[2J\x9b1m\a"
    shown, refused = tmp_path / "shown.jsonl", tmp_path / "refused.jsonl"
    write_trace(shown, Trace(msgspec.structs.replace(trace.header, title=commands), trace.log))
    refused.write_bytes(shown.read_bytes() + msgspec.json.encode({commands: 1}))
    for path in (shown, refused):
        monkeypatch.setattr(sys, "argv", ["scripted", "view", str(path)])
        with pytest.raises(SystemExit):
            main()
    said = "".join(capsys.readouterr())
    assert said.count(r"\x1b[2J\x9b1m\x07") == 2
    assert all(one.isprintable() or one == "\n" for one in said)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="line 1: not the header"):
        read_trace(tmp_path / "binary")


@pytest.mark.parametrize(
    ("ended", "passed"),
    [
        ({}, True),
        ({"differs": "step 3"}, False),
        ({"broken": "a reads b"}, False),
        ({"error": "KeyError: 7"}, False),
        ({"error": "KeyError: 7", "recorded_error": "KeyError: 7"}, True),
        ({"recorded_error": "KeyError: 7"}, False),
        ({"broken": "a reads b", "error": "KeyError: 7", "recorded_error": "KeyError: 7"}, True),
    ],
)
def test_a_rerun_has_passed_if_it_kept_every_promise_or_died_as_recorded(ended: dict[str, str], passed: bool) -> None:
    assert Rerun(StepLog(1, 1, ()), **ended).passed is passed
