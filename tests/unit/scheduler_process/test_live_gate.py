"""The live gate: wakes for every source, takes events in order, never wakes for nothing."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from engine.core.config import EngineConfig
from engine.core.errors import IntegrityError, ProcessDiedError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import Abort, Completion, GrammarReady, PipelineEvent, PipelineFailed, encode
from engine.core.plan import Forward, ForwardMode, GrammarOrder, Microbatch, WeightUpdate
from engine.core.scheduler import Scheduler
from engine.core.scheduler.ports import Step, StepResult
from engine.process.clock import MonotonicClock
from engine.process.control import Control, ProcessDied, Serving, Shutdown
from engine.process.inbox import MAX_MESSAGES_A_STEP, Inbox
from engine.process.settings import ServerSettings
from engine.server.scheduler_process.live_gate import LiveGate

DEPTH = 3
NOTHING = StepResult(step=1, microbatch=None, replies=(), again=False, deadline=None)
AGAIN = StepResult(step=1, microbatch=None, replies=(), again=True, deadline=None)


class RemotePipeline:
    """Completions come by a socket, as from stage processes: all that are there are read at once."""

    def __init__(self, results: zmq.Socket[bytes]) -> None:
        self._results = results
        self._read: deque[Completion] = deque()

    @property
    def ready(self) -> bool:
        return bool(self._read)

    def launch(self, microbatch: Microbatch) -> None:
        raise AssertionError(f"a gate launches nothing, got {microbatch}")

    def next_completion(self, timeout_s: float | None) -> PipelineEvent | None:
        assert timeout_s == 0
        while self._results.poll(0):
            self._read.append(msgspec.msgpack.decode(self._results.recv(), type=Completion))
        return self._read.popleft() if self._read else None

    def wake_sources(self) -> Sequence[Any]:
        return [self._results]

    def order_grammar(self, order: GrammarOrder) -> None:
        raise AssertionError(f"nothing was to be compiled, but {order} was")

    def answers(self) -> Sequence[GrammarReady]:
        return ()

    def answer_source(self) -> int | None:
        return None

    def close(self) -> None:
        return


class InProcessPipeline:
    """Completions are computed when asked for; computing one may let a message arrive."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self.launched = deque(completions)
        self.while_computing = lambda: None
        self.takes_more = False

    @property
    def ready(self) -> bool:
        return bool(self.launched)

    def next_completion(self, timeout_s: float | None) -> PipelineEvent | None:
        if not self.launched:
            return None
        self.while_computing()
        return self.launched.popleft()

    def answers(self) -> Sequence[GrammarReady]:
        return ()

    def answer_source(self) -> int | None:
        return None

    def wake_sources(self) -> Sequence[Any]:
        return ()


