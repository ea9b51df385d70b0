"""Dynamic chunk sizes: chunks of a prompt that make every microbatch cost about the same.

A token costs more after a longer prefix. With chunks of equal size, the later microbatches of a long prompt occupy a
stage longer than the earlier ones, and the other stages wait. Pure integer arithmetic.
"""

from __future__ import annotations

import math


class ChunkSizes:
    """The cost of a chunk of x tokens after a prefix of L is ``x * (2 * L + x + 2 * parity)``, in arbitrary units.

    ``parity_tokens`` is the prefix at which a token's attention costs as much as its other computation. A microbatch
    may cost as much as one prompt of ``base_tokens`` without a prefix.
    """

    def __init__(self, base_tokens: int, parity_tokens: int, page_size: int) -> None:
        self._linear = 2 * parity_tokens
        self._page_size = page_size
        self.budget = self.cost(0, base_tokens)

    def cost(self, prefix: int, tokens: int) -> int:
        """Return the cost of a chunk of this many tokens after this prefix."""
        return tokens * (2 * prefix + tokens + self._linear)

    def part(self, prefix: int, rest: int, *, room: int, spent: int = 0) -> int:
        """Return the size of the next chunk of a prompt's ``rest`` tokens, at most ``room``; other chunks cost
        ``spent``.

        Whole pages, at least one, so that a prompt always advances; a remainder shorter than a page is included.
        """
        page = self._page_size
        # The positive root of x * x + slope * x = left, rounded down.
        slope, left = 2 * prefix + self._linear, max(0, self.budget - spent)
        tokens = (math.isqrt(slope * slope + 4 * left) - slope) // 2
        tokens = max(page, tokens - (prefix + tokens) % page)
        return min(rest if rest < tokens + page else tokens, room)
