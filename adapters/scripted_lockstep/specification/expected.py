"""The output that the executable specification requires of a step.

Only data: the specification makes it, and conformance compares it with the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.core.messages import Reply
from engine.core.plan import DECODE, MIXED, PREFILL, ForwardMode, GrammarOrder, LoraChange, LoraOrder, SamplingSpec

# An order to the stages: its kind and transfer; for a new transfer, the number of pages and their destination.
SpecifiedOrder = tuple[object, ...]


class ExpectedSegment(NamedTuple):
    """One request's part of a microbatch. ``pages`` is a count: page numbers are not specified.

    ``window_pages`` has, for each page, whether a window page is beside it; it is empty without window layers.
    """

    rid: str
    start: int
    token_ids: tuple[int, ...]
    page_start: int
    pages: int
    emits: bool
    sampling: SamplingSpec | None
    window_pages: tuple[bool, ...]
    drafts: int
    logprobs_from: int
    targets: tuple[int, ...]
    lora: int


class Expected(NamedTuple):
    """One step. ``number`` is the last microbatch's; ``mode`` is None if the step launches none.

    ``order`` is the argument of a microbatch without requests: the new weights, or the folder of a profile. ``copies``
    counts the pages copied to the host and from it; the choice of pages is not specified. ``transfers`` are the orders
    to send and receive KV. The texts in ``replies`` are the specified parts of answers and refusals.
    """

    mode: ForwardMode | None
    number: int
    segments: Sequence[ExpectedSegment]
    order: str | int | None
    lora: LoraChange | None
    replies: Sequence[Reply]
    deadline: float | None
    again: bool
    grammars: tuple[GrammarOrder, ...] = ()
    copies: tuple[int, int] = (0, 0)
    transfers: Sequence[SpecifiedOrder] = ()
    loras: tuple[LoraOrder, ...] = ()


def mode_of(prompts: Sequence[object], decodes: Sequence[object]) -> ForwardMode:
    """Return the mode of a microbatch with these parts."""
    if not decodes:
        return PREFILL
    return MIXED if prompts else DECODE
