"""Dynamic chunk sizes of the executable specification: the largest part of a prompt that a microbatch can bear.

Names in bold are the rules of docs/architecture.md, "The rules of a step". It counts, and solves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.limits import Limits


def next_part(limits: Limits, plan: Sequence[tuple[Any, int, int]], prefix: int, rest: int, room: int) -> int:
    """**Chunks**: all that there is room for. **Even**: as many pages as the microbatch can bear, at least one."""
    if not limits.dynamic_chunking:
        return min(rest, room)
    most, page = _cost(limits, 0, limits.prefill_budget_tokens), limits.page_size
    spent = sum([_cost(limits, start, end - start) for _, start, end in plan])
    end = prefix - prefix % page
    while spent + _cost(limits, prefix, end + page - prefix) <= most:
        end += page
    tokens = max(page, end - prefix)
    return min(rest if rest < tokens + page else tokens, room)


def _cost(limits: Limits, prefix: int, tokens: int) -> int:
    """**Even**: what a part of a prompt costs: its tokens, each by the prefix that it attends to."""
    return tokens * (2 * limits.chunk_parity_tokens + 2 * prefix + tokens)
