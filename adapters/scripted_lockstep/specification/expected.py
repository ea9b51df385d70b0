"""What a step of the engine must show, in the form in which the executable specification says it.

Owns the forms only. The specification fills them; conformance compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.core.messages import Reply
from engine.core.plan import DECODE, MIXED, PREFILL, ForwardMode, GrammarOrder, LoraChange, SamplingSpec

# An order to the stages: what, of which transfer; and of one that begins how many pages, and where they go.
SpecifiedOrder = tuple[object, ...]


class ExpectedSegment(NamedTuple):
    """One request's share of a microbatch. ``pages`` is a number: which pages they are is not promised.

    ``window_pages`` says of each whether there is a window page beside it; of a model without window layers nothing.
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
    """One step. ``number`` is that of the last microbatch, ``mode`` is None when this step launches none.

    ``told`` is what a microbatch of no request tells the stages: the new weights, or where a profile goes.
    ``copies`` says how many pages it copies to the host, and from it: which ones these are is not promised.
    ``transfers`` are the orders to send and receive KV.
    The messages of answers and refusals in ``replies`` are the part of them that is promised.
    """

    mode: ForwardMode | None
    number: int
    segments: Sequence[ExpectedSegment]
    told: str | int | None
    lora: LoraChange | None
    replies: Sequence[Reply]
    deadline: float | None
    again: bool
    grammars: tuple[GrammarOrder, ...] = ()
    copies: tuple[int, int] = (0, 0)
    transfers: Sequence[SpecifiedOrder] = ()


def mode_of(prompts: Sequence[object], decodes: Sequence[object]) -> ForwardMode:
    """What a microbatch with these parts is called."""
    if not decodes:
        return PREFILL
    return MIXED if prompts else DECODE
