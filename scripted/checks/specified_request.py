"""A request of the executable specification: what it asked for, its output, and what it owns.

It says what its client and the last stage are told. The specification decides what happens to it.
"""

from __future__ import annotations

from typing import Final

from engine.limits import Limits
from engine.messages import FinishReason, Generate, SamplingParams, TokenLogprob, TokenOutput
from engine.plan import SamplingSpec

__all__ = ["Page", "SpecifiedRequest"]

# All that the stages and a client say by the same name, but the seed, which the engine may choose.
_FROM_THE_MESSAGE: Final = {*SamplingSpec.__struct_fields__} & {*SamplingParams.__struct_fields__} - {"seed"}


class Page:
    """A page of the prefix cache: ``tokens``, after those of the pages above. ``ends_node`` where a node ends."""

    __slots__ = ("above", "below", "depth", "ends_node", "tokens", "used")

    def __init__(self, above: Page | None, tokens: tuple[int, ...]) -> None:
        self.above, self.tokens, self.used, self.ends_node = above, tokens, 0, False
        self.depth: int = 0 if above is None else above.depth + 1
        self.below: dict[tuple[int, ...], Page] = {}


class SpecifiedRequest:
    """``ids`` are its prompt and its output. It waits exactly while it owns no memory.

    Of its ``pages`` the first are those of ``prefix``, in the cache; the stages know the ones before ``told_pages``.
    Of its tokens, ``hit_tokens`` were in the cache when it was admitted, those before ``planned_tokens`` are launched,
    and ``goal_tokens`` are computed before it decodes. ``cached_tokens`` were hit when it was admitted first.
    """

    def __init__(self, message: Generate, arrival: int, limits: Limits) -> None:
        self.message, self.rid, self.arrival, self.priority = message, message.rid, arrival, message.priority
        self.ids = list(message.prompt_ids)
        chosen = (limits.seed + arrival * 6_364_136_223_846_793_005) % 2**63
        self.seed = chosen if message.sampling.seed is None else message.sampling.seed
        self.limit_tokens = min(len(self.ids) + message.sampling.max_new_tokens, limits.context_length)
        ignores_eos = message.sampling.ignore_eos and message.sampling.grammar is None
        eos = () if ignores_eos else limits.eos_token_ids
        self.stop_ids = frozenset((*message.sampling.stop_token_ids, *eos))
        self.end: FinishReason | None = None
        self.owns_memory = self.is_running = self.is_leaving = self.was_retracted = False
        self.prefix: list[Page] = []
        self.pages = self.told_pages = self.hit_tokens = self.planned_tokens = self.goal_tokens = self.in_flight = 0
        self.overtaken = self.cached_tokens = self.grammar_id = 0
        self.drafts: tuple[int, ...] = ()  # guesses that are in flight
        self.guesses: tuple[int, ...] = ()  # what a draft model guesses next

    def output(
        self, token: int | None = None, logprob: TokenLogprob | None = None, *, error: str | None = None
    ) -> TokenOutput:
        """What its client is told of a new token, of its end, or of both."""
        prompt_tokens = len(self.message.prompt_ids)
        return TokenOutput(
            rid=self.rid,
            token_ids=() if token is None else (token,),
            logprobs=() if logprob is None else (logprob,),
            finish_reason=self.end,
            stop_token_id=token if self.end is FinishReason.STOP else None,
            error=error,
            prompt_tokens=prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=len(self.ids) - prompt_tokens,
        )

    def sampling(self) -> SamplingSpec:
        """**Sampling**: nothing in it depends on the output so far, so it is the same after a retraction."""
        sampling, prompt_tokens = self.message.sampling, len(self.message.prompt_ids)
        return SamplingSpec(
            seed=self.seed,
            suppressed_ids=tuple(sorted(self.stop_ids)) if sampling.min_new_tokens else (),
            suppressed_until=prompt_tokens + sampling.min_new_tokens,
            return_logprob=self.message.return_logprob,
            top_logprobs_num=self.message.top_logprobs_num,
            prompt_tokens=prompt_tokens,
            grammar_id=self.grammar_id,
            **{name: getattr(sampling, name) for name in _FROM_THE_MESSAGE},
        )
