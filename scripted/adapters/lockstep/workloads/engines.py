"""The beginnings of base workloads: engines that several of them share."""

from __future__ import annotations

from typing import Final

__all__ = ["PP1", "PP4", "SMALL", "WINDOWED"]

PP4: Final = "pp_size=4 pp_async_depth=2 chunked_prefill_size=64 max_total_tokens=1024"
PP1: Final = "chunked_prefill_size=32 max_total_tokens=512"

SMALL: Final = "page_size=4 chunked_prefill_size=16 max_total_tokens=48"

# A window of 64 tokens in pages of 16: one request uses 6 window pages at most, or 7 with chunks of 32 tokens.
WINDOWED: Final = "model=embedded-window page_size=16 chunked_prefill_size=16"
