"""The account of prompt logprobs in plans: each position that a value is due from is asked once, where it is computed.

It sees plans only. What came of them, and what clients were told, is the account of clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.plan import Segment
from scripted.core.violation import Violation

__all__ = ["check_asked"]


def check_asked(segment: Segment, ids: Sequence[int], due: range, in_flight: Iterable[Segment]) -> None:
    """A segment of a request with these ids asks for what is due of it, and skips nothing.

    ``due`` are the positions whose logits have not yet given the logprob of the token that follows; what ``in_flight``
    asks for is on its way. Raises Violation.
    """
    rid, start, end = segment.rid, segment.start, segment.start + len(segment.token_ids)
    reached = due.start
    for other in in_flight:
        if other.logprobs_from == reached:
            reached += len(other.targets)
    if reached < due.stop and start > reached:
        raise Violation(
            f"{rid} goes on at position {start}, but its prompt logprobs are due from position {reached} on"
        )
    rows = range(max(start, due.start), min(end, due.stop))
    asked = segment.logprobs_from, segment.targets
    expected = (rows.start, tuple(ids[rows.start + 1 : rows.stop + 1])) if rows else (-1, ())
    if asked != expected:
        raise Violation(
            f"{rid} asks for the logprobs of {list(asked[1])} after position {asked[0]}, but due are those of "
            f"{list(expected[1])} after position {expected[0]}"
        )
