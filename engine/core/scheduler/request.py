"""The scheduler's view of a request, from admission to its one terminal reply.

A request changes no other structure: the scheduler moves it from place to place, the memory fills its lease.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from engine.core.memory import PLAIN, KvKey, Lease
from engine.core.messages import FinishReason
from engine.core.plan import SamplingSpec

# Beyond every position.
NO_POSITION: Final = 1 << 62


class Place(StrEnum):
    """Where a request is. It is in exactly one place at a time.

    ``WAITING`` in the queue, owning nothing; ``CHUNKED`` partly prefilled; ``DISPATCHED`` with its whole prompt
    launched and the last result not yet back; ``RUNNING`` decoding; ``RETRACTING`` on its way back to the queue and
    ``RELEASING`` already ended, both only until the last microbatch with it is back; ``GONE`` ended and freed.
    ``RECEIVING`` the KV of its prompt in a decode engine, or about to continue from it; ``DELIVERING`` the last of that
    KV in a prefill engine.
    """

    WAITING = "waiting"
    CHUNKED = "chunked"
    DISPATCHED = "dispatched"
    RUNNING = "running"
    RETRACTING = "retracting"
    RELEASING = "releasing"
    GONE = "gone"
    RECEIVING = "receiving"
    DELIVERING = "delivering"


# Constants: every step looks some up, and a lookup on the class takes four to ten times as long.
WAITING, CHUNKED, DISPATCHED, RUNNING, RETRACTING, RELEASING, GONE, RECEIVING, DELIVERING = Place


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One request. Token counts are absolute positions, prompt first, then the output.

    ``ids`` is prompt and output in one list, which a re-prefill after a retraction computes. The current lease computes
    them as prompt from ``prefill_start``, where the cached prefix ends, up to ``prefill_tokens``; ``planned_tokens``
    are computed, launched or cached already. ``cached_tokens``, which its client sees, are the prompt tokens that
    others had cached when it was first admitted; ``cached_tokens_host`` of them were loaded from host memory. Tokens
    that it computed itself and finds again after a retraction do not count as hits. ``in_flight`` counts the
    microbatches and transfers with it that are not back, ``overtaken`` the later requests that started while it waits.
    With ``ended_by_token`` its output is complete, and is published when it is freed.

    Set by features: ``kv_key`` identifies the LoRA and the cache salt of its KV, and is opaque elsewhere.
    ``logits_from`` is the first position of the prompt whose logits it needs. With ``needs_history`` sampling a token
    depends on the tokens before it. With ``may_be_received`` another engine may compute its prompt.
    """

    rid: str
    priority: int
    arrival: int
    spec: SamplingSpec
    stop_ids: frozenset[int]
    limit_tokens: int
    ids: list[int]
    prompt_tokens: int

    place: Place = Place.WAITING
    lease: Lease | None = None
    in_flight: int = 0
    prefill_start: int = 0
    prefill_tokens: int = 0
    planned_tokens: int = 0
    cached_tokens: int = 0
    cached_tokens_host: int = 0
    chunks_done: int = 0
    overtaken: int = 0
    retractions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    ended_by_token: bool = False
    kv_key: KvKey = PLAIN
    logits_from: int = NO_POSITION
    needs_history: bool = False
    may_be_received: bool = False

    @property
    def is_finished(self) -> bool:
        """True after its terminal reply."""
        return self.finish_reason is not None

    @property
    def is_prefilled(self) -> bool:
        """True if its whole prompt is launched and it wants no new token."""
        return self.planned_tokens == self.limit_tokens

    @property
    def may_go_ahead(self) -> bool:
        """True if it may be planned, while it runs, before its newest token is known: the stage has that token.

        Exactly one decode of it is in flight, and that decode's token is not its last by length: the next one would be
        computed for nothing. A stop token cannot be foreseen; its surplus result is dropped. If sampling depends on
        earlier tokens, they must be known at the launch.
        """
        return (
            self.in_flight == 1
            and len(self.ids) + 1 < self.limit_tokens
            and not self.needs_history
            and not self.spec.has_penalty
        )

    @property
    def hit_limit_tokens(self) -> int:
        """The maximum number of tokens that may come from the cache, which has no logits.

        A request needs the logits of its last token, for the next one, and the logits from ``logits_from`` on.
        """
        return self.logits_from if self.logits_from < self.prompt_tokens - 1 else len(self.ids) - 1

    def __repr__(self) -> str:
        return (
            f"Request({self.rid!r}, {self.place}, prompt={self.prompt_tokens}, ids={len(self.ids)}, "
            f"planned={self.planned_tokens}, in_flight={self.in_flight}, lease={self.lease})"
        )
