"""vLLM's prefix cache by tokens: its hashes do not reveal them, so each is noted when its request ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

from scripted.core.promises import CachedPrefix
from scripted_vllm.config import VllmSettings
from scripted_vllm.images import seen_in


class KnownBlocks:
    """The tokens and the LoRA behind each block hash. A hash never changes its tokens, so copies share them."""

    def __init__(self, settings: VllmSettings) -> None:
        self._size = settings.kv_block_size
        # Other hashes end within a block, and blocks of other layers hold a state or do not belong to the device.
        self._is_read = settings.enable_prefix_caching and settings.hash_block_size == settings.kv_block_size
        self._is_read &= not settings.hisparse_host_blocks
        self._tokens: dict[bytes, tuple[tuple[int, ...], int]] = {}

    def note(self, request: Any) -> None:
        """Note the hashes of an ending request, if the scheduler had it."""
        if request is None or not self._is_read:
            return
        lora = request.lora_request.lora_int_id if request.lora_request else 0
        tokens = seen_in(tuple(request.all_token_ids), request.mm_features)
        for place, known in enumerate(request.block_hashes, 1):
            self._tokens.setdefault(known, (tokens[: place * self._size], lora))

    def prefixes_in(self, pool: Any) -> Iterator[CachedPrefix]:
        """Yield the cached blocks of the first group of layers whose tokens are known."""
        for key, there in pool.cached_block_hash_to_block._cache.items():  # noqa: SLF001 - not public
            known = self._tokens.get(get_block_hash(key))
            if known is None or get_group_id(key) != 0:
                continue
            tokens, lora = known
            for block in there.values() if isinstance(there, dict) else (there,):
                yield CachedPrefix(tokens, (block.block_id,), lora, first=len(tokens) // self._size - 1)
