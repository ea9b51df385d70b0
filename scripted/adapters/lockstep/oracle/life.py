"""A request's life as its client knows it: what it asked for, what it has so far, and when its time is over.

It sees only messages and what the account of clients notes in it, never the engine's own request.
"""

from __future__ import annotations

from engine.limits import Limits
from engine.messages import FinishReason, Generate, PromptLogprob
from scripted.adapters.lockstep.oracle.pages import Tenancy

__all__ = ["Life"]


class Life:
    """One request, from its ``Generate`` to its terminal reply or its refusal. ``ids`` is prompt and output.

    ``versions`` are the weights that computed what it was told, each once. ``cached_tokens`` is what its client is
    told: where its computation began when it started for the first time. ``prompt_logprobs`` are what it was told of
    its prompt. ``lora_path`` is where its LoRA is.
    """

    __slots__ = (
        "cached_tokens",
        "end",
        "ids",
        "limit",
        "lora_path",
        "message",
        "parts",
        "prompt_logprobs",
        "prompt_tokens",
        "refused",
        "retractions",
        "rid",
        "running",
        "since",
        "started",
        "stop_ids",
        "tenancy",
        "versions",
        "waits_s",
    )

    def __init__(self, message: Generate, limits: Limits, now: float = 0.0) -> None:
        self.message = message
        self.since = now
        waits = [one for one in (message.waiting_timeout_s, limits.waiting_timeout_s) if one is not None]
        self.waits_s = min(waits, default=None)
        self.rid = message.rid
        self.parts = self.retractions = 0
        self.ids = list(message.prompt_ids)
        self.prompt_tokens = len(self.ids)
        self.limit = min(self.prompt_tokens + message.sampling.max_new_tokens, limits.context_length)
        self.stop_ids = message.sampling.stop_token_ids
        if not message.sampling.ignore_eos or message.sampling.grammar is not None:
            self.stop_ids += limits.eos_token_ids
        self.tenancy: Tenancy | None = None
        self.running = self.started = False
        self.end: FinishReason | None = None
        self.refused = False
        self.cached_tokens = 0
        self.versions: tuple[int, ...] = ()
        self.lora_path: str | None = None
        self.prompt_logprobs: tuple[PromptLogprob, ...] = ()

    @property
    def due(self) -> range:
        """The positions whose logits have not yet given the prompt logprob that was asked for."""
        first = self.message.prompt_logprobs_from
        return range(0) if first < 0 else range(first + len(self.prompt_logprobs), self.prompt_tokens - 1)

    @property
    def looks_back(self) -> bool:
        """Whether what it says next depends on what it has said, other than by what the model makes of that."""
        sampling = self.message.sampling
        counts = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) != (0, 0, 1)
        return counts or sampling.grammar is not None

    @property
    def most_hit(self) -> int:
        """How many of its tokens may come from the cache: none whose logits are needed."""
        return self.due.start if self.due else len(self.ids) - 1

    def out_of_time(self, now: float) -> str | None:
        """The name of the time limit that is over first; None while none is."""
        own, waits = self.message.timeout_s, None if self.started else self.waits_s
        if waits is not None and now >= self.since + waits and (own is None or waits < own):
            return "waiting_timeout_s"
        return "timeout_s" if own is not None and now >= self.since + own else None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The output so far."""
        return tuple(self.ids[self.prompt_tokens :])
