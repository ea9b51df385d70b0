"""The settings of a vLLM scheduler as schedules name them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from scripted.sdk.images import LARGEST_IMAGE


class VllmSettingsError(ValueError):
    """Raised for settings that vLLM or this adapter refuses, with the rule that they break."""


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a scheduler, under vLLM's own names. The defaults are small, so that limits are reached soon.

    - ``num_gpu_blocks`` includes the null block, which no request gets.
    - ``model_runner``: the version of vLLM's model runner that plans are made for.
    - ``speculative_method``: ``eagle`` is a drafter that reads one token ahead; ``mtp`` has a module for each guess,
      each of which reads one token further ahead.
    - ``sliding_window``: some layers attend to this many tokens; the cache has a second group.
    - ``attention_chunk_size``: some layers attend to tokens of the same chunk; one more group.
    - ``mamba_cache_mode`` other than ``off``: some layers are Mamba's; one more group.
    - ``prefix_cache_retention_interval``: windows and states are cached at its multiples and at the end of a prompt; -1
      caches all.
    - ``swa_bounded_replay``: windows are not cached; after a prefix hit the last window is computed again.
    - ``prefix_match_unit``: a prefix hit ends at any multiple of it; 0 for none.
    - ``mamba_checkpoint_alignment``: kernels keep the state at its multiples within a chunk; 0 for none.
    - ``rswa_window``: layers attend to the prompt and to this many tokens of the output.
    - ``circular_buffer_tokens``: one more group, with one block per request for this many tokens.
    - ``decode_context_parallel_size``: the number of ranks that a block is spread over.
    - ``hisparse_host_blocks``: HiSparse keeps pages in this many blocks of host memory, 0 for none, and reads them
      through ``hisparse_hot_blocks`` of the device.
    - ``kv_connector``: how a connector loads, if there is one. ``kv_offered_tokens`` of each prompt are stored outside;
      an ``async`` load or a save takes ``kv_transfer_steps``; with ``kv_saves`` the blocks of an ended request are kept
      until it is saved, with ``kv_saves_aborted`` also those of an aborted one.
    - ``structured_output``: requests may have grammars, each of which compiles in ``grammar_steps``.
    - ``max_loras``: three LoRAs are known, and this many may be computed together; 0 for none.
    - ``encoder_cache_size``, in tokens: prompts may have images, of which a step computes ``encoder_compute_budget``
      tokens. With ``ec_connector`` every second image is outside and arrives in ``ec_transfer_steps``.
    - ``is_encoder_decoder``: the model attends to its first image separately from the prompt.
    - ``enable_sleep_mode``: operators may release the memory of weights and KV.
    - ``log_stats`` is the engine's setting. Without ``checks_sessions`` a session may outgrow its context, as vLLM's
      front end lets it.
    - ``scheduler_cls``, MODULE:CLASS, is the user's own scheduler.
    - ``connector_cls`` is the user's own KV connector, with both of its sides; several, separated by commas, are parts
      of vLLM's MultiConnector. ``connector_extra`` is JSON for their extra configuration.
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
    speculative_method: Literal["ngram_gpu", "ngram", "eagle", "mtp"] = "ngram_gpu"
    model_runner: Literal[1, 2] = 2
    sliding_window: int = 0
    attention_chunk_size: int = 0
    prefix_cache_retention_interval: int = -1
    swa_bounded_replay: bool = False
    mamba_cache_mode: Literal["off", "none", "align"] = "off"
    mamba_checkpoint_alignment: int = 0
    enable_mamba_shared_prefix_checkpoint: bool = False
    prefix_match_unit: int = 0
    rswa_window: int = 0
    circular_buffer_tokens: int = 0
    decode_context_parallel_size: int = 1
    hisparse_host_blocks: int = 0
    hisparse_hot_blocks: int = 1
    enable_kv_cache_events: bool = False
    kv_cache_report_mode: Literal["incremental", "full"] = "incremental"
    kv_connector: Literal["none", "sync", "async"] = "none"
    kv_role: Literal["kv_both", "kv_consumer", "kv_producer"] = "kv_both"
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    kv_offered_tokens: int = 8
    kv_transfer_steps: int = 2
    kv_saves: bool = False
    kv_saves_aborted: bool = False
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
    enable_sleep_mode: bool = False
    log_stats: bool = False
    scheduler_cls: str = ""
    connector_cls: str = ""
    connector_extra: str = ""

    def __post_init__(self) -> None:
        for holds, rule in _RULES:
            if not holds(self):
                raise VllmSettingsError(f"{rule.format(self)}; got {self}")

    @property
    def windows(self) -> tuple[tuple[int, bool], ...]:
        """The tokens of each group after the first, and whether they are a chunk."""
        sizes = ((self.sliding_window, False), (self.attention_chunk_size, True))
        return tuple([one for one in sizes if one[0]])

    @property
    def kv_block_size(self) -> int:
        """The tokens of a block over all ranks."""
        return self.block_size * self.decode_context_parallel_size

    @property
    def room(self) -> int:
        """The tokens of all blocks except the null block."""
        return (self.num_gpu_blocks - 1) * self.kv_block_size

    @property
    def rings(self) -> tuple[int, ...]:
        """The tokens that each group of one block holds; these groups follow the groups with states."""
        return (self.circular_buffer_tokens,) if self.circular_buffer_tokens else ()

    @property
    def has_groups(self) -> bool:
        """Whether the cache has more than one group."""
        return (
            bool(self.windows or self.rings or self.hisparse_host_blocks) or self.has_mamba or self.is_encoder_decoder
        )

    @property
    def has_mamba(self) -> bool:
        """Whether some layers keep a state."""
        return self.mamba_cache_mode != "off"

    @property
    def hash_block_size(self) -> int:
        """The tokens that one hash of the prefix cache covers."""
        return self.prefix_match_unit or math.gcd(self.kv_block_size, *self.states)

    @property
    def scheduler_block_size(self) -> int:
        """The common multiple of the groups' block sizes."""
        return math.lcm(self.kv_block_size, *self.states)

    @property
    def states(self) -> tuple[int, ...]:
        """The tokens between two blocks of states, for each group after the groups with windows."""
        sizes = {"off": (), "none": (self.max_model_len,), "align": (self.block_size,)}
        return sizes[self.mamba_cache_mode]

    @property
    def keeps_images_whole(self) -> bool:
        """Whether a share that reaches an image reaches its end."""
        return self.disable_chunked_mm_input and not self.is_encoder_decoder

    @property
    def has_drafter(self) -> bool:
        """Whether a drafter has its own KV, which depends on the tokens after a position."""
        return self.speculative_method in ("eagle", "mtp")

    @property
    def has_modules(self) -> bool:
        """Whether guesses come from MTP modules."""
        return self.num_speculative_tokens > 0 and self.speculative_method == "mtp"

    @property
    def has_connector(self) -> bool:
        """Whether there is a KV connector."""
        return self.kv_connector != "none"

    @property
    def has_transfers(self) -> bool:
        """Whether there are transfers that a schedule can hold."""
        return self.has_connector or self.hisparse_host_blocks > 0

    @property
    def depth(self) -> int:
        """The most batches in flight: ``VllmConfig.max_concurrent_batches``."""
        if not self.async_scheduling:
            return self.pipeline_parallel_size
        return self.pipeline_parallel_size + 1


