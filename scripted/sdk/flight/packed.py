"""Frames as a running engine keeps them: bytes from one call of an encoder, which a writer unpacks later.

The garbage collector does not track bytes, and their size is known. The writer adds checksums and redaction. Plans and
results are arrays, because their fields come from an engine's own lists; other frames are maps. A beginning stays an
object until it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import msgspec

from scripted.sdk.flight.frames import AnyFrame, Planned, Result, Start, blocks_of, shape_of

_PLAN: Final = "plan"
_RESULT: Final = "result"
# Decimal places of a time in seconds.
MICROSECONDS: Final = 6
# The first byte of an array in MessagePack.
_ARRAYS: Final = (*range(0x90, 0xA0), 0xDC, 0xDD)


class Beginning(NamedTuple):
    """A scheduler's state between two steps: a start whose requests have no output yet.

    ``outputs`` are the engine's own lists in the order of the requests, with their lengths in that state: the lists
    only grow, and are copied when the snapshot is written. Copying 64 outputs of 8,000 tokens takes 4 ms.
    """

    start: Start
    outputs: Sequence[tuple[Sequence[int], int]] = ()

    @property
    def tokens(self) -> int:
        """The number of tokens that it keeps in memory."""
        return sum([len(one.request.prompt_ids) for one in self.start.held]) + sum([count for _, count in self.outputs])

    def whole(self) -> Start:
        """Return the start with the outputs."""
        held = [
            msgspec.structs.replace(one, said=tuple(tokens[:count]))
            for one, (tokens, count) in zip(self.start.held, self.outputs, strict=True)
        ]
        return msgspec.structs.replace(self.start, held=tuple(held))


class _PackedPlan(msgspec.Struct, frozen=True, array_like=True, tag=_PLAN, gc=False):
    plan: int
    now: float
    ids: list[int]
    starts: list[int]
    counts: list[int]
    # Empty if no share has a guess.
    guesses: list[int]
    tables: list[Any]
    preempted: list[int]


class _PackedResult(msgspec.Struct, frozen=True, array_like=True, tag=_RESULT, gc=False):
    plan: int
    # For each share the index of its row; None for a share that samples nothing.
    rows: list[int | None]
    sampled: list[list[int]]


@runtime_checkable
class _Array(Protocol):
    """A numpy or torch array or number."""

    def tolist(self) -> object: ...


def _as_list(value: object) -> object:
    """Return an array's numbers; MessagePack has only lists. Raises TypeError for anything else."""
    if isinstance(value, _Array):
        return value.tolist()
    raise TypeError(f"a flight has no place for a {type(value).__name__}")


_encode: Final[Callable[[Any], bytes]] = msgspec.msgpack.Encoder(enc_hook=_as_list).encode
_decode_array: Final[Callable[[bytes], _PackedPlan | _PackedResult]] = msgspec.msgpack.Decoder(
    _PackedPlan | _PackedResult
).decode
_decode_map: Final[Callable[[bytes], AnyFrame]] = msgspec.msgpack.Decoder(AnyFrame).decode


def packed(frame: AnyFrame) -> bytes:
    """Encode a frame. Raises TypeError for a field that cannot be encoded."""
    return _encode(frame)


def packed_plan(
    plan: int,
    now: float,
    *,
    ids: Sequence[int],
    starts: Sequence[int],
    counts: Sequence[int],
    tables: Sequence[object],
    guesses: Sequence[int] = (),
    preempted: Sequence[int] = (),
) -> bytes:
    """Pack a plan: for each share its request's number, its first position, tokens, block table and guesses."""
    return _encode((_PLAN, plan, now, ids, starts, counts, guesses, tables, preempted))


def packed_result(plan: int, rows: Sequence[int | None], sampled: object) -> bytes:
    """Pack the rows of sampled tokens in the engine's own order; ``rows`` has the index of each share's row."""
    return _encode((_RESULT, plan, rows, () if sampled is None else sampled))


def unpacked(data: bytes) -> AnyFrame:
    """Decode a frame. Raises msgspec.MsgspecError for bytes that this module did not make."""
    if data[0] not in _ARRAYS:
        return _decode_map(data)
    frame = _decode_array(data)
    return _planned(frame) if isinstance(frame, _PackedPlan) else _result(frame)


def planned_from(data: bytes) -> Planned:
    """Decode a packed plan."""
    frame = _decode_array(data)
    assert isinstance(frame, _PackedPlan), "a result is no plan"
    return _planned(frame)


def _planned(plan: _PackedPlan) -> Planned:
    guesses = plan.guesses or [0] * len(plan.ids)
    shares = list(zip(plan.ids, plan.starts, plan.counts, guesses, strict=True))
    return Planned(
        plan=plan.plan,
        now=round(plan.now, MICROSECONDS),
        shape=shape_of(shares, plan.preempted),
        blocks=blocks_of(plan.tables) if plan.tables else 0,
        shares=tuple(zip(plan.ids, plan.counts, strict=True)),
        preempted=tuple(plan.preempted),
    )


def _result(result: _PackedResult) -> Result:
    sampled = result.sampled
    said = [() if row is None or not sampled else tuple(sampled[row]) for row in result.rows]
    return Result(plan=result.plan, token_ids=tuple(said))
