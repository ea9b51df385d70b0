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
        "sessions-first-runner": f"model_runner=1; {_TALKING}",
        "loras-tight": f"{_TIGHT} max_loras=2 {_ASYNC}; {_ADAPTED}",
        "guesses-async-stages": f"{_TIGHT} num_speculative_tokens=3 {_ASYNC} {_STAGES}; {_TWINS}",
    }.items()
}
