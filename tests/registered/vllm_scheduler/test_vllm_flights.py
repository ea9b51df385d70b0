"""Flights of vLLM's scheduler: recorded by the hooks that a server's plugin sets, replayed in one process.

Goal: a hang or crash of somebody's vLLM is a stepped reproduction. Method: workloads of the search on a scheduler with
a recorder; every plan of the replay is compared, also from a ring that lost its beginning. Origin: issue 49. Mutant:
those of benchmarks/planted_flights.toml.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ci.register import register_cpu_ci

if find_spec("vllm") is None:
    pytest.skip("no vLLM is installed; `make vllm` makes an environment with one", allow_module_level=True)

from scripted_vllm.config import VllmSettings
from scripted_vllm.flight.hook import attach
from scripted_vllm.machine import VllmMachine

from benchmarks.planted_flights import row_of, vllm
from scripted.core.adapters import adapter_named
from scripted.core.schedule import Schedule
from scripted.sdk import Add
from scripted.sdk.flight.reader import Flight, read_flight
from scripted.sdk.flight.recorder import FOLDER_VARIABLE, OPTIONS_VARIABLE, FlightRecorder
from scripted.sdk.flight.replay import FlightOutcome, replay_flight
from scripted.search.execution import execute

register_cpu_ci(est_time=20, suite="vllm-cpu")

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[3]
ADAPTER: Any = adapter_named("vllm")
# What a scheduler of another release does in all of them is compared too.
WORKLOADS = (
    *(
        "growing",
        "priority-async",
        "chunks",
        "async-tight",
        "stages-async",
        "guesses",
        "guesses-async",
        "loads-failing",
    ),
    *("loads-async", "windows-async", "grammars-async", "grammars-guesses", "loras", "saves"),
)
IN_THE_MIDDLE = ("growing", "growing-first-runner", "chunks", "priority-async", "async-tight", "windows-async", "loras")
# The second prompt begins with the first one, which is in the prefix cache.
SHARING = "default; 1 start a prompt=13 new=2; 8 start b prompt=17 new=2"


@pytest.fixture
def recorders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[FlightRecorder]:
    """The recorder of each machine that is made, with the options of the environment."""
    made: list[FlightRecorder] = []
    own = VllmMachine.__init__

    def recorded(self: VllmMachine, settings: Any) -> None:
        own(self, settings)
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / str(len(made))))
        recorder = attach(self.scheduler)
        monkeypatch.delenv(FOLDER_VARIABLE)
        assert recorder is not None
        made.append(recorder)

    monkeypatch.setattr(VllmMachine, "__init__", recorded)
    return made


def flights_of(line: str, recorders: list[FlightRecorder], why: str = "call") -> list[Flight]:
    """The flights of a schedule's machines."""
    execute(Schedule.parse(ADAPTER.workloads.get(f"vllm-{line}", line), of="vllm"))
    paths = [recorder.leave(why) for recorder in recorders]
    for recorder in recorders:
        recorder.close()
    flights = [read_flight(path) for path in paths if path is not None]
    return [flight for flight in flights if flight.plans > 2]


