"""A request as the scheduler holds it, from admission to its one terminal reply.

It owns no behaviour that needs another structure: the scheduler moves it from place to place, the memory fills its
lease.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from engine.core.memory import KvKey, Lease
from engine.core.messages import Delivery, FinishReason, Grammar
from engine.core.plan import SamplingSpec

# Beyond every position.
NO_LOGPROBS_DUE: Final = 1 << 62
# No KV was computed with it.
NOT_RESIDENT: Final = -1


class Place(StrEnum):
    """Where a request is. It is in exactly one place at a time.

    ``WAITING`` in the queue, owning nothing; ``CHUNKED`` partly prefilled; ``DISPATCHED`` all of its prompt launched,
    the result of the last part not yet back; ``RUNNING`` decoding; ``RETRACTING`` on its way back to the queue and
    ``RELEASING`` already ended, both only until the last microbatch with it is back; ``GONE`` ended and freed.
    In a decode engine ``RECEIVING`` its prompt's KV, or about to go on from there; in a prefill engine ``DELIVERING``
    the last of it.
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


# Constants, because a member takes four to ten times as long to look up on its class, and every step asks for some.
WAITING, CHUNKED, DISPATCHED, RUNNING, RETRACTING, RELEASING, GONE, RECEIVING, DELIVERING = Place


@dataclass(slots=True, eq=False)
class KnownGrammar:
    """A grammar under the id that the last stage knows it by. ``users`` are requests that are alive or in flight."""

    id: int
    grammar: Grammar
    is_ready: bool = False
    users: dict[Request, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False, kw_only=True)
class Lora:
    """A LoRA adapter: its name, where its weights are, and whether the stages have them.

    ``version`` is the number of the load that the stages hold, 0 while they hold none: it is not *resident* then.

    ``used`` is the number of the last microbatch with it, or of the first that could have it. One that
    is ``leaving`` is about to be unloaded, and no further request may ask for it.
    """

    name: str
    path: str
    version: int = 0
    used: int = -1
    leaving: bool = False

    def use(self, microbatch: int) -> int:
        """Note that a microbatch is computed with it; returns the version that the stages know it by."""
        assert self.version, f"{self} is not resident, but microbatch {microbatch} is to be computed with it"
        self.used = microbatch
        return self.version


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One request. Token counts are absolute positions, prompt first, then the output.

    ``ids`` is prompt and output in one list: what a re-prefill after a retraction has to compute. In the present lease
    they are computed as prompt from ``prefill_start``, where the cached prefix ends, up to ``prefill_tokens``;
    ``planned_tokens`` are computed, launched or cached already. ``cached_tokens`` is what its client is told: the
    tokens of the prompt that others had cached when it was first admitted. What it computed itself and finds again
    after a retraction is no hit. ``in_flight`` counts the microbatches and transfers with it that are not back,
    ``overtaken`` the later requests that started while it waits. ``guesses`` are a draft model's, of what
    follows ``ids``; ``lookup_text`` is where drafts are looked up without one, see ``Drafts``. ``logprobs_due`` is the
    first position whose logits have not yet given the prompt logprob that is asked for. With a ``grammar`` it
    starts when that is ready. ``lora`` is the LoRA that computes it, None for the model itself; ``salt`` is the key of
    its cache salt, 0 without one. ``misses`` counts
    the verifications in a row in which no guess held; it is guessed for again when it has ``guesses_from`` tokens, and
    ``guesses_hold`` is true when one did in one of the last two. With ``ended_by_token`` its output is whole, and is
    published when it is freed. ``prefill_at`` is the engine that computes its prompt, None where this one does;
    ``deliver`` says where its KV is sent, of which the first ``sent_pages`` are sent or about to be.
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
    chunks_done: int = 0
    overtaken: int = 0
    retractions: int = 0
    guesses: tuple[int, ...] = ()
    lookup_text: bytearray | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs_due: int = NO_LOGPROBS_DUE
    grammar: KnownGrammar | None = None
    lora: Lora | None = None
    salt: int = 0
    cache_salt: str | None = None
    prefill_at: str | None = None
    deliver: Delivery | None = None
    sent_pages: int = 0
    misses: int = 0
    guesses_from: int = 0
    guesses_hold: bool = False
    ended_by_token: bool = False

    @property
    def lacks_lora(self) -> bool:
        """True while it cannot start because the stages have not loaded its LoRA."""
        return self.lora is not None and not self.lora.version

    @property
    def kv_key(self) -> KvKey:
        """What its KV is computed with and for."""
        return (0 if self.lora is None else self.lora.version or NOT_RESIDENT), self.salt

    @property
    def is_finished(self) -> bool:
        """True from its terminal reply on."""
        return self.finish_reason is not None

    @property
    def is_prefilled(self) -> bool:
        """True when all that it ever computes is launched: only for a request of no new token."""
        return self.planned_tokens == self.limit_tokens

    @property
    def may_go_ahead(self) -> bool:
        """Whether it may be planned, while it runs, although its newest token is not known: the stage keeps that.

        One decode of it is in flight, and no second one. The token on its way is not the last that it may have: then
        the next one would be computed for nothing. That it is a stop token cannot be known; its result is dropped then.
        Where a choice depends on what was said before, by a grammar or by penalties, that has to be known when it is
        launched.
        """
        return (
            self.in_flight == 1
            and len(self.ids) + 1 < self.limit_tokens
            and self.grammar is None
            and not self.spec.has_penalty
        )

    @property
    def hit_limit_tokens(self) -> int:
        """How many of its tokens may come from the cache: no token whose logits are needed.

        Those are the last one's, for the next token, and those that a prompt logprob is still due from.
        """
        return self.logprobs_due if self.logprobs_due < self.prompt_tokens - 1 else len(self.ids) - 1

    def __repr__(self) -> str:
        return (
            f"Request({self.rid!r}, {self.place}, prompt={self.prompt_tokens}, ids={len(self.ids)}, "
            f"planned={self.planned_tokens}, in_flight={self.in_flight}, lease={self.lease})"
        )
