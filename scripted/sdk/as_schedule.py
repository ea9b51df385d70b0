"""Translates a recording of an SDK machine into a schedule: the same events and steps, new prompts and names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripted.core.schedule import Schedule
from scripted.core.translation import Lengths, RecordedStep, Translated, Translator
from scripted.sdk.messages import Add, BatchFailed, BatchResult, Event, Record, Stepped, Tokens


def schedule_of(adapter: Any, config: object, records: Sequence[Record]) -> Translated:
    """Translate the steps of a machine of this configuration."""
    translator = _Translator(adapter, config, records)
    return translator.translated(Schedule(config, (), adapter.name), map(_recorded, records), records, plan_of)


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
        told = [record.stepped for record in records if record.stepped is not None]
        super().__init__(
            adapter.actions,
            depth=limits.depth,
            page_size=limits.block_size,
            lengths=_lengths_of(told),
            timed=any(stepped.deadline is not None for stepped in told),
            guesses=bool(can.speculative_tokens),
        )
        self._stops = sum(bool(event.stop_token_ids) for event in _adds(records))

    def batch_of(self, event: Event) -> int | None:
        return event.batch_id if isinstance(event, BatchResult | BatchFailed) else None

    def own_notes(self) -> Iterator[str]:
        if self._stops:
            yield f"{self._stops} requests have stop tokens; here they are as long as they became"


def _adds(records: Sequence[Record]) -> Iterator[Add]:
    return (event for record in records for event in record.step.events if isinstance(event, Add))


def _lengths_of(told: Sequence[Stepped]) -> dict[str, list[int]]:
    lengths = Lengths()
    for reply in (reply for stepped in told for reply in stepped.replies):
        if isinstance(reply, Tokens):
            lengths.tell(reply.rid, len(reply.token_ids), reply.finish_reason)
    return lengths.by_rid
