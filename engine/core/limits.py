"""Limits: a model and a configuration as plain numbers, for the scheduler and the front end.

``ModelFacts`` is read from a checkpoint without loading it; ``Limits`` joins it with an ``EngineConfig``, so that every
'auto' is resolved once, here. The only rule for requests that can never fit is here too.
"""

from __future__ import annotations

import msgspec

from engine.core.config import (
    CHUNKING_OFF,
    EMBEDDED_MODEL,
    EMBEDDED_WINDOW_MODEL,
    EngineConfig,
    has_embedded_window,
    loras_of,
)
from engine.core.errors import ConfigError


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of a checkpoint. ``vocab_size`` bounds token ids.

    ``window_tokens`` is the number of tokens that its window layers see, 0 without such layers.
    ``window_kv_bytes_per_token`` is for the window layers and ``kv_bytes_per_token`` for all others, 0 without any;
    ``draft_kv_bytes_per_token`` is a draft model's share of these. ``embedding_size`` is the length of the vectors of
    an embedding model, 0 for a model that generates text; without ``shares_prefixes`` every prompt is computed whole.
    ``kv_origin`` is a digest of what its KV depends on; empty for an engine that exchanges no KV.
    """

    name: str
    vocab_size: int
    context_length: int
    num_layers: int
    kv_bytes_per_token: int
    window_tokens: int = 0
    window_kv_bytes_per_token: int = 0
    draft_kv_bytes_per_token: int = 0
    eos_token_ids: tuple[int, ...] = ()
    embedding_size: int = 0
    shares_prefixes: bool = True
    kv_origin: str = ""

    def with_draft(self, draft: ModelFacts) -> ModelFacts:
        """Add the KV of a draft model to the model's own. Raises ConfigError for a draft model that does not fit."""
        if draft.vocab_size != self.vocab_size or draft.window_tokens:
            raise ConfigError(
                f"speculative_draft_model must have the vocabulary of {self.name!r}, {self.vocab_size} tokens, and no "
                f"window layers, got {draft.name!r} with {draft.vocab_size} and a window of {draft.window_tokens}; use "
                "another model of the same family"
            )
        total = self.kv_bytes_per_token + draft.kv_bytes_per_token
        context_length = min(self.context_length, draft.context_length)
        return msgspec.structs.replace(
            self,
            kv_bytes_per_token=total,
            draft_kv_bytes_per_token=draft.kv_bytes_per_token,
            context_length=context_length,
        )


# The embedded model: a tiny Qwen3 with a byte-level vocabulary. 256 bytes, then the special tokens; four layers, so
# that four stages have one each; 2 (K and V) * 4 layers * 2 kv heads * 16 per head * 4 bytes.
EMBEDDED_FACTS = ModelFacts(
    name=EMBEDDED_MODEL,
    vocab_size=264,
    context_length=8192,
    num_layers=4,
    kv_bytes_per_token=1024,
    eos_token_ids=(257,),
)

# The same model with a window of 64 tokens in every other layer, the first included.
EMBEDDED_WINDOW_FACTS = msgspec.structs.replace(
    EMBEDDED_FACTS, name=EMBEDDED_WINDOW_MODEL, kv_bytes_per_token=512, window_tokens=64, window_kv_bytes_per_token=512
)


def embedded_facts(model: str) -> ModelFacts:
    return EMBEDDED_WINDOW_FACTS if has_embedded_window(model) else EMBEDDED_FACTS


