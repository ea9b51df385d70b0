"""The newest token of each row, the input of a decode that was planned before the token was known.

The host keeps it in the order of results, the device in the order of launches. A token that stays unknown belongs to a
failed microbatch, whose requests have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import torch

from engine.core.messages import Completion
from engine.core.plan import Segment
from engine.model.transfer import sent

# The stand-in for a token that the host does not know yet, or never will: an id in every vocabulary.
_STAND_IN: Final = (0,)


class AheadIds:
    """The ids of a batch that exist only on the device: their ``places`` in the batch, each with its row."""

    def __init__(self, places: Sequence[int], rows: Sequence[int], newest: torch.Tensor) -> None:
        self._places, self._rows = places, rows
        self._newest = newest

    def fill(self, ids: torch.Tensor) -> None:
        """Copy them into the ids [tokens] of the batch, on the device."""
        places, rows = sent([np.array(self._places, np.int64), np.array(self._rows, np.int64)], ids.device)
        ids.index_copy_(0, places, self._newest.index_select(0, rows))


class DeviceTokens:
    """The newest tokens of successful launches, by row, on the device; the host may not know them yet."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._newest = torch.zeros(rows, dtype=torch.int64, device=device)
        self._there: set[int] = set()

    def place(self, segments: Sequence[Segment]) -> tuple[tuple[Segment, ...], AheadIds | None]:
        """Return the next launch's segments with stand-ins for unknown ids, and the places that the device fills."""
        given: list[Segment] = []
        places: list[int] = []
        rows: list[int] = []
        first = 0
        for segment in segments:
            if segment.is_ahead:
                if segment.row in self._there:
                    places.append(first)
                    rows.append(segment.row)
                given.append(msgspec.structs.replace(segment, token_ids=_STAND_IN))
            else:
                given.append(segment)
            first += len(segment.token_ids)
        return tuple(given), AheadIds(places, rows, self._newest) if places else None

    def keep(self, emitters: Sequence[Segment], ids: torch.Tensor) -> None:
        """Keep the tokens [segments] of these segments, on the device."""
        if not emitters:
            return
        rows = [segment.row for segment in emitters]
        self._newest.index_copy_(0, sent([np.array(rows, np.int64)], ids.device)[0], ids)
        self._there.update(rows)

    def take(self, emitters: Sequence[Segment], tokens: Sequence[int]) -> None:
        """Keep tokens that the host knows, while nothing is in flight."""
        self.keep(emitters, sent([np.array(tokens, np.int64)], self._newest.device)[0])

    def drop(self, segments: Sequence[Segment]) -> None:
        """Drop the rows of a failed microbatch: they have no newest token."""
        self._there.difference_update([segment.row for segment in segments])

    def forget(self) -> None:
        self._there.clear()


class NewestTokens:
    """The newest tokens of results, by row; ``on_device`` also has tokens that the host does not know yet."""

    def __init__(self, on_device: DeviceTokens | None = None) -> None:
        self._tokens: dict[int, int] = {}
        self._on_device = on_device

    def resolve(self, segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        """Fill the unknown ids in the segments of the next result. Returns the same segments if none is ahead.

        A stand-in replaces the token of a request that has ended.
        """
        if not any(segment.is_ahead for segment in segments):
            return segments
        return tuple([self._known(segment) if segment.is_ahead else segment for segment in segments])

    def _known(self, segment: Segment) -> Segment:
        token = self._tokens.get(segment.row)
        return msgspec.structs.replace(segment, token_ids=_STAND_IN if token is None else (token,))

    def note(self, segments: Sequence[Segment], completion: Completion, *, on_device: bool) -> None:
        """Note the next result, of a microbatch without drafts. With ``on_device`` the device already has its tokens.

        Always drops the rows' earlier tokens, because a row may have a new request.
        """
        chosen = _chosen(segments, completion)
        for segment in segments:
            self._tokens.pop(segment.row, None)
        self._tokens.update({segment.row: token for segment, token in chosen})
        if self._on_device is not None and not on_device:
            self._on_device.drop(segments)
            self._on_device.take([segment for segment, _ in chosen], [token for _, token in chosen])

    def forget(self) -> None:
        self._tokens.clear()
        if self._on_device is not None:
            self._on_device.forget()


def _chosen(segments: Sequence[Segment], completion: Completion) -> list[tuple[Segment, int]]:
    """Pair a result's tokens with their segments, without those of failed requests; empty for a failed microbatch."""
    if completion.error is not None:
        return []
    ended = {error.rid for error in completion.errors}
    emitters = [segment for segment in segments if segment.emits]
    chosen = zip(emitters, completion.token_ids, strict=True)
    return [(segment, token) for segment, token in chosen if segment.rid not in ended]
