"""The settings of a running vLLM's scheduler under the adapter's names, and notes on features without a name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec

from scripted.sdk.flight.frames import Scalar
from scripted_vllm.config import VllmSettings

_OF_SCHEDULER: Final = (
    "max_num_batched_tokens", "max_num_seqs", "policy", "async_scheduling", "enable_chunked_prefill",
    "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive", "scheduler_reserve_full_isl", "watermark",
    "disable_chunked_mm_input", "prefill_schedule_interval",
)  # fmt: skip


def settings_of(scheduler: Any) -> tuple[dict[str, Scalar], tuple[str, ...]]:
    """Return the settings as words, and notes on the features that they leave out."""
    config = scheduler.vllm_config
    words: dict[str, Scalar] = {
        name: getattr(config.scheduler_config, name)
        for name in _OF_SCHEDULER
        if hasattr(config.scheduler_config, name)  # later releases added some
    }
    words |= {
        "block_size": config.cache_config.block_size,
        "num_gpu_blocks": scheduler.kv_cache_config.num_blocks,
        "max_model_len": scheduler.max_model_len,
        "enable_prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "pipeline_parallel_size": config.parallel_config.pipeline_parallel_size,
        "decode_context_parallel_size": config.parallel_config.decode_context_parallel_size,
        "model_runner": 2 if scheduler.use_v2_model_runner else 1,
        "log_stats": bool(scheduler.log_stats),
    }
    notes = []
    for part in (_groups_of(scheduler), _guesses_of(config), _connector_of(config), _rest_of(config)):
        more, missing = part
        words |= more
        notes += missing
    default = msgspec.structs.asdict(VllmSettings())
    return {name: value for name, value in words.items() if value != default[name]}, tuple(notes)


_Part = tuple[dict[str, Scalar], list[str]]


# The start of a note on a group of layers that the adapter's settings cannot express.
OTHER_GROUP: Final = "the KV cache group"


def _groups_of(scheduler: Any) -> _Part:
    interval = getattr(scheduler.kv_cache_config, "prefix_cache_retention_interval", None)
    words: dict[str, Scalar] = {} if interval is None else {"prefix_cache_retention_interval": interval}
    notes = []
    for number, group in enumerate(scheduler.kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        kind = type(spec)
        if kind is FullAttentionSpec and not number:
            continue
        if kind is SlidingWindowSpec and number and "sliding_window" not in words:
            words["sliding_window"] = spec.sliding_window
        elif kind is ChunkedLocalAttentionSpec and number and "attention_chunk_size" not in words:
            words["attention_chunk_size"] = spec.attention_chunk_size
        else:
            notes.append(f"{OTHER_GROUP} {number} of {kind.__name__}")
    return words, notes


def _guesses_of(config: Any) -> _Part:
    guesses = config.speculative_config
    if guesses is None:
        return {}, []
    # The scheduler treats all guesses without a draft model alike; vLLM refuses some with batches in flight.
    method = "ngram_gpu"
    if guesses.use_eagle():
        method = "mtp" if guesses.use_multi_module_mtp() else "eagle"
    words: dict[str, Scalar] = {"num_speculative_tokens": guesses.num_speculative_tokens, "speculative_method": method}
    return words, []


def _connector_of(config: Any) -> _Part:
    transfer = config.kv_transfer_config
    if transfer is None:
        return {}, []
    words: dict[str, Scalar] = {
        "kv_connector": "async",
        "kv_role": transfer.kv_role,
        "kv_load_failure_policy": transfer.kv_load_failure_policy,
    }
    return words, []


def _rest_of(config: Any) -> _Part:
    words: dict[str, Scalar] = {}
    if config.lora_config is not None:
        words["max_loras"] = config.lora_config.max_loras
    return words, list(_missing(config))


def _missing(config: Any) -> Iterator[str]:
    if config.ec_transfer_config is not None:
        yield "the connector of encoder outputs"
    if config.model_config.is_encoder_decoder:
        yield "an encoder beside the decoder"
    if config.model_config.is_multimodal_model:
        yield "images and other inputs beside text"
    if config.model_config.runner_type != "generate":
        yield f"a model that does not generate ({config.model_config.runner_type})"
