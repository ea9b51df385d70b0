"""The typed content of the page: lanes, boxes and marks, placed but not painted, and the width of a step.

The unit of ``y`` is the height of a lane, the unit of ``x`` the width of a step; the template and its style turn them
into pixels.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

_NARROWEST_PX: Final = 94
_WIDEST_PX: Final = 170
# A long remark widens the steps less than a box does.
_WIDEST_FOR_CHIPS_PX: Final = 150
# The character width of the style's monospaced font, its padding, and the space around a box or chip in its column.
_CHARACTER_PX: Final = 6.4
_PADDING_PX: Final = 8
_AROUND_PX: Final = 8
_AROUND_CHIP_PX: Final = 20
# The mark before the text of an event that stands out.
_MARK_CHARACTERS: Final = 3
# A chip of one line is one lane high; each further line adds half a lane.
_LINES_PER_LANE: Final = 2


class Lane(msgspec.Struct, frozen=True):
    """One row of a run; ``group`` is set on the first lane of its group."""

    name: str
    y: float
    height: float
    group: str = ""


class Stripe(msgspec.Struct, frozen=True):
    """One request's share of a box: its label and positions. ``colour`` is None without a request."""

    text: str
    colour: int | None
    positions: str = ""
    requests: tuple[int, ...] = ()


class Box(msgspec.Struct, frozen=True):
    """A microbatch in one stage, its waiting result, or the members of a queue, at one step.

    ``requests`` are the filter numbers of its requests, here and in the other shapes.
    """

    x: int
    y: float
    label: str
    kind: str
    stripes: tuple[Stripe, ...]
    title: str
    requests: tuple[int, ...] = ()


class Chip(msgspec.Struct, frozen=True):
    """A mark in a lane: an event, an answer, a queue's members. ``height`` is in lanes; a colour is one request's."""

    x: int
    y: float
    height: float
    text: str
    kind: str
    title: str
    colour: int | None = None
    requests: tuple[int, ...] = ()
    # The number of a message between engines; a line leads to where it arrives.
    message: int | None = None


class Path(msgspec.Struct, frozen=True):
    """A microbatch's path through the stages, as the points of an SVG polyline."""

    points: str
    colour: int
    requests: tuple[int, ...] = ()


class Band(msgspec.Struct, frozen=True):
    """Steps ``x`` to ``x + width - 1`` of one run, shaded: the window, or the step that failed."""

    x: int
    width: int
    kind: str
    text: str


class Led(msgspec.Struct, frozen=True):
    """The step and events that led to the failure, over ``width`` steps before it.

    It lies beneath the events' own chips, and stays at the edge of the window when these are scrolled away. Nothing
    else arrives in these steps.
    """

    x: int
    width: int
    y: float
    height: float
    text: str


class Callout(msgspec.Struct, frozen=True):
    """The error of the step that failed, beside it."""

    x: int
    y: float
    title: str
    text: str


def column_width(boxes: Iterable[Box], chips: Iterable[Chip] = ()) -> int:
    """Return a width at which no box or chip cuts off its text, up to a bound for each."""
    boxes_px = max((_width(box.label, box.stripes) for box in boxes), default=0)
    chips_px = max((_chip_width(chip) for chip in chips), default=0)
    return max(_NARROWEST_PX, min(_WIDEST_PX, boxes_px), min(_WIDEST_FOR_CHIPS_PX, chips_px))


def fits(label: str, stripes: Sequence[Stripe]) -> bool:
    """Whether the widest step shows all of a box."""
    return _width(label, stripes) <= _WIDEST_PX


def _chip_width(chip: Chip) -> int:
    lines = 1 + round((chip.height - 1) * _LINES_PER_LANE)
    mark = _MARK_CHARACTERS if chip.kind == "strong" else 0
    return round((_line_characters(chip.text, max(1, lines)) + mark) * _CHARACTER_PX + _AROUND_CHIP_PX)


@functools.lru_cache(maxsize=4096)
def _line_characters(text: str, lines: int) -> int:
    """Return the line length at which a text fits into this many lines, broken between words."""
    most = round(_WIDEST_FOR_CHIPS_PX / _CHARACTER_PX)
    width = max(1, min(most, -(-len(text) // lines)))
    while width < most and len(textwrap.wrap(text, width, break_long_words=True)) > lines:
        width += 1
    longest = max(map(len, text.split()), default=0)
    return max(width, min(most, longest))


def _width(label: str, stripes: Sequence[Stripe]) -> int:
    characters = len(label) + sum(len(stripe.text) + len(stripe.positions) for stripe in stripes)
    parts = len(stripes) + bool(label)
    return round(characters * _CHARACTER_PX + parts * _PADDING_PX + _AROUND_PX)
