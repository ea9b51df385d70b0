"""Follows what blocks hold, plan by plan, and finds requests that read something else than their own tokens.

For full attention, windows and states, without connectors, images and tokens in flight. Standalone tests contain this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# What a block holds at one place: the LoRA, and all tokens up to there.
Text = tuple[int, ...]

# The block that vLLM gives instead of one that is not needed; it keeps nothing.
NULL_BLOCK = 0


class BlockContents:
    """The contents of all blocks, and the tables and tokens of requests. ``outputs`` are the right ones by request."""

    def __init__(self, settings: Any, outputs: Mapping[str, Sequence[int]]) -> None:
        self._settings = settings
        self._outputs = outputs
        self._tables: dict[str, list[list[int]]] = {}
        self._texts: dict[str, Text] = {}
        # KV by block and place in it, and states by block. A block holds one or the other.
        self._kv: dict[int, dict[int, Text]] = {}
        self._states: dict[int, Text] = {}

    def take(self, plan: Any) -> list[str]:
        """Compute a plan; return the requests that read something else than their own tokens."""
        starts = self._begin(plan)
        for one in plan.kv_cache_block_copies or ():
            self._copy(one.src_block_id, one.dst_block_id)
        shares = [(name, starts[name], starts[name] + count) for name, count in plan.num_scheduled_tokens.items()]
        # A state is read before any share of the same plan leaves one; KV is written first.
        wrong = {name for name, start, _ in shares if not self._continues(name, start)}
        for name, start, end in shares:
            self._compute(name, start, end)
        wrong |= {name for name, start, end in shares if not self._reads(name, start, end)}
        return [name for name, _, _ in shares if name in wrong]

    def _begin(self, plan: Any) -> dict[str, int]:
        for new in plan.scheduled_new_reqs:
            lora = new.lora_request.lora_int_id if new.lora_request else 0
            self._tables[new.req_id] = [[*table] for table in new.block_ids]
            self._texts[new.req_id] = (lora, *new.prompt_token_ids, *self._outputs.get(new.req_id, ()))
        cached = plan.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self._tables[name] = [[] for _ in blocks]
            for table, more in zip(self._tables[name], blocks or (), strict=False):
                table += more
        starts = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
        return starts | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))

    def _copy(self, source: int, target: int) -> None:
        self._kv.pop(target, None)
        self._states.pop(target, None)
        if source in self._kv:
            self._kv[target] = dict(self._kv[source])
        if source in self._states:
            self._states[target] = self._states[source]

    def _groups(self, name: str, start: int) -> list[tuple[list[int], int]]:
        """Return the tables of attention, each with the first position that is read from ``start`` on."""
        firsts = [start // size * size if is_chunk else start - size + 1 for size, is_chunk in self._settings.windows]
        return list(zip(self._tables[name], [0, *firsts], strict=False))

    def _state_at(self, name: str, end: int) -> int:
        """Return the block with the state after ``end`` tokens."""
        return _block_of(self._tables[name][1 + len(self._settings.windows)], (end - 1) // self._settings.states[0])

    def _continues(self, name: str, start: int) -> bool:
        if not (self._settings.states and start):
            return True
        return self._states.get(self._state_at(name, start)) == self._texts[name][: start + 1]

    def _compute(self, name: str, start: int, end: int) -> None:
        size, text = self._settings.block_size, self._texts[name]
        for table, _ in self._groups(name, start):
            for at in range(start, end):
                if block := _block_of(table, at // size):
                    self._kv.setdefault(block, {})[at % size] = text[: at + 2]
                    self._states.pop(block, None)
        if self._settings.states and (block := self._state_at(name, end)):
            self._states[block] = text[: end + 1]
            self._kv.pop(block, None)

    def _reads(self, name: str, start: int, end: int) -> bool:
        size, text = self._settings.block_size, self._texts[name]
        is_kept = not self._settings.states or self._states.get(self._state_at(name, end)) == text[: end + 1]
        return is_kept and all(
            self._kv.get(_block_of(table, at // size), {}).get(at % size) == text[: at + 2]
            for table, first in self._groups(name, start)
            for at in range(max(0, first), end)
        )


def _block_of(table: Sequence[int], index: int) -> int:
    """Return a block of a table; the null block behind its end."""
    return table[index] if index < len(table) else NULL_BLOCK


def wrong_reads_in(plans: Sequence[Any], outputs: Mapping[str, Sequence[int]], settings: Any) -> list[str]:
    """Return the requests that read something else than their own tokens, over all plans of a scheduler in order."""
    blocks = BlockContents(settings, outputs)
    return [name for plan in plans for name in blocks.take(plan)]
