"""Checks that digests identify their records: two steps that differ in any field differ in their digest.

It changes the fields of a step one by one; the digest must notice each change.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterator, Sequence
from typing import Any, Final

import msgspec

from engine.core.instruments import DigestChain
from engine.core.plan import Microbatch
from engine.core.scheduler import StepRecord
from scripted.core.violation import Violation

# Digests leave out call ids, which a front end numbers over its lifetime, and folders of profiles, which have a date
# and a random part.
_NOT_DIGESTED: Final = frozenset(("call_id", "folder"))
# A single step first. In the digested encoding, lists of more than 15 entries have another header; the longer list
# comes first, because some runs have no more steps.
_BATCHES: Final = (1, 16, 15, 17)
# The digest of plans leaves out token values, sampling and the paths of weight updates, but includes the number of
# tokens.
_NOT_IN_PLANS: Final = re.compile(r"\.(token_ids|sampling|next_id)\b|^microbatch\.path\b")

# The events, the microbatch, the replies and the sizes of one step.
DigestedStep = tuple[tuple[Any, ...], Microbatch | None, tuple[Any, ...], tuple[int, ...]]


def check_digest(step: DigestedStep, kinds: Container[type] | None = None) -> None:
    """Change every field of the items of these kinds in turn, or of all items; and drop the last item.

    Raises Violation that names a field that a digest leaves out.
    """
    events, microbatch, replies, _ = step
    kinds = {type(item) for item in (*events, microbatch, *replies)} if kinds is None else kinds
    chain = _chain(step)
    full, plans = chain.digest, chain.plan_digest
    for path, other in _changed_steps(step, kinds):
        chain = _chain(other)
        if chain.digest == full:
            raise Violation(f"the digest leaves out {path}: two steps that differ in it have the digest {full}")
        is_in_plans = path.startswith(("microbatch", "sizes")) and not _NOT_IN_PLANS.search(path)
        if is_in_plans and chain.plan_digest == plans:
            raise Violation(f"the digest of plans leaves out {path}: two steps that differ in it have {plans}")


def check_digests(records: Sequence[StepRecord]) -> None:
    """Change every field of the first event and reply of each type, and of the microbatch, with each mode.

    The time of reading a digest must not matter. Raises Violation, which names a field that a digest leaves out.
    """
    steps = [_digested(record) for record in records]
    _check_moments(steps)
    for before, record in itertools.pairwise(records):
        if record.digest == before.digest:
            raise Violation(
                f"step {record.step} is not in the digest: it is {record.digest}, as after step {before.step}"
            )
    seen: set[tuple[object, type]] = set()
    for step in steps:
        events, microbatch, replies, _ = step
        mode = None if microbatch is None else microbatch.mode
        new = {(mode, type(item)) for item in (*events, microbatch, *replies)} - seen
        if new:
            seen |= new
            check_digest(step, {kind for _, kind in new})
            _check_names(step)


def _changed_steps(step: DigestedStep, kinds: Container[type]) -> Iterator[tuple[str, DigestedStep]]:
    events, microbatch, replies, sizes = step
    for path, others in _changed_items(events, "events", kinds):
        yield path, (others, microbatch, replies, sizes)
    for path, others in _changed_items(replies, "replies", kinds):
        yield path, (events, microbatch, others, sizes)
    if type(microbatch) in kinds:
        for path, other in _changed(microbatch, "microbatch"):
            yield path, (events, other, replies, sizes)
        for path, other in _changed(sizes, "sizes"):
            yield path, (events, microbatch, replies, other)


def _changed_items(items: tuple[Any, ...], path: str, kinds: Container[type]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the items with the first of each of these kinds changed, then without the last item."""
    firsts: dict[type, int] = {}
    for index, item in enumerate(items):
        if type(item) in kinds:
            firsts.setdefault(type(item), index)
    for index in firsts.values():
        for where, other in _changed(items[index], f"{path}[{index}]"):
            yield where, (*items[:index], other, *items[index + 1 :])
    if firsts:
        yield f"{path}, its last", items[:-1]


def _digested(record: StepRecord) -> DigestedStep:
    sizes = (record.waiting, record.running, record.pages_free, record.pages_cached, record.pages_held)
    return record.events, record.microbatch, record.replies, sizes


def _check_moments(steps: Sequence[DigestedStep]) -> None:
    """Check that digests do not depend on the times of reading, which fold steps in batches or all at once."""
    digests = {_digests_in_batches(steps, sizes) for sizes in (_BATCHES, (len(steps),))}
    if len(digests) > 1:
        raise Violation(f"the digest of {len(steps)} steps depends on how often it is read: {sorted(digests)}")


def _check_names(step: DigestedStep) -> None:
    """Check that the digest does not depend on the ids of calls."""
    events, microbatch, replies, sizes = step
    if not any(getattr(item, "call_id", None) for item in (*events, *replies)):
        return
    others = (_renamed(events), microbatch, _renamed(replies), sizes)
    if _digests(others) != _digests(step):
        raise Violation(
            f"the digest depends on the ids of calls: {_digests(step)} with the ids of {[*events, *replies]}"
        )


def _renamed(items: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        msgspec.structs.replace(item, call_id=f"other-{item.call_id}") if getattr(item, "call_id", None) else item
        for item in items
    )


def _digests_in_batches(steps: Sequence[DigestedStep], sizes: Sequence[int]) -> tuple[str, str]:
    """Read both digests after batches of these sizes in turn, and at the end."""
    chain, turns = DigestChain(), itertools.cycle(sizes)
    rest = next(turns)
    for step in steps:
        chain.add(step)
        rest -= 1
        if not rest:
            _ = chain.digest, chain.plan_digest
            rest = next(turns)
    return chain.digest, chain.plan_digest


def _digests(step: DigestedStep) -> tuple[str, str]:
    chain = _chain(step)
    return chain.digest, chain.plan_digest


def _chain(step: DigestedStep) -> DigestChain:
    chain = DigestChain()
    chain.add(step)
    return chain


def _changed(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the value once for each of its parts, with that part changed and the part's path."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if name not in _NOT_DIGESTED:
                for where, other in _changed(getattr(value, name), f"{path}.{name}"):
                    yield where, msgspec.structs.replace(value, **{name: other})
    elif isinstance(value, tuple):
        for index, item in enumerate(value[:2]):
            for where, other in _changed(item, f"{path}[{index}]"):
                yield where, (*value[:index], other, *value[index + 1 :])
        if value and not isinstance(value[0], tuple | None):
            yield f"{path}, its last", value[:-1]
    elif isinstance(value, bool):
        yield path, not value
    elif isinstance(value, int | float):
        yield path, value + 1
    elif isinstance(value, str):
        # The text of an enum is digested too.
        yield path, f"{value}-other"
