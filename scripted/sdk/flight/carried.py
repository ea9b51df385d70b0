"""Lists, for every frame of a flight, which fields a schedule carries, and notes on the fields that it loses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Final

import msgspec

from scripted.core.phrases import plural
from scripted.sdk.flight.frames import (
    Aborted,
    Arrived,
    Called,
    Drafted,
    End,
    FlightHeader,
    Held,
    InFlight,
    Kept,
    Offered,
    Planned,
    Ready,
    Result,
    Start,
)
from scripted.sdk.flight.reader import Flight

# Calls that are events of the SDK, with the arguments that these have.
_CALLS: Final[Mapping[str, frozenset[str]]] = {
    "flush": frozenset({"force"}),
    "pause": frozenset({"mode"}),
    "resume": frozenset(),
}
_ABORTS: Final = ("abort", "FINISHED_ABORTED")


class Fate(Enum):
    """How a schedule treats a field of a flight.

    ``CARRIED``: the schedule has it. ``AGAIN``: its run makes it again, or it only identifies a frame. ``OUTSIDE``: an
    adapter whose machine tells its world outside carries it, and another notes it. ``NOTED``: it is lost, with a note.
    """

    CARRIED = "carried"
    AGAIN = "made again"
    OUTSIDE = "carried by some adapters"
    NOTED = "noted"


_CARRIED, _AGAIN, _OUTSIDE, _NOTED = Fate.CARRIED, Fate.AGAIN, Fate.OUTSIDE, Fate.NOTED

FATES: Final[Mapping[type[msgspec.Struct], Mapping[str, Fate]]] = {
    FlightHeader: {
        "format": _AGAIN, "adapter": _CARRIED, "version": _AGAIN, "config": _CARRIED, "notes": _NOTED,
        "redacted": _AGAIN, "began": _AGAIN,
    },
    Arrived: {
        # Only the equality of tokens matters, and a salt makes equal tokens differ.
        "id": _AGAIN, "rid": _CARRIED, "prompt_ids": _CARRIED, "max_new_tokens": _CARRIED, "stop_token_ids": _NOTED,
        "priority": _CARRIED, "at": _NOTED, "lora": _CARRIED, "grammar": _OUTSIDE, "salt": _CARRIED,
        "images": _NOTED, "engine": _NOTED,
    },
    Aborted: {"ids": _CARRIED, "status": _NOTED},
    Called: {"name": _NOTED, "arguments": _NOTED, "answer": _AGAIN},
    Offered: {"id": _OUTSIDE, "tokens": _OUTSIDE, "is_async": _OUTSIDE},
    Kept: {"id": _OUTSIDE},
    Ready: {"id": _OUTSIDE, "compiles": _OUTSIDE},
    # The translation itself says that other guesses are right.
    Drafted: {"drafts": _AGAIN, "plan": _AGAIN},
    # Of its tokens the schedule has their number.
    Result: {
        "plan": _AGAIN, "token_ids": _CARRIED, "sent": _OUTSIDE, "received": _OUTSIDE, "failed": _OUTSIDE,
        "lost": _OUTSIDE,
    },
    Planned: {
        "plan": _AGAIN, "now": _AGAIN, "shape": _AGAIN, "blocks": _AGAIN, "shares": _AGAIN, "preempted": _AGAIN,
        "times": _AGAIN,
    },
    Start: {
        "plan": _AGAIN, "now": _AGAIN, "held": _NOTED, "in_flight": _NOTED, "paused": _CARRIED, "lost": _NOTED,
    },
    Held: {
        "request": _CARRIED, "said": _CARRIED, "is_running": _NOTED, "computed": _NOTED, "place": _NOTED,
        "counters": _NOTED,
    },
    InFlight: {"plan": _NOTED, "shares": _NOTED, "drafts": _NOTED},
    End: {"why": _AGAIN, "now": _AGAIN, "error": _AGAIN},
}  # fmt: skip


def lost_in(flight: Flight, *, tells_outside: bool) -> Iterator[str]:
    """Yield a note for each lost field that this flight uses; an adapter notes itself what it tells in other words."""
    yield from flight.header.notes
    if flight.start is not None:
        yield from _lost_in_ring(flight.start)
    held = () if flight.start is None else flight.start.held
    requests = [*(one.request for one in held), *_of(flight, Arrived)]
    yield from _lost_in_requests(requests)
    for status in sorted({one.status for one in _of(flight, Aborted)}.difference(_ABORTS)):
        yield f"requests were ended from outside as {status}; here they are aborted"
    yield from _lost_in_calls(_of(flight, Called))
    if not tells_outside:
        yield from _lost_outside(flight, requests)


def stops_note(count: int) -> Iterator[str]:
    """Yield a note on this number of requests with stop tokens, if there are any."""
    if count:
        yield f"stop tokens of {plural(count, 'request')}; here the output is as long as it became"


def _of(flight: Flight, kind: type[Any]) -> list[Any]:
    return [frame for frame in flight.frames if isinstance(frame, kind)]


def _lost_in_ring(start: Start) -> Iterator[str]:
    if start.held or start.in_flight:
        running = sum([one.is_running for one in start.held])
        yield (
            f"the ring begins with {plural(len(start.held), 'open request')}, of which {running} ran, and "
            f"{plural(len(start.in_flight), 'batch')} in flight; here they arrive in its first step and compute again"
        )
    yield from [f"the ring begins with step {start.plan}, and the recording lost {one}" for one in start.lost]


def _lost_in_requests(requests: list[Arrived]) -> Iterator[str]:
    yield from stops_note(sum([bool(one.stop_token_ids) for one in requests]))
    images = sum([bool(one.images) for one in requests])
    if images:
        yield f"images of {plural(images, 'request')}, which the schedule leaves out"
    names = sorted({name for one in requests for name in one.engine})
    if names:
        yield f"requests set {', '.join(names)}; here they are as long as they became"
    times = [one.at for one in requests]
    if times != sorted(times) and any(one.priority for one in requests):
        yield "requests reached the scheduler in another order than their arrival times; here the order is the time"


def _lost_in_calls(calls: list[Called]) -> Iterator[str]:
    for name in sorted({one.name for one in calls}.difference(_CALLS)):
        count = sum([one.name == name for one in calls])
        yield f"{plural(count, 'call')} of {name}, which no event of a schedule has"
    for name, known in _CALLS.items():
        asked = {key for one in calls if one.name == name for key, value in one.arguments.items() if value}
        for argument in sorted(asked - known):
            yield f"{name} was called with {argument}, which a schedule's {name} has not"


def _lost_outside(flight: Flight, requests: list[Arrived]) -> Iterator[str]:
    results: list[Result] = _of(flight, Result)
    counts = {
        "answers of a KV connector": len(_of(flight, Offered)),
        "ends of transfers": sum([len(one.sent) + len(one.received) for one in results]),
        "failed loads": sum([bool(one.failed or one.lost) for one in results]),
        "kept blocks of ended requests": len(_of(flight, Kept)),
        "requests with grammars": sum([one.grammar for one in requests]),
        "compiled grammars": len(_of(flight, Ready)),
    }
    for name, count in counts.items():
        if count:
            yield f"{count} {name}: the adapter has no actions for them"
