"""Flights of vLLM's scheduler: recorded by the hooks that a server's plugin sets, replayed in one process.

Goal: a hang or crash of somebody's vLLM is a stepped reproduction. Method: workloads of the search on a scheduler with
a recorder; every plan of the replay is compared, also from a ring that lost its beginning. Origin: issue 49. Mutant:
those of benchmarks/planted_flights.toml.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ci.register import register_cpu_ci

if find_spec("vllm") is None:
    pytest.skip("no vLLM is installed; `make vllm` makes an environment with one", allow_module_level=True)

from scripted_vllm.config import VllmSettings
from scripted_vllm.engine_objects import new_request, new_scheduler, result_of
from scripted_vllm.flight import hook
from scripted_vllm.flight.hook import attach, hook_engine
from scripted_vllm.machine import VllmMachine
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.engine.utils import CoreEngineProcManager

from benchmarks.planted_flights import row_of, vllm
from scripted.core.adapters import adapter_named
from scripted.core.mutant import Mutant
from scripted.core.schedule import Schedule
from scripted.core.translation import Translated
from scripted.sdk import Add, Signal
from scripted.sdk.as_schedule import schedule_of_flight
from scripted.sdk.flight.frames import Arrived, Offered, Planned, Result
from scripted.sdk.flight.reader import Flight, read_flight
from scripted.sdk.flight.recorder import FOLDER_VARIABLE, OPTIONS_VARIABLE, FlightRecorder
from scripted.sdk.flight.replay import FlightOutcome, replay_flight
from scripted.search.execution import execute, record
from scripted.search.shrinking import shrink

register_cpu_ci(est_time=20, suite="vllm-cpu")
# A recorder handles signals until its process ends.
pytestmark = pytest.mark.usefixtures("restores_signal_handlers")

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
WAITS_FOR_ITSELF = (
    "num_gpu_blocks=7 max_model_len=24 kv_connector=async kv_load_failure_policy=recompute kv_offered_tokens=16; "
    "1 start a prompt=16 new=1; 1 fail-load"
)
OUTSIDE = {
    "hold-transfers": "the load of its prefix from outside",
    "offer tokens=-1": "its KV connector, which cannot tell yet how much of the prompt it has",
}
LOADS = "kv_connector=async kv_load_failure_policy=recompute"
# Loads that end in another order than they begin, offers to one request, and priorities.
CONNECTED = {
    "ends of loads in another order": f"{LOADS}; 1 start a prompt=12 new=3; 1 start b prompt=12 seed=1 new=2; "
    "2 hold-transfers; 4 release-transfers rid=b; 7 fail-load block=1 rid=a; 8 release-transfers",
    "offers to one request": f"{LOADS} num_gpu_blocks=20; 1 offer tokens=4 rid=b; 1 start a prompt=12 new=3; "
    "1 start b prompt=12 seed=1 new=2; 2 start c prompt=9 seed=2 new=2; 3 offer tokens=0",
    "priorities": "policy=priority max_num_seqs=1; 1 start a prompt=6 new=4; 2 start b prompt=6 seed=1; "
    "2 start c prompt=6 seed=2 priority=3",
    "saves": "kv_connector=async kv_saves=True kv_transfer_steps=3; 1 start a prompt=9 new=2; "
    "2 start b prompt=9 seed=1 new=5; 4 abort b",
}
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


# A connector that cannot tell yet, while another request runs.
CANNOT_TELL = (
    "kv_connector=async num_gpu_blocks=40; 1 start a prompt=5 new=30; 1 start b prompt=12 seed=1 new=2; "
    "1 offer tokens=0 rid=a; 1 offer tokens=-1 rid=b; 28 offer tokens=4 rid=b"
)
# Where the hooks know that an answer must be written again: what a ring loses, and a load that failed.
ANSWERED_AGAIN = {
    "snapshot": (CANNOT_TELL, "steps=8", "self._answered.clear()"),
    "_follow_connector": (WAITS_FOR_ITSELF, "", "self._answered.pop(request.request_id, None)"),
}


@pytest.mark.parametrize("waiting", [1, 8])
def test_a_step_that_waits_for_a_connector_writes_nothing(waiting: int, recorders: list[FlightRecorder]) -> None:
    """An answer is a frame once; the replay repeats it for every later question."""
    machine = VllmMachine(Schedule.parse("kv_connector=async; 1 flush", of="vllm").config)
    machine.step([Signal(name="offer", value=-1)], 0.0)
    machine.step([Add(rid=f"r{one}", prompt_ids=(one, 2, 3), max_new_tokens=4) for one in range(waiting)], 0.0)
    for _ in range(200):
        machine.step([], 0.0)
    path = recorders[-1].leave("stall")
    recorders[-1].close()
    assert path is not None
    flight = read_flight(path)
    assert flight.plans > 200
    assert [type(frame) for frame in flight.frames] == [Arrived] * waiting + [Offered] * waiting + [Planned]


@pytest.mark.parametrize("where", ANSWERED_AGAIN)
def test_an_answer_is_written_again_where_a_replay_has_lost_it(
    where: str, recorders: list[FlightRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, options, forgets = ANSWERED_AGAIN[where]
    monkeypatch.setenv(OPTIONS_VARIABLE, options)
    (flight,) = flights_of(line, recorders)
    recorders.clear()
    target = f"scripted_vllm.flight.hook:_Hooks.{where}"
    bug = Mutant(name="x", origin="", bug="", signature="", test="", target=target, cut=forgets, becomes="pass")
    with bug.switched_on():
        (broken,) = flights_of(line, recorders)
    monkeypatch.undo()
    assert replay_flight(ADAPTER, flight).differs is None
    assert replay_flight(ADAPTER, broken).differs is not None


def test_redaction_changes_no_plan(recorders: list[FlightRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay has the hit of the recording only if the substitutes share the prefix too."""
    monkeypatch.setenv(OPTIONS_VARIABLE, "redact=true")
    (flight,) = flights_of(SHARING, recorders)
    assert flight.header.redacted
    assert replayed(flight, monkeypatch).differs is None


