"""Flights of SGLang's scheduler: recorded by the hooks that a server's plugin sets, replayed in one process.

Goal: a hang or crash of somebody's SGLang is a stepped reproduction. Method: workloads of the search on a
scheduler with a recorder; every plan of the replay is compared. Origin: issue 49. Mutant: those of
benchmarks/planted_flights_sglang.toml.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci.register import register_cpu_ci

if find_spec("sglang") is None:
    pytest.skip("no SGLang is installed; `make sglang` makes an environment with one", allow_module_level=True)

from scripted_plugins.sglang import install
from scripted_sglang.adapter import ADAPTER
from scripted_sglang.flight.hook import attach
from scripted_sglang.machine import SglangMachine
from sglang.srt.managers.io_struct import CloseSessionReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tokenizer_manager import SignalHandler

from benchmarks.planted_flights import row_of, sglang
from scripted.core.schedule import Schedule
from scripted.sdk.flight import ending
from scripted.sdk.flight.reader import Flight, read_flight
from scripted.sdk.flight.recorder import FOLDER_VARIABLE, OPTIONS_VARIABLE, FlightRecorder
from scripted.sdk.flight.replay import FlightOutcome, replay_flight
from scripted.search.execution import execute

register_cpu_ci(est_time=40, suite="sglang-cpu")

# SGLang and its imports emit warnings.
# A recorder handles signals until its process ends.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("restores_signal_handlers")]

WORKLOADS = (
    *("growing", "growing-mixed", "tight-pages-overlap", "twins-normal-lpm", "chunks-pages-mixed", "splits-tight"),
    *("paused", "priority", "own-rids"),
)
# The second prompt begins with the first one, which is in the prefix cache.
SHARING = "default; 1 start a prompt=13 new=2; 8 start b prompt=17 new=2"


@pytest.fixture
def recorders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[FlightRecorder]:
    """The recorder of each machine that is made; none is a copy of another."""
    made: list[FlightRecorder] = []

    def recorded(settings: Any) -> SglangMachine:
        machine = SglangMachine(settings)
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / str(len(made))))
        with machine.inside():
            recorder = attach(machine.scheduler)
        monkeypatch.delenv(FOLDER_VARIABLE)
        assert recorder is not None
        made.append(recorder)
        return machine

    monkeypatch.setattr(ADAPTER, "_new_machine", recorded)
    return made


def flight_of(schedule: Schedule, recorders: list[FlightRecorder], why: str = "call") -> Flight:
    """The flight of a schedule's machine."""
    execute(schedule)
    flights = [read_flight(path) for path in [recorder.leave(why) for recorder in recorders] if path is not None]
    for recorder in recorders:
        recorder.close()
    (flight,) = [flight for flight in flights if flight.plans > 2]
    return flight


