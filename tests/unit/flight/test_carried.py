"""What a schedule has of a flight: no frame and no field is lost without a word."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from every_case import every_case
from flights import FIXED, flown

from scripted.core.action import rid_of
from scripted.core.adapters import adapter_named
from scripted.core.schedule import Schedule
from scripted.core.translation import RecordedStep, Translated, Translator, action_of
from scripted.sdk.actions import CancelRequest, SubmitRequest
from scripted.sdk.as_schedule import schedule_of_flight
from scripted.sdk.cooperative.stall import Stall
from scripted.sdk.flight.carried import FATES, Fate, lost_in
from scripted.sdk.flight.frames import (
    Aborted,
    AnyFrame,
    Arrived,
    Called,
    Event,
    FlightHeader,
    Held,
    InFlight,
    Kept,
    Offered,
    Planned,
    Ready,
    Result,
    Start,
    line_of,
)
from scripted.sdk.flight.reader import Flight, read_flight
from scripted.sdk.flight.replay import FlightOutcome
from scripted.sdk.messages import Abort, Add, Record, Signal, Step, Stepped
from scripted.sdk.signals import SignalAction
from scripted.search.execution import execute

ROOT = Path(__file__).resolve().parents[3]
ARRIVED = Arrived(id=1, rid="a", prompt_ids=(1, 2), max_new_tokens=3)
HELD = Held(request=ARRIVED)
PLAIN = Flight(FlightHeader(adapter="x"), None, (ARRIVED, Planned(plan=1, now=0.0, shape=0)), None)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def arrived(*requests: dict[str, Any]) -> Flight:
    return with_frames(*[msgspec.structs.replace(ARRIVED, id=number, **one) for number, one in enumerate(requests, 1)])


def with_frames(*frames: Event | Planned) -> Flight:
    return msgspec.structs.replace(PLAIN, frames=frames)


def ring(**given: Any) -> Flight:
    return msgspec.structs.replace(PLAIN, start=Start(plan=5, now=0.0, **given))


# A flight that uses a field which is lost, or which some adapters carry.
USES = {
    (FlightHeader, "notes"): Flight(FlightHeader(adapter="x", notes=("the host tier",)), None, (), None),
    (Arrived, "stop_token_ids"): arrived({"stop_token_ids": (7,)}),
    (Arrived, "at"): arrived({"at": 2.0, "priority": 1}, {"at": 1.0}),
    (Arrived, "grammar"): arrived({"grammar": True}),
    (Arrived, "images"): arrived({"images": ((0, 4, "cat"),)}),
    (Arrived, "engine"): arrived({"engine": {"min_tokens": 2}}),
    (Aborted, "status"): with_frames(Aborted(ids=(1,), status="FINISHED_ERROR")),
    (Called, "name"): with_frames(Called(name="throttle")),
    (Called, "arguments"): with_frames(Called(name="flush", arguments={"connector": True})),
    **dict.fromkeys([(Offered, name) for name in ("id", "tokens", "is_async")], with_frames(Offered(id=1, tokens=4))),
    (Kept, "id"): with_frames(Kept(id=1)),
    **dict.fromkeys([(Ready, name) for name in ("id", "compiles")], with_frames(Ready(id=1))),
    (Result, "sent"): with_frames(Result(plan=1, sent=(1,))),
    (Result, "received"): with_frames(Result(plan=1, received=(1,))),
    (Result, "failed"): with_frames(Result(plan=1, failed=(1,))),
    (Result, "lost"): with_frames(Result(plan=1, lost=(3,))),
    (Start, "held"): ring(held=(HELD,)),
    (Start, "in_flight"): ring(in_flight=(InFlight(plan=4),)),
    (Start, "lost"): ring(lost=("the order of free blocks",)),
    **dict.fromkeys([(Held, name) for name in ("is_running", "computed", "place", "counters")], ring(held=(HELD,))),
    **dict.fromkeys([(InFlight, name) for name in ("plan", "shares", "drafts")], ring(in_flight=(InFlight(plan=4),))),
}


def test_the_list_has_every_frame_with_every_field() -> None:
    """A new kind of frame, or a new field, is carried into schedules, or its loss is said."""
    kinds = {*get_args(AnyFrame), Held, InFlight}
    listed = {kind: set(fields) for kind, fields in FATES.items()}
    assert listed == {kind: set(kind.__struct_fields__) for kind in kinds}


@every_case(("use", "flight"), USES.items())
def test_a_lost_field_has_its_note(use: object, flight: Flight) -> None:
    assert not [*lost_in(PLAIN, tells_outside=False)]
    assert [*lost_in(flight, tells_outside=False)], use


def test_every_lost_field_is_used_by_a_flight_of_these_tests() -> None:
    fates = {(kind, name): fate for kind, fields in FATES.items() for name, fate in fields.items()}
    assert {use for use, fate in fates.items() if fate in (Fate.NOTED, Fate.OUTSIDE)} == set(USES)


def schedule_of(path: Path, change: Any) -> Translated:
    """The schedule of a flight whose frames are changed before."""
    flight = read_flight(path)
    frames = [change(frame) for frame in (flight.header, *flight.frames) if change(frame) is not None]
    path.write_bytes(b"".join(map(line_of, frames)))
    known: Any = adapter_named(FIXED)
    translated: Translated = known.schedule_of_recording(path, until=None)
    return translated


TWINS = "blocks=12; 1 start a prompt=8 new=2; 9 start b prompt=8 new=2"


@pytest.mark.parametrize(("salts", "shares"), [({}, True), ({1: "x", 2: "x"}, True), ({1: "x", 2: "y"}, False)])
def test_prompts_of_different_salts_share_nothing(salts: dict[int, str], shares: bool, tmp_path: Path) -> None:
    def salted(frame: AnyFrame) -> AnyFrame:
        return msgspec.structs.replace(frame, salt=salts.get(frame.id, "")) if isinstance(frame, Arrived) else frame

    starts: list[Any] = [one.action for one in schedule_of(flown(tmp_path, TWINS), salted).schedule.placed]
    prompts = [one.prompt_ids for one in starts if one.is_start]
    assert (prompts[0] == prompts[1]) is shares


def test_steps_in_which_a_server_waits_are_left_out() -> None:
    """A connector that is asked in each step made a schedule of 10,000 steps, which no run came to the end of."""
    known: Any = adapter_named(FIXED)
    add = Add(rid="a", prompt_ids=(1, 2), max_new_tokens=1)
    waits = Record(Step((Signal(name="offered", rid="a", value=2),), 0.0), Stepped(), {})
    records = (
        Record(Step((add,), 0.0), Stepped(), {}),
        *[waits] * 9000,
        Record(Step((Abort(rid="a"),), 1.0), None, {}),
    )
    outcome = FlightOutcome(
        opening=(), records=records, differs=None, broken=None, error=None, stands=(), hangs=(),
        plans=tuple(range(1, 9003)),
    )  # fmt: skip
    translated = schedule_of_flight(known, known.read_config({}), PLAIN, outcome)
    assert [str(one) for one in translated.schedule.placed[-1:]] == ["5 abort r1"]


def test_a_recorded_signal_is_its_action_again() -> None:
    """Signals were dropped without a word; the names of requests are the schedule's."""
    stall = Stall(after=2)
    assert action_of(Signal(name="stall", value=2), [Stall], None) == stall
    assert Stall.read_back(Signal(name="other"), None) is None


