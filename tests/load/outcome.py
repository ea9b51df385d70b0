"""Judges the outcome of each request of a load run, given what its client did.

Owns the rules of judgement; talks to no process. A complaint is a sentence; no complaint is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from workload import Ask, Behaviour

# From a death to the final message of every stream, but for the time in which processes wait for a core.
DEATH_BOUND_S = 2.0
# A client learns of an end later than the server does; an answer that comes so long before is surely of a live rid.
TWIN_MARGIN_S = 1.0


@dataclass(frozen=True)
class Window:
    """A time in which an operator ended every live request, in seconds of the monotonic clock."""

    start: float
    end: float


@dataclass
class Outcome:
    """A client's view of one request; times are in seconds of the monotonic clock, 0 for what never happened.

    ``finish_reasons`` has every terminal piece, in the order in which they came. ``cut`` says how the connection broke.
    """

    ask: Ask
    started: float = 0.0
    first_event: float = 0.0
    ended: float = 0.0
    status: int = 0
    events: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    output_ids: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    matched_stop: str | int | None = None
    completion_tokens: int = 0
    error: str = ""
    closed_in_order: bool = False
    cut: str = ""
    abort_sent: bool = False
    left: bool = False
    twin_status: int = 0
    twin_ended: float = 0.0

    @property
    def ending(self) -> str:
        if self.left:
            return "left"
        if self.cut:
            return "cut"
        if self.error:
            return f"error {self.status}"
        return "+".join(sorted(set(self.finish_reasons))) or "silence"

    def __str__(self) -> str:
        return f"{self.ask.rid} ({self.ask.behaviour}, {self.events} events, ended by {self.ending}): {self.error}"


def complaint_about(outcome: Outcome, windows: Sequence[Window]) -> str | None:
    """Return the complaint about an outcome on a live server, or None; operators ended everything in ``windows``."""
    ask = outcome.ask
    if outcome.cut:
        return f"{outcome} was cut off: {outcome.cut}"
    if ask.behaviour is Behaviour.BAD:
        right = outcome.status == 400 and outcome.error and not outcome.events
        return None if right else f"{outcome} is a bad request and must get 400, got {outcome.status}"
    if outcome.left:
        return None
    if outcome.error:
        # Of several choices one may find the queue full when another one's first token is out already.
        began = outcome.status == 200 and ask.choices > 1 and bool(outcome.events)
        busy = (outcome.status == 429 or began) and "max_queued_requests" in outcome.error
        return None if busy else f"{outcome}: the only error here is a full queue, got {outcome.status}"
    return _complaint_about_twin(outcome) or _complaint_about_end(outcome, windows)


def _complaint_about_end(outcome: Outcome, windows: Sequence[Window]) -> str | None:
    ask, reasons = outcome.ask, outcome.finish_reasons
    if len(reasons) != ask.choices:
        return f"{outcome} must end {ask.choices} times, once a choice, ended {len(reasons)} times: {reasons}"
    if ask.streams and not outcome.closed_in_order:
        return f"{outcome} ended, but its stream was not closed by [DONE]"
    if "abort" in reasons:
        was = any(window.start <= outcome.ended and outcome.started <= window.end for window in windows)
        return None if outcome.abort_sent or was else f"{outcome} was aborted without a cause"
    if ask.choices > 1:
        return None
    if outcome.completion_tokens != len(outcome.output_ids):
        return f"{outcome} counts {outcome.completion_tokens} tokens, its ids are {len(outcome.output_ids)}"
    return _complaint_about_length(outcome, reasons[0])


def _complaint_about_length(outcome: Outcome, reason: str) -> str | None:
    ask, text = outcome.ask, outcome.texts.get(0, "")
    if ask.stop is not None and ask.stop in text:
        return f"{outcome} shows its stop string {ask.stop!r} in {text!r}"
    if reason == "length":
        right = outcome.completion_tokens == ask.new_tokens
        return None if right else f"{outcome} must have {ask.new_tokens} tokens, has {outcome.completion_tokens}"
    return None if outcome.matched_stop is not None else f"{outcome} stopped, but says not by what"


def _complaint_about_twin(outcome: Outcome) -> str | None:
    """A second request of a rid that was live from before the second was sent until well after it was answered."""
    if not outcome.twin_ended or outcome.twin_ended + TWIN_MARGIN_S > outcome.ended:
        return None
    return None if outcome.twin_status == 409 else f"{outcome}: its twin must get 409, got {outcome.twin_status}"


def complaint_after_death(outcome: Outcome, process: str, died: float, bound_s: float = DEATH_BOUND_S) -> str | None:
    """Return the complaint about an outcome on a server whose ``process`` was killed at ``died``, or None."""
    if outcome.ended <= died:
        return None
    if outcome.ended > died + bound_s:
        return f"{outcome} lived on for {outcome.ended - died:.2f} s after the death of {process}"
    if outcome.left or outcome.ask.behaviour is Behaviour.BAD:
        return None
    if outcome.error:
        named = f"the {process} process died" in outcome.error or outcome.status == 429
        return None if named else f"{outcome} does not name {process}"
    if outcome.cut:
        # Its connection may not even have been accepted; a stream that had begun must get a final message.
        return f"{outcome} was cut off without an error: {outcome.cut}" if outcome.first_event else None
    return None if outcome.closed_in_order or outcome.finish_reasons else f"{outcome} ended in silence"
