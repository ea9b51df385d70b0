"""Flights of SDK machines: a wrapper that records a machine, and a new machine that replays a flight's frames."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from scripted.core.refusals import ScriptDefinitionError
from scripted.sdk.capabilities import Capabilities, Limits
from scripted.sdk.flight.frames import (
    Aborted,
    Arrived,
    Called,
    Event,
    FlightHeader,
    Planned,
    Result,
    Scalar,
    Start,
    blocks_of,
    shape_of,
)
from scripted.sdk.flight.packed import Beginning
from scripted.sdk.flight.recorder import FlightRecorder
from scripted.sdk.flight.replay import add_of, call_of, name_of
from scripted.sdk.flight.standing import Hint
from scripted.sdk.messages import (
    Abort,
    Add,
    Batch,
    BatchResult,
    FlushCache,
    Pause,
    Refused,
    Resume,
    SdkMachine,
    Stepped,
    Tokens,
)
from scripted.sdk.messages import Event as SdkEvent


class RecordedMachine:
    """Wraps a machine and records its steps.

    ``recorder`` makes the recorder from a function that describes the current state. Replies tell what requests do, so
    the ring cannot begin in the middle of one: a machine does not report its internal state.
    """

    def __init__(self, machine: SdkMachine, recorder: Callable[[Callable[[], Beginning]], FlightRecorder]) -> None:
        self.machine = machine
        self.depth: int = machine.depth
        self.recorder = recorder(self._snapshot)
        self._live: dict[str, Arrived] = {}
        self._requests = 0
        self._plans = 0
        # The plan number of each batch in flight, by the machine's batch id.
        self._batches: dict[int, int] = {}

    @property
    def is_idle(self) -> bool:
        return self.machine.is_idle

    def counts(self) -> Mapping[str, int]:
        return self.machine.counts()

    def step(self, events: Sequence[SdkEvent], now: float) -> Stepped:
        """Do one step and record it, even if the machine dies in it."""
        for event in events:
            self._note(event)
        try:
            stepped = self.machine.step(events, now)
        except Exception as exc:
            self.recorder.leave("crash", f"{type(exc).__name__}: {exc}")
            raise
        numbers = {rid: one.id for rid, one in self._live.items()}
        for reply in stepped.replies:
            if isinstance(reply, Refused) or (isinstance(reply, Tokens) and reply.finish_reason is not None):
                self._live.pop(reply.rid, None)
        self._plans += 1
        if stepped.microbatch is not None:
            self._batches[stepped.microbatch.id] = self._plans
        self.recorder.planned(planned_of(stepped, self._plans, now, numbers), len(self._live))
        return stepped

    def _note(self, event: SdkEvent) -> None:
        match event:
            case Add():
                self._requests += 1
                self._live[event.rid] = frame = _arrived(event, self._requests)
                self.recorder.event(frame)
            case Abort():
                if event.rid in self._live:
                    self.recorder.event(Aborted(ids=(self._live[event.rid].id,)))
            case BatchResult():
                plan = self._batches.pop(event.batch_id)
                self.recorder.event(Result(plan=plan, token_ids=event.token_ids), moves=True)
            case FlushCache():
                self.recorder.event(Called(name="flush", arguments={"force": event.force}))
            case Pause():
                self.recorder.event(Called(name="pause", arguments={"mode": event.mode}))
            case Resume():
                self.recorder.event(Called(name="resume"))
            case _:
                raise ScriptDefinitionError(f"a flight has no frame for {event!r:.80}; record schedules without it")

    def _snapshot(self) -> Beginning:
        return Beginning(Start(plan=self._plans + 1, now=self.recorder.now, lost=("everything before this step",)))


class MachineOfFlight:
    """A new SDK machine that replays a flight's frames; each plan is a step."""

    knows_contents = True

    def __init__(self, machine: SdkMachine, limits: Limits, can: Capabilities) -> None:
        self.limits = limits
        self.can = can
        self._machine = machine
        self._events: list[SdkEvent] = []
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._batches: dict[int, Batch] = {}
        self._stepped = Stepped()
        self._calls = 0

    def begin(self, start: Start) -> None:
        """Start at a ring's beginning. Raises ScriptDefinitionError if a request was live."""
        if start.held or start.in_flight or start.plan > 1:
            raise ScriptDefinitionError(
                "a machine of the SDK is replayed from its first step on; record it with all=1, which keeps every step"
            )

    def take(self, event: Event) -> None:
        match event:
            case Arrived():
                name = self._names[event.id] = name_of(event)
                self._numbers[name] = event.id
                self._events.append(add_of(event, event.id - 1))
            case Aborted():
                self._events += [Abort(rid=self._names[one]) for one in event.ids]
            case Called():
                self._calls += 1
                call = call_of(event, self._calls)
                if call is None:
                    raise ScriptDefinitionError(
                        f"a flight has flush, pause and resume as calls of such a machine, got {event.name!r}"
                    )
                self._events.append(call)
            case _:
                raise ScriptDefinitionError(f"a machine of the SDK takes no {type(event).__name__} of a flight")

    def land(self, result: Result, tokens: Mapping[int, Sequence[int]]) -> None:
        batch = self._batches.pop(result.plan, None)
        if batch is not None:
            said = [tuple(tokens.get(self._numbers[share.rid], ())) for share in batch.shares]
            self._events.append(BatchResult(batch_id=batch.id, token_ids=tuple(said)))

    def plan(self, plan: int, now: float) -> Planned:
        events, self._events = self._events, []
        stepped = self._machine.step(events, now)
        if stepped.microbatch is not None:
            self._batches[plan] = stepped.microbatch
        planned = planned_of(stepped, plan, now, self._numbers)
        self._stepped = _numbered(stepped, plan)
        return planned

    def stepped(self) -> Stepped:
        return self._stepped

    def counts(self) -> Mapping[str, int]:
        return self._machine.counts()

    def hints(self) -> Mapping[str, Hint]:
        """Return no hints: an SDK machine reports what it does, not why."""
        return {}


def _numbered(stepped: Stepped, plan: int) -> Stepped:
    """Return the step with its batch numbered by its plan."""
    if stepped.microbatch is None:
        return stepped
    return msgspec.structs.replace(stepped, microbatch=msgspec.structs.replace(stepped.microbatch, id=plan))


def planned_of(stepped: Stepped, plan: int, now: float, numbers: Mapping[str, int]) -> Planned:
    """Return the frame of a step's plan."""
    shares = () if stepped.microbatch is None else stepped.microbatch.shares
    preempted = [numbers[rid] for rid in stepped.preempted if rid in numbers]
    placed = [(numbers.get(one.rid, 0), one.start, one.count, len(one.draft_ids)) for one in shares]
    return Planned(
        plan=plan,
        now=now,
        shape=shape_of(placed, preempted),
        blocks=blocks_of([one.tables for one in shares]) if shares else 0,
        shares=tuple([(request, count) for request, _, count, _ in placed]),
        preempted=tuple(preempted),
    )


def _arrived(event: Add, number: int) -> Arrived:
    return Arrived(
        id=number,
        rid=event.rid,
        prompt_ids=event.prompt_ids,
        max_new_tokens=event.max_new_tokens,
        stop_token_ids=event.stop_token_ids,
        priority=event.priority,
        lora=event.lora,
    )


def header_of(adapter: str, config: Mapping[str, Scalar], version: str = "", notes: Iterable[str] = ()) -> FlightHeader:
    """Return the first frame of a flight of this adapter's scheduler."""
    return FlightHeader(adapter=adapter, version=version, config=dict(config), notes=tuple(notes), began=time.time())
