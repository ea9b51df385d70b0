"""A prefix cache holds what was computed: each cached block was written, under those tokens and no others.

A hit would show it, but only of a prompt that hits exactly that block. Judged when everything has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import msgspec

from scripted.core.violation import Violation


class CachedPrefix(msgspec.Struct, frozen=True):
    """The tokens of a prompt from its first on, in full blocks, and the blocks that are said to hold their KV.

    ``lora`` is what computed them, as the device knows it. ``block_ids`` are the prefix's blocks from ``first`` on,
    where the cache names blocks one by one, or has lost those before.
    """

    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    lora: int = 0
    first: int = 0


@runtime_checkable
class KeepsPrefixes(Protocol):
    """A machine that can list its prefix cache."""

    def cached_prefixes(self) -> Iterable[CachedPrefix]:
        """Return the cached prefixes, each to the end of its last block."""
        ...


@runtime_checkable
class HoldsPrefixes(Protocol):
    """A device that knows what each block holds."""

    def wrong_block(self, prefix: CachedPrefix) -> int | None:
        """Return the first block of a prefix that holds anything else; None if all hold it."""
        ...


def check_prefixes(machine: object, device: object) -> None:
    """Judge that every cached block holds the KV of its tokens. Raises Violation."""
    if not isinstance(machine, KeepsPrefixes) or not isinstance(device, HoldsPrefixes):
        return
    for prefix in machine.cached_prefixes():
        wrong = device.wrong_block(prefix)
        if wrong is not None:
            raise Violation(
                f"the prefix cache has block {wrong} in a prefix of {len(prefix.token_ids)} tokens, blocks "
                f"{list(prefix.block_ids)}, but the block does not hold their KV: the next prompt like it reads "
                "something else"
            )
