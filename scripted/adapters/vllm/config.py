"""The settings of a vLLM scheduler, as schedules name them."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from scripted.sdk.images import LARGEST_IMAGE


class VllmSettingsError(ValueError):
    """These settings make no vLLM engine; the text says which rule they break."""


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a scheduler, under vLLM's own names. The defaults are small, so that limits are met soon.

    ``num_gpu_blocks`` counts the null block, which no request gets. ``model_runner`` is the version of vLLM's model
    runner that plans are made for. With a ``sliding_window`` some layers attend to so many tokens alone, and the cache
    has two groups; with an ``attention_chunk_size`` to those of the same chunk, and it has one more; with a
    ``mamba_cache_mode`` that is not ``off`` some layers are Mamba's, and have one more. Of prompts in windows and
    states only each ``prefix_cache_retention_interval`` is cached, and where a prompt ends; -1 for all. With a
    ``prefix_match_unit``, 0 for none, a prefix hit ends at any multiple of it. ``kv_connector`` says how a connector
    loads, if there is one: ``kv_offered_tokens`` of each prompt are outside, and an ``async`` load or a save takes
    ``kv_transfer_steps``; with ``kv_saves`` the blocks of a request that ended are kept until it is saved. With
    ``structured_output`` requests may have grammars, each of which is compiled in ``grammar_steps``. With
    ``max_loras``, 0 for none, three LoRAs are known, and so many may be computed together. With an
    ``encoder_cache_size``, in tokens, prompts may have images, of which ``encoder_compute_budget`` tokens are computed
    in a step; with ``ec_connector`` every second one is outside, and comes in ``ec_transfer_steps``. A model with
    ``is_encoder_decoder`` attends to its first image apart from the prompt. ``log_stats`` is that of the engine.
    Without ``checks_sessions`` a session gets input that outgrows its context, as vLLM's front end lets it.
    """

    block_size: int = 4
    num_gpu_blocks: int = 13
    max_model_len: int = 32
    max_num_batched_tokens: int = 16
    max_num_seqs: int = 4
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool = False
    pipeline_parallel_size: int = 1
    num_speculative_tokens: int = 0
    speculative_method: Literal["ngram", "eagle"] = "ngram"
    disable_lookahead_block_hashes: bool = False
    model_runner: Literal[1, 2] = 2
    sliding_window: int = 0
    attention_chunk_size: int = 0
    prefix_cache_retention_interval: int = -1
    mamba_cache_mode: Literal["off", "none", "align"] = "off"
    prefix_match_unit: int = 0
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
    encoder_cache_size: int = 0
    encoder_compute_budget: int = 8
    disable_chunked_mm_input: bool = False
    ec_connector: bool = False
    ec_transfer_steps: int = 1
    is_encoder_decoder: bool = False
    checks_sessions: bool = True
    prefill_schedule_interval: int = 1
    log_stats: bool = False

    def __post_init__(self) -> None:
        room = (self.num_gpu_blocks - 1) * self.block_size
        rules = (
            (min(self.block_size, self.max_num_batched_tokens, self.max_num_seqs) >= 1, "sizes are 1 or more"),
            (self.pipeline_parallel_size >= 1, "pipeline_parallel_size is 1 or more"),
            (self.num_speculative_tokens >= 0, "num_speculative_tokens is 0 or more"),
            (
                min(self.sliding_window, self.attention_chunk_size, self.grammar_steps, self.max_loras) >= 0,
                "sliding_window, attention_chunk_size, grammar_steps and max_loras are 0 or more",
            ),
            (
                not self.encoder_cache_size
                or min(self.encoder_cache_size, self.encoder_compute_budget) >= LARGEST_IMAGE,
                f"with an encoder_cache_size, it and encoder_compute_budget hold the largest image, {LARGEST_IMAGE}",
            ),
            (
                not self.disable_chunked_mm_input
                or min(self.max_num_batched_tokens, self.long_prefill_token_threshold or LARGEST_IMAGE)
                >= LARGEST_IMAGE,
                f"with disable_chunked_mm_input, batches and parts of prompts are those of an image, {LARGEST_IMAGE}",
            ),
            (
                self.enable_chunked_prefill or not self.long_prefill_token_threshold,
                "a long_prefill_token_threshold cuts prompts, and goes with enable_chunked_prefill=True",
            ),
            (
                not self.attention_chunk_size % self.block_size,
                "vLLM's attention_chunk_size is a multiple of block_size",
            ),
            (
                not (self.ec_connector or self.is_encoder_decoder) or self.encoder_cache_size > 0,
                "ec_connector and is_encoder_decoder go with an encoder_cache_size",
            ),
            (
                not self.is_encoder_decoder
                or not (self.enable_prefix_caching or self.enable_chunked_prefill or self.has_connector),
                "vLLM has no prefix cache, chunked prefill or KV connector for encoder-decoder models",
            ),
            (
                not (self.attention_chunk_size and (self.has_mamba or self.speculative_method == "eagle")),
                "vLLM has no attention_chunk_size beside Mamba or EAGLE",
            ),
            (
                not (self.has_mamba and self.num_speculative_tokens),
                "the device of this adapter keeps no states of guesses: Mamba goes with num_speculative_tokens=0",
            ),
            (
                not self.has_mamba or (self.mamba_cache_mode == "align") == self.enable_prefix_caching,
                "mamba_cache_mode is align with a prefix cache and none without",
            ),
            (
                self.mamba_cache_mode != "align"
                or (self.enable_chunked_prefill and self.max_num_batched_tokens >= self.block_size),
                "with mamba_cache_mode=align, prompts are cut, and max_num_batched_tokens is block_size or more",
            ),
            (
                not self.prefix_match_unit
                or (self.mamba_cache_mode == "align" and not self.block_size % self.prefix_match_unit),
                "a prefix_match_unit divides block_size and goes with mamba_cache_mode=align",
            ),
            (
                self.num_gpu_blocks - 1 >= self._needed_blocks,
                f"with several groups, num_gpu_blocks is more than one request may need, {self._needed_blocks}",
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
    def windows(self) -> tuple[tuple[int, bool], ...]:
        """Of the groups behind the first: their tokens, and whether these are a chunk."""
        sizes = ((self.sliding_window, False), (self.attention_chunk_size, True))
        return tuple([one for one in sizes if one[0]])

    @property
    def has_groups(self) -> bool:
        """Whether the cache has more than one."""
        return bool(self.windows) or self.has_mamba or self.is_encoder_decoder

    @property
    def _needed_blocks(self) -> int:
        """What a request of the whole context takes of all groups, as vLLM counts it at its start; 0 with one group."""
        if not self.has_groups:
            return 0
        needed = -(-self.max_model_len // self.block_size)
        for size, _ in self.windows:
            held = min(size + self.depth * self.max_num_batched_tokens, self.max_model_len)
            needed += 1 - (-held // self.block_size)
        if self.is_encoder_decoder:
            needed -= -LARGEST_IMAGE // self.block_size
        # The state before a chunk, and the one after it.
        return needed + {"off": 0, "none": 1, "align": 2}[self.mamba_cache_mode]

    @property
    def has_mamba(self) -> bool:
        """Whether there are layers that keep a state."""
        return self.mamba_cache_mode != "off"

    @property
    def hash_block_size(self) -> int:
        """Tokens of a hash of the prefix cache."""
        return self.prefix_match_unit or self.block_size

    @property
    def scheduler_block_size(self) -> int:
        """The common multiple of the groups' block sizes."""
        return math.lcm(self.block_size, *self.states)

    @property
    def states(self) -> tuple[int, ...]:
        """Of the groups behind those with windows: tokens from one block of states to the next."""
        sizes = {"off": (), "none": (self.max_model_len,), "align": (self.block_size,)}
        return sizes[self.mamba_cache_mode]

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
