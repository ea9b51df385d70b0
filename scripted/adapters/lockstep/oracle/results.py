"""What a microbatch's result does: tokens that are told, requests that end, memory that may be given to others.

It books what came back in the ledger. What was launched is the launches'.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.messages import Completion, FinishReason, PipelineFailed
from engine.plan import ForwardMode, Segment
from scripted.adapters.lockstep.oracle.ledger import Flight, Ledger
from scripted.adapters.lockstep.oracle.life import Life
from scripted.adapters.lockstep.oracle.pages import Tenancy
from scripted.core.violation import Violation

__all__ = ["follow_death", "follow_result"]


def follow_result(ledger: Ledger, completion: Completion) -> None:
    """Account for a result. Raises Violation for one that is not of the microbatch that was launched first."""
    if not ledger.flights or completion.microbatch_id < ledger.flights[0].id:
        return  # It was given up when the pipeline failed.
    flight = ledger.flights.popleft()
    if flight.id != completion.microbatch_id:
        raise Violation(f"microbatch {completion.microbatch_id} came back, {flight.id} was launched first")
    if not flight.segments:
        _land_control(ledger, flight, completion.error)
    for failed in completion.errors:
        for life in flight.lives:
            if life.rid == failed.rid and life.end is None:
                ledger.end(life, failed.reason, error=failed.error)
    if completion.prompt_logprobs:
        _take_parts(ledger, flight, completion)
    ledger.pages.land_copies(flight.copies, failed=completion.error is not None)
    came = (iter(completion.token_ids), iter(completion.accepted)) if completion.error is None else None
    for segment, life, tenancy in flight.work:
        if came is None and life.end is None:
            ledger.end(life, FinishReason.ERROR, error=completion.error)
        _land(ledger, segment, life, tenancy, came)


def follow_death(ledger: Ledger, failed: PipelineFailed) -> None:
    """The pipeline is dead: every request ends with an error, and nothing in flight comes back."""
    ledger.dead = ledger.dead or failed
    ledger.end_all(FinishReason.ERROR, error=str(failed))
    ledger.profiles.give_up()
    ledger.loras.lose()
    while ledger.flights:
        flight = ledger.flights.popleft()
        ledger.pages.land_copies(flight.copies, failed=True)
        for segment, _, tenancy in flight.work:
            ledger.pages.land(segment, tenancy, confirmed=False)


def _land_control(ledger: Ledger, flight: Flight, error: str | None) -> None:
    """A microbatch without tokens is back: the stages have done what it said, or none has."""
    if flight.mode is ForwardMode.UPDATE and ledger.calls.land_update(error):
        ledger.totals.weights_version += 1
        ledger.pages.flush()
    if flight.mode is ForwardMode.PROFILE:
        ledger.profiles.land(error)
    if flight.mode is ForwardMode.LORA:
        _take_change(ledger, error)


def _take_change(ledger: Ledger, error: str | None) -> None:
    change = ledger.loras.land(error)
    ledger.totals.lora_loads, ledger.totals.lora_evictions = ledger.loras.loads, ledger.loras.evictions
    if error is None or ledger.loras.is_asked_for(change):
        return
    for life in [one for one in ledger.live.values() if one.message.lora == change.name]:
        ledger.end(life, FinishReason.UNAVAILABLE, error=error)


def _take_parts(ledger: Ledger, flight: Flight, completion: Completion) -> None:
    """Prompt logprobs: each part is told with its chunk's result, before the tokens of any."""
    parts = iter(completion.prompt_logprobs)
    version = ledger.totals.weights_version
    for segment, life, _ in flight.work:
        if segment.logprobs_from < 0:
            continue
        part = next(parts)
        if life.end is None:
            ledger.due.expect(life, part=part)
            life.prompt_logprobs += part
            life.versions += () if version in life.versions else (version,)


def _land(
    ledger: Ledger, segment: Segment, life: Life, tenancy: Tenancy, came: tuple[Iterator[int], Iterator[int]] | None
) -> None:
    """A segment is back, with the tokens and the accepted guesses that came; None with an error."""
    confirmed, rejected = life.end is None, 0
    if not segment.drafts:
        ledger.pages.land(segment, tenancy, confirmed=confirmed)
    elif came is not None:
        rejected = segment.drafts - next(came[1])
        ledger.totals.drafted_tokens += segment.drafts
        ledger.totals.accepted_tokens += segment.drafts - rejected
    if segment.emits and came is not None:
        for _ in range(1 + segment.drafts - rejected):
            _take_token(ledger, life, next(came[0]), tenancy)
    elif life.end is None and not tenancy.in_flight and tenancy.planned == life.limit:
        # Nothing is to follow the prompt, and all of it is computed.
        ledger.end(life, FinishReason.LENGTH)
    if segment.drafts:
        # After the tokens: what was guessed right belongs to the request only now.
        tenancy.planned -= rejected
        ledger.pages.land(segment, tenancy, confirmed=confirmed, rejected=rejected)
    # After the token, because a request on its way back to the queue may end with it.
    if life.tenancy is not None and life.tenancy.leaving:
        ledger.note_if_retracted(life)


def _take_token(ledger: Ledger, life: Life, token: int, tenancy: Tenancy) -> None:
    if life.end is not None:
        return
    life.ids.append(token)
    ledger.totals.generated_tokens += 1
    version = ledger.totals.weights_version
    if version not in life.versions:
        life.versions += (version,)
    life.running = not tenancy.leaving
    if token in life.stop_ids:
        ledger.end(life, FinishReason.STOP, token)
    elif len(life.ids) >= life.limit:
        ledger.end(life, FinishReason.LENGTH, token)
    else:
        ledger.due.expect(life, (token,))
