"""The settings of a vLLM scheduler, as schedules name them."""

from __future__ import annotations

from typing import Literal

import msgspec


class VllmSettingsError(ValueError):
    """These settings make no vLLM engine; the text says which rule they break."""


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a scheduler, under vLLM's own names. The defaults are small, so that limits are met soon.

    ``num_gpu_blocks`` counts the null block, which no request gets. ``model_runner`` is the version of vLLM's model
    runner that plans are made for. With a ``sliding_window`` some layers attend to so many tokens alone, and the cache
    has two groups. ``kv_connector`` says how a connector loads, if there is one: ``kv_offered_tokens`` of each prompt
    are outside, and an ``async`` load or a save takes ``kv_transfer_steps``; with ``kv_saves`` the blocks of a request
    that ended are kept until it is saved. With ``structured_output`` requests may have grammars, each of which is
    compiled in ``grammar_steps``. With ``max_loras``, 0 for none, three LoRAs are known, and so many may be computed
    together.
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
    structured_output: bool = False
    grammar_steps: int = 1
    max_loras: int = 0

    def __post_init__(self) -> None:
        room = (self.num_gpu_blocks - 1) * self.block_size
        rules = (
            (min(self.block_size, self.max_num_batched_tokens, self.max_num_seqs) >= 1, "sizes are 1 or more"),
            (self.pipeline_parallel_size >= 1, "pipeline_parallel_size is 1 or more"),
            (self.num_speculative_tokens >= 0, "num_speculative_tokens is 0 or more"),
            (
                min(self.sliding_window, self.grammar_steps, self.max_loras) >= 0,
                "sliding_window, grammar_steps and max_loras are 0 or more",
            ),
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