def replayed(flight: Flight, monkeypatch: pytest.MonkeyPatch) -> FlightOutcome:
    monkeypatch.undo()
    return replay_flight(ADAPTER, flight)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_plan_is_as_recorded(
    workload: str, recorders: list[FlightRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    flight = flight_of(Schedule.parse(ADAPTER.workloads[f"sglang-{workload}"], of="sglang"), recorders)
    outcome = replayed(flight, monkeypatch)
    assert (outcome.differs, outcome.breaks, flight.damage) == (None, None, "")


def test_redaction_changes_no_plan(recorders: list[FlightRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay has the hit of the recording only if the substitutes share the prefix too."""
    monkeypatch.setenv(OPTIONS_VARIABLE, "redact=true")
    flight = flight_of(Schedule.parse(SHARING, of="sglang"), recorders)
    assert flight.header.redacted
    outcome = replayed(flight, monkeypatch)
    assert (outcome.differs, outcome.breaks) == (None, None)


@pytest.mark.parametrize("options", ["", "redact=true"])
def test_a_prefix_under_another_salt_is_no_hit(
    options: str, recorders: list[FlightRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the salt the second prompt of the replay hits the first one, and its plan differs."""
    monkeypatch.setenv(OPTIONS_VARIABLE, options)
    say = SglangMachine._say

    def salted(self: SglangMachine, *messages: Any) -> None:
        for message in [one for one in messages if isinstance(one, TokenizedGenerateReqInput)]:
            message.extra_key = message.rid
        say(self, *messages)

    monkeypatch.setattr(SglangMachine, "_say", salted)
    flight = flight_of(Schedule.parse(SHARING, of="sglang"), recorders)
    outcome = replayed(flight, monkeypatch)
    assert (outcome.differs, outcome.breaks) == (None, None)


def test_a_host_tier_is_named_where_plans_differ(
    recorders: list[FlightRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    flight = flight_of(Schedule.parse(ADAPTER.workloads["sglang-host"], of="sglang"), recorders)
    differs = replayed(flight, monkeypatch).differs
    assert differs is not None
    assert differs.likely == "the host tier"


def test_who_waits_behind_an_abort_that_left_the_batch_full_says_so(
    recorders: list[FlightRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The defect of benchmarks/tables/defects.md: the aborted request did not fit, the one behind it would."""
    line = "default; 1 start a prompt=5 new=13; 1 start b prompt=12 new=13; 1 start c prompt=1 new=1; 3 abort b"
    flight = flight_of(Schedule.parse(line, of="sglang"), recorders, "stall")
    roots = [stand.root for stand in replayed(flight, monkeypatch).stands]
    wait = "its turn: batch_is_full is set since b did not fit, which has left the queue, and only a request that"
    assert roots[0].startswith(f"c waits for {wait}"), roots


def test_what_is_not_recorded_ends_the_recording_and_not_the_server(recorders: list[FlightRecorder]) -> None:
    machine = ADAPTER.new_parts(ADAPTER.read_config({}), record=False)[0]
    message = CloseSessionReqInput(session_id="s")
    with machine.inside(), pytest.raises(KeyError):  # as the machine's table says, which has no sessions
        machine.scheduler._request_dispatcher(message)
    failures = [recorder.failure for recorder in recorders if recorder.failure]
    assert failures == ["NotRecordedError: CloseSessionReqInput is not recorded"]
    for recorder in recorders:
        recorder.close()


def test_the_plugin_records_schedulers_only_where_the_variable_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def own(self: object) -> None:
        made.append(self)

    monkeypatch.setattr(Scheduler, "__init__", own)
    monkeypatch.setattr(SignalHandler, "sigterm_handler", SignalHandler.sigterm_handler)
    monkeypatch.setitem(sys.modules, "scripted_sglang.flight.hook", SimpleNamespace(attach=made.append))
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    install()
    assert Scheduler.__init__ is own
    monkeypatch.setenv(FOLDER_VARIABLE, "somewhere")
    install()
    install()
    scheduler = object.__new__(Scheduler)
    Scheduler.__init__(scheduler)
    assert made == [scheduler, scheduler], "made, and attached once"


@pytest.mark.parametrize("open_requests", [{}, {"a": None}])
def test_a_server_that_is_told_to_stop_asks_for_the_flight_of_what_is_open(
    open_requests: dict[str, None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang drains its requests first: one that is stuck never ends, and whoever waits kills the server."""
    asked: list[bool] = []
    monkeypatch.setattr(Scheduler, "__init__", lambda _: None)
    monkeypatch.setattr(SignalHandler, "sigterm_handler", SignalHandler.sigterm_handler)
    monkeypatch.setattr(ending, "ask_engines", lambda: asked.append(manager.gracefully_exit))
    monkeypatch.setenv(FOLDER_VARIABLE, "somewhere")
    install()
    manager = SimpleNamespace(rid_to_state=open_requests, gracefully_exit=False)
    SignalHandler(manager).sigterm_handler()
    assert manager.gracefully_exit
    assert asked == [False] * bool(open_requests)


def test_a_planted_bug_is_recorded_replayed_and_shrunk(tmp_path: Path) -> None:
    """A lost abort of a running request breaks its promise within one load; 64 clients shrink to two events."""
    engine = sglang()
    planted = next(mutant for mutant in engine.bugs() if mutant.name == "lost-abort")
    row = row_of(engine, planted, tmp_path)
    assert "| yes | " in row
    assert "is launched, but it was aborted" in row
    assert row.split(" | ")[-2] == "2", row
