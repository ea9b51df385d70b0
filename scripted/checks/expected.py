"""What a step of the engine must show, in the form in which the executable specification says it.

Owns the forms only. The specification fills them; conformance compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.messages import Reply
from engine.plan import ForwardMode, GrammarOrder, SamplingSpec

__all__ = ["Expected", "ExpectedSegment"]


class ExpectedSegment(NamedTuple):
    """One request's share of a microbatch. ``pages`` is a number: which pages they are is not promised."""

    rid: str
    start: int
    token_ids: tuple[int, ...]
    page_start: int
    pages: int
    emits: bool
    sampling: SamplingSpec | None
    drafts: int


class Expected(NamedTuple):
    """One step. ``number`` is that of the last microbatch, ``mode`` is None when this step launches none.

    The messages of answers and refusals in ``replies`` are the part of them that is promised.
    """

    mode: ForwardMode | None
    number: int
    segments: Sequence[ExpectedSegment]
    weights: str | None
    replies: Sequence[Reply]
    deadline: float | None
    again: bool
    grammars: tuple[GrammarOrder, ...] = ()
