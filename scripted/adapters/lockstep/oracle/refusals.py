"""Which requests must be refused, by which rule, and whether a refusal names it. It changes nothing."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Final

from engine.limits import Limits
from engine.messages import Event, Generate, Refusal, RefusalKind, ended_by
from scripted.adapters.lockstep.oracle.ledger import Ledger
from scripted.adapters.lockstep.oracle.life import Life
from scripted.core.violation import Violation

__all__ = ["check_refusal", "refusal_of"]

# What the text of a refusal names: the rule that is in the request's way.
_RULES: Final = {
    RefusalKind.UNAVAILABLE: ("process died",),
    RefusalKind.INVALID: ("context_length", "max_prefill_tokens", "KV cache", "the prompt is empty"),
    RefusalKind.DUPLICATE: ("is alive",),
    RefusalKind.BUSY: ("max_queued_requests",),
    RefusalKind.NOT_FOUND: ("must be loaded", "being unloaded"),
}


def refusal_of(life: Life, ledger: Ledger) -> RefusalKind | None:
    """Why a request that arrives now must be refused; None when it must enter the queue."""
    return _refusal_of(life, ledger, ledger.live, ledger.waiting)


def check_refusal(message: Generate, refusal: Refusal, ahead: Iterable[Event], ledger: Ledger) -> None:
    """A request is refused before a step has seen it, with ``ahead`` on the way to the engine before it.

    Raises Violation where nothing is in its way, or where the refusal is of another rule than that.
    """
    live = {rid: life.tenancy is None for rid, life in ledger.live.items()}
    for other in ahead:
        if isinstance(other, Generate):
            live[other.rid] = True
        for rid in ended_by(other, live.keys()):
            del live[rid]
    due = _refusal_of(Life(message, ledger.limits), ledger, live, sum(live.values()))
    if refusal.kind is not due:
        raise Violation(f"{message.rid} is refused as {refusal.kind}, but due is {due}: {refusal.message}")
    if refusal.rid != message.rid or not any(rule in refusal.message for rule in _RULES[refusal.kind]):
        raise Violation(f"{message.rid} is refused as {refusal.kind} without the rule or its rid: {refusal}")


def _refusal_of(life: Life, ledger: Ledger, live: Container[str], waiting: int) -> RefusalKind | None:
    if ledger.dead is not None:
        return RefusalKind.UNAVAILABLE
    if _never_fits(life, ledger.limits):
        return RefusalKind.INVALID
    if life.message.lora is not None and not ledger.loras.may_ask_for(life.message.lora):
        return RefusalKind.NOT_FOUND
    if life.rid in live:
        return RefusalKind.DUPLICATE
    return RefusalKind.BUSY if waiting >= ledger.limits.max_queued_requests else None


def _never_fits(life: Life, limits: Limits) -> bool:
    """By its numbers: the prompt leaves no room for a token, or the KV of all but the last token has none.

    A prompt that nothing is to follow may fill the context.
    """
    prompt = life.prompt_tokens
    longest = limits.context_length - (life.message.sampling.max_new_tokens > 0)
    if not 0 < prompt <= longest or (not limits.chunking and prompt > limits.prefill_budget_tokens):
        return True
    return max(life.limit, prompt + 1) - 1 > limits.total_pages * limits.page_size
