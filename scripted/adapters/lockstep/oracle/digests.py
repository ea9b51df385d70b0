"""Digests stand for their records: two steps that differ in any field differ in their digest.

It changes one field of a step after another; the digest must notice each change.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from engine.instruments import DigestChain
from engine.plan import Microbatch
from engine.scheduler import StepRecord
from scripted.core.violation import Violation

# A front end numbers its calls over its whole life, so that their ids are in no digest.
_NOT_DIGESTED: Final = frozenset(("call_id",))
# Lists of more than 15 entries have another header in the encoding that is digested.
_BATCHES: Final = (15, 16, 17)
# What a segment says of tokens and of sampling is not in the digest of plans; the count of its tokens is. Nor are the
# paths of a weight update and of a profile.
_NOT_IN_PLANS: Final = frozenset(("token_ids", "sampling", "microbatch.path", "microbatch.folder", "next_id"))

# The events, the microbatch, the replies and the sizes of one step.
DigestedStep = tuple[tuple[Any, ...], Microbatch | None, tuple[Any, ...], tuple[int, ...]]


def check_digest(step: DigestedStep) -> None:
    """Change every field of a step in turn. Raises Violation that names one that the digest leaves out."""
    full, plans = _digests(step)
    events, microbatch, replies, sizes = step
    changed: list[tuple[str, DigestedStep]] = []
    changed += [(path, (other, microbatch, replies, sizes)) for path, other in _changed(events, "events")]
    changed += [(path, (events, other, replies, sizes)) for path, other in _changed(microbatch, "microbatch")]
    changed += [(path, (events, microbatch, other, sizes)) for path, other in _changed(replies, "replies")]
    changed += [(path, (events, microbatch, replies, other)) for path, other in _changed(sizes, "sizes")]
    for path, other in changed:
        if _digests(other)[0] == full:
            raise Violation(f"the digest leaves out {path}: two steps that differ in it have the digest {full}")
    others = [(path, other, sizes) for path, other in _changed(microbatch, "microbatch", leaving_out=_NOT_IN_PLANS)]
    others += [(path, microbatch, other) for path, other in _changed(sizes, "sizes")]
    for path, other_microbatch, other_sizes in others:
        if _digests((events, other_microbatch, replies, other_sizes))[1] == plans:
            raise Violation(f"the digest of plans leaves out {path}: two steps that differ in it have {plans}")


def check_digests(records: Sequence[StepRecord]) -> None:
    """The same for the first step of each kind among these: with and without a microbatch, replies and events.

    And when a digest is asked for does not matter to what it is. Raises Violation.
    """
    _check_moments([_digested(record) for record in records])
    for before, record in itertools.pairwise(records):
        if record.digest == before.digest:
            raise Violation(
                f"step {record.step} is not in the digest: it is {record.digest}, as after step {before.step}"
            )
    kinds: set[tuple[object, ...]] = set()
    for record in records:
        mode = None if record.microbatch is None else record.microbatch.mode
        kind = (mode, *{type(item) for item in (*record.events, *record.replies)})
        if kind not in kinds:
            kinds.add(kind)
            check_digest(_digested(record))
            _check_names(_digested(record))


def _digested(record: StepRecord) -> DigestedStep:
    sizes = (record.waiting, record.running, record.pages_free, record.pages_cached, record.pages_held)
    return record.events, record.microbatch, record.replies, sizes


def _check_moments(steps: Sequence[DigestedStep]) -> None:
    """Steps are folded into a digest in batches, of one step or of many: when it is asked for does not matter."""
    digests = {_digests_in_batches(steps, size) for size in (1, *_BATCHES, len(steps))}
    if len(digests) > 1:
        raise Violation(f"the digest of {len(steps)} steps depends on how often it was asked for: {sorted(digests)}")


def _check_names(step: DigestedStep) -> None:
    """How a front end numbers its calls does not matter."""
    events, microbatch, replies, sizes = step
    others = (_renamed(events), microbatch, _renamed(replies), sizes)
    if _digests(others) != _digests(step):
        raise Violation(f"the digest depends on the ids of calls: {_digests(step)} with those of {[*events, *replies]}")


def _renamed(items: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        msgspec.structs.replace(item, call_id=f"other-{item.call_id}") if getattr(item, "call_id", None) else item
        for item in items
    )


def _digests_in_batches(steps: Sequence[DigestedStep], size: int) -> tuple[str, str]:
    chain = DigestChain()
    for number, step in enumerate(steps, 1):
        chain.add(step)
        if number % size == 0:
            _ = chain.digest
    return chain.digest, chain.plan_digest


def _digests(step: DigestedStep) -> tuple[str, str]:
    chain = DigestChain()
    chain.add(step)
    return chain.digest, chain.plan_digest


def _changed(value: Any, path: str, *, leaving_out: frozenset[str] = frozenset()) -> Iterator[tuple[str, Any]]:
    """The value once for each thing in it, with that thing changed, and where it is."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if name in leaving_out or f"{path}.{name}" in leaving_out or name in _NOT_DIGESTED:
                continue
            for where, other in _changed(getattr(value, name), f"{path}.{name}", leaving_out=leaving_out):
                yield where, msgspec.structs.replace(value, **{name: other})
    elif isinstance(value, tuple):
        for index, item in enumerate(value[:2]):
            for where, other in _changed(item, f"{path}[{index}]", leaving_out=leaving_out):
                yield where, (*value[:index], other, *value[index + 1 :])
        if value and not isinstance(value[0], tuple | None):
            yield f"{path}, its last", value[:-1]
    elif isinstance(value, bool):
        yield path, not value
    elif isinstance(value, int | float):
        yield path, value + 1
    elif isinstance(value, str):
        # Of an enum too: what is digested is its text.
        yield path, f"{value}-other"