# The rules that settings of an engine must obey, with their error texts.
_RULES: Final[tuple[tuple[Callable[[VllmSettings], bool], str], ...]] = (
    (
        lambda s: all(all(name.partition(":")) for name in (s.scheduler_cls, *s.connector_cls.split(",")) if name),
        "scheduler_cls must be MODULE:CLASS, connector_cls one or more of them, separated by commas",
    ),
    (
        lambda s: not s.connector_cls or not (s.has_connector or s.has_groups or s.kv_role != "kv_both"),
        "connector_cls replaces kv_connector, and needs one group of layers and kv_role=kv_both",
    ),
    (
        lambda s: not s.connector_cls or (s.depth == 1 and not s.num_speculative_tokens and not s.encoder_cache_size),
        "connector_cls needs one batch in flight, no guesses and no images, so that all tokens are known",
    ),
    (
        lambda s: not s.connector_cls or s.enable_prefix_caching,
        "connector_cls needs enable_prefix_caching=True, because connectors identify blocks by their hashes",
    ),
    (
        lambda s: min(s.block_size, s.max_num_batched_tokens, s.max_num_seqs) >= 1,
        "block_size, max_num_batched_tokens and max_num_seqs must be at least 1",
    ),
    (
        lambda s: min(s.pipeline_parallel_size, s.decode_context_parallel_size) >= 1,
        "pipeline_parallel_size and decode_context_parallel_size must be at least 1",
    ),
    (lambda s: s.num_speculative_tokens >= 0, "num_speculative_tokens must not be negative"),
    (
        lambda s: min(s.sliding_window, s.attention_chunk_size, s.grammar_steps, s.max_loras) >= 0,
        "sliding_window, attention_chunk_size, grammar_steps and max_loras must not be negative",
    ),
    (
        lambda s: min(s.rswa_window, s.circular_buffer_tokens, s.mamba_checkpoint_alignment) >= 0,
        "rswa_window, circular_buffer_tokens and mamba_checkpoint_alignment must not be negative",
    ),
    (
        lambda s: not s.encoder_cache_size or min(s.encoder_cache_size, s.encoder_compute_budget) >= LARGEST_IMAGE,
        f"encoder_cache_size and encoder_compute_budget must hold the largest image, {LARGEST_IMAGE} tokens",
    ),
    (
        lambda s: (
            not s.disable_chunked_mm_input
            or min(s.max_num_batched_tokens, s.long_prefill_token_threshold or LARGEST_IMAGE) >= LARGEST_IMAGE
        ),
        f"with disable_chunked_mm_input a batch and a chunk must hold the largest image, {LARGEST_IMAGE} tokens",
    ),
    (
        lambda s: s.enable_chunked_prefill or not s.long_prefill_token_threshold,
        "long_prefill_token_threshold needs enable_chunked_prefill=True",
    ),
    (lambda s: not s.attention_chunk_size % s.block_size, "attention_chunk_size must be a multiple of block_size"),
    (
        lambda s: not (s.ec_connector or s.is_encoder_decoder) or s.encoder_cache_size > 0,
        "ec_connector and is_encoder_decoder need an encoder_cache_size",
    ),
    (
        lambda s: (
            not s.is_encoder_decoder or not (s.enable_prefix_caching or s.enable_chunked_prefill or s.has_connector)
        ),
        "vLLM supports no prefix cache, chunked prefill or KV connector for encoder-decoder models",
    ),
    (
        lambda s: not (s.attention_chunk_size and (s.has_mamba or s.has_drafter)),
        "vLLM does not combine attention_chunk_size with Mamba, EAGLE or MTP",
    ),
    (
        lambda s: not s.has_mamba or (s.mamba_cache_mode == "align") == s.enable_prefix_caching,
        "mamba_cache_mode must be align with a prefix cache and none without one",
    ),
    (
        lambda s: (
            s.mamba_cache_mode != "align" or (s.enable_chunked_prefill and s.max_num_batched_tokens >= s.block_size)
        ),
        "mamba_cache_mode=align needs enable_chunked_prefill=True and max_num_batched_tokens of at least block_size",
    ),
    (
        lambda s: s.mamba_cache_mode != "align" or not s.disable_chunked_mm_input,
        "mamba_cache_mode=align allows no disable_chunked_mm_input, because a chunk may end within an image",
    ),
    (
        lambda s: not s.has_mamba or s.block_size > s.num_speculative_tokens,
        "with Mamba layers block_size must be greater than num_speculative_tokens",
    ),
    (
        lambda s: (
            not (s.prefix_match_unit and s.circular_buffer_tokens and s.prefix_match_unit % s.circular_buffer_tokens)
        ),
        "prefix_match_unit must be a multiple of circular_buffer_tokens, because a hit keeps only whole rings",
    ),
    (
        lambda s: not s.prefix_match_unit or (s.mamba_cache_mode == "align" and not s.block_size % s.prefix_match_unit),
        "prefix_match_unit must divide block_size, and needs mamba_cache_mode=align",
    ),
    (
        lambda s: (
            not (s.mamba_checkpoint_alignment or s.enable_mamba_shared_prefix_checkpoint)
            or s.mamba_cache_mode == "align"
        ),
        "checkpoints of Mamba's states need mamba_cache_mode=align",
    ),
    (
        lambda s: (
            not s.hisparse_host_blocks or s.hisparse_host_blocks >= 2 - (-s.max_model_len // max(1, s.block_size))
        ),
        "hisparse_host_blocks must hold a request of max_model_len, plus two blocks",
    ),
    (
        lambda s: (
            not s.hisparse_host_blocks
            or not (s.windows or s.rings or s.rswa_window or s.has_mamba or s.is_encoder_decoder or s.has_connector)
        ),
        "HiSparse allows no other groups of layers, and in this adapter no connector",
    ),
    (
        lambda s: (
            not s.hisparse_host_blocks
            or (s.pipeline_parallel_size == s.decode_context_parallel_size == 1 and s.model_runner == 2)
        ),
        "HiSparse needs model_runner=2, and allows no pipeline stages and no context parallelism",
    ),
    (
        lambda s: not s.hisparse_host_blocks or (s.scheduler_reserve_full_isl and s.hisparse_hot_blocks >= 1),
        "HiSparse needs scheduler_reserve_full_isl=True and hisparse_hot_blocks of at least 1",
    ),
    (
        lambda s: not s.swa_bounded_replay or (s.sliding_window > 0 and s.model_runner == 2),
        "swa_bounded_replay needs a sliding_window and model_runner=2",
    ),
    (
        lambda s: not s.swa_bounded_replay or not (s.has_mamba or any(s.sliding_window % size for size in s.rings)),
        "swa_bounded_replay allows no Mamba layers, and sliding_window must be a multiple of each ring",
    ),
    (
        lambda s: not (s.swa_bounded_replay and (s.attention_chunk_size or (s.sliding_window - 1) % s.block_size == 0)),
        "swa_bounded_replay allows no attention_chunk_size, and no sliding_window - 1 that is a multiple of block_size",
    ),
    (lambda s: not (s.rswa_window and s.has_groups), "rswa_window allows no other kinds of layers"),
    (
        lambda s: (
            not s.circular_buffer_tokens
            or (
                not s.block_size % s.circular_buffer_tokens
                and s.block_size >= s.circular_buffer_tokens + s.depth * s.num_speculative_tokens
            )
        ),
        "block_size must be a multiple of circular_buffer_tokens, with room for all guesses in flight",
    ),
    (
        lambda s: s.decode_context_parallel_size == 1 or not (s.windows or s.rings or s.is_encoder_decoder),
        "decode_context_parallel_size above 1 allows only full attention and Mamba layers",
    ),
    (lambda s: 2 <= s.max_model_len <= s.room, "max_model_len must be from 2 to {0.room}, the tokens of all blocks"),
    (
        lambda s: s.enable_chunked_prefill or s.max_num_batched_tokens >= s.max_model_len,
        "without chunked prefill max_num_batched_tokens must be at least max_model_len",
    ),
    (
        lambda s: min(s.kv_offered_tokens, s.kv_transfer_steps) >= 0,
        "kv_offered_tokens and kv_transfer_steps must not be negative",
    ),
    (lambda s: s.kv_saves or not s.kv_saves_aborted, "kv_saves_aborted needs kv_saves=True"),
    (lambda s: s.max_num_batched_tokens >= s.max_num_seqs, "max_num_batched_tokens must be at least max_num_seqs"),
    (
        lambda s: s.max_num_batched_tokens > s.num_speculative_tokens,
        "max_num_batched_tokens must be greater than num_speculative_tokens",
    ),
    (
        lambda s: not (s.async_scheduling and s.model_runner == 1 and s.pipeline_parallel_size > 1),
        "asynchronous scheduling with pipeline stages needs model_runner=2",
    ),
)
