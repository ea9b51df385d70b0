"""A request of the executable specification: its arguments, its output and its memory.

It makes the replies to its client and the sampling for the last stage. The specification decides what happens to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, Final

from engine.core.limits import Limits
from engine.core.messages import (
    LENGTH,
    STOP,
    Completion,
    FinishReason,
    Generate,
    PromptLogprob,
    SamplingParams,
    TokenLogprob,
    TokenOutput,
    salt_key,
)
from engine.core.plan import SamplingSpec
from scripted_lockstep.specification.expected import ExpectedSegment

_NONE_DUE: Final[tuple[int, tuple[int, ...]]] = (-1, ())
# The fields with one name for stages and clients, except the seed, which the engine may choose.
_FROM_THE_MESSAGE: Final = sorted({*SamplingSpec.__struct_fields__} & {*SamplingParams.__struct_fields__} - {"seed"})
_given: Final = attrgetter(*_FROM_THE_MESSAGE)


# The version of the LoRA that computed the KV, and the number of the cache salt.
SpecifiedKey = tuple[int, int]


class Page:
    """A page of the prefix cache: ``tokens``, after its key and after the pages above.

    ``ends_node``: a node ends here. ``used`` is the number of its last use, ``hits`` its **Hit count**.
    """

    __slots__ = ("above", "below", "depth", "ends_node", "hits", "tokens", "used")

    def __init__(self, above: Page | None, tokens: tuple[Any, ...]) -> None:
        self.above, self.tokens, self.used, self.hits, self.ends_node = above, tokens, 0, 0, False
        self.depth: int = 0 if above is None else above.depth + 1
        self.below: dict[tuple[Any, ...], Page] = {}


class SpecifiedLora:
    """A LoRA. The stages hold it as ``version``, unless that is 0; ``used`` is the last microbatch that used it."""

    def __init__(self, name: str, path: str) -> None:
        self.name, self.path, self.version, self.used, self.is_leaving = name, path, 0, -1, False


class SpecifiedRequest:
    """``ids`` are its prompt and its output. It waits exactly while it owns no memory.

    The first of its ``pages`` are those of ``prefix``, in the cache; the stages know the ones before ``known_pages``.
    With window layers it uses a window page beside each page from ``window_start`` on. ``hit_tokens`` of its tokens
    were cached at its admission, the tokens before ``planned_tokens`` are launched, and ``goal_tokens`` are computed
    before it decodes; ``parts`` counts the parts of a split prompt. ``cached_tokens`` were hit at its first admission,
    ``cached_tokens_host`` of them on the host.
    The logits of the positions from ``due`` to ``due_end`` have not yet given the prompt logprobs that it asked for.
    """

    def __init__(
        self, message: Generate, arrival: int, limits: Limits, since: float = 0.0, lora: SpecifiedLora | None = None
    ) -> None:
        self.since = since
        limited = (message.timeout_s, message.waiting_timeout_s, limits.waiting_timeout_s) != (None, None, None)
        self.has_time_limit = limited
        self.message, self.rid, self.arrival, self.priority = message, message.rid, arrival, message.priority
        self.ids = list(message.prompt_ids)
        chosen = (limits.seed + arrival * 6_364_136_223_846_793_005) % 2**63
        self.seed = chosen if message.sampling.seed is None else message.sampling.seed
        self.limit_tokens = min(len(self.ids) + message.sampling.max_new_tokens, limits.context_length)
        ignores_eos = message.sampling.ignore_eos and message.sampling.grammar is None
        eos = () if ignores_eos else limits.eos_token_ids
        self.stop_ids = frozenset((*message.sampling.stop_token_ids, *eos))
        self.end: FinishReason | None = None
        self.owns_memory = self.is_running = self.is_leaving = False
        self.is_receiving = self.is_delivering = False
        self.prefill_at = message.prefill_at  # None after a failure
        self.sent_pages = 0 if message.deliver is None else message.deliver.first_page
        self.is_whole = False  # whether it ended with a token
        self.prefix: list[Page] = []
        self.pages = self.known_pages = self.hit_tokens = self.planned_tokens = self.goal_tokens = self.in_flight = 0
        self.overtaken = self.cached_tokens = self.cached_tokens_host = self.window_start = 0
        self.grammar_id = self.parts = self.retractions = 0
        self.drafts: tuple[int, ...] = ()  # guesses that are in flight
        self.guesses: tuple[int, ...] = ()  # the draft model's next guesses
        self.misses = self.guesses_from = 0  # failed verifications in a row; tokens at which it guesses again
        self.guesses_hold = False  # whether the last two had a hit
        self.lora, self._salt = lora, salt_key(message.cache_salt)
        self.due_end = -1 if message.prompt_logprobs_from < 0 else len(self.ids) - 1
        self.due = message.prompt_logprobs_from
        self.prompt_logprobs: tuple[PromptLogprob, ...] = ()  # the prompt logprobs and counts that its client got
        self.versions: tuple[int, ...] = ()  # the weights that computed its client's tokens

    @property
    def may_hit(self) -> int:
        """**Hit**: neither the last token nor a token whose logits are due."""
        return self.due if self.due < self.due_end else len(self.ids) - 1

    @property
    def is_prefilled(self) -> bool:
        """**End**: the whole prompt is launched, and no output is to follow it."""
        return self.planned_tokens == self.limit_tokens

    @property
    def may_go_ahead(self) -> bool:
        """**Ahead**: one token is in flight and is not the last, and the next one depends on no token count."""
        sampling = self.message.sampling
        counts = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) != (0, 0, 1)
        looks_back = counts or sampling.grammar is not None
        return self.in_flight == 1 and len(self.ids) + 1 < self.limit_tokens and not looks_back

    def why_ended(self, token: int) -> FinishReason | None:
        """**End**: the reason to end with this newest token; None to continue."""
        if token in self.stop_ids:
            return STOP
        return LENGTH if len(self.ids) >= self.limit_tokens else None

    @staticmethod
    def prompt_logprob_outputs(
        plan: Sequence[tuple[SpecifiedRequest, int, int]],
        segments: Sequence[ExpectedSegment],
        completion: Completion,
        version: int,
    ) -> Iterator[TokenOutput]:
        """**Prompt logprobs**: each part is sent in the step of its chunk's result, before any token."""
        values = iter(completion.prompt_logprobs)
        for (request, _, _), segment in zip(plan, segments, strict=True):
            part = next(values) if segment.targets else ()
            if part and request.end is None:
                request.due = segment.logprobs_from + len(segment.targets)
                request.prompt_logprobs += part
                request.versions += () if version in request.versions else (version,)
                yield request.output(part=part)

    def due_logprobs(self, start: int, end: int) -> tuple[int, tuple[int, ...]]:
        """**Prompt logprobs**: the first position of this part, and the tokens after the positions that are due."""
        if self.due_end < 0:
            return _NONE_DUE
        first, end = max(start, self.due), min(end, self.due_end)
        return (first, tuple(self.ids[first + 1 : end + 1])) if first < end else _NONE_DUE

    @property
    def lacks_lora(self) -> bool:
        """**LoRAs**: a request cannot start before the stages hold its LoRA."""
        return self.lora is not None and not self.lora.version

    @property
    def version(self) -> int:
        """The version of its LoRA: 0 for the model itself, -1 before the stages hold the LoRA."""
        return 0 if self.lora is None else self.lora.version or -1

    @property
    def kv_key(self) -> SpecifiedKey:
        """**Hit**: the LoRA and the salt of its KV: a prefix is hit where both are equal."""
        return self.version, self._salt

    def use_lora(self, microbatch: int) -> int:
        """Return the version of the LoRA for a microbatch, and note that it was used."""
        if self.lora is None:
            return 0
        self.lora.used = microbatch
        return self.lora.version

    def output(
        self,
        token: int | None = None,
        logprob: TokenLogprob | None = None,
        *,
        error: str | None = None,
        part: tuple[PromptLogprob, ...] = (),
    ) -> TokenOutput:
        """Make a reply to its client: a new token, its end, both, or a part of its prompt's logprobs."""
        prompt_tokens = len(self.message.prompt_ids)
        return TokenOutput(
            rid=self.rid,
            token_ids=() if token is None else (token,),
            logprobs=() if logprob is None else (logprob,),
            finish_reason=self.end,
            stop_token_id=token if self.end is STOP else None,
            error=error,
            prompt_tokens=prompt_tokens,
            cached_tokens=self.cached_tokens,
            cached_tokens_host=self.cached_tokens_host,
            completion_tokens=len(self.ids) - prompt_tokens,
            prompt_logprobs=part,
        )

    def sampling(self) -> SamplingSpec:
        """**Sampling**: independent of the output so far, and therefore the same after a retraction."""
        sampling, prompt_tokens = self.message.sampling, len(self.message.prompt_ids)
        return SamplingSpec(
            seed=self.seed,
            suppressed_ids=tuple(sorted(self.stop_ids)) if sampling.min_new_tokens else (),
            suppressed_until=prompt_tokens + sampling.min_new_tokens,
            return_logprob=self.message.return_logprob,
            top_logprobs_num=self.message.top_logprobs_num,
            prompt_tokens=prompt_tokens,
            prompt_top_logprobs_num=self.message.prompt_top_logprobs_num,
            grammar_id=self.grammar_id,
            **dict(zip(_FROM_THE_MESSAGE, _given(sampling), strict=True)),
        )
