"""What may be planned ahead: a decode of a request whose newest token is on its way, and no other.

It books nothing.
"""

from __future__ import annotations

from engine.plan import Segment
from scripted.adapters.lockstep.oracle.life import Life
from scripted.adapters.lockstep.oracle.pages import Tenancy
from scripted.core.violation import Violation

__all__ = ["check_ahead"]


def check_ahead(segment: Segment, life: Life, tenancy: Tenancy) -> None:
    """Compare a segment that goes on from a token that is not known with its request. Raises Violation."""
    known = len(life.ids)
    if not life.running or tenancy.in_flight != 2:  # Itself included, which is booked already.
        raise Violation(
            f"{life.rid} is planned ahead, which needs one decode in flight before it: it runs is {life.running}, "
            f"{tenancy.in_flight - 1} microbatches with it are in flight"
        )
    if segment.start != known or tenancy.planned != known:
        raise Violation(
            f"{life.rid} has {known} tokens, is planned up to {tenancy.planned}, and goes on with {segment}"
        )
    if known + 1 >= life.limit:
        raise Violation(f"{life.rid} is planned ahead of the last of its {life.limit} tokens, which is on its way")
    if life.looks_back:
        raise Violation(f"{life.rid} is planned ahead, but a choice of its depends on the token before: {segment}")
    if not segment.emits or segment.drafts or segment.sampling is not None or segment.logprobs_from >= 0:
        raise Violation(f"{life.rid} is planned ahead and must say one token and nothing else: {segment}")
