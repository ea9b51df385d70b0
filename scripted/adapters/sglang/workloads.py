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
        "own-rids": f"client_rids=False; {_TWINS}",
    }.items()
}
