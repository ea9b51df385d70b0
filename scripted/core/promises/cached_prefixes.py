"""A prefix cache holds what was computed: each cached block was written, under those tokens and no others.

Otherwise a wrong block shows only when a prompt hits exactly that block. Checked once everything has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import msgspec

from scripted.core.violation import Violation


class CachedPrefix(msgspec.Struct, frozen=True):
    """The first tokens of a prompt, in full blocks, and the blocks that supposedly hold their KV.

    ``lora`` is the LoRA that computed them, as the device knows it. ``block_ids`` are the prefix's blocks from
    ``first`` on: the cache may name blocks one by one, or have lost the earlier ones.
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
        """Return the first block of a prefix with other contents; None if all blocks hold the prefix."""
        ...


def check_prefixes(machine: object, device: object) -> None:
    """Check that every cached block holds the KV of its tokens. Raises Violation."""
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
