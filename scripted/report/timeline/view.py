"""What the page shows, as typed data: runs, lanes, boxes, marks and the state of each step, placed but not painted.

Owns nothing but shapes. A unit of ``y`` is the height of one lane, a unit of ``x`` the width of one step; the template
and its style turn them into pixels.
"""

from __future__ import annotations

import msgspec


class Lane(msgspec.Struct, frozen=True):
    """One row of a run; ``group`` is set on the first lane of its group."""

    name: str
    y: float
    height: float
    group: str = ""


class Stripe(msgspec.Struct, frozen=True):
    """One request's share of a box: its label and positions. ``colour`` is None for what is no request's."""

    text: str
    colour: int | None
    positions: str = ""
    requests: tuple[int, ...] = ()


class Box(msgspec.Struct, frozen=True):
    """A microbatch in one stage, its waiting result, or the members of a queue, at one step.

    ``requests`` are the numbers of those it belongs to, here and in the other shapes: the filter goes by them.
    """

    x: int
    y: float
    label: str
    kind: str
    stripes: tuple[Stripe, ...]
    title: str
    requests: tuple[int, ...] = ()


class Chip(msgspec.Struct, frozen=True):
    """A mark in a lane: an event, an answer, a queue's members. ``height`` in lanes; no colour: not of one request."""

    x: int
    y: float
    height: float
    text: str
    kind: str
    title: str
    colour: int | None = None
    requests: tuple[int, ...] = ()
    # What one engine says to another, by its number: a line leads to where it is heard.
    message: int | None = None


class Heard(msgspec.Struct, frozen=True):
    """Where a message of another engine arrives."""

    x: int
    y: float
    message: int


class Path(msgspec.Struct, frozen=True):
    """A microbatch's way through the stages as the points of an SVG polyline."""

    points: str
    colour: int
    requests: tuple[int, ...] = ()


class Band(msgspec.Struct, frozen=True):
    """Steps ``x`` to ``x + width - 1`` of one run, shaded: the window, or the step that failed."""

    x: int
    width: int
    kind: str
    text: str


class Callout(msgspec.Struct, frozen=True):
    """The error of the step that failed, beside it."""

    x: int
    y: float
    title: str
    text: str


class Section(msgspec.Struct, frozen=True):
    """A heading and its lines in the state of a step."""

    title: str
    lines: tuple[str, ...]


class StepView(msgspec.Struct, frozen=True):
    """Everything known about one step. ``flags`` are of 'window', 'failed', 'differs'."""

    x: int
    step: int
    headline: str
    flags: tuple[str, ...]
    sections: tuple[Section, ...]


class DifferenceView(msgspec.Struct, frozen=True):
    """Where a run parts from the first one."""

    x: int
    step: int
    field: str
    left: str
    right: str


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    title: str
    engine: str
    verdict: str
    tier: str
    adapter: str
    mutant: str
    outcome: str
    config: str
    height: float
    queues_y: float
    queues_height: float
    lanes: tuple[Lane, ...]
    boxes: tuple[Box, ...]
    chips: tuple[Chip, ...]
    paths: tuple[Path, ...]
    bands: tuple[Band, ...]
    callout: Callout | None
    states: tuple[StepView, ...]
    difference: DifferenceView | None
    heard: tuple[Heard, ...] = ()


class RequestView(msgspec.Struct, frozen=True):
    """A request that the page can be filtered by."""

    number: int
    label: str
    rid: str


class PageView(msgspec.Struct, frozen=True, kw_only=True):
    """The whole page. ``columns`` is the width in steps, ``width_px`` that of one, ``focus`` the column to open at.

    ``fits_on_paper``: all columns can be read on one page.
    """

    title: str
    columns: int
    width_px: int
    requests: tuple[RequestView, ...]
    focus: int
    left_out: str
    fits_on_paper: bool
    runs: tuple[RunView, ...]
