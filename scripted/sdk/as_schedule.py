"""What a ``Recorder`` wrote as a schedule: the same events at the same steps, with prompts and names of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripted.core.schedule import Schedule
from scripted.core.translation import ENDLESS, RecordedStep, Translated, Translator
from scripted.sdk.capabilities import Capabilities, Limits
from scripted.sdk.messages import Add, BatchFailed, BatchResult, Event, Record, Tokens

_ENDED = ("length", "stop")


def schedule_of(adapter: Any, config: Any, records: Sequence[Record]) -> Translated:
    """These steps of a machine of this configuration."""
    limits, can = adapter.limits_of(config)
    translator = _Translator(adapter, limits, can, records)
    placed = translator.placed(map(_recorded, records))
    schedule = Schedule(config, (), adapter.name).with_placed(placed)
    plans = [plan_of(record, translator.names) for record in records]
    return Translated(schedule, translator.steps, plans, tuple(translator.notes()))


def plan_of(record: Record, names: Mapping[str, str]) -> object:
    """What a step launched, with these names for the requests."""
    batch = None if record.stepped is None else record.stepped.microbatch
    if batch is None:
        return None
    return [(names.get(share.rid, share.rid), share.start, share.count, share.block_ids) for share in batch.shares]


def _recorded(record: Record) -> RecordedStep:
    batch = None if record.stepped is None else record.stepped.microbatch
    return RecordedStep(record.step.now, record.step.events, None if batch is None else batch.id)


class _Translator(Translator):
    def __init__(self, adapter: Any, limits: Limits, can: Capabilities, records: Sequence[Record]) -> None:
        told = [record.stepped for record in records if record.stepped is not None]
        super().__init__(
            adapter.actions,
            depth=limits.depth,
            page_size=limits.block_size,
            lengths=_lengths_of(records),
            timed=any(stepped.deadline is not None for stepped in told),
        )
        self._can = can
        self._stops = sum(bool(event.stop_token_ids) for event in _adds(records))

    def batch_of(self, event: Event) -> int | None:
        return event.batch_id if isinstance(event, BatchResult | BatchFailed) else None

    def notes(self) -> Iterator[str]:
        if self._can.speculative_tokens:
            yield "guesses depend on the text, and a schedule has a text of its own: other guesses hold in it"
        if self._stops:
            yield f"{self._stops} requests have stop tokens; here they are as long as they became"
        yield from super().notes()


def _adds(records: Sequence[Record]) -> Iterator[Add]:
    return (event for record in records for event in record.step.events if isinstance(event, Add))


def _lengths_of(records: Sequence[Record]) -> dict[str, list[int]]:
    """How many tokens each request was told when it ended by itself, by rid, in the order of its lives."""
    lengths: dict[str, list[int]] = {}
    said: dict[str, int] = {}
    for record in records:
        for reply in () if record.stepped is None else record.stepped.replies:
            if isinstance(reply, Tokens):
                said[reply.rid] = said.get(reply.rid, 0) + len(reply.token_ids)
                if reply.finish_reason is not None:
                    tokens = said.pop(reply.rid)
                    lengths.setdefault(reply.rid, []).append(tokens if reply.finish_reason in _ENDED else ENDLESS)
    return lengths