@pytest.mark.parametrize(("event", "wait"), OUTSIDE.items())
def test_a_request_that_waits_for_the_outside_says_so(
    event: str, wait: str, recorders: list[FlightRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that died ends no load, and gives no answer: the scheduler is not to blame."""
    line = f"kv_connector=async kv_offered_tokens=8 num_gpu_blocks=9; 1 {event}; 1 start a prompt=12 new=2"
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
    outcome = replayed(flights[0], monkeypatch)
    (stand,) = outcome.stands
    assert (stand.kind, stand.root, outcome.breaks) == ("load", f"a_1 waits for {wait}", None)


def test_a_failed_load_that_waits_for_itself_says_so(recorders: list[FlightRecorder]) -> None:
    """The defect of benchmarks/tables/defects.md: the last load reserves blocks that the next one needs."""
    (flight,) = flights_of(WAITS_FOR_ITSELF, recorders, why="stall")
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


class Loop(EngineCoreProc):
    """vLLM's own loop around a scheduler and an executor, without a process, a socket or a worker."""

    def __init__(self, scheduler: Scheduler, executor: object, batches: int) -> None:
        # Skips the base class's constructor, which starts threads and opens sockets.
        self.vllm_config = scheduler.vllm_config
        self.scheduler = scheduler
        self.model_executor = executor
        self.batch_queue = deque(maxlen=batches) if batches else None
        self.batch_queue_size = batches
        self.step_fn = self.step_with_batch_queue if batches else self.step
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self.aborts_queue: queue.Queue[Any] = queue.Queue()
        self.shutdown_state = EngineShutdownState.RUNNING
        self.check_for_draft_tokens, self.async_scheduling = True, False
        self.engines_running = self.publish_dp_lb_stats = self.enable_fault_tolerance = self.log_stats = False
        self.is_mm_encoder_only = self.is_pooling_model = False
        self._weight_version = ""


def landing(returned: Callable[[Any], object] = lambda _: None) -> Callable[..., Future[Any]]:
    """A call of an executor whose result lands at once: what ``returned`` makes of the call's plan."""

    def call(plan: object, **_: object) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(returned(plan))
        except RuntimeError as exc:
            future.set_exception(exc)
        return future

    return call


def raising(*_: object) -> None:
    raise RuntimeError("the worker has failed")


# Where an exception leaves vLLM's engine outside of its scheduler: the calls of its executor. An empty one is a worker
# that dies between two steps, which reaches the loop as a message.
DEATHS: dict[str, dict[str, Callable[..., Any]]] = {
    "before the batch": {"execute_model": lambda *_, **__: raising()},
    "in the batch": {"execute_model": landing(raising)},
    "in the sampling": {"execute_model": landing(), "sample_tokens": raising},
    "in a queued batch": {"execute_model": landing(raising), "sample_tokens": landing()},
    "after the step": {
        "execute_model": landing(lambda plan: result_of(plan, {"a": [5]})),
        "take_draft_token_ids": raising,
    },
    "between two steps": {},
}


@pytest.fixture
def unhooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own calls are put back behind the test."""
    for owner in (Scheduler, EngineCore, EngineCoreProc, DPEngineCoreProc, CoreEngineProcManager):
        for name in ("__init__", "shutdown", *hook._ENGINE_CALLS):
            if name in vars(owner):
                monkeypatch.setattr(owner, name, vars(owner)[name])


@pytest.mark.usefixtures("unhooked")
@pytest.mark.parametrize("is_hooked", [True, False], ids=["hooked", "scheduler-alone"])
@pytest.mark.parametrize("death", DEATHS)
def test_an_engine_that_dies_leaves_its_crash_before_it_says_so(
    death: str, is_hooked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's front end kills an engine that reports its death, before the scheduler is shut down."""
    calls = DEATHS[death]
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    if is_hooked:
        hook_engine()
    scheduler = new_scheduler(VllmSettings())
    if not is_hooked:
        attach(scheduler)
    scheduler.add_request(new_request(VllmSettings(), "a", (1, 2, 3), max_tokens=4))
    loop = Loop(scheduler, SimpleNamespace(**calls), batches=int(death == "in a queued batch"))
    if not calls:
        loop.input_queue.put((EngineCoreRequestType.EXECUTOR_FAILED, None))
    with pytest.raises(RuntimeError) as raised:
        loop.run_busy_loop()
    left = list(tmp_path.glob("*.flight"))
    assert len(left) == is_hooked
    scheduler.shutdown()
    (path,) = tmp_path.glob("*.flight")
    end = read_flight(path).end
    assert end is not None
    assert (end.why, end.error) == (
        ("crash", f"outside the scheduler: RuntimeError: {raised.value}") if is_hooked else ("exit", "")
    )


@pytest.mark.usefixtures("unhooked")
def test_an_engine_that_is_told_to_stop_leaves_the_requests_that_it_aborts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator stops a server because of a request that is stuck, and vLLM's first act is to abort it."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    hook_engine()
    own = signal.signal(signal.SIGTERM, lambda *_: setattr(loop, "shutdown_state", EngineShutdownState.REQUESTED))
    try:
        scheduler = new_scheduler(VllmSettings())
        result = landing(lambda plan: result_of(plan, {name: [5] for name in plan.num_scheduled_tokens}))
        executor = SimpleNamespace(execute_model=result, take_draft_token_ids=lambda: None)
        loop = Loop(scheduler, executor, batches=0)
        scheduler.add_request(new_request(VllmSettings(), "a", (1, 2, 3), max_tokens=4))
        loop._process_engine_step()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit):
            loop.run_busy_loop()
    finally:
        signal.signal(signal.SIGTERM, own)
    assert not scheduler.requests
    scheduler.shutdown()
    (path,) = tmp_path.glob("*.flight")
    flight = read_flight(path)
    assert flight.end is not None
    assert (flight.end.why, [type(frame) for frame in flight.frames]) == ("exit", [Arrived, Planned, Result])
    assert replayed(flight, monkeypatch).differs is None


@pytest.mark.usefixtures("unhooked")
def test_a_front_end_lets_its_engines_write_before_it_kills_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it kills them right behind the signal. Their end is no failure, which would end the front end too."""
    done: list[object] = []
    monkeypatch.setattr(hook, "stop_engines", lambda engines: done.append((engines, manager.manager_stopped.is_set())))
    monkeypatch.setattr(CoreEngineProcManager, "shutdown", lambda _, timeout: done.append(timeout))
    hook_engine()
    manager = object.__new__(CoreEngineProcManager)
    manager.manager_stopped, manager.processes = threading.Event(), []
    manager.shutdown(timeout=0)
    assert done == [([], True), 0]


def schedule_of(flight: Flight) -> Translated:
    """The schedule of a flight of a scheduler that is no longer recorded."""
    config = ADAPTER.read_config({name: str(value) for name, value in flight.header.config.items()})
    return schedule_of_flight(ADAPTER, config, flight, replay_flight(ADAPTER, flight))


# In a schedule other guesses are right, because its tokens are others.
@pytest.mark.parametrize("workload", [*[one for one in WORKLOADS if "guesses" not in one], *CONNECTED])
def test_a_schedule_of_a_flight_launches_the_same(
    workload: str, recorders: list[FlightRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the priorities, LoRAs, grammars, offers, ends of transfers and failed loads of the recording."""
    (flight,) = flights_of(CONNECTED.get(workload, workload), recorders)
    monkeypatch.undo()
    translated = schedule_of(flight)
    _, records = record(translated.schedule)
    launched = [ADAPTER.plan_of(records[step - 1]) for step in translated.steps if step <= len(records)]
    assert [one for one in launched if one] == [one for one in translated.plans if one]


def test_a_hang_in_production_is_a_schedule_of_two_events(
    recorders: list[FlightRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed load waits for itself: the schedule has the pool, the connector and the failure, and the hang's words.

    The recording has a thousand steps in which the connector is asked in vain. The replay says of the flight itself
    that its request waits forever.
    """
    (flight,) = flights_of(WAITS_FOR_ITSELF, recorders, why="stall")
    monkeypatch.undo()
    flight = asked_in_vain(flight, 1000)
    outcome = replay_flight(ADAPTER, flight)
    assert (outcome.differs, outcome.hangs) == (None, ("a_1",))
    translated = schedule_of(flight)
    assert translated.notes == ()
    small = shrink(translated.schedule)
    assert "nothing happens any more, but something waits forever" in execute(small.schedule).failure.text
    assert [one.action.kind for one in small.schedule.placed] == ["start", "fail-load"]
    settings = ADAPTER.config_words(small.schedule.config)
    assert {"num_gpu_blocks", "kv_connector", "kv_load_failure_policy"} <= set(settings)


def asked_in_vain(flight: Flight, times: int) -> Flight:
    """The flight with its last question to the connector so many times, as earlier releases wrote it."""
    *before, offered, planned = flight.frames
    assert isinstance(offered, Offered), "the request asks in every step"
    assert isinstance(planned, Planned)
    more: list[Any] = []
    first = planned.plan + planned.times
    for number in range(first, first + times):
        more += [offered, Planned(plan=number, now=planned.now, shape=0)]
    return msgspec.structs.replace(flight, frames=(*before, offered, planned, *more))


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