class Reader(Translator[Any]):
    """Translates requests, aborts and the signals of these tests."""

    def __init__(self) -> None:
        actions = (SubmitRequest, CancelRequest, Told)
        super().__init__(actions, depth=1, page_size=4, lengths={}, timed=False, guesses=False)

    def batch_of(self, event: Any) -> int | None:
        return None

    def opening(self) -> tuple[()]:
        return ()


class Told(SignalAction, frozen=True, kw_only=True, omit_defaults=True, tag="told"):
    """Tells the scheduler something about a request."""

    tokens: int
    rid: str | None = None


ORDERS = {
    "told b, add b": "told r1, start r1",
    "told c, abort b, add b, add c": "told r1, abort r2, start r2, start r1",
    "told b, add a / add b": "told r1, start r2 / start r1",
    "add a / abort a, add a, told a": "start r1 / abort r1, start r1, told r1",
}


@every_case(("recorded", "expected"), ORDERS.items())
def test_an_event_that_comes_before_its_request_names_it(recorded: str, expected: str) -> None:
    """What a connector was to offer a request in the step of its arrival went to a request that never came."""
    make = {
        "told": lambda rid: Signal(name="told", value=2, rid=rid),
        "abort": lambda rid: Abort(rid=rid),
        "add": lambda rid: Add(rid=rid, prompt_ids=(1, 2), max_new_tokens=1),
    }
    steps = [[one.split() for one in step.split(", ")] for step in recorded.split(" / ")]
    read = Reader().placed([RecordedStep(0.0, [make[kind](rid) for kind, rid in step], None) for step in steps])
    placed = itertools.groupby(read, key=lambda one: one.step)
    shown = [", ".join([f"{one.action.kind} {rid_of(one.action)}" for one in step]) for _, step in placed]
    assert " / ".join(shown) == expected


def test_a_long_recording_has_as_many_steps_as_it_needs() -> None:
    """A schedule of 5,000 steps was "not settled after 4000 steps", which was shrunk to a test of nothing."""
    schedule = Schedule.parse(f"adapter={FIXED} blocks=12; 4500 start a prompt=4 new=1")
    assert execute(schedule).failure is None
