"""Base workloads of SGLang's scheduler: its other configurations, each with requests that meet their limits.

The portable ones, which every scheduler gets, run with the default settings.
"""

from __future__ import annotations

from typing import Final

# More is admitted than fits, so that requests are retracted.
_BOLD: Final = "schedule_conservativeness=0.1 max_total_tokens=32"
_NORMAL: Final = "disable_overlap_schedule=True"
_PAGES: Final = "page_size=4"
_MIXED: Final = "enable_mixed_chunk=True"

_GROWING: Final = "1 start a prompt=9 new=12; 2 start b prompt=10 seed=1 new=12; 3 start c prompt=5 seed=2 new=10"
_TWINS: Final = "1 start a prompt=12 new=8; 3 start b prompt=12 new=8; 6 start c prompt=12 shared=8 tail=3 new=8"
_CHUNKS: Final = "1 start a prompt=22 new=4; 2 start b prompt=18 seed=1 new=5; 3 start c prompt=6 seed=2 new=6"
_PRIORITIES: Final = (
    "1 start a prompt=14 new=6; 2 start b prompt=7 seed=1 new=8 priority=1; 4 start c prompt=5 seed=2 new=8 priority=2"
)
# Prefixes of one another that end inside what is cached: nodes of the tree are split, locked or not.
_SPLITS: Final = (
    "1 start a prompt=12 new=6; 4 start b prompt=12 shared=6 tail=1 new=2; "
    "10 start c prompt=12 shared=3 tail=2 new=2; 16 start d prompt=20 seed=4 new=2"
)

# The last pages are taken within one step of each other.
_TIGHT: Final = (
    "1 start a prompt=3 new=9; 2 start b prompt=4 seed=1 new=5; 3 start c prompt=4 seed=2 new=8; "
    "4 start d prompt=8 seed=3 new=7"
)
_TIGHTER: Final = (
    "1 start a prompt=3 new=12; 2 start b prompt=4 seed=1 new=7; 3 start c prompt=3 seed=2 new=9; "
    "4 start d prompt=10 seed=3 new=11"
)
# As many as there are rows; a chunk ends within each prompt.
_FOUR: Final = (
    "1 start a prompt=7 new=12; 1 start b prompt=7 seed=1 new=12; 1 start c prompt=7 seed=2 new=12; "
    "1 start d prompt=7 seed=3 new=4"
)

# A host tier: what was evicted is loaded back, in prompts that share it, while others push it out again.
_TIERED: Final = "enable_hierarchical_cache=True"
_STORED: Final = f"{_TIERED} hicache_storage_backend=dynamic"
_BUFFER: Final = "hicache_host_memory_mode=buffer_only"
_WAITS: Final = "hicache_storage_prefetch_policy=wait_complete"
_BACK: Final = (
    "1 start a prompt=20 new=3; 8 start b prompt=28 seed=1 new=3; 16 start c prompt=20 shared=16 tail=2 new=4; "
    "24 start d prompt=28 seed=1 new=2; 24 start e prompt=20 new=3"
)
_CHURN: Final = (
    "1 start a prompt=16 new=4; 3 start b prompt=16 seed=1 new=4; 6 start c prompt=16 shared=12 tail=2 new=4; "
    "9 start d prompt=16 seed=2 new=4; 12 start e prompt=16 seed=1 new=4; 15 start f prompt=16 new=4"
)
# What the storage has is all that is left; the first of the others leaves no row for them.
_FLUSHED: Final = (
    "1 start a prompt=20 new=2; 11 flush; 12 start b prompt=8 seed=1 new=8; 12 start c prompt=20 new=3; "
    "13 start d prompt=20 new=3"
)

WORKLOADS: Final = {
    f"sglang-{name}": text
    for name, text in {
        "growing": f"{_BOLD}; {_GROWING}",
        "growing-normal": f"{_BOLD} {_NORMAL}; {_GROWING}",
        "growing-pages": f"{_BOLD} {_PAGES}; {_GROWING}",
        "tight-pages": f"schedule_conservativeness=0.1 max_total_tokens=24 {_PAGES} {_NORMAL}; {_TIGHT}",
        "tight-pages-overlap": f"schedule_conservativeness=0.1 max_total_tokens=32 {_PAGES}; {_TIGHTER}",
        "queue": f"{_BOLD} max_queued_requests=2; {_GROWING}",
        "growing-mixed": f"{_BOLD} {_MIXED}; {_GROWING}",
        "growing-without-cache": f"{_BOLD} disable_radix_cache=True; {_GROWING}",
        "twins-pages": f"{_PAGES}; {_TWINS}",
        "twins-normal-lpm": f"{_NORMAL} schedule_policy=lpm; {_TWINS}",
        "chunks-normal": f"{_NORMAL}; {_CHUNKS}",
        "chunks-one-row": f"max_running_requests=1; {_CHUNKS}",
        "four-rows": f"max_total_tokens=160; {_FOUR}",
        "chunks-mixed": f"{_MIXED}; {_CHUNKS}",
        "chunks-pages": f"{_PAGES}; {_CHUNKS}",
        "chunks-pages-mixed": f"{_PAGES} {_MIXED} {_NORMAL}; {_CHUNKS}",
        "splits": f"default; {_SPLITS}",
        "splits-tight": f"max_total_tokens=28; {_SPLITS}",
        "paused": f"default; {_TWINS}; 7 pause mode=retract; 12 continue",
        "priority": f"enable_priority_scheduling=True max_running_requests=2; {_PRIORITIES}",
        "priority-normal": f"enable_priority_scheduling=True max_running_requests=2 {_NORMAL}; {_PRIORITIES}",
        "host": f"{_TIERED}; {_BACK}",
        "host-paused": f"{_TIERED}; {_CHURN}; 7 pause mode=retract; 13 continue",
        "host-small": f"{_TIERED} hicache_ratio=0.5; {_BACK}",
        "host-pages": f"{_TIERED} {_PAGES}; {_CHURN}",
        "host-normal": f"{_TIERED} {_NORMAL} hicache_ratio=1.0; {_CHURN}",
        "host-selective": f"{_TIERED} hicache_write_policy=write_through_selective; {_CHURN}",
        "host-write-back": f"{_TIERED} hicache_write_policy=write_back hicache_ratio=0.5; {_BACK}",
        "host-write-back-pages": f"{_TIERED} hicache_write_policy=write_back {_PAGES}; {_CHURN}",
        "storage": f"{_STORED} hicache_ratio=0.5; {_BACK}",
        "storage-waits": f"{_STORED} {_WAITS} hicache_ratio=1.0; {_FLUSHED}",
        "storage-pages": f"{_STORED} {_PAGES} {_WAITS} hicache_ratio=0.5; {_CHURN}",
        "storage-buffer": f"{_STORED} {_BUFFER} {_WAITS}; {_BACK}",
        "storage-buffer-pages": f"{_STORED} {_BUFFER} {_PAGES} hicache_ratio=0.5; {_CHURN}",
        "storage-write-back": f"{_STORED} hicache_write_policy=write_back hicache_ratio=0.5; {_CHURN}",
        "own-rids": f"client_rids=False; {_TWINS}",
    }.items()
}
