"""Reads vLLM's plans and outputs. Standalone tests contain this file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def positions_of(plan: Any, request_id: str) -> range:
    """Return the positions of a request that a plan computes."""
    cached = plan.scheduled_cached_reqs
    starts = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
    starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    start = starts.get(request_id, 0)
    return range(start, start + plan.num_scheduled_tokens.get(request_id, 0))


def said_of(outputs: Sequence[Any], request_id: str) -> list[int]:
    """Return the tokens that a request's client received."""
    of_requests = [one for output in outputs for each in output.values() for one in each.outputs]
    return [token for one in of_requests if one.request_id == request_id for token in one.new_token_ids]


def launches(plan: Any) -> bool:
    return bool(plan.num_scheduled_tokens)


def moves(plan: Any) -> bool:
    return bool(plan.num_scheduled_tokens or getattr(plan.kv_connector_metadata, "loads", ()))
