"""How wide a step is: wide enough that no box cuts off its text, up to a bound.

Owns the estimate of a box's width in pixels, by which a box leaves out what does not fit as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from scripted.report.timeline.view import Box, Stripe

_NARROWEST_PX: Final = 94
_WIDEST_PX: Final = 170
# The style's font, its paddings, and what is around a box in its column.
_CHARACTER_PX: Final = 6.2
_PADDING_PX: Final = 8
_AROUND_PX: Final = 8


def column_width(boxes: Iterable[Box]) -> int:
    widest = max((_width(box.label, box.stripes) for box in boxes), default=0)
    return max(_NARROWEST_PX, min(_WIDEST_PX, widest))


def fits(label: str, stripes: Sequence[Stripe]) -> bool:
    """Whether the widest step shows all of a box."""
    return _width(label, stripes) <= _WIDEST_PX


def _width(label: str, stripes: Sequence[Stripe]) -> int:
    characters = len(label) + sum(len(stripe.text) + len(stripe.positions) for stripe in stripes)
    parts = len(stripes) + bool(label)
    return round(characters * _CHARACTER_PX + parts * _PADDING_PX + _AROUND_PX)
