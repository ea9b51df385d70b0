"""Replays a flight on a scheduler in this process: compares every plan and checks every promise, without a model.

After the first plan that differs, requests still sample the recorded tokens, one after another, so that a changed
scheduler can be judged by its promises.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import msgspec

from scripted.core.account import Account
from scripted.core.installed import is_in_harness
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.violation import Violation
from scripted.sdk.capabilities import Capabilities, Limits
from scripted.sdk.flight.frames import (
    Aborted,
    Arrived,
    Called,
    Event,
    FlightHeader,
    Offered,
    Planned,
    Ready,
    Result,
    Start,
)
from scripted.sdk.flight.reader import Flight
from scripted.sdk.flight.standing import OUTSIDE, Hint, Stand, Watch
from scripted.sdk.messages import (
    Abort,
    Add,
    Batch,
    BatchResult,
    FlushCache,
    Pause,
    Record,
    Resume,
    Share,
    Signal,
    Step,
    Stepped,
)
from scripted.sdk.messages import Event as SdkEvent
from scripted.sdk.oracle import SdkOracle
from scripted.sdk.pipeline import SimulatedRunner

# A token that no recording has, sampled once a request's recorded output ends.
_FILLER: Final = 1 << 31
# This many empty plans stand for any number of empty plans.
_EMPTY_TWICE: Final = 3
# How many plans may follow a recording's end until every request has moved.
_MORE_PLANS: Final = 2000
_STANDS_AFTER: Final = 16
# A device whose batch takes longer is slow or hangs.
_SILENT_S: Final = 5.0
_STALL: Final = "stall"
_SHOWN_DIFFERENCES: Final = 4


class FlightMachine(Protocol):
    """A scheduler driven by the frames of a flight. Requests are numbers in frames and names in ``stepped``.

    ``limits`` and ``can`` belong to its configuration. ``knows_contents``: plans computed everything that blocks hold,
    so reads can be checked.
    """

    limits: Limits
    can: Capabilities
    knows_contents: bool

    def begin(self, start: Start) -> None:
        """Bring a new scheduler into the state at a ring's beginning."""
        ...

    def take(self, event: Event) -> None:
        """Take an event other than a result."""
        ...

    def land(self, result: Result, tokens: Mapping[int, Sequence[int]]) -> None:
        """Take the result of a plan, with these tokens for its requests."""
        ...

    def plan(self, plan: int, now: float) -> Planned:
        """Make one plan."""
        ...

    def stepped(self) -> Stepped:
        """Return the plan and the replies since the last call."""
        ...

    def counts(self) -> Mapping[str, int]: ...

    def hints(self) -> Mapping[str, Hint]:
        """Return, by request, the resources that only the scheduler knows the request waits for."""
        ...


class Outside(NamedTuple):
    """The world outside of a scheduler during a flight, as a schedule of its adapter expresses it.

    ``signals`` belong to the steps of their plans; ``settings`` are the configuration's that they need. ``requests``
    are fields of ``Add`` by request, where the schedule's differ from the replay's. ``notes`` say what is lost.
    """

    signals: Sequence[tuple[int, Signal]] = ()
    settings: Mapping[str, object] = {}
    requests: Mapping[str, Mapping[str, Any]] = {}
    notes: Sequence[str] = ()


@runtime_checkable
class TellsOutside(Protocol):
    """A machine whose frames of the world outside its scheduler become actions of a schedule."""

    def outside(self) -> Outside:
        """Return what happened outside since the replay began."""
        ...


@runtime_checkable
class ReplaysFlights(Protocol):
    """An adapter that makes machines for flights of its scheduler."""

    def flight_machine(self, header: FlightHeader) -> FlightMachine:
        """Make a new machine. Raises ScriptDefinitionError for a configuration that cannot be made here."""
        ...

    def version(self) -> str:
        """Return the installed release of the scheduler; empty if there is none."""
        ...


class PlanDifference(NamedTuple):
    """The first plan that differs from the recording, and the input that was probably not recorded."""

    plan: int
    text: str
    likely: str


class FlightOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """A replay: its steps, its first difference, the first broken promise, and the scheduler's fatal error.

    ``stands`` are the requests stuck at the recording's end; ``hangs`` the requests that never resume, if that was
    tried. ``opening`` are the requests at a ring's beginning, with their earlier output as part of their prompts.
    ``plans`` are the numbers of the steps' plans: of many consecutive empty plans only a few are made. ``outside`` is
    None for a machine that does not tell it.
    """

    opening: tuple[Add, ...]
    records: tuple[Record, ...]
    differs: PlanDifference | None
    broken: str | None
    error: str | None
    stands: tuple[Stand, ...]
    hangs: tuple[str, ...]
    plans: tuple[int, ...] = ()
    outside: Outside | None = None

    @property
    def breaks(self) -> str | None:
        """The broken promise in words; None if all hold."""
        if self.broken is not None:
            return self.broken
        if self.error is not None:
            return f"the scheduler dies of {self.error}"
        return f"nothing happens any more, but {', '.join(self.hangs)} wait forever" if self.hangs else None


def replay_flight(adapter: ReplaysFlights, flight: Flight, *, until: int | None = None) -> FlightOutcome:
    """Replay a flight, up to a plan. Raises ScriptDefinitionError for a flight that this scheduler cannot take."""
    run = _Run(adapter.flight_machine(flight.header), flight, _why_likely(adapter, flight))
    return run.all(until)


def _why_likely(adapter: ReplaysFlights, flight: Flight) -> str:
    """Return the likely cause of a difference whose plan gives no clue."""
    installed, recorded = adapter.version(), flight.header.version
    if installed != recorded:
        return f"the release: {recorded or 'an unknown one'} was recorded, {installed or 'an unknown one'} is installed"
    lost = flight.start.lost if flight.start is not None else ()
    return "; ".join((*flight.header.notes, *lost)) or "an input that no frame has: tell the recorder's maintainers"


class _Said:
    """The recorded tokens: of each share of each plan, and of each request in order."""

    def __init__(self, flight: Flight) -> None:
        self.of_plan: dict[int, dict[int, tuple[int, ...]]] = {}
        self._streams: dict[int, deque[int]] = {}
        shares = {} if flight.start is None else {one.plan: one.shares for one in flight.start.in_flight}
        for frame in flight.frames:
            if isinstance(frame, Planned):
                shares[frame.plan] = frame.shares
            elif isinstance(frame, Result):
                pairs = zip(shares.pop(frame.plan, ()), frame.token_ids, strict=False)
                self.of_plan[frame.plan] = said = {request: tokens for (request, _), tokens in pairs}
                for request, tokens in said.items():
                    self._streams.setdefault(request, deque()).extend(tokens)

    def pop(self, request: int, count: int) -> None:
        """Consume a request's next recorded tokens."""
        stream = self._streams.get(request, ())
        for _ in range(min(count, len(stream))):
            self._streams[request].popleft()

    def next_of(self, request: int) -> int:
        """Take the next token of a request whose plans no longer match the recording."""
        stream = self._streams.get(request)
        return stream.popleft() if stream else _FILLER


class _Runner(SimulatedRunner):
    """The simulated runner with recorded tokens: it checks every read and samples the recorded tokens.

    Without a recording's beginning the content of blocks is unknown, and it checks no read.
    """

    def __init__(
        self, limits: Limits, can: Capabilities, said: _Said, numbers: Mapping[str, int], is_whole: bool
    ) -> None:
        super().__init__(limits, can)
        self.is_as_recorded = True
        self._said = said
        self._numbers = numbers
        self._is_whole = is_whole
        self._plan = 0

    def launch(self, microbatch: Batch) -> None:
        self._plan = microbatch.id
        super().launch(microbatch)

    def tokens_given(self, rid: str) -> tuple[int, ...]:
        """The recorded tokens of a share; after the first difference, the next one of its request."""
        request = self._numbers[rid]
        recorded = self._said.of_plan.get(self._plan, {}).get(request, ()) if self.is_as_recorded else ()
        if recorded:
            self._said.pop(request, len(recorded))
        return recorded or (self._said.next_of(request),)

    def has_said(self, rid: str, tokens: Sequence[int]) -> None:
        """Note the tokens that a request got before the recording began."""
        self._requests[rid].extend(tokens)

    def _check_reads(self, share: Share, block_ids: Sequence[int], begin: int, end: int) -> None:
        if self._is_whole:
            super()._check_reads(share, block_ids, begin, end)


class _Oracle(SdkOracle):
    """Checks all promises that need no model: the tokens are recorded."""

    def __init__(self, limits: Limits, can: Capabilities) -> None:
        super().__init__(limits, can, None)
        self.account = Account(None, can.late_launches)


