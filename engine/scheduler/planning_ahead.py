"""Planning ahead: which requests may decode once more while the token of their last decode is on its way.

The stage keeps that token, so the plan need not say it. What is planned ahead takes memory from no other request.
"""

from __future__ import annotations

from engine.scheduler.request import Request


def may_go_ahead(request: Request) -> bool:
    """Whether a running request may be planned although its newest token is not known.

    One decode of it is in flight, and no second one. The token on its way is not the last that it may have: then the
    next one would be computed for nothing. That it is a stop token cannot be known; its result is dropped then. Where a
    choice depends on what was said before, by a grammar or by penalties, that has to be known when it is launched.
    """
    return (
        request.in_flight == 1
        and len(request.ids) + 1 < request.limit_tokens
        and request.grammar is None
        and not request.spec.has_penalty
    )
