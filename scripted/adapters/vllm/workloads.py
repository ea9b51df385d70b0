"""Base workloads of vLLM's scheduler: its other configurations, each with requests that meet their limits.

The portable ones, which every scheduler gets, run with the default settings.
"""

from __future__ import annotations

from typing import Final

# Blocks for about one and a half requests, so that they preempt each other.
_TIGHT: Final = "num_gpu_blocks=9"
_SMALL_BLOCKS: Final = "block_size=2 num_gpu_blocks=12 max_model_len=20 max_num_batched_tokens=8"
_ASYNC: Final = "async_scheduling=True"
_STAGES: Final = "pipeline_parallel_size=2"

_GROWING: Final = "1 start a prompt=9 new=10; 2 start b prompt=10 seed=1 new=10; 3 start c prompt=5 seed=2 new=8"
_TWINS: Final = "1 start a prompt=12 new=8; 3 start b prompt=12 new=8; 6 start c prompt=12 shared=8 tail=3 new=8"
_CHUNKS: Final = "1 start a prompt=25 new=4; 2 start b prompt=20 seed=1 new=5; 3 start c prompt=6 seed=2 new=6"
_PRIORITIES: Final = (
    "1 start a prompt=14 new=6; 2 start b prompt=7 seed=1 new=8 priority=1; 4 start c prompt=5 seed=2 new=8 priority=2"
)
_TOGETHER: Final = (
    "1 start a prompt=7 new=6; 1 start b prompt=7 seed=1 new=6; 1 start c prompt=7 seed=2 new=6; "
    "2 start d prompt=7 seed=3 new=6 priority=1"
)
# To the end of the context, which is before the end of their output.
_LONG: Final = "1 start a prompt=20 new=40; 2 start b prompt=9 seed=1 new=40"
_LOADS: Final = "kv_connector=async"
_LOADS_NOW: Final = "kv_connector=sync"
_WINDOW: Final = "sliding_window=6 num_gpu_blocks=20"
_REPLAYED: Final = f"{_WINDOW} swa_bounded_replay=True"
_HOST: Final = "hisparse_host_blocks=14 num_gpu_blocks=16 max_num_batched_tokens=8"
_FAILS: Final = "kv_load_failure_policy=fail"

_GRAMMARS: Final = "structured_output=True"
_MASKED: Final = (
    "1 start a prompt=9 new=8 grammar=1; 2 start b prompt=10 seed=1 new=8; 3 start c prompt=5 seed=2 new=7 grammar=1"
)
_TALKING: Final = (
    "1 start a prompt=9 new=3 session=1; 2 start b prompt=6 new=4 seed=1 session=1; 3 start c prompt=5 seed=2 new=4; "
    "10 more a tokens=5 new=3 seed=3; 11 more b tokens=4 new=2; 18 more a tokens=2; 19 end-session b; "
    "20 start d prompt=12"
)
# More of it comes before the answer to what came last.
_TALKING_ON: Final = (
    "1 start a prompt=9 new=5 session=1; 2 start b prompt=6 new=4 seed=1 session=1; 3 more a tokens=5 new=3 seed=3; "
    "3 start c prompt=5 seed=2 new=6; 4 more b tokens=3 new=4; 5 more a tokens=3 new=3; 6 end-session a; "
    "16 more b tokens=2"
)
_MAMBA: Final = "mamba_cache_mode=align num_gpu_blocks=16"
_EAGLE: Final = "num_speculative_tokens=2 speculative_method=eagle"
_CROSSED: Final = (
    "is_encoder_decoder=True encoder_cache_size=8 enable_prefix_caching=False enable_chunked_prefill=False "
    "max_num_batched_tokens=32"
)
_TIGHTER: Final = "num_gpu_blocks=12"
# Prompts that share blocks, whole and in part, at once and later, and go on.
_TWINS_AND_CHUNKS: Final = (
    "; 1 start a prompt=21 new=5; 2 start b prompt=21 new=4; 3 start c prompt=18 shared=9 tail=1 new=6; "
    "8 start d prompt=24 new=3; 9 start e prompt=12 shared=8 tail=2 new=4"
)
# Prompts that go on where another one ended, within a block.
_GROWN: Final = (
    "; 1 start a prompt=11 new=2; 6 start b prompt=24 new=3; 14 start c prompt=14 new=3; "
    "18 start d prompt=21 shared=13 tail=1"
)
# An image of six tokens, which two share, one of three and one of five; the encoder's cache holds one or two.
_SEEN: Final = (
    "1 start a prompt=14 new=4 images=1; 2 start b prompt=20 new=4 seed=1 images=2; 3 start c prompt=12 seed=2 new=5; "
    "4 start d prompt=14 new=3 images=1; 6 start e prompt=24 new=3 images=3; 9 start f prompt=20 seed=1 images=2"
)
_SEEN_PRIORITIES: Final = (
    "1 start a prompt=15 new=4 images=2; 2 start b prompt=8 seed=1 new=6 priority=1 images=1; "
    "4 start c prompt=7 seed=2 new=6 priority=2 images=1"
)
_ADAPTED: Final = (
    "1 start a prompt=9 new=8 lora=1; 2 start b prompt=9 new=6 lora=2; 3 start c prompt=9 new=6 lora=1; "
    "4 start d prompt=9 new=5; 5 start e prompt=12 new=4 lora=3"
)