# Default KV capacity of the embedded model, in tokens: the same in every tier and on every machine, so that a script
# meets the same pool everywhere.
EMBEDDED_TOTAL_TOKENS = 16_384


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Every number that the scheduler obeys. Sizes are in tokens, pages, rows or requests, as their names say.

    Without window layers ``window_tokens`` and ``window_pages`` are 0; without speculation ``draft_tokens``,
    ``ngram_max`` and ``ngram_min`` are. With ``drafts_itself`` the draft model has the weights of the model. ``loras``
    are the configured LoRAs, by name and path; ``max_loras`` is 0 for an engine without LoRAs. ``waiting_timeout_s``
    and ``max_gap_s`` are in seconds, ``max_gap_steps`` in steps of decodes, None for no limit; at most one of the two
    gaps is set. ``embedding_size`` is 0 for a model that generates text. With ``prefills`` the engine computes prompts
    for decode engines; a decode engine ``receives`` them, and waits up to ``prefill_timeout_s``. ``kv_origin`` is the
    model's.
    """

    pp_size: int
    depth: int
    page_size: int
    total_pages: int
    rows: int
    prefill_budget_tokens: int
    chunking: bool
    mixed_chunk: bool
    max_queued_requests: int
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    radix_cache: bool
    schedule_policy: str
    priority_preemption: bool
    seed: int
    window_tokens: int = 0
    window_pages: int = 0
    draft_tokens: int = 0
    ngram_max: int = 0
    ngram_min: int = 0
    has_draft_model: bool = False
    drafts_itself: bool = False
    waiting_timeout_s: float | None = None
    microbatch_requests: int | None = None
    dynamic_chunking: bool = False
    chunk_parity_tokens: int = 1
    max_gap_s: float | None = None
    max_gap_steps: int | None = None
    max_cached_grammars: int = 64
    max_loras: int = 0
    loras: tuple[tuple[str, str], ...] = ()
    host_pages: int = 0
    async_scheduling: bool = False
    kv_events: bool = False
    embedding_size: int = 0
    prefills: bool = False
    receives: bool = False
    prefill_timeout_s: float = 30.0
    kv_origin: str = ""

    @classmethod
    def of(cls, config: EngineConfig, facts: ModelFacts, total_tokens: int | None = None) -> Limits:
        """Resolve a configuration against a model.

        ``total_tokens`` is the KV capacity measured on the device, for a configuration that sets none. Raises
        ConfigError when the model cannot do what the configuration asks.
        """
        _require_possible(config, facts)
        capacity = config.max_total_tokens or total_tokens or EMBEDDED_TOTAL_TOKENS
        chunking = config.chunked_prefill_size != CHUNKING_OFF
        budget = min(config.chunked_prefill_size, config.max_prefill_tokens) if chunking else config.max_prefill_tokens
        same = {name: getattr(config, name) for name in cls.__struct_fields__ if name in EngineConfig.model_fields}
        resolved = {
            "depth": config.depth,
            "total_pages": capacity // config.page_size,
            "rows": config.max_running_requests,
            "prefill_budget_tokens": budget,
            "chunking": chunking,
            "context_length": config.context_length or facts.context_length,
            "vocab_size": facts.vocab_size,
            "eos_token_ids": facts.eos_token_ids,
            "radix_cache": config.radix_cache and facts.shares_prefixes,
            "window_tokens": facts.window_tokens,
            "max_gap_s": config.max_gap_s,
            "max_gap_steps": config.gap_steps,
            "microbatch_requests": config.pp_max_micro_batch_size,
            "max_loras": config.most_loras,
            "loras": loras_of(config.lora),
            "host_pages": config.host_kv_tokens // config.page_size,
            "async_scheduling": config.async_scheduling and not facts.embedding_size,
            "embedding_size": facts.embedding_size,
            "prefills": config.role == "prefill",
            "receives": config.role == "decode",
            "kv_origin": facts.kv_origin,
        }
        limits = cls(**same | resolved | _speculation_of(config))
        return limits._with_window_pages(config, facts) if facts.window_tokens else limits

    @property
    def decode_budget_tokens(self) -> int:
        """Maximum tokens in a decode microbatch: one for each row, and its drafts."""
        return self.rows * (1 + self.draft_tokens)

    @property
    def draft_scratch_pages(self) -> int:
        """Pages outside every plan, for a draft model's KV of guesses beyond a request's own pages."""
        return min(self.rows, self.most_requests) * self.pages_for(self.draft_tokens) if self.has_draft_model else 0

    @property
    def most_requests(self) -> int:
        """The maximum number of requests in a microbatch; without a bound, a number above the rows."""
        return self.rows + 1 if self.microbatch_requests is None else self.microbatch_requests

    @property
    def time_limits(self) -> tuple[float, ...]:
        """The engine's time limits for any request, in seconds."""
        return () if self.waiting_timeout_s is None else (self.waiting_timeout_s,)

    @property
    def most_window_pages(self) -> int:
        """Window pages that all rows can use at once: a window each, and the tokens in flight."""
        ahead = self.draft_tokens or self.async_scheduling
        drafts = self._span(ahead) if ahead else 0
        return self.rows * (self._span(self.window_tokens) + drafts) + self.depth * self._span(
            self.prefill_budget_tokens
        )

    @property
    def row_window_pages(self) -> int:
        """Maximum window pages of one request that is prefilled one microbatch at a time."""
        at_once = max(min(self.prefill_budget_tokens, self.context_length), 1 + self.draft_tokens)
        return self._span(self.window_tokens - 1 + at_once)

    def _span(self, tokens: int) -> int:
        """Maximum pages that this many consecutive tokens touch."""
        return (tokens + self.page_size - 2) // self.page_size + 1

    def _with_window_pages(self, config: EngineConfig, facts: ModelFacts) -> Limits:
        """Set the window pool to its configured size, else to the largest useful one; a page has at most one window
        page.
        """
        least, most = self.row_window_pages, self.most_window_pages
        wanted = most if config.max_window_tokens is None else config.max_window_tokens // self.page_size
        pages = min(wanted, most, self.total_pages)
        if pages < min(least, self.total_pages):
            raise ConfigError(
                f"max_window_tokens must be >= {least * self.page_size}, which a request of model {facts.name!r} "
                f"may use (a window of {self.window_tokens} tokens and {self.prefill_budget_tokens} in flight, in "
                f"pages of {self.page_size}), got {config.max_window_tokens}; raise it, lower chunked_prefill_size or "
                "leave it unset"
            )
        return msgspec.structs.replace(self, window_pages=pages)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def why_never_fits(self, prompt_tokens: int, max_new_tokens: int) -> str | None:
        """Return why a request can never run here, with the numbers; None if it can.

        The front end calls it before queueing and the scheduler at admission, so both refuse alike. Output is clamped
        to the context; the KV of the very last token is never written. The window pool never refuses a request: it is
        large enough for any single one.
        """
        if prompt_tokens < 1:
            return "the prompt is empty; a prompt needs at least 1 token"
        # A prompt alone may fill the context; a prompt that is continued leaves room for a token.
        longest = self.context_length if max_new_tokens == 0 else self.context_length - 1
        if prompt_tokens > longest:
            return (
                f"the prompt has {prompt_tokens} tokens, but context_length is {self.context_length} and leaves room "
                f"for at most {longest}: this model's maximum context length is {self.context_length} tokens; shorten "
                "the prompt"
            )
        if not self.chunking and prompt_tokens > self.prefill_budget_tokens:
            return (
                f"the prompt has {prompt_tokens} tokens, but max_prefill_tokens is {self.prefill_budget_tokens} and "
                "chunked prefill is off; shorten the prompt or switch chunking on"
            )
        # The KV of the whole prompt is written even without a new token.
        total = max(prompt_tokens, min(prompt_tokens + max_new_tokens, self.context_length) - 1)
        if self.pages_for(total) > self.total_pages:
            return (
                f"the request needs {self.pages_for(total)} pages of {self.page_size} tokens ({prompt_tokens} prompt + "
                f"{max_new_tokens} new tokens), but the KV cache has {self.total_pages}; ask for fewer tokens"
            )
        return None


