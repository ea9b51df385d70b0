"""Admission: turns a client's ``Generate`` into a request, or into a refusal with the reason and its numbers.

It changes nothing: the caller puts the request into the queue. A request passes here once, when its message is
applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.core.memory import PLAIN
from engine.core.messages import Generate, PipelineFailed, Refusal, RefusalKind, salt_key
from engine.core.plan import SamplingSpec
from engine.core.scheduler.core import Core
from engine.core.scheduler.feature import Feature
from engine.core.scheduler.request import Request

# An odd multiplier (of Knuth's MMIX generator), which spreads the arrival numbers of unseeded requests over 63 bits.
_SEED_MULTIPLIER: Final = 6_364_136_223_846_793_005
_SEED_MASK: Final = 2**63 - 1


class Admission:
    """Checks messages against the limits, the books and the features of one scheduler."""

    def __init__(self, core: Core, features: Sequence[Feature]) -> None:
        self._limits = core.limits
        self._books = core.books
        # Includes features that are off: they refuse the requests that need them.
        self._refusing = [one for one in features if type(one).refusal_of is not Feature.refusal_of]
        self._end_ids = frozenset(core.limits.eos_token_ids)

    def refusal_of(
        self,
        message: Generate,
        failure: PipelineFailed | None,
        *,
        queued: int,
        taken: frozenset[str],
        freed: frozenset[str],
    ) -> Refusal | None:
        """Return why this request may not enter the queue; None if it may. See ``Scheduler.refusal_of``."""
        if failure is not None:
            return Refusal(rid=message.rid, kind=RefusalKind.UNAVAILABLE, message=str(failure))
        never = self._limits.why_never_fits(len(message.prompt_ids), message.sampling.max_new_tokens)
        if never is not None:
            return Refusal(rid=message.rid, kind=RefusalKind.INVALID, message=never)
        for feature in self._refusing:
            refusal = feature.refusal_of(message)
            if refusal is not None:
                return refusal
        alive = message.rid in self._books.requests and message.rid not in freed
        if alive or message.rid in taken:
            why = f"rid {message.rid!r} is alive; wait for its end or use another rid"
            return Refusal(rid=message.rid, kind=RefusalKind.DUPLICATE, message=why)
        leaving = sum(request.rid in freed for request in self._books.waiting) if freed else 0
        waiting, most = len(self._books.waiting) - leaving + queued, self._limits.max_queued_requests
        first = message.first_choice
        comes_with_first = first in taken or (first in self._books.requests and first not in freed)
        if waiting + message.choices > most and not comes_with_first:
            return Refusal(rid=message.rid, kind=RefusalKind.BUSY, message=_why_busy(waiting, most, message.choices))
        return None

    def request_of(self, message: Generate, arrival: int) -> Request:
        """Create the request of a message, the ``arrival``-th to be admitted; features have not seen it yet."""
        prompt_tokens, sampling = len(message.prompt_ids), message.sampling
        stop_ids = frozenset(sampling.stop_token_ids)
        # A completed grammar allows only an end token, so end tokens must end the request.
        if not sampling.ignore_eos or sampling.grammar is not None:
            stop_ids |= self._end_ids
        return Request(
            rid=message.rid,
            priority=message.priority,
            arrival=arrival,
            ids=list(message.prompt_ids),
            prompt_tokens=prompt_tokens,
            limit_tokens=min(prompt_tokens + sampling.max_new_tokens, self._limits.context_length),
            spec=self._spec(message, arrival, stop_ids),
            stop_ids=stop_ids,
            kv_key=(PLAIN[0], salt_key(message.cache_salt)),
        )

    def _spec(self, message: Generate, arrival: int, stop_ids: frozenset[int]) -> SamplingSpec:
        sampling, prompt_tokens = message.sampling, len(message.prompt_ids)
        unseeded = (self._limits.seed + arrival * _SEED_MULTIPLIER) & _SEED_MASK
        return SamplingSpec(
            seed=unseeded if sampling.seed is None else sampling.seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty,
            suppressed_ids=tuple(sorted(stop_ids)) if sampling.min_new_tokens else (),
            suppressed_until=prompt_tokens + sampling.min_new_tokens,
            return_logprob=message.return_logprob,
            top_logprobs_num=message.top_logprobs_num,
            prompt_tokens=prompt_tokens,
            logit_bias=sampling.logit_bias,
            prompt_top_logprobs_num=message.prompt_top_logprobs_num,
        )


def _why_busy(waiting: int, most: int, choices: int) -> str:
    if choices > most:
        return f"{choices} choices must wait together, max_queued_requests is {most}; ask for fewer in one request"
    more = "" if choices == 1 else f" and {choices} choices come"
    return f"{waiting} requests wait{more}, max_queued_requests is {most}; come back later"