WORKLOADS: Final = {
    f"vllm-{name}": text
    for name, text in {
        "growing": f"{_TIGHT}; {_GROWING}",
        "growing-without-cache": f"{_TIGHT} enable_prefix_caching=False; {_GROWING}",
        "growing-first-runner": f"{_TIGHT} model_runner=1; {_GROWING}",
        "whole-prompts": f"{_TIGHT} enable_chunked_prefill=False max_num_batched_tokens=32; {_GROWING}",
        "watermark": f"{_TIGHT} watermark=0.2 scheduler_reserve_full_isl=False; {_GROWING}",
        "chunks": f"max_num_batched_tokens=8 long_prefill_token_threshold=5; {_CHUNKS}",
        "chunks-tight": f"{_TIGHT} max_num_batched_tokens=8 long_prefill_token_threshold=5; {_CHUNKS}",
        "priority": f"{_TIGHT} policy=priority; {_PRIORITIES}",
        "priority-together": f"{_TIGHT} policy=priority; {_TOGETHER}",
        "priority-chunks": f"{_SMALL_BLOCKS} policy=priority long_prefill_token_threshold=4; {_PRIORITIES}",
        "priority-async": f"{_TIGHT} policy=priority {_ASYNC}; {_PRIORITIES}",
        "priority-guesses": f"{_TIGHT} policy=priority num_speculative_tokens=2; {_PRIORITIES}",
        "async": f"{_ASYNC}; {_TWINS}",
        "async-tight": f"{_TIGHT} {_ASYNC}; {_GROWING}",
        "async-first-runner": f"{_TIGHT} {_ASYNC} model_runner=1; {_GROWING}",
        "async-chunks-first-runner": f"{_TIGHT} {_ASYNC} max_num_batched_tokens=8 model_runner=1; {_CHUNKS}",
        "async-chunks": f"{_TIGHT} {_ASYNC} max_num_batched_tokens=8; {_CHUNKS}",
        "stages": f"{_TIGHT} {_STAGES}; {_GROWING}",
        "stages-async": f"{_TIGHT} {_STAGES} {_ASYNC}; {_GROWING}",
        "stages-async-deep": f"{_TIGHT} pipeline_parallel_size=3 {_ASYNC}; {_TWINS}",
        "guesses": f"{_TIGHT} num_speculative_tokens=2; {_GROWING}",
        "guesses-first-runner": f"{_TIGHT} num_speculative_tokens=2 model_runner=1; {_TWINS}",
        "context": f"{_TIGHT}; {_LONG}",
        "context-guesses": f"{_TIGHT} num_speculative_tokens=3; {_LONG}",
        "context-guesses-async": f"{_TIGHT} num_speculative_tokens=3 {_ASYNC} {_STAGES}; {_LONG}",
        "guesses-async": f"{_TIGHT} num_speculative_tokens=2 {_ASYNC}; {_GROWING}",
        "loads": f"{_LOADS}; {_TWINS}",
        "loads-tight": f"{_TIGHT} {_LOADS}; {_GROWING}",
        "loads-async": f"{_TIGHT} {_LOADS} {_ASYNC} kv_saves=True; {_GROWING}",
        "loads-failing": f"{_TIGHT} {_LOADS} {_FAILS}; {_TWINS}",
        "loads-now": f"{_LOADS_NOW}; {_TWINS}",
        "loads-now-async": f"{_LOADS_NOW} {_ASYNC}; {_GROWING}",
        "loads-now-failing": f"{_LOADS_NOW} {_FAILS} {_ASYNC}; {_TWINS}",
        "saves": f"{_TIGHT} {_LOADS_NOW} kv_offered_tokens=0 kv_saves=True; {_TWINS}",
        "windows": f"{_WINDOW}; {_TWINS}",
        "windows-chunks": f"{_WINDOW} max_num_batched_tokens=8 enable_kv_cache_events=True; {_CHUNKS}",
        "windows-async": f"{_WINDOW} max_num_batched_tokens=8 {_ASYNC}; {_LONG}",
        "windows-tight": f"sliding_window=5 num_gpu_blocks=16 max_num_batched_tokens=8; {_GROWING}",
        "windows-guesses": f"{_WINDOW} num_speculative_tokens=2; {_GROWING}",
        "windows-guesses-async": (
            f"sliding_window=4 num_gpu_blocks=16 max_num_batched_tokens=8 num_speculative_tokens=3 {_ASYNC}; {_GROWING}"
        ),
        "loads-ragged": f"{_LOADS} kv_offered_tokens=6; {_TWINS}",
        "events-in-full": f"{_TIGHT} enable_kv_cache_events=True kv_cache_report_mode=full; {_TWINS}",
        "grammars": f"{_GRAMMARS}; {_MASKED}",
        "grammars-async": f"{_GRAMMARS} {_ASYNC}; {_MASKED}",
        "grammars-guesses": f"{_TIGHT} {_GRAMMARS} num_speculative_tokens=2; {_MASKED}",
        "grammars-guesses-async": f"{_TIGHT} {_GRAMMARS} num_speculative_tokens=2 {_ASYNC}; {_MASKED}",
        "grammars-guesses-async-stages": f"{_GRAMMARS} num_speculative_tokens=3 {_ASYNC} {_STAGES}; {_MASKED}",
        "grammars-late": f"{_GRAMMARS} grammar_steps=4 {_ASYNC}; {_MASKED}; 2 start f prompt=5 grammar=-1",
        "loras": f"max_loras=1; {_ADAPTED}",
        "sessions": f"max_num_batched_tokens=8; {_TALKING}",
        "sessions-async": f"{_ASYNC}; {_TALKING}",
        "sessions-guesses-async": f"num_speculative_tokens=2 {_ASYNC}; {_TALKING}",
        "sessions-eagle-async": f"{_EAGLE} {_ASYNC}; {_TALKING}",
        "sessions-first-runner": f"model_runner=1; {_TALKING}",
        "sessions-queued": f"max_num_batched_tokens=8; {_TALKING_ON}",
        "sessions-queued-async": f"{_TIGHT} {_ASYNC}; {_TALKING_ON}",
        "sessions-queued-guesses-async": f"num_speculative_tokens=2 {_ASYNC} {_STAGES}; {_TALKING_ON}",
        "sessions-queued-stages": f"{_STAGES} max_num_batched_tokens=8; {_TALKING_ON}",
        # Preempted while the last token of its answer is in flight.
        "sessions-preempted": (
            f"{_TIGHT} {_STAGES}; 1 start a prompt=12 new=6 seed=1; 1 start b prompt=9 new=5 session=1"
        ),
        # They say the same, until one of them gets more; and the other one is preempted.
        "sessions-alike": (
            f"num_gpu_blocks=10 {_ASYNC} {_STAGES}; 1 start a prompt=10 session=1; 1 start b prompt=10 new=16; "
            "2 more a tokens=5"
        ),
        "loras-tight": f"{_TIGHT} max_loras=2 {_ASYNC}; {_ADAPTED}",
        "images": f"encoder_cache_size=8; {_SEEN}",
        "images-tight": f"{_TIGHT} encoder_cache_size=6 encoder_compute_budget=6 max_num_batched_tokens=8; {_SEEN}",
        "images-whole": f"encoder_cache_size=8 disable_chunked_mm_input=True max_num_batched_tokens=8; {_SEEN}",
        "images-async": f"{_TIGHT} encoder_cache_size=8 max_num_batched_tokens=8 {_ASYNC}; {_SEEN}",
        "images-stages": f"{_TIGHT} encoder_cache_size=12 max_num_batched_tokens=8 {_STAGES} {_ASYNC}; {_SEEN}",
        "images-priority": (
            f"{_SMALL_BLOCKS} encoder_cache_size=8 policy=priority long_prefill_token_threshold=4; {_SEEN_PRIORITIES}"
        ),
        "images-loads": f"{_LOADS} encoder_cache_size=8; {_SEEN}",
        "images-guesses": f"{_TIGHT} encoder_cache_size=8 num_speculative_tokens=2 {_ASYNC}; {_SEEN}",
        "mamba": f"{_MAMBA} {_TWINS_AND_CHUNKS}",
        "mamba-async": f"{_MAMBA} {_ASYNC} max_num_batched_tokens=8 {_TWINS_AND_CHUNKS}",
        "mamba-growing": f"{_MAMBA} max_num_batched_tokens=8; {_GROWING}",
        "mamba-priority": f"{_MAMBA} policy=priority max_num_batched_tokens=8; {_TOGETHER}",
        "mamba-stages": f"{_MAMBA} {_STAGES} {_ASYNC} long_prefill_token_threshold=6 {_TWINS_AND_CHUNKS}",
        "mamba-windows": f"{_MAMBA} sliding_window=5 num_gpu_blocks=24; {_TWINS}",
        "mamba-images": f"{_MAMBA} encoder_cache_size=8 max_num_batched_tokens=8; {_SEEN}",
        "mamba-parts": f"{_MAMBA} prefix_match_unit=2 {_TWINS_AND_CHUNKS}",
        "mamba-parts-async": f"{_MAMBA} prefix_match_unit=2 {_ASYNC} max_num_batched_tokens=8 {_TWINS_AND_CHUNKS}",
        "mamba-parts-growing": f"{_MAMBA} prefix_match_unit=2 max_num_batched_tokens=8; {_GROWING}",
        "mamba-parts-grown": f"{_MAMBA} prefix_match_unit=2{_GROWN}",
        # The first image ends behind a block, and the second one does not fit beside it.
        "mamba-images-large": (
            f"{_MAMBA} block_size=8 max_num_batched_tokens=8 encoder_cache_size=8; "
            "1 start a prompt=25 seed=1 images=2 new=3; 2 start b prompt=24 seed=2 images=2 new=3"
        ),
        "mamba-uncached": f"mamba_cache_mode=none enable_prefix_caching=False {_TIGHTER}; {_GROWING}",
        "eagle": f"{_EAGLE}; {_TWINS}",
        "eagle-async": f"{_TIGHT} {_EAGLE} {_ASYNC}; {_GROWING}",
        "eagle-windows": f"{_EAGLE} {_WINDOW}; {_TWINS}",
        "eagle-windows-dropped": f"{_EAGLE} {_WINDOW} disable_lookahead_block_hashes=True; {_TWINS}",
        "eagle-loads": f"{_EAGLE} {_LOADS}; {_TWINS}",
        "eagle-images": f"{_EAGLE} encoder_cache_size=8 max_num_batched_tokens=8; {_SEEN}",
        "eagle-chunks": f"{_EAGLE} max_num_batched_tokens=8 {_ASYNC} enable_kv_cache_events=True; {_CHUNKS}",
        "attention-chunks": f"attention_chunk_size=8 num_gpu_blocks=20 max_num_batched_tokens=8 {_TWINS_AND_CHUNKS}",
        "attention-chunks-async": f"attention_chunk_size=8 num_gpu_blocks=24 {_ASYNC}; {_LONG}",
        "attention-chunks-loads": f"attention_chunk_size=8 num_gpu_blocks=20 {_LOADS}; {_TWINS}",
        "windows-retained": f"{_WINDOW} prefix_cache_retention_interval=8 {_TWINS_AND_CHUNKS}",
        "windows-retained-eagle": f"{_WINDOW} {_EAGLE} prefix_cache_retention_interval=0 {_TWINS_AND_CHUNKS}",
        "windows-replayed": f"{_REPLAYED} {_TWINS_AND_CHUNKS}",
        "windows-replayed-async": f"{_REPLAYED} {_ASYNC} max_num_batched_tokens=8 {_TWINS_AND_CHUNKS}",
        "windows-replayed-loads": f"{_REPLAYED} {_LOADS} kv_offered_tokens=16 {_TWINS_AND_CHUNKS}",
        "windows-replayed-loads-now": f"{_REPLAYED} {_LOADS_NOW} kv_offered_tokens=16 {_TWINS_AND_CHUNKS}",
        "windows-replayed-pulled": f"{_REPLAYED} {_LOADS} kv_role=kv_consumer; {_TWINS}",
        "mamba-retained": f"{_MAMBA} prefix_cache_retention_interval=8 {_TWINS_AND_CHUNKS}",
        "mamba-retained-once": f"{_MAMBA} prefix_cache_retention_interval=0 {_ASYNC} {_TWINS_AND_CHUNKS}",
        "prefills-apart": f"prefill_schedule_interval=3 max_num_batched_tokens=8 log_stats=True; {_CHUNKS}",
        "counted": f"{_TIGHT} log_stats=True num_speculative_tokens=2 {_ASYNC}; {_GROWING}",
        "loads-counted": f"{_LOADS} log_stats=True {_FAILS} kv_saves=True; {_TWINS}",
        "loads-windows": f"{_LOADS} {_WINDOW}; {_TWINS}",
        "loads-now-windows": f"{_LOADS_NOW} {_WINDOW} {_ASYNC}; {_TWINS}",
        "loads-mamba": f"{_LOADS} {_MAMBA} kv_offered_tokens=16 {_TWINS_AND_CHUNKS}",
        "loads-now-mamba": f"{_LOADS_NOW} {_MAMBA} kv_offered_tokens=16 {_TWINS_AND_CHUNKS}",
        "loads-mamba-parts": f"{_LOADS} {_MAMBA} kv_offered_tokens=12 prefix_match_unit=2 {_TWINS_AND_CHUNKS}",
        "images-outside": f"encoder_cache_size=8 ec_connector=True; {_SEEN}",
        "images-outside-late": f"{_TIGHT} encoder_cache_size=8 ec_connector=True ec_transfer_steps=3 {_ASYNC}; {_SEEN}",
        "encoder-decoder": f"{_CROSSED}; {_SEEN}",
        "encoder-decoder-async": f"{_CROSSED} {_ASYNC} {_TIGHTER}; {_SEEN}",
        "mamba-guesses": f"{_MAMBA} num_speculative_tokens=2 {_TWINS_AND_CHUNKS}",
        "mamba-guesses-async": f"{_MAMBA} num_speculative_tokens=3 {_ASYNC} max_num_batched_tokens=8; {_GROWING}",
        "mamba-guesses-stages": f"{_MAMBA} num_speculative_tokens=2 {_ASYNC} {_STAGES}; {_TWINS}",
        "mamba-guesses-uncached": (
            f"mamba_cache_mode=none enable_prefix_caching=False num_gpu_blocks=16 num_speculative_tokens=2; {_GROWING}"
        ),
        "mamba-guesses-grammars": f"{_MAMBA} num_speculative_tokens=2 {_GRAMMARS} {_ASYNC}; {_MASKED}",
        "mamba-eagle": f"{_MAMBA} {_EAGLE} {_TWINS_AND_CHUNKS}",
        "mamba-checkpoints": f"{_MAMBA} mamba_checkpoint_alignment=2 prefix_match_unit=2 {_TWINS_AND_CHUNKS}",
        "mamba-checkpoints-async": (
            f"{_MAMBA} mamba_checkpoint_alignment=1 num_speculative_tokens=2 {_ASYNC}; {_CHUNKS}"
        ),
        "mamba-checkpoints-kept": (
            f"{_MAMBA} mamba_checkpoint_alignment=2 prefix_cache_retention_interval=0 prefix_match_unit=2{_GROWN}"
        ),
        "mamba-junctions": (
            f"{_MAMBA} enable_mamba_shared_prefix_checkpoint=True prefix_match_unit=2 {_TWINS_AND_CHUNKS}"
        ),
        "mamba-spread": f"{_MAMBA} decode_context_parallel_size=2 {_TWINS_AND_CHUNKS}",
        "spread": f"num_gpu_blocks=7 decode_context_parallel_size=2; {_TWINS}",
        "spread-loads": f"{_TIGHT} decode_context_parallel_size=2 {_LOADS}; {_TWINS}",
        "windows-of-output": f"rswa_window=3; {_GROWING}",
        "windows-of-output-async": f"{_TIGHT} rswa_window=5 num_speculative_tokens=2 {_ASYNC}; {_GROWING}",
        "rings": f"circular_buffer_tokens=4 num_gpu_blocks=14 max_num_batched_tokens=8 {_TWINS_AND_CHUNKS}",
        "rings-guesses": f"circular_buffer_tokens=2 num_speculative_tokens=1 num_gpu_blocks=12 {_ASYNC}; {_GROWING}",
        "rings-loads": f"circular_buffer_tokens=4 num_gpu_blocks=16 {_LOADS} kv_offered_tokens=6; {_TWINS}",
        "host-pages": f"{_HOST} {_TWINS_AND_CHUNKS}",
        "host-pages-async": f"{_HOST} {_ASYNC} num_gpu_blocks=20 {_TWINS_AND_CHUNKS}",
        "host-pages-growing": f"{_HOST} kv_transfer_steps=1; {_GROWING}",
        "host-pages-guesses": f"{_HOST} num_speculative_tokens=2 {_ASYNC} num_gpu_blocks=20; {_TWINS}",
        "guesses-async-stages": f"{_TIGHT} num_speculative_tokens=3 {_ASYNC} {_STAGES}; {_TWINS}",
    }.items()
}
