"""A request as the scheduler holds it, from admission to its one terminal reply.

It owns no behaviour that needs another structure: the scheduler moves it from place to place, the memory fills its
lease.
"""

from __future__ import annotations

from enum import StrEnum

from engine.memory import Lease
from engine.messages import FinishReason, Generate
from engine.plan import SamplingSpec

__all__ = ["Place", "Request"]


class Place(StrEnum):
    """Where a request is. It is in exactly one place at a time.

    ``WAITING`` in the queue, owning nothing; ``CHUNKED`` partly prefilled; ``DISPATCHED`` all of its prompt launched,
    the result of the last part not yet back; ``RUNNING`` decoding; ``RETRACTING`` on its way back to the queue and
    ``RELEASING`` already ended, both only until the last microbatch with it is back; ``GONE`` ended and freed.
    """

    WAITING = "waiting"
    CHUNKED = "chunked"
    DISPATCHED = "dispatched"
    RUNNING = "running"
    RETRACTING = "retracting"
    RELEASING = "releasing"
    GONE = "gone"


class Request:
    """One request. Token counts are absolute positions, prompt first, then the output.

    ``ids`` is prompt and output in one list: what a re-prefill after a retraction has to compute. In the present lease
    they are computed as prompt from ``prefill_start``, where the cached prefix ends, up to ``prefill_tokens``;
    ``planned_tokens`` are computed, launched or cached already. ``cached_tokens`` is what its client is told: the
    tokens of the prompt that others had cached when it was first admitted. What it computed itself and finds again
    after a retraction is no hit. ``in_flight`` counts the microbatches with it that are not back, ``overtaken`` the
    later requests that started while it waits.
    """

    __slots__ = (
        "arrival",
        "cached_tokens",
        "chunks_done",
        "error",
        "finish_reason",
        "ids",
        "in_flight",
        "lease",
        "limit_tokens",
        "overtaken",
        "place",
        "planned_tokens",
        "prefill_start",
        "prefill_tokens",
        "priority",
        "prompt_tokens",
        "retractions",
        "rid",
        "spec",
        "stop_ids",
    )

    def __init__(
        self, message: Generate, *, arrival: int, limit_tokens: int, spec: SamplingSpec, stop_ids: frozenset[int]
    ) -> None:
        self.rid = message.rid
        self.priority = message.priority
        self.arrival = arrival
        self.spec = spec
        self.stop_ids = stop_ids
        self.limit_tokens = limit_tokens
        self.ids = list(message.prompt_ids)
        self.prompt_tokens = len(self.ids)

        self.place = Place.WAITING
        self.lease: Lease | None = None
        self.in_flight = 0
        self.prefill_start = 0
        self.prefill_tokens = 0
        self.planned_tokens = 0
        self.cached_tokens = 0
        self.chunks_done = 0
        self.overtaken = 0
        self.retractions = 0
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None

    @property
    def is_finished(self) -> bool:
        """True from its terminal reply on."""
        return self.finish_reason is not None

    @property
    def remaining_prompt_tokens(self) -> int:
        """Tokens that must still be launched before it can decode."""
        if self.place is Place.WAITING:
            return len(self.ids)
        return max(0, self.prefill_tokens - self.planned_tokens) if self.place is Place.CHUNKED else 0

    def __repr__(self) -> str:
        return (
            f"Request({self.rid!r}, {self.place}, prompt={self.prompt_tokens}, ids={len(self.ids)}, "
            f"planned={self.planned_tokens}, in_flight={self.in_flight}, lease={self.lease})"
        )
