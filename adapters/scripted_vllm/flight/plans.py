"""Packs vLLM's plans, both in a running engine and in a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from scripted.sdk.flight.packed import packed_plan

# The fields of vLLM's parameters that end a request that repeats itself.
REPETITIONS: Final = ("max_pattern_size", "min_pattern_size", "min_count")


class Numbers:
    """Request numbers by the engine's names; caches the last answer: consecutive plans have the same requests."""

    def __init__(self) -> None:
        self.by_name: dict[str, int] = {}
        self._names: list[str] = []
        self._numbers: list[int] = []

    def add(self, name: str, number: int) -> None:
        self.by_name[name] = number
        # A name may be used again, with another number.
        self._names, self._numbers = [], []

    def of(self, names: list[str]) -> list[int]:
        if names != self._names:
            self._names, self._numbers = names, list(map(self.by_name.__getitem__, names))
        return self._numbers


def packed_of(plan: Any, number: int, now: float, numbers: Numbers) -> bytes:
    """Pack a plan."""
    counts, cached, drafts = plan.num_scheduled_tokens, plan.scheduled_cached_reqs, plan.scheduled_spec_decode_tokens
    names = list(counts)
    starts, tables = cached.num_computed_tokens, cached.new_block_ids
    if plan.scheduled_new_reqs or cached.req_ids != names:
        starts, tables = _in_order(plan, names)
    return packed_plan(
        number,
        now,
        ids=numbers.of(names),
        starts=starts,
        counts=list(counts.values()),
        tables=tables,
        guesses=[len(drafts.get(name, ())) for name in names] if drafts else (),
        preempted=preempted_of(plan, numbers),
    )


def _in_order(plan: Any, names: Sequence[str]) -> tuple[list[int], list[Any]]:
    """Return the first positions and the block tables in the order of the plan's shares."""
    new, cached = plan.scheduled_new_reqs, plan.scheduled_cached_reqs
    # Some model runners receive a resumed request as a new one.
    starts = {one.req_id: one.num_computed_tokens for one in new}
    starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    tables = {one.req_id: one.block_ids for one in new}
    tables.update(zip(cached.req_ids, cached.new_block_ids, strict=True))
    return [starts[name] for name in names], [tables[name] for name in names]


def preempted_of(plan: Any, numbers: Numbers) -> list[int]:
    known = numbers.by_name
    return sorted([known[name] for name in plan.preempted_req_ids or () if name in known])