class World:
    """A gate and everything that it waits on."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], pipeline: Any = None, *, step_timeout_s: float = 0.0
    ) -> None:
        self.inbox = Inbox(context, "inproc://requests")
        self.client = context.socket(zmq.PUSH)
        self.client.connect("inproc://requests")
        self.results = context.socket(zmq.PULL)
        self.results.bind("inproc://results")
        self.last_stage = context.socket(zmq.PUSH)
        self.last_stage.connect("inproc://results")
        self.supervisor, theirs = Pipe()
        self.control = Control(theirs)
        self.pipeline = pipeline or RemotePipeline(self.results)
        self.scheduler = Scheduler(Limits.of(EngineConfig(), EMBEDDED_FACTS))
        self.gate = LiveGate(
            SimpleNamespace(  # type: ignore[arg-type] - of its context a gate reads these
                inbox=self.inbox,
                pipeline=self.pipeline,
                control=self.control,
                clock=MonotonicClock(),
                limits=SimpleNamespace(depth=DEPTH),
                scheduler=self.scheduler,
                settings=ServerSettings(step_timeout_s=step_timeout_s),
                stuck_stage=lambda number: ("stage-1", f"it computes {number}"),
            )
        )

    def send(self, rid: str) -> None:
        self.client.send(encode(Abort(rid=rid)))

    def complete(self, number: int) -> None:
        self.last_stage.send(encode(Completion(microbatch_id=number)))

    def say(self, message: msgspec.Struct) -> None:
        self.supervisor.send_bytes(msgspec.msgpack.encode(message))

    def close(self) -> None:
        for end in (self.client, self.results, self.last_stage):
            end.close(linger=0)
        self.inbox.close()
        self.control.close()
        self.supervisor.close()


@pytest.fixture
def make_world():
    with zmq.Context() as context:
        worlds: list[World] = []

        def make(pipeline: Any = None, **options: float) -> World:
            worlds.append(World(context, pipeline, **options))
            worlds[-1].gate.__enter__()
            return worlds[-1]

        yield make
        for world in worlds:
            world.close()


@pytest.fixture
def world(make_world) -> World:
    return make_world()


def _waiting_step(world: World, previous: StepResult | None = NOTHING) -> tuple[threading.Thread, list[Step | None]]:
    """A thread that is inside next_step, and where its result will be."""
    steps: list[Step | None] = []
    thread = threading.Thread(target=lambda: steps.append(world.gate.next_step(previous)), daemon=True)
    thread.start()
    return thread, steps


@pytest.mark.parametrize("source", ["message", "completion", "shutdown"])
def test_every_source_wakes_a_waiting_gate(world: World, source: str) -> None:
    """Every source of work wakes at once (A03)."""
    thread, steps = _waiting_step(world)
    match source:
        case "message":
            world.send("a")
        case "completion":
            world.complete(7)
        case "shutdown":
            world.say(Shutdown())
    thread.join(30)
    assert not thread.is_alive()
    expected = {"message": (Abort(rid="a"),), "completion": (Completion(microbatch_id=7),), "shutdown": None}[source]
    assert (steps[0] and steps[0].events) == expected


def test_idle_gate_does_not_wake(world: World) -> None:
    """A01, A03: what was no event (the supervisor's good news) is one wake-up, and the wait itself none."""
    thread, _ = _waiting_step(world)
    world.say(Serving(base_url="", pids={}))
    thread.join(0.05)
    assert thread.is_alive()
    assert world.gate.wakeups == 1
    world.send("a")
    thread.join(30)
    assert world.gate.wakeups == 2


def test_message_between_check_and_wait_is_not_lost(world: World) -> None:
    """G27: everything is there before the wait begins, so nothing but the sockets themselves can tell."""
    world.send("a")
    assert world.gate.next_step(NOTHING).events == (Abort(rid="a"),)
    world.send("b")
    world.send("c")
    assert world.gate.next_step(NOTHING).events[0] == Abort(rid="b")


def test_completions_come_before_messages_in_arrival_order(world: World) -> None:
    world.send("a")
    world.send("b")
    world.complete(1)
    world.complete(2)
    expected = (Completion(microbatch_id=1), Completion(microbatch_id=2), Abort(rid="a"), Abort(rid="b"))
    assert world.gate.next_step(NOTHING).events == expected


def test_a_source_that_has_nothing_is_not_asked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A02: an empty answer costs as much as a full one, each token."""

    def unasked(*_: object) -> None:
        raise AssertionError("asked although it had nothing")

    world.send("a")
    with monkeypatch.context() as patch:
        patch.setattr(world.pipeline, "next_completion", unasked)
        assert world.gate.next_step(NOTHING).events == (Abort(rid="a"),)
    world.complete(1)
    monkeypatch.setattr(world.inbox, "drain", unasked)
    assert world.gate.next_step(NOTHING).events == (Completion(microbatch_id=1),)


def test_a_step_takes_messages_up_to_the_bound(world: World) -> None:
    """A04: tested at bound + 1."""
    for number in range(MAX_MESSAGES_A_STEP + 1):
        world.send(str(number))
    assert len(world.gate.next_step(NOTHING).events) == MAX_MESSAGES_A_STEP
    assert world.gate.next_step(NOTHING).events == (Abort(rid=str(MAX_MESSAGES_A_STEP)),)


def test_no_wait_when_the_scheduler_has_more_to_do(world: World) -> None:
    assert world.gate.next_step(AGAIN).events == ()
    world.send("a")
    assert world.gate.next_step(AGAIN).events == (Abort(rid="a"),)


def test_deadline_is_a_step_without_events(world: World) -> None:
    now = MonotonicClock().now()
    step = world.gate.next_step(msgspec.structs.replace(NOTHING, deadline=now + 0.002))
    assert step.events == ()
    assert step.now >= now + 0.002
    assert world.gate.wakeups == 1


def test_work_in_this_process_is_taken_one_at_a_time(make_world) -> None:
    """Messages that came while one microbatch was computed are seen before the next one is."""
    pipeline = InProcessPipeline([Completion(microbatch_id=1), Completion(microbatch_id=2)])
    world = make_world(pipeline)
    pipeline.while_computing = lambda: world.send("late")
    assert world.gate.next_step(NOTHING).events == (Completion(microbatch_id=1), Abort(rid="late"))
    pipeline.while_computing = lambda: None
    assert world.gate.next_step(NOTHING).events == (Completion(microbatch_id=2),)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_that_may_plan_ahead_does_not_wait_for_work_in_this_process(ahead: bool, make_world) -> None:
    """A GPU gets its next work before its last result is awaited; without async scheduling, requests gather."""
    result = Completion(microbatch_id=1)
    pipeline = InProcessPipeline([result])
    pipeline.takes_more = ahead
    world = make_world(pipeline)
    assert world.gate.next_step(AGAIN).events == (() if ahead else (result,))
    world.send("a")
    assert world.gate.next_step(AGAIN).events == (Abort(rid="a"),)
    if ahead:
        assert world.gate.next_step(NOTHING).events == (result,)


def test_dead_stage_is_an_event_and_then_the_end(world: World) -> None:
    """A dead or late stage ends every stream with an error (A06)."""
    world.say(ProcessDied(process="stage-2", cause="killed"))
    assert world.gate.next_step(NOTHING).events == (PipelineFailed(process="stage-2", cause="killed"),)
    with pytest.raises(ProcessDiedError, match="stage-2 process died: killed"):
        world.gate.next_step(NOTHING)


def test_dead_front_end_ends_the_loop_at_once(world: World) -> None:
    world.say(ProcessDied(process="frontend", cause="killed"))
    with pytest.raises(ProcessDiedError, match="frontend"):
        world.gate.next_step(NOTHING)


def test_dead_supervisor_ends_the_loop_at_once(world: World) -> None:
    world.supervisor.close()
    with pytest.raises(ProcessDiedError, match="supervisor"):
        world.gate.next_step(NOTHING)


LAUNCHED = msgspec.structs.replace(NOTHING, microbatch=Forward(7, ForwardMode.DECODE, ()))


def test_a_stage_that_returns_nothing_is_named_and_then_it_is_the_end(make_world) -> None:
    """A05, A06: a stuck stage is no silence."""
    world = make_world(step_timeout_s=0.02)
    why = "microbatch 7 did not come back within 0.02 s (step_timeout_s): it computes 7"
    assert world.gate.next_step(LAUNCHED).events == (PipelineFailed(process="stage-1", cause=why),)
    with pytest.raises(ProcessDiedError, match="stage-1 process died: microbatch 7"):
        world.gate.next_step(NOTHING)


def test_messages_do_not_put_off_the_end_of_a_stuck_stage(make_world) -> None:
    world = make_world(step_timeout_s=0.02)
    previous, events = LAUNCHED, []
    while not any(isinstance(event, PipelineFailed) for event in events):
        world.send("a")
        events += world.gate.next_step(previous).events
        previous = NOTHING
        assert len(events) < 1_000_000


def test_each_result_begins_the_wait_anew_and_without_work_there_is_none(make_world) -> None:
    """A01: what is late is measured from the last result, and an idle engine is not woken."""
    world = make_world(step_timeout_s=0.05)
    assert world.gate.next_step(_after(world, LAUNCHED)).events == (Completion(microbatch_id=7),)
    thread, _ = _waiting_step(world)
    thread.join(0.2)
    assert thread.is_alive()
    wakeups = world.gate.wakeups
    world.send("a")
    thread.join(30)
    assert world.gate.wakeups == wakeups + 1


def _after(world: World, previous: StepResult) -> StepResult:
    assert previous.microbatch is not None
    world.complete(previous.microbatch.id)
    return previous


def test_other_weights_may_take_as_long_as_a_start(make_world) -> None:
    world = make_world(step_timeout_s=0.01)
    update = msgspec.structs.replace(NOTHING, microbatch=WeightUpdate(7, None))
    thread, steps = _waiting_step(world, update)
    thread.join(0.1)
    assert thread.is_alive()
    world.complete(7)
    thread.join(30)
    assert steps[0].events == (Completion(microbatch_id=7),)


def test_a_pipeline_that_broke_is_an_event_and_then_the_end(make_world, monkeypatch: pytest.MonkeyPatch) -> None:
    """A06: a stage that sends unreadable frames is reported like a dead one."""
    world = make_world()
    broken = PipelineFailed(process="stage-0", cause="it sent what cannot be read")
    world.complete(1)
    monkeypatch.setattr(world.pipeline, "next_completion", lambda _: broken)
    assert world.gate.next_step(NOTHING).events == (broken,)
    with pytest.raises(ProcessDiedError, match="stage-0"):
        world.gate.next_step(NOTHING)


@pytest.mark.parametrize("timeout_s", [1e12, float("inf")])
def test_a_deadline_that_no_clock_reaches_is_waited_for_all_the_same(world: World, timeout_s: float) -> None:
    """A05: what an operator may ask for must not end the loop."""
    deadline = MonotonicClock().now() + timeout_s
    thread, steps = _waiting_step(world, msgspec.structs.replace(NOTHING, deadline=deadline))
    world.send("a")
    thread.join(30)
    assert steps[0].events == (Abort(rid="a"),)


def test_first_step_waits(world: World) -> None:
    thread, steps = _waiting_step(world, None)
    thread.join(0.02)
    assert thread.is_alive()
    world.send("a")
    thread.join(30)
    assert steps[0].events == (Abort(rid="a"),)


def test_idle_engine_is_audited_before_the_wait(world: World) -> None:
    """B11: books that do not balance end the engine, and not only under a harness."""
    world.scheduler.memory.rows.free -= 1
    with pytest.raises(IntegrityError, match="rows"):
        world.gate.next_step(NOTHING)