def replayed(flight: Flight, monkeypatch: pytest.MonkeyPatch) -> FlightOutcome:
    monkeypatch.undo()
    return replay_flight(ADAPTER, flight)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_plan_is_as_recorded(
    workload: str, recorders: list[FlightRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    (flight,) = flights_of(workload, recorders)
    outcome = replayed(flight, monkeypatch)
    assert (outcome.differs, outcome.breaks, flight.damage) == (None, None, "")


@pytest.mark.parametrize("workload", IN_THE_MIDDLE)
def test_a_ring_that_lost_its_beginning_is_replayed(
    workload: str, recorders: list[FlightRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, "steps=8")
    (flight,) = flights_of(workload, recorders)
    assert flight.start is not None
    outcome = replayed(flight, monkeypatch)
    assert (outcome.differs, outcome.breaks, flight.damage) == (None, None, "")


def test_redaction_changes_no_plan(recorders: list[FlightRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay has the hit of the recording only if the substitutes share the prefix too."""
    monkeypatch.setenv(OPTIONS_VARIABLE, "redact=true")
    (flight,) = flights_of(SHARING, recorders)
    assert flight.header.redacted
    assert replayed(flight, monkeypatch).differs is None


def test_a_request_that_waits_for_a_load_says_so(
    recorders: list[FlightRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads are held, as by a peer that died: what waits behind them names them."""
    line = "kv_connector=async kv_offered_tokens=8 num_gpu_blocks=9; 1 hold-transfers; 1 start a prompt=12 new=2"
    flights: list[Flight] = []
    step = VllmMachine.step

    def watched(self: VllmMachine, *given: Any) -> Any:
        stepped = step(self, *given)
        if self.scheduler.requests and not flights and self._steps == 3:
            path = recorders[-1].leave("stall")
            assert path is not None
            flights.append(read_flight(path))
        return stepped

    monkeypatch.setattr(VllmMachine, "step", watched)
    flights_of(line, recorders)
    (stand,) = replayed(flights[0], monkeypatch).stands
    assert (stand.kind, stand.root) == ("load", "a_1 waits for the load of its prefix from outside")


def test_a_failed_load_that_waits_for_itself_says_so(recorders: list[FlightRecorder]) -> None:
    """The defect of benchmarks/tables/defects.md: the last load reserves blocks that the next one needs."""
    sizes = "num_gpu_blocks=7 max_model_len=24 kv_connector=async kv_load_failure_policy=recompute"
    line = f"{sizes} kv_offered_tokens=16; 1 start a prompt=16 new=1; 1 fail-load"
    (flight,) = flights_of(line, recorders, why="stall")
    (stand,) = replay_flight(ADAPTER, flight).stands
    wait = "4 blocks for its load: 6 free, 4 of them reserved for a_1 itself, whose load of step 3 has failed"
    assert stand.root == f"a_1 waits for {wait}"


def test_a_request_that_every_queue_has_lost_is_open(recorders: list[FlightRecorder]) -> None:
    """A lost wake-up is a stall, also where vLLM itself counts no request any more."""
    machine = VllmMachine(VllmSettings())
    machine.step([Add(rid="a", prompt_ids=(1, 2), max_new_tokens=4)], 0.0)
    machine.scheduler.running.clear()
    machine.step([], 0.0)
    assert machine.scheduler.get_num_unfinished_requests() == 0
    assert recorders[-1]._live == 1
    recorders[-1].close()


def test_what_is_not_recorded_ends_the_recording_and_not_the_engine(recorders: list[FlightRecorder]) -> None:
    execute(Schedule.parse(ADAPTER.workloads["vllm-sessions"], of="vllm"))
    assert recorders[-1].failure == "NotRecordedError: streaming sessions are not recorded"


def test_a_planted_bug_is_recorded_replayed_and_shrunk(tmp_path: Path) -> None:
    """An abort that leaves its request among the running ones kills the engine; 64 clients shrink to two events."""
    planted = next(mutant for mutant in vllm().bugs() if mutant.name == "lost-abort")
    row = row_of(vllm(), planted, tmp_path)
    assert "| crash | yes | the scheduler dies of KeyError" in row
    assert row.split(" | ")[-2] == "2", row


TESTS_OF_AN_ENGINE = """
import time

import pytest
from vllm.plugins import load_general_plugins

from benchmarks.planted_flights import Load, vllm

load_general_plugins()  # as an engine does


@pytest.fixture
def lost_abort():
    (bug,) = [bug for bug in vllm().bugs() if bug.name == "lost-abort"]
    with bug.switched_on():
        yield


def run(steps):
    engine = vllm()
    load = Load(engine, engine.settings[0], 0)
    for _ in range(steps):
        load.step()


def test_clients_hang_up(lost_abort):
    run(400)


def test_wall_time():
    begun = time.monotonic()
    run(40)
    assert time.monotonic() < begun, "too slow"
"""


def test_pytest_says_which_failures_of_an_engines_tests_replay(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost abort in vLLM's scheduler is a race that replays; a failing assertion on wall time is not."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "adapters"))))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(test_engine=TESTS_OF_AN_ENGINE)
    result = pytester.runpytest_subprocess("-p", "scripted.pytest_plugin", "--record", "kept")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines([
        "test_engine.py::test_clients_hang_up: it replays without a model, *: the scheduler dies of KeyError: *",
        "test_engine.py::test_wall_time: it does not replay: * plans as recorded, and no promise breaks. *",
    ])  # fmt: skip
