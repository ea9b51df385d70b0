"""The frame of a plan of vLLM, in a running engine and in a replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from scripted.sdk.flight.frames import Planned, blocks_of, shape_of

# The parts of vLLM's parameters that end a request which repeats itself.
REPETITIONS: Final = ("max_pattern_size", "min_pattern_size", "min_count")


def planned_of(plan: Any, number: int, now: float, numbers: Mapping[str, int]) -> Planned:
    """Return the frame of a plan. ``numbers`` are those of requests by their names in the engine."""
    preempted = [numbers[name] for name in plan.preempted_req_ids or () if name in numbers]
    counts = plan.num_scheduled_tokens
    if not counts:
        return Planned(plan=number, now=now, shape=shape_of((), preempted), preempted=tuple(preempted))
    cached, drafts = plan.scheduled_cached_reqs, plan.scheduled_spec_decode_tokens
    starts = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
    starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    placed = [(numbers[name], starts[name], count, len(drafts.get(name, ()))) for name, count in counts.items()]
    # A resumed request is a new one to some model runners.
    tables = {new.req_id: new.block_ids for new in plan.scheduled_new_reqs}
    tables.update(zip(cached.req_ids, cached.new_block_ids, strict=True))
    return Planned(
        plan=number,
        now=now,
        shape=shape_of(placed, preempted),
        blocks=blocks_of([tables[name] for name in counts]),
        shares=tuple([(one, count) for one, _, count, _ in placed]),
        preempted=tuple(preempted),
    )