def _speculation_of(config: EngineConfig) -> dict[str, int | bool]:
    """Return the limits of speculative decoding; 0 for those that the configured algorithm does not use."""
    algorithm = config.speculative_algorithm
    looks_up = algorithm == "ngram"
    return {
        "draft_tokens": config.speculative_num_draft_tokens if algorithm != "off" else 0,
        "ngram_max": config.speculative_ngram_max if looks_up else 0,
        "ngram_min": config.speculative_ngram_min if looks_up else 0,
        "has_draft_model": algorithm == "draft_model",
        "drafts_itself": config.speculative_draft_model == config.model,
    }


def _require_possible(config: EngineConfig, facts: ModelFacts) -> None:
    """Raise ConfigError when the model cannot do what the configuration asks."""
    if (config.context_length or 0) > facts.context_length:
        raise ConfigError(
            f"context_length must be <= {facts.context_length}, the limit of model {facts.name!r}, "
            f"got {config.context_length}; lower it or leave it unset"
        )
    if config.pp_size > facts.num_layers:
        raise ConfigError(
            f"pp_size must be <= {facts.num_layers}, the layers of model {facts.name!r}, got {config.pp_size}; "
            "use fewer stages"
        )
    if config.host_kv_tokens and facts.window_tokens:
        raise ConfigError(
            f"host_kv_tokens must be 0 for model {facts.name!r}, whose window layers keep their KV on the device "
            f"alone, got {config.host_kv_tokens}; leave it out"
        )
    if not facts.shares_prefixes and (config.host_kv_tokens or config.kv_events):
        field = "host_kv_tokens" if config.host_kv_tokens else "kv_events"
        raise ConfigError(
            f"{field} must be left out for model {facts.name!r}: it embeds by the mean of a prompt's tokens, "
            "so that no prefix is shared"
        )
    if config.role != "both" and (facts.window_tokens or facts.embedding_size):
        kind = "has window layers, whose KV is not sent" if facts.window_tokens else "generates no text"
        raise ConfigError(
            f"role must be 'both' for model {facts.name!r}, which {kind}, got {config.role!r}; leave it out"
        )
    if facts.embedding_size and config.speculative_algorithm != "off":
        raise ConfigError(
            f"speculative_algorithm must be 'off' for model {facts.name!r}, which generates no text, got "
            f"{config.speculative_algorithm!r}; leave it out"
        )
