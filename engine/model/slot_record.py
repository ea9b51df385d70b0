"""A record of each KV slot of a stage: token, position, and with the sanitizer a fingerprint.

The record is separate from the real KV cache, and attention never reads it. Penalties read a row's history from it, so
that tokens of a cached prefix count too; the KV sanitizer checks it before every read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import IntegrityError
from engine.core.plan import Copies, Segment
from engine.model.batch import Batch
from engine.model.kv_pool import KVPool, Slots

_NEVER_WRITTEN = -1
_ROOT = 0x6A09E667F3BCC908
_PRIME = 0x100000001B3
_MASK = 2**64 - 1


class SlotRecord:
    """Tokens and positions by slot; with ``sanitize`` also a hash chain over the tokens that lead to each slot."""

    def __init__(self, pool: KVPool, *, sanitize: bool, host_pages: int = 0) -> None:
        self._pool = pool
        self._sanitize = sanitize
        self._tokens = np.full(pool.total_slots, _NEVER_WRITTEN, np.int32)
        self._positions = np.full(pool.total_slots, _NEVER_WRITTEN, np.int32)
        self._fingerprints = np.zeros(pool.total_slots if sanitize else 0, np.uint64)
        # The fingerprint of each slot in the pool of the window layers.
        window_slots = pool.window.total_slots if sanitize and pool.window is not None else 0
        self._window_fingerprints = np.zeros(window_slots, np.uint64)
        # The records of host pages: see ``page``.
        self._kept = [np.zeros((host_pages, *part.shape), part.dtype) for part in self.page(0)]
        # The root of every chain; each version of the weights has another one.
        self._root = _ROOT
        # Where each row may continue: the position after its last certain token, and the fingerprints of that token and
        # of each draft.
        self._tips: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._abandoned: set[int] = set()

    @property
    def slots_written(self) -> int:
        return int(np.count_nonzero(self._positions != _NEVER_WRITTEN))

    def digest(self) -> str:
        """Return a digest of the token and position in every slot; equal plans give equal digests on any machine."""
        state = hashlib.blake2b(self._tokens.tobytes(), digest_size=16)
        state.update(self._positions.tobytes())
        return state.hexdigest()

    def write(self, batch: Batch) -> None:
        """Record the slots that a forward pass will write. With the sanitizer, first check the slots that it reads.

        Raises IntegrityError if a row's slots do not hold the row's tokens.
        """
        checked = self._to_check(batch.segments) if self._sanitize else []
        for segment in checked:
            self._chain(segment)
        self._tokens[batch.slots_array] = batch.token_ids_array
        self._positions[batch.slots_array] = batch.positions_array
        if self._pool.window is not None:
            for segment in checked:
                self._write_window(segment, self._pool.window)
        for segment in checked:
            self._check(segment)
            if self._pool.window is not None:
                self._check_window(segment, self._pool.window)

    @property
    def sanitizer_root(self) -> int | None:
        """The root of every chain of fingerprints; None without the sanitizer."""
        return self._root if self._sanitize else None

    def page(self, number: int) -> Sequence[NDArray[Any]]:
        """Return views of one page's records: tokens, positions, and with the sanitizer fingerprints."""
        slots = slice(number * self._pool.page_size, (number + 1) * self._pool.page_size)
        return [part[slots] for part in (self._tokens, self._positions, self._fingerprints) if part.size]

    def carry_out(self, copies: Copies) -> None:
        for page, host in copies.out:
            for kept, part in zip(self._kept, self.page(page), strict=True):
                kept[host] = part
        for host, page in copies.into:
            for kept, part in zip(self._kept, self.page(page), strict=True):
                part[:] = kept[host]

    def abandon(self, segments: Sequence[Segment]) -> None:
        """Stop checking the rows of a microbatch that was not computed, each until its next request.

        Later chunks of the same prompts may be in flight already. They will read slots that were never written, but
        their requests have ended: no client sees the result.
        """
        self._abandoned.update(segment.row for segment in segments)

    def history(self, segment: Segment) -> NDArray[np.int32]:
        """Return the ids of a segment's row by position, up to and including the segment's own tokens."""
        return self._tokens[self._pool.slots(segment.row, 0, segment.start + len(segment.token_ids))]

    def move_to(self, pool: KVPool) -> None:
        """Use the page tables of another pool from now on; the record stays."""
        self._pool = pool

    def change_weights(self) -> None:
        """Forbid reads of all earlier slots, which other weights computed."""
        self._root = (self._root + 1) * _PRIME & _MASK
        self._tips.clear()

    def forget(self) -> None:
        """Clear the record; only while no request owns memory."""
        self._tokens.fill(_NEVER_WRITTEN)
        self._positions.fill(_NEVER_WRITTEN)
        self._tips.clear()
        self._abandoned.clear()

    def _to_check(self, segments: Sequence[Segment]) -> list[Segment]:
        self._abandoned.difference_update([segment.row for segment in segments if segment.sampling is not None])
        return [segment for segment in segments if segment.row not in self._abandoned]

    def _chain(self, segment: Segment) -> None:
        slots = self._slots(segment)
        link = int(self._fingerprints[slots[segment.start - 1]]) if segment.start else self._root_of(segment)
        tip = self._tips.get(segment.row) if segment.sampling is None else None
        if tip is not None and not _goes_on(segment.start, link, *tip):
            raise IntegrityError(
                f"the KV of {segment.rid} (row {segment.row}) must continue from position {tip[0]}, where it ended, "
                f"but at position {segment.start} it follows other tokens: a page was overwritten by another owner"
            )
        links = []
        for slot, token in zip(slots[segment.start :].tolist(), segment.token_ids, strict=True):
            link = (link ^ (token + 1)) * _PRIME & _MASK
            self._fingerprints[slot] = link
            links.append(link)
        end = segment.start + len(segment.token_ids) - segment.drafts
        self._tips[segment.row] = (end, tuple(links[-1 - segment.drafts :]))

    def _check(self, segment: Segment) -> None:
        """Check that each position is in its slot, and that each link follows from the previous one, for all positions
        at once.
        """
        slots = self._slots(segment)
        positions, links = self._positions[slots], self._fingerprints[slots]
        before = np.concatenate([np.array([self._root_of(segment)], np.uint64), links[:-1]])
        expected = (before ^ (self._tokens[slots] + 1).astype(np.uint64)) * np.uint64(_PRIME)
        wrong = np.flatnonzero((positions != np.arange(len(slots))) | (links != expected))
        if wrong.size:
            position = int(wrong[0])
            slot = int(slots[position])
            raise IntegrityError(
                f"the KV of {segment.rid} (row {segment.row}) at position {position} must be its own, but page "
                f"{slot // self._pool.page_size} holds token {self._tokens[slot]} of position "
                f"{self._positions[slot]} of another sequence: the page was freed, is owned twice, is older than the "
                "weights, or belongs to another LoRA"
            )

    def _root_of(self, segment: Segment) -> int:
        """Return the root of a segment's chain, which depends on its LoRA."""
        return (self._root ^ segment.lora * _PRIME) & _MASK

    def _write_window(self, segment: Segment, window: KVPool) -> None:
        place = segment.row, segment.start, segment.start + len(segment.token_ids)
        self._window_fingerprints[window.slots(*place)] = self._fingerprints[self._pool.slots(*place)]

    def _check_window(self, segment: Segment, window: KVPool) -> None:
        """Check that the window layers see the same row as the other layers."""
        first = max(0, segment.start - window.window_tokens + 1)
        place = segment.row, first, segment.start + len(segment.token_ids)
        slots = window.slots(*place)
        wrong = np.flatnonzero(self._window_fingerprints[slots] != self._fingerprints[self._pool.slots(*place)])
        if wrong.size:
            raise IntegrityError(
                f"the KV of {segment.rid} (row {segment.row}) at position {first + int(wrong[0])} must be its own, "
                f"but window page {int(slots[wrong[0]]) // window.page_size} holds the KV of another sequence: it "
                "was released before the position was out of the window, or is owned twice"
            )

    def _slots(self, segment: Segment) -> Slots:
        return self._pool.slots(segment.row, 0, segment.start + len(segment.token_ids))


def _goes_on(start: int, link: int, end: int, links: tuple[int, ...]) -> bool:
    """Return whether a row that ended at ``end``, with drafts after it, may continue at ``start``, after some."""
    return 0 <= start - end < len(links) and links[start - end] == link
