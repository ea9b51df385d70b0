"""What may be launched: within depth and budgets, for requests that are alive, each at its own next position.

It books what a plan says in the ledger. What becomes of it is the results'.
"""

from __future__ import annotations

from engine.plan import DECODE, MIXED, PREFILL, UPDATE, LoraUpdate, Microbatch, Segment, WeightUpdate
from scripted.adapters.lockstep.oracle.asked_logprobs import check_asked
from scripted.adapters.lockstep.oracle.ledger import Flight, Ledger
from scripted.adapters.lockstep.oracle.life import Life
from scripted.adapters.lockstep.oracle.pages import Tenancy
from scripted.adapters.lockstep.oracle.planned_ahead import check_ahead
from scripted.core.violation import Violation

__all__ = ["follow_launch"]


def follow_launch(ledger: Ledger, microbatch: Microbatch) -> None:
    """Account for a microbatch. Raises Violation for one that was not to be launched like this."""
    _check_launch(ledger, microbatch)
    lives: list[Life] = []
    tenancies: list[Tenancy] = []
    for segment in microbatch.segments:
        life, tenancy = _tenant_of(ledger, segment)
        lives.append(life)
        tenancies.append(tenancy)
    decodes = sum([life.running for life in lives])
    ledger.pages.launch(microbatch.segments, tenancies, microbatch.copies)
    for segment, life, tenancy in zip(microbatch.segments, lives, tenancies, strict=True):
        _check_tokens(ledger, segment, life, tenancy)
        _note_part(ledger, life, tenancy)
    if lives:
        mode = DECODE if decodes == len(lives) else MIXED if decodes else PREFILL
        if microbatch.mode is not mode:
            raise Violation(f"microbatch {microbatch.id} is called {microbatch.mode}, but has what makes it {mode}")
    ledger.flights.append(Flight(microbatch, lives, tenancies))
    ledger.totals.forward_ct += 1


def _check_launch(ledger: Ledger, microbatch: Microbatch) -> None:
    number, limits, flights = microbatch.id, ledger.limits, ledger.flights
    if number != ledger.totals.forward_ct:
        raise Violation(f"microbatch {number} is launched, but it is number {ledger.totals.forward_ct}")
    if flights and flights[-1].mode is UPDATE:
        raise Violation(f"microbatch {number} is launched while the weights are being updated")
    if isinstance(microbatch, WeightUpdate):
        _check_update(ledger, microbatch)
        return
    if len(flights) >= limits.depth:
        raise Violation(f"microbatch {number} is launched, {limits.depth} are in flight already")
    if isinstance(microbatch, LoraUpdate):
        in_use = {tenancy.lora for tenancy in ledger.pages.rows.values()}
        ledger.loras.launch(microbatch.change, in_use, is_used=ledger.is_used(microbatch.change.name))
    if microbatch.is_control:
        return
    if ledger.paused is not None:
        raise Violation(f"microbatch {number} is launched while generation is paused")
    most = limits.decode_budget_tokens if microbatch.mode is DECODE else limits.prefill_budget_tokens
    if not 1 <= microbatch.tokens <= most:
        raise Violation(f"microbatch {number} has {microbatch.tokens} tokens, the budget is {most}")
    bound = limits.microbatch_requests
    if bound is not None and len(microbatch.segments) > bound:
        raise Violation(f"microbatch {number} has {len(microbatch.segments)} requests, the bound is {bound}")
    if len(microbatch.segments) > 1 and len(set(rids := microbatch.rids)) != len(rids):
        raise Violation(f"a request is in microbatch {number} twice: {', '.join(rids)}")


def _check_update(ledger: Ledger, microbatch: WeightUpdate) -> None:
    if not ledger.is_quiescent:
        busy = [flight.id for flight in ledger.flights], list(ledger.pages.rows.values())
        raise Violation(f"the weights are updated while microbatches {busy[0]} are in flight and {busy[1]} own rows")
    update = ledger.calls.update
    if update is None or update.model_path != microbatch.path:
        raise Violation(f"the weights are updated to {microbatch.path}, but asked for is {update}")


def _tenant_of(ledger: Ledger, segment: Segment) -> tuple[Life, Tenancy]:
    """The request of a segment and its stay in the segment's row; a new one when the segment brings a spec."""
    life = ledger.live.get(segment.rid)
    if life is None:
        raise Violation(f"{segment.rid} is computed although it is not alive")
    tenancy = life.tenancy
    if segment.sampling is None:
        if tenancy is None or tenancy.leaving or tenancy.row != segment.row:
            raise Violation(f"{segment.rid} goes on in row {segment.row}, but its row is {tenancy}")
        return life, tenancy
    before = ledger.pages.rows.get(segment.row)
    for old in (tenancy, before):
        if old is not None and ledger.pages.rows.get(old.row) is old:
            ledger.retract(old)
    if not life.started:
        life.started, life.cached_tokens = True, segment.start
        ledger.totals.cached_tokens += segment.start
    ledger.grammars.check_start(life.message, segment.sampling)
    life.tenancy = tenancy = Tenancy(life.rid, segment.row, life.ids, segment.start, segment.lora)
    ledger.pages.open(tenancy)
    return life, tenancy


def _check_tokens(ledger: Ledger, segment: Segment, life: Life, tenancy: Tenancy) -> None:
    """Positions without a gap, the request's own tokens, its own LoRA, and what was asked of its prompt."""
    if ledger.limits.async_scheduling and segment.is_ahead:
        check_ahead(segment, life, tenancy)
        tenancy.planned += 1
        return
    start, known = segment.start, len(life.ids)
    end = start + len(segment.token_ids) - segment.drafts
    if segment.lora or life.message.lora is not None:
        ledger.loras.computes(segment, life.message.lora)
    if segment.lora != tenancy.lora:
        raise Violation(f"{life.rid} began with version {tenancy.lora} of its LoRA, now it is {segment.lora}")
    if start != tenancy.planned or tuple(life.ids[start:end]) != segment.token_ids[: end - start]:
        raise Violation(f"{life.rid} is due at position {tenancy.planned} of {life.ids}, planned is {segment}")
    emits = end == known < life.limit
    if segment.emits is not emits:
        raise Violation(f"{life.rid} has {known} tokens, computed up to {end} it emits one is {emits}")
    if segment.logprobs_from >= 0 or life.message.prompt_logprobs_from >= 0:
        # Of this stay in a row, that is: what a request was asked before it was sent back has come.
        asked = [one for flight in ledger.flights for one, _, other in flight.work if other is tenancy]
        check_asked(segment, life.ids, life.due, asked)
    if segment.drafts and (end != known or known + segment.drafts >= life.limit):
        raise Violation(f"{life.rid} has {known} of at most {life.limit} tokens and guesses: {segment}")
    tenancy.planned = end + segment.drafts


def _note_part(ledger: Ledger, life: Life, tenancy: Tenancy) -> None:
    """At most one request is partly computed."""
    if tenancy.planned < len(life.ids):
        if ledger.partial is not None and ledger.partial is not life:
            raise Violation(f"{life.rid} is split while {ledger.partial.rid} is partly computed")
        ledger.partial = life
        life.parts += 1
    elif ledger.partial is life:
        ledger.partial = None
        life.parts += 1