class _NoMachine:
    """Stands in for a flight's machine when the oracle asks questions at the end of a run."""

    depth = 1
    is_idle = False

    def step(self, events: Sequence[SdkEvent], now: float) -> Stepped:
        del events, now
        raise NotImplementedError("frames step the machine of a flight")

    def counts(self) -> Mapping[str, int]:
        return {}


_NO_MACHINE: Final = _NoMachine()


class _Run:
    """One replay, frame by frame."""

    def __init__(self, machine: FlightMachine, flight: Flight, likely: str) -> None:
        self._machine = machine
        self._flight = flight
        self._likely = likely
        self._names: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._said = _Said(flight)
        is_whole = flight.start is None and machine.knows_contents
        self._runner = _Runner(machine.limits, machine.can, self._said, self._numbers, is_whole)
        # None once a promise is broken: from then on the oracle's account is useless.
        self._oracle: _Oracle | None = _Oracle(machine.limits, machine.can)
        if flight.start is not None and machine.can.speculative_tokens:
            # No frame says how many of the guesses in flight at the beginning were accepted.
            self._oracle = None
        self._watch = Watch(machine.limits)
        self._records: list[Record] = []
        self._plans: list[int] = []
        self._opening: list[Add] = []
        self._events: list[SdkEvent] = []
        self._calls = 0
        # The replay's plans without results, each with its requests; plans from a ring's beginning were never launched
        # here.
        self._in_flight: dict[int, tuple[str, ...]] = {}
        self._before: set[int] = set()
        # The runner's results for plans in flight.
        self._done: dict[int, BatchResult] = {}
        self._plan = 0
        self._differs: PlanDifference | None = None
        self._broken: str | None = None
        self._error: str | None = None
        self._stood: tuple[Stand, ...] | None = None

    def all(self, until: int | None) -> FlightOutcome:
        hangs: tuple[str, ...] = ()
        try:
            self._replay(until)
            self._stood = self._stand()
            hangs = self._run_on() if self._is_stall and until is None else ()
        except Violation as exc:
            self._broken = self._broken or f"step {self._plan}: {exc}"
        except ScriptDefinitionError:
            raise
        except Exception as exc:  # noqa: BLE001 - the death of the recorded scheduler is the finding
            self._note_death(exc)
        if self._stood is None:
            self._stood = self._stand()
        return FlightOutcome(
            opening=tuple(self._opening),
            records=tuple(self._records),
            differs=self._differs,
            broken=self._broken,
            error=self._error,
            stands=self._stood,
            hangs=hangs,
            plans=tuple(self._plans),
            outside=self._machine.outside() if isinstance(self._machine, TellsOutside) else None,
        )

    @property
    def _is_stall(self) -> bool:
        return self._flight.end is not None and self._flight.end.why == _STALL

    @property
    def _is_silent(self) -> bool:
        """Whether the recording's last plan was old at its end: no step followed in which a request could stand."""
        end = self._flight.end
        last = next((frame.now for frame in reversed(self._flight.frames) if isinstance(frame, Planned)), None)
        return end is not None and last is not None and end.now - last >= _SILENT_S

    def _replay(self, until: int | None) -> None:
        end = self._flight.end
        if self._flight.start is not None:
            self._begin(self._flight.start)
        for frame in self._flight.frames:
            if (until is not None and self._plan >= until) or (self._differs and self._oracle is None):
                return
            self._take(frame)
        if end is not None and end.error and until is None:
            # The scheduler died before its last plan was recorded.
            self._make_plan(Planned(plan=self._plan + 1, now=end.now, shape=0), is_recorded=False)

    def _stand(self) -> tuple[Stand, ...]:
        after = 0 if self._is_stall or self._is_silent else _STANDS_AFTER
        free = self._machine.counts().get("blocks_free")
        return self._watch.stands(self._plan, after, self._machine.hints(), free)

    # -- frames --

    def _begin(self, start: Start) -> None:
        self._plan = start.plan - 1
        for held in start.held:
            message = self._message(held.request)
            self._runner.begin(message)
            self._opening.append(
                msgspec.structs.replace(
                    message,
                    prompt_ids=(*message.prompt_ids, *held.said),
                    max_new_tokens=max(1, message.max_new_tokens - len(held.said)),
                )
            )
            life = self._watch.begin(message.rid, len(message.prompt_ids), message.max_new_tokens, self._plan)
            life.said, life.computed = len(held.said), held.computed if held.is_running else None
            if self._oracle is not None:
                self._oracle.account.begin(message)
                self._oracle.account.live[message.rid].launched = life.launched = held.is_running
            self._runner.has_said(message.rid, held.said)
        for flight in start.in_flight:
            names = tuple([self._names[request] for request, _ in flight.shares])
            self._in_flight[flight.plan] = names
            self._before.add(flight.plan)
            said = self._said.of_plan.get(flight.plan)
            for (request, _), name in zip(flight.shares, names, strict=True):
                self._watch.fly(name, flight.plan, self._plan)
                self._runner.has_said(name, (_FILLER,) if said is None else said.get(request, ()))
        self._machine.begin(start)

    def _take(self, frame: Event | Planned) -> None:
        match frame:
            case Planned():
                for turn in range(min(frame.times, _EMPTY_TWICE)):
                    self._make_plan(msgspec.structs.replace(frame, plan=frame.plan + turn), is_recorded=True)
                self._plan = frame.plan + frame.times - 1
            case Result():
                self._land(frame)
            case Arrived():
                message = self._message(frame)
                self._events.append(message)
                self._runner.begin(message)
                self._machine.take(frame)
            case _:
                self._events += self._events_of(frame)
                self._machine.take(frame)

    def _message(self, frame: Arrived) -> Add:
        name = name_of(frame)
        self._names[frame.id], self._numbers[name] = name, frame.id
        return add_of(frame, frame.id)

    def _events_of(self, frame: Event) -> Iterator[SdkEvent]:
        match frame:
            case Aborted():
                yield from (Abort(rid=self._names[request]) for request in frame.ids)
            case Called():
                call = call_of(frame, self._calls + 1)
                self._calls += call is not None
                yield call or Signal(name=frame.name)
            case Offered():
                yield Signal(name="offered", rid=self._names[frame.id], value=frame.tokens or 0)
            case Ready():
                yield Signal(name="grammar", rid=self._names[frame.id], value=int(frame.compiles))
            case _:
                pass

    # -- results and plans --

    def _land(self, frame: Result) -> None:
        """Take a result, after the results of older plans, which the recorded scheduler did not make."""
        for plan in [plan for plan in self._in_flight if plan < frame.plan]:
            self._land_plan(Result(plan=plan))
        self._land_plan(frame)

    def _land_plan(self, frame: Result) -> None:
        names = self._in_flight.pop(frame.plan, ())
        said = self._said.of_plan.get(frame.plan, {})
        if frame.plan in self._before:
            said = said or {self._numbers[name]: (_FILLER,) for name in names}
        elif names:
            done = self._done.pop(frame.plan, None)
            if done is not None and not (self._runner.is_as_recorded and said):
                said = {self._numbers[name]: ids for name, ids in zip(names, done.token_ids, strict=True)}
            ids = tuple([tuple(said.get(self._numbers[name], ())) for name in names])
            self._events.append(BatchResult(batch_id=frame.plan, token_ids=ids))
        self._watch.land(frame.plan)
        self._machine.land(frame, said)

    def _make_plan(self, recorded: Planned, *, is_recorded: bool) -> Planned:
        self._plan = recorded.plan
        if not self._runner.is_as_recorded and len(self._in_flight) >= self._machine.limits.depth:
            self._land_plan(Result(plan=min(self._in_flight)))
        planned = self._machine.plan(recorded.plan, recorded.now)
        stepped, events = self._machine.stepped(), tuple(self._events)
        self._events = []
        batch = stepped.microbatch
        self._in_flight[recorded.plan] = () if batch is None else tuple([share.rid for share in batch.shares])
        self._records.append(Record(Step(events, recorded.now), stepped, dict(self._machine.counts())))
        self._plans.append(recorded.plan)
        if is_recorded and self._differs is None:
            self._compare(recorded, planned)
        self._watch.follow(events, stepped, recorded.plan)
        self._check(events, stepped)
        if recorded.plan in self._in_flight and batch is None:
            del self._in_flight[recorded.plan]
        return planned

    def _compare(self, recorded: Planned, planned: Planned) -> None:
        is_whole = self._flight.start is None
        if recorded.shape == planned.shape and (recorded.blocks == planned.blocks or not is_whole):
            return
        self._runner.is_as_recorded = False
        then, now = dict(recorded.shares), dict(planned.shares)
        parts = [f"{self._names[one]} is not planned, and {then[one]} tokens were" for one in then if one not in now]
        parts += [
            f"{self._names[one]} computes {now[one]} tokens, and was not planned" for one in now if one not in then
        ]
        parts += [
            f"{self._names[one]} computes {now[one]} tokens, recorded were {then[one]}"
            for one in then
            if one in now and now[one] != then[one]
        ]
        if not parts and recorded.shape != planned.shape:
            parts = ["the same tokens, but other positions, guesses or preemptions"]
        text = "; ".join(parts[:_SHOWN_DIFFERENCES]) or "the same shares, but in other blocks"
        hints = self._machine.hints()
        waits = [hints[self._names[one]].text for one in then if one not in now and self._names[one] in hints]
        likely = f"the end of a wait for {waits[0]}" if waits else self._likely
        self._differs = PlanDifference(recorded.plan, text, likely)

    def _check(self, events: Sequence[SdkEvent], stepped: Stepped) -> None:
        if self._oracle is None:
            return
        self._oracle.account.step = self._plan
        try:
            self._runner.follow(events, stepped)
            if stepped.microbatch is not None:
                self._runner.launch(stepped.microbatch)
                done = self._runner.next_completion(None)
                if isinstance(done, BatchResult):
                    self._done[stepped.microbatch.id] = done
            self._oracle.after_step(events, stepped, _NO_MACHINE, self._runner)
        except Violation as exc:
            self._broken, self._oracle = f"step {self._plan}: {exc}", None

    def _note_death(self, exc: Exception) -> None:
        """Note the scheduler's death. Raises ScriptDefinitionError if the adapter does not fit this scheduler."""
        raised_in = traceback.extract_tb(exc.__traceback__)[-1]
        if is_in_harness(raised_in.filename):
            raise ScriptDefinitionError(
                f"the flight cannot be replayed here: {type(exc).__name__}: {exc}, in {raised_in.filename}, line "
                f"{raised_in.lineno}"
            ) from exc
        self._error = f"{type(exc).__name__}: {exc}"
        step = Step(tuple(self._events), self._records[-1].step.now if self._records else 0.0)
        self._records.append(Record(step, None, {}, self._error))
        self._plans.append(self._plan)

    # -- after the end --

    def _run_on(self) -> tuple[str, ...]:
        """Run until every open request has moved; return the requests that never do and that nothing outside holds."""
        ended, idle, now = self._plan, 0, self._records[-1].step.now if self._records else 0.0
        self._runner.is_as_recorded = False
        open_ones = list(self._watch.lives)
        for _ in range(_MORE_PLANS):
            for plan in list(self._in_flight):
                self._land(Result(plan=plan))
            planned = self._make_plan(Planned(plan=self._plan + 1, now=now, shape=0), is_recorded=False)
            idle = 0 if planned.shares or self._in_flight else idle + 1
            lives = self._watch.lives
            left = [rid for rid in open_ones if rid in lives and lives[rid].since <= ended]
            if not left or self._oracle is None:
                return ()
            if idle >= _STANDS_AFTER:
                hints = self._machine.hints()
                return tuple([rid for rid in left if rid not in hints or hints[rid].kind not in OUTSIDE])
        return ()


def name_of(request: Arrived) -> str:
    """Return a request's name in a replay; for vLLM's adapter, the replaced sign has another meaning."""
    return request.rid.replace("@", "_")


def add_of(request: Arrived, arrival: int) -> Add:
    """Return the event of a request, the ``arrival``-th of its scheduler."""
    return Add(
        rid=name_of(request),
        prompt_ids=request.prompt_ids,
        max_new_tokens=request.max_new_tokens,
        stop_token_ids=request.stop_token_ids,
        priority=request.priority,
        arrival=arrival,
        lora=request.lora,
    )


def call_of(call: Called, number: int) -> FlushCache | Pause | Resume | None:
    """Return the event of a call under this number; None for a call that only one engine has."""
    match call.name:
        case "flush":
            return FlushCache(call_id=call_id(number), force=bool(call.arguments.get("force")))
        case "pause":
            return Pause(call_id=call_id(number), mode=str(call.arguments.get("mode")))
        case "resume":
            return Resume(call_id=call_id(number))
    return None


def call_id(number: int) -> str:
    """Return the id of a call; flushes, pauses and resumes are counted together from 1."""
    return f"call-{number}"
