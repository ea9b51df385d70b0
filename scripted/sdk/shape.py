"""Checks the form of a machine and its output: each check describes the first fault, or returns None.

A fault here is a defect of the adapter, not of its scheduler. This module checks no promise of a scheduler.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, SupportsIndex

from scripted.core.machine import Closable, HasToBeClosed
from scripted.core.phrases import text_of
from scripted.sdk.messages import Answer, Batch, Refused, Share, Stepped, Tokens

_PARTS: Final = ("step", "counts", "is_idle", "depth")
_REPLIES: Final = (Tokens, Refused, Answer)


def wrong_in_machine(machine: Any) -> str | None:
    """Name the part that a new machine lacks or has in a wrong form."""
    lacks = [part for part in _PARTS if not _has(machine, part)]
    if lacks:
        return f"has no {', '.join(lacks)}"
    wrong = _wrong_in_call("step", lambda: inspect.signature(machine.step).bind((), 0.0))
    if wrong is not None:
        return wrong
    wrong = _wrong_in_call("counts", lambda: dict(machine.counts()))
    if wrong is not None:
        return wrong
    counts = machine.counts()
    are_named = isinstance(counts, Mapping) and all(isinstance(name, str) for name in counts)
    if not are_named or not all(map(_is_whole, counts.values())):
        return f"has counts() that return {counts!r:.80}; they are a dict of whole numbers by name"
    wrong = _wrong_in_call("is_idle", lambda: machine.is_idle)
    if wrong is not None:
        return wrong
    if callable(machine.is_idle):
        return "has is_idle as a method, which would always be true; make it a property"
    if not _is_whole(machine.depth) or machine.depth < 1:
        return f"has the depth {machine.depth!r}; it is a whole number of at least 1"
    parts = getattr(machine, "__dict__", {}).values()
    if not isinstance(machine, Closable) and any(isinstance(part, HasToBeClosed) for part in parts):
        return "has threads or an event loop, and no close() that ends them"
    return None


def wrong_in_step(stepped: object) -> str | None:
    """Name the first fault in the output of a step."""
    if not isinstance(stepped, Stepped):
        return f"returns a Stepped, got {stepped!r:.80}"
    for name, value in (("replies", stepped.replies), ("preempted", stepped.preempted)):
        if type(value) not in (tuple, list):
            return f"returns {name} as a tuple, got {value!r:.80}"
    if not isinstance(stepped.again, bool):
        return f"returns True or False as again, got {stepped.again!r:.80}"
    for reply in stepped.replies:
        if not isinstance(reply, _REPLIES):
            return f"returns Tokens, Refused and Answer as replies, got {reply!r:.80}"
    batch = stepped.microbatch
    return None if batch is None else _wrong_in_batch(batch)


def _wrong_in_batch(batch: object) -> str | None:
    if not isinstance(batch, Batch):
        return f"returns a Batch or None as its microbatch, got {batch!r:.80}"
    if not _is_whole(batch.id):
        return f"numbers its batches, got the id {batch.id!r:.80}"
    for share in batch.shares:
        if not isinstance(share, Share):
            return f"returns a batch of Shares, got {share!r:.80}"
        if not isinstance(share.rid, str):
            return f"returns a Share with the rid of a request, a text, got {share.rid!r:.80}"
        if not _is_whole(share.start) or not _is_whole(share.count):
            return f"returns a Share with whole numbers as start and count, got {share.start!r} and {share.count!r}"
        if not all(type(table) in (tuple, list) for table in share.tables):
            return f"returns a Share with its block table as a tuple, got {share.block_ids!r:.80}"
    return None


def _has(machine: object, part: str) -> bool:
    """Whether the machine has a part, even if reading the property raises."""
    if inspect.getattr_static(machine, part, None) is not None:
        return True
    try:
        return hasattr(machine, part)
    except Exception:  # noqa: BLE001 - the user's adapter may raise anything
        return True


def _wrong_in_call(part: str, call: Callable[[], object]) -> str | None:
    try:
        call()
    except Exception as exc:  # noqa: BLE001 - the user's adapter may raise anything
        takes = "; it takes the events and the time: step(events, now)" if part == "step" else ""
        return f"has {part} that cannot be asked: {type(exc).__name__}: {text_of(exc)}{takes}"
    return None


def _is_whole(value: object) -> bool:
    return type(value) is int or (isinstance(value, SupportsIndex) and not isinstance(value, bool))
