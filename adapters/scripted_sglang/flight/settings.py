"""The settings of a running SGLang's scheduler under the adapter's names, and notes on features without a name."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any, Final

from sglang.srt.runtime_context import get_parallel

from scripted.sdk.flight.frames import Scalar

# Server arguments with the same name in the adapter.
_SAME: Final = (
    "disable_radix_cache", "enable_mixed_chunk", "schedule_policy", "schedule_conservativeness",
    "enable_priority_scheduling", "max_queued_requests",
)  # fmt: skip
# Arguments that the adapter's scheduler leaves at the default, with the feature's name for a note.
_OFF: Final = {
    "speculative_algorithm": "speculation",
    "enable_lora": "LoRA",
    "enable_hierarchical_cache": "the host tier",
    "enable_dp_attention": "data parallel attention",
    "enable_beam_search": "beam search",
    "disaggregation_decode_enable_radix_cache": "prefill and decode servers",
}
_PREFILL_TOKENS: Final = 16384


def version() -> str:
    return importlib.metadata.version("sglang")


def settings_of(scheduler: Any) -> tuple[dict[str, Scalar] | None, tuple[str, ...]]:
    """Return the settings as words, and notes on omitted features; no words for any rank but the first."""
    args = scheduler.server_args
    if not scheduler.is_generation or get_parallel().pp_rank or get_parallel().tp_rank:
        return None, ()
    chunk = scheduler.chunked_prefill_size
    context = scheduler.model_config.context_len
    words: dict[str, Scalar] = {name: getattr(args, name) for name in _SAME}
    words |= {
        "page_size": scheduler.page_size,
        "max_total_tokens": scheduler.max_total_num_tokens,
        "max_running_requests": scheduler.max_running_requests,
        "context_length": context,
        "chunked_prefill_size": context if chunk is None else chunk,
        "disable_overlap_schedule": not scheduler.enable_overlap,
    }
    return {name: value for name, value in words.items() if value is not None}, tuple(_notes(scheduler, args))


def _notes(scheduler: Any, args: Any) -> Iterator[str]:
    yield from [text for name, text in _OFF.items() if getattr(args, name, None)]
    if scheduler.max_prefill_tokens != _PREFILL_TOKENS:
        yield f"max_prefill_tokens={scheduler.max_prefill_tokens}"
    if getattr(args, "disaggregation_mode", "null") != "null":
        yield f"the role {args.disaggregation_mode}"
