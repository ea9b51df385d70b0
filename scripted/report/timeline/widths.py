"""How wide a step is: wide enough that no box cuts off its text, up to a bound.

Owns the estimate of a box's width in pixels, and the choice of what a wider box leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from scripted.report.timeline.view import Box, Stripe

_NARROWEST_PX: Final = 94
_WIDEST_PX: Final = 150
# The style's font, its paddings, and what is around a box in its column.
_CHARACTER_PX: Final = 6
_PADDING_PX: Final = 7
_AROUND_PX: Final = 8
# What a label shows of its end when it has to give way to the positions.
_SHORTEST_LABEL: Final = 4


def column_width(boxes: Iterable[Box]) -> int:
    """The width of a step in pixels."""
    widest = max((_width(box.label, box.stripes) for box in boxes), default=0)
    return max(_NARROWEST_PX, min(_WIDEST_PX, widest))


def fitting(label: str, stripes: Sequence[Stripe]) -> tuple[Stripe, ...]:
    """The stripes of a box; without positions where these would be cut off. The title of the box has them all."""
    if _width(label, stripes) <= _WIDEST_PX:
        return tuple(stripes)
    return tuple(Stripe(stripe.text, stripe.colour, "", stripe.requests) for stripe in stripes)


def _width(label: str, stripes: Sequence[Stripe]) -> int:
    """The width that shows the positions in full and at least the end of each label."""
    texts = [min(len(stripe.text), _SHORTEST_LABEL) + len(stripe.positions) for stripe in stripes]
    characters = len(label) + sum(texts)
    parts = len(stripes) + bool(label)
    return round(characters * _CHARACTER_PX + parts * _PADDING_PX + _AROUND_PX)
