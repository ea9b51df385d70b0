"""What a vLLM scheduler is made of for the search: settings that schedules name, and vLLM's own configuration of them.

No model and no tokenizer: all that the scheduler asks about a model is how long its context is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, Literal

import msgspec
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from scripted.adapters.vllm.kv_events import Subscriber

_HASH_BYTES: Final = 8


class VllmSettingsError(ValueError):
    """These settings make no vLLM engine; the text says which rule they break."""


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a scheduler, under vLLM's own names. The defaults are small, so that limits are met soon.

    ``num_gpu_blocks`` counts the null block, which no request gets. ``model_runner`` is the version of vLLM's model
    runner that plans are made for. With a ``sliding_window`` some layers attend to so many tokens alone, and the cache
    has two groups. ``kv_connector`` says how a connector loads, if there is one: ``kv_offered_tokens``
    of each prompt are outside, and an ``async`` load or a save takes ``kv_transfer_steps``; with ``kv_saves`` the
    blocks of a request that ended are kept until it is saved.
    """

    block_size: int = 4
    num_gpu_blocks: int = 13
    max_model_len: int = 32
    max_num_batched_tokens: int = 16
    max_num_seqs: int = 4
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool = False
    pipeline_parallel_size: int = 1
    num_speculative_tokens: int = 0
    model_runner: Literal[1, 2] = 2
    sliding_window: int = 0
    enable_kv_cache_events: bool = False
    kv_cache_report_mode: Literal["incremental", "full"] = "incremental"
    kv_connector: Literal["none", "sync", "async"] = "none"
    kv_role: Literal["kv_both", "kv_consumer", "kv_producer"] = "kv_both"
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    kv_offered_tokens: int = 8
    kv_transfer_steps: int = 2
    kv_saves: bool = False

    def __post_init__(self) -> None:
        room = (self.num_gpu_blocks - 1) * self.block_size
        rules = (
            (min(self.block_size, self.max_num_batched_tokens, self.max_num_seqs) >= 1, "sizes are 1 or more"),
            (self.pipeline_parallel_size >= 1, "pipeline_parallel_size is 1 or more"),
            (self.num_speculative_tokens >= 0, "num_speculative_tokens is 0 or more"),
            (self.sliding_window >= 0, "sliding_window is 0 or more"),
            (
                not (self.sliding_window and self.has_connector),
                "the connector of this adapter loads one group: sliding_window goes with kv_connector='none'",
            ),
            (
                self.num_gpu_blocks - 1 >= self._needed_blocks,
                f"with two groups, num_gpu_blocks is more than one request may need, {self._needed_blocks}",
            ),
            (2 <= self.max_model_len <= room, f"max_model_len is from 2 to what all blocks hold, {room}"),
            (
                self.enable_chunked_prefill or self.max_num_batched_tokens >= self.max_model_len,
                "without chunked prefill, max_num_batched_tokens is max_model_len or more",
            ),
            (
                min(self.kv_offered_tokens, self.kv_transfer_steps) >= 0,
                "kv_offered_tokens and kv_transfer_steps are 0 or more",
            ),
            (self.max_num_batched_tokens >= self.max_num_seqs, "max_num_batched_tokens is max_num_seqs or more"),
            (
                self.max_num_batched_tokens > self.num_speculative_tokens,
                "max_num_batched_tokens is more than num_speculative_tokens",
            ),
            (
                not (self.async_scheduling and self.model_runner == 1 and self.pipeline_parallel_size > 1),
                "asynchronous scheduling with pipeline stages needs model_runner=2",
            ),
        )
        for holds, rule in rules:
            if not holds:
                raise VllmSettingsError(f"{rule}; got {self}")

    @property
    def windows(self) -> tuple[int, ...]:
        """Of the groups behind the first."""
        return (self.sliding_window,) if self.sliding_window else ()

    @property
    def _needed_blocks(self) -> int:
        """What a request of the whole context takes of two groups, as vLLM counts it at its start; 0 with one group."""
        if not self.sliding_window:
            return 0
        held = min(self.sliding_window - 1 + self.depth * self.max_num_batched_tokens, self.max_model_len)
        return -(-self.max_model_len // self.block_size) - (-held // self.block_size) + 1

    @property
    def has_connector(self) -> bool:
        """Whether there is a KV connector."""
        return self.kv_connector != "none"

    @property
    def depth(self) -> int:
        """Batches that vLLM has in flight with such an engine: ``VllmConfig.max_concurrent_batches``."""
        if not self.async_scheduling:
            return self.pipeline_parallel_size
        return self.pipeline_parallel_size + 1


def new_scheduler(settings: VllmSettings) -> Scheduler:
    """vLLM's scheduler, as its engine makes one."""
    config, kv_cache, structured = _parts(settings)
    kind = AsyncScheduler if settings.async_scheduling else Scheduler
    scheduler = kind(config, kv_cache, structured, block_size=settings.block_size)
    # vLLM's own property asks the environment and the graphics card.
    scheduler.use_v2_model_runner = settings.model_runner == 2
    if settings.enable_kv_cache_events:
        scheduler.kv_event_publisher = Subscriber()
    return scheduler


@functools.cache
def request_hasher(settings: VllmSettings) -> Callable[[Any], list[Any]] | None:
    """What hashes the blocks of a request; None without a prefix cache. Only equality of hashes matters."""
    if not settings.enable_prefix_caching:
        return None
    init_none_hash(sha256)
    hasher: Callable[[Any], list[Any]] = get_request_block_hasher(settings.block_size, _hash)
    return hasher


def _hash(value: object) -> bytes:
    return hash(value).to_bytes(_HASH_BYTES, "little", signed=True)


@functools.cache
def _parts(settings: VllmSettings) -> tuple[VllmConfig, KVCacheConfig, Any]:
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_model_len=settings.max_model_len,
            is_encoder_decoder=False,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            policy=settings.policy,
            long_prefill_token_threshold=settings.long_prefill_token_threshold,
            scheduler_reserve_full_isl=settings.scheduler_reserve_full_isl,
            watermark=settings.watermark,
        ),
        cache_config=CacheConfig(block_size=settings.block_size, enable_prefix_caching=settings.enable_prefix_caching),
        # A released vLLM finds no device on a machine without a graphics card.
        device_config=DeviceConfig(device="cpu"),
    )
    # What the platform of this machine would decide, and a model would have to be loaded for.
    config.scheduler_config.async_scheduling = settings.async_scheduling
    config.scheduler_config.enable_chunked_prefill = settings.enable_chunked_prefill
    config.parallel_config.pipeline_parallel_size = settings.pipeline_parallel_size
    config.cache_config.num_gpu_blocks = settings.num_gpu_blocks
    config.model_config = _ModelConfig(max_model_len=settings.max_model_len)
    if settings.num_speculative_tokens:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=settings.num_speculative_tokens,
            prompt_lookup_max=2,
            prompt_lookup_min=1,
        )
    if settings.has_connector:
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="ScheduledConnector",
            kv_connector_module_path="scripted.adapters.vllm.connector",
            kv_role=settings.kv_role,
            kv_load_failure_policy=settings.kv_load_failure_policy,
            kv_connector_extra_config={
                "offered": settings.kv_offered_tokens,
                "is_async": settings.kv_connector == "async",
                "saves": settings.kv_saves,
            },
        )
    if settings.enable_kv_cache_events:
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    shape = {"block_size": settings.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float16}
    groups = [KVCacheGroupSpec(["layer"], FullAttentionSpec(**shape))]
    groups += [
        KVCacheGroupSpec(["window"], SlidingWindowSpec(sliding_window=size, **shape)) for size in settings.windows
    ]
    kv_cache = KVCacheConfig(
        num_blocks=settings.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
    )
    return config, kv_cache, _Unstructured()


class _Unstructured(SimpleNamespace):
    """The manager of structured output, of requests that have none."""

    def accept_tokens(self, request: object, tokens: list[int]) -> bool:
        """All are."""
        del request, tokens
        return True

    def validate_tokens(self, request: object, tokens: list[int]) -> list[int]:
        """All are valid."""
        del request
        return tokens


class _ModelConfig(SimpleNamespace):
    """What the scheduler asks of a model that generates text."""

    uses_mrope = False
    is_encoder_decoder = False
    is_diffusion = False
    return_sampling_mask = False
    supports_multimodal_inputs = False
    is_multimodal_model = False
    multimodal_config = None
    runner_type = "generate"
