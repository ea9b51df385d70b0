"""Translates a recording of an SDK machine into a schedule: the same events and steps, new prompts and names.

A flight also has a world outside of its scheduler, and a server's empty steps, of which the schedule has a few.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from scripted.core.schedule import Schedule
from scripted.core.translation import Lengths, RecordedStep, Translated, Translator
from scripted.sdk.flight.carried import lost_in, stops_note
from scripted.sdk.flight.frames import Arrived
from scripted.sdk.flight.reader import Flight
from scripted.sdk.flight.replay import FlightOutcome, Outside, call_id, name_of
from scripted.sdk.flight.shown import steps_of
from scripted.sdk.messages import Add, Completion, Event, Pause, Record, Signal, Step, Stepped, Tokens

# How many consecutive empty steps a schedule keeps: a waiting scheduler does the same in each.
_EMPTY_STEPS: Final = 3
# Salts make equal tokens differ, by more than any token's number.
_SALT_BITS: Final = 64


def schedule_of(adapter: Any, config: object, records: Sequence[Record]) -> Translated:
    """Translate the steps of a machine of this configuration."""
    translator = _Translator(adapter, config, records)
    return translator.translated(Schedule(config, (), adapter.name), map(_recorded, records), records, plan_of)


def schedule_of_flight(adapter: Any, config: Any, flight: Flight, outcome: FlightOutcome) -> Translated:
    """Translate a replayed flight. ``config`` has the settings of its header."""
    recorded = outcome.outside
    outside = recorded or Outside()
    words = {**adapter.config_words(config), **outside.settings}
    config = adapter.read_config({name: str(value) for name, value in words.items()})
    acting = {action.__struct_config__.tag for action in adapter.actions if action.event is Signal}
    records = _with_outside(steps_of(outcome), outcome.plans, outside, acting)
    translated = schedule_of(adapter, config, [*_without_idling(_as_in(flight, records))])
    notes = (*translated.notes, *lost_in(flight, tells_outside=recorded is not None), *outside.notes)
    return translated._replace(notes=tuple(dict.fromkeys(notes)))


def _with_outside(
    records: Sequence[Record], plans: Sequence[int], outside: Outside, acting: Collection[object]
) -> Iterator[Record]:
    """Yield the steps with the signals of their plans, and of their own signals those that are ``acting``.

    A signal of an empty plan that the replay has left out belongs to the next one.
    """
    signals: dict[int, list[Event]] = {}
    for plan, signal in outside.signals:
        place = min(bisect.bisect_left(plans, plan), len(records) - 1)
        signals.setdefault(place, []).append(signal)
    for place, record in enumerate(records):
        events: list[Event] = []
        for event in record.step.events:
            if isinstance(event, Add):
                event = msgspec.structs.replace(event, **outside.requests.get(event.rid, {}))
            if not isinstance(event, Signal) or event.name in acting:
                events.append(event)
        # After the arrivals, which give their requests names.
        yield _with_events(record, [*events, *signals.get(place, ())])


def _as_in(flight: Flight, records: Iterable[Record]) -> Iterator[Record]:
    """Yield the steps with the pause in which a ring begins, and with other tokens behind each salt."""
    start = flight.start
    held = () if start is None else start.held
    arrived = [*(one.request for one in held), *(one for one in flight.frames if isinstance(one, Arrived))]
    salts = {salt: number for number, salt in enumerate(dict.fromkeys([one.salt for one in arrived if one.salt]), 1)}
    added = {name_of(one): salts[one.salt] << _SALT_BITS for one in arrived if one.salt}
    for place, record in enumerate(records):
        if start is not None and start.paused and not place:
            record = _with_events(record, [*record.step.events, Pause(call_id=call_id(0), mode=start.paused)])
        yield _salted(record, added) if added else record


def _salted(record: Record, added: Mapping[str, int]) -> Record:
    """Return a step whose requests have these numbers added to their tokens: only their equality matters."""

    def shifted(rid: str, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple([token + added.get(rid, 0) for token in tokens])

    events = [
        msgspec.structs.replace(one, prompt_ids=shifted(one.rid, one.prompt_ids)) if isinstance(one, Add) else one
        for one in record.step.events
    ]
    record = _with_events(record, events)
    if record.stepped is None:
        return record
    replies = [
        msgspec.structs.replace(one, token_ids=shifted(one.rid, one.token_ids)) if isinstance(one, Tokens) else one
        for one in record.stepped.replies
    ]
    return msgspec.structs.replace(record, stepped=msgspec.structs.replace(record.stepped, replies=tuple(replies)))


def _without_idling(records: Iterable[Record]) -> Iterator[Record]:
    """Drop all but the first few of consecutive steps in which nothing arrives and nothing is planned."""
    for is_idle, some in itertools.groupby(records, key=_is_idle):
        yield from itertools.islice(some, _EMPTY_STEPS if is_idle else None)


def _is_idle(record: Record) -> bool:
    stepped = record.stepped
    if stepped is None or record.step.events:
        return False
    return not (stepped.microbatch or stepped.replies or stepped.preempted)


def _with_events(record: Record, events: Iterable[Event]) -> Record:
    return msgspec.structs.replace(record, step=Step(tuple(events), record.step.now))


def plan_of(record: Record, names: Mapping[str, str]) -> object:
    """Return the plan of a step, with these names for its requests."""
    batch = None if record.stepped is None else record.stepped.microbatch
    if batch is None:
        return None
    return [(names.get(share.rid, share.rid), share.start, share.count, share.block_ids) for share in batch.shares]


def _recorded(record: Record) -> RecordedStep:
    batch = None if record.stepped is None else record.stepped.microbatch
    replies = () if record.stepped is None else record.stepped.replies
    said = [(reply.rid, reply.token_ids) for reply in replies if isinstance(reply, Tokens)]
    return RecordedStep(record.step.now, record.step.events, None if batch is None else batch.id, said)


class _Translator(Translator):
    def __init__(self, adapter: Any, config: object, records: Sequence[Record]) -> None:
        limits, can = adapter.limits_of(config)
        steps = [record.stepped for record in records if record.stepped is not None]
        super().__init__(
            adapter.actions,
            depth=limits.depth,
            page_size=limits.block_size,
            lengths=_lengths_of(steps),
            timed=any(stepped.deadline is not None for stepped in steps),
            guesses=bool(can.speculative_tokens),
        )
        events = (event for record in records for event in record.step.events)
        self._stops = sum(isinstance(event, Add) and bool(event.stop_token_ids) for event in events)

    def batch_of(self, event: Event) -> int | None:
        return event.batch_id if isinstance(event, Completion) else None

    def own_notes(self) -> Iterator[str]:
        yield from stops_note(self._stops)


def _lengths_of(steps: Sequence[Stepped]) -> dict[str, list[int]]:
    lengths = Lengths()
    for reply in (reply for stepped in steps for reply in stepped.replies):
        if isinstance(reply, Tokens):
            lengths.tell(reply.rid, len(reply.token_ids), reply.finish_reason)
    return lengths.by_rid
