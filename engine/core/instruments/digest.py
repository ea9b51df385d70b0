"""The digest chain: one value for all steps of a scheduler.

Two runs with the same digest had the same events, plans, replies and sizes in every step. The plan chain omits token
values, so a real and a simulated model agree on it. Neither depends on machine, process or hash seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import ClassVar, Final, TypeVar, get_args

import msgspec

from engine.core.messages import CallAnswer, Event, Reply, StartProfile, encode
from engine.core.plan import LoraUpdate, Microbatch, ProfileSwitch, SleepSwitch

_DIGEST_BYTES: Final = 8
# Copying a hash takes a sixth of the time of creating one.
_EMPTY: Final = hashlib.blake2b(digest_size=_DIGEST_BYTES)
# Steps are folded in batches: hashing is a large part of a simulated step, and few digests are read. A batch of large
# plans has fewer steps, so that no step of a server hashes many earlier ones.
_PENDING_LIMIT_STEPS: Final = 256
_PENDING_LIMIT_SEGMENTS: Final = 2048

# Every message with a call id, found by its field, so that none is forgotten.
_CALLS: Final = frozenset(kind for kind in get_args(Event) + get_args(Reply) if "call_id" in kind.__struct_fields__)
_NO_NAMES: Final = {kind: {"call_id": ""} for kind in _CALLS} | {StartProfile: {"call_id": "", "folder": ""}}

_Item = TypeVar("_Item", bound=msgspec.Struct)
_Entry = tuple[Sequence[Event], Microbatch | None, Sequence[Reply], tuple[int, ...]]
_QUIET: Final[_Entry] = ((), None, (), ())


class DigestChain:
    """Two running hashes over the steps of one scheduler, each updated when it is read.

    A chain without ``keeps_steps`` records nothing.
    """

    keeps_steps: ClassVar[bool] = True

    def __init__(self) -> None:
        self._full, self._plans = _EMPTY.copy(), _EMPTY.copy()
        # The steps that are not hashed yet, and their plans with the sizes.
        self._pending: list[_Entry] = []
        self._pending_plans: list[tuple[Microbatch | None, tuple[int, ...]]] = []
        self._pending_segments = 0
        # The folder of the last profile; the front end's name for it has the date and a random part.
        self._folder = ""

    def add(self, entry: _Entry) -> None:
        """Append one step: events, microbatch, replies, and the sizes after it."""
        events, microbatch, replies, sizes = entry
        if type(microbatch) is ProfileSwitch and microbatch.folder:
            self._folder = microbatch.folder
            microbatch = msgspec.structs.replace(microbatch, folder="")
        if self._folder:
            replies = [self._without_folder(reply) for reply in replies]
        self._append((_nameless(events), microbatch, _nameless(replies) if replies else replies, sizes))

    def add_quiet(self) -> None:
        """Append one step without events, microbatch, replies and changes."""
        self._append(_QUIET)

    def _append(self, entry: _Entry) -> None:
        _, microbatch, _, sizes = entry
        self._pending.append(entry)
        self._pending_plans.append((microbatch, sizes))
        if microbatch is not None:
            self._pending_segments += len(microbatch.segments)
        is_large = self._pending_segments >= _PENDING_LIMIT_SEGMENTS
        if is_large or len(self._pending) >= _PENDING_LIMIT_STEPS:
            self._fold()
        if is_large or len(self._pending_plans) >= _PENDING_LIMIT_STEPS:
            self._fold_plans()
        if is_large:
            self._pending_segments = 0

    @property
    def digest(self) -> str:
        """Return the digest of all steps, token values included; 16 hex digits."""
        self._fold()
        return self._full.hexdigest()

    @property
    def plan_digest(self) -> str:
        """Return the digest of all launches, their pages and their order, without token values; 16 hex digits."""
        self._fold_plans()
        return self._plans.hexdigest()

    def _without_folder(self, reply: Reply) -> Reply:
        if type(reply) is not CallAnswer:
            return reply
        return msgspec.structs.replace(reply, message=reply.message.replace(self._folder, ""))

    def _fold(self) -> None:
        if self._pending:
            self._full.update(_stream(self._pending))
            self._pending.clear()

    def _fold_plans(self) -> None:
        pending = self._pending_plans
        if pending:
            shapes = [(plan_shape(microbatch) if microbatch else (), sizes) for microbatch, sizes in pending]
            self._plans.update(_stream(shapes))
            pending.clear()


class SilentDigests(DigestChain):
    """A chain that ignores steps: hashing is a third of a step, and only recordings and harnesses read digests.

    It has no hash object: a fork could not copy one.
    """

    keeps_steps: ClassVar[bool] = False

    def __init__(self) -> None:
        pass


def _nameless(items: Sequence[_Item]) -> Sequence[_Item]:
    """Drop the names that the front end generates: call ids and the folders of profiles."""
    for item in items:
        if type(item) in _CALLS:
            return [msgspec.structs.replace(one, **_NO_NAMES.get(type(one), {})) for one in items]
    return items


def _stream(entries: Sequence[object]) -> bytes:
    """Concatenate the encoded entries without a header, so that the hash does not depend on the batches."""
    # The msgpack header of a list: 1 byte up to 15 items, 3 up to 65,535.
    return encode(entries)[1 if len(entries) < 16 else 3 :]


def plan_shape(microbatch: Microbatch) -> list[object]:
    """Return a plan without its token values."""
    head: list[object] = [microbatch.id, microbatch.mode]
    if isinstance(microbatch, LoraUpdate):
        head.append(microbatch.change)
    if isinstance(microbatch, SleepSwitch):
        head.append(microbatch.level)
    if microbatch.copies is not None:
        head.append(microbatch.copies)
    return head + [
        (
            s.rid,
            s.row,
            s.start,
            len(s.token_ids),
            s.page_start,
            s.pages,
            s.choosers if s.drafts else s.emits,
            s.window_pages,
            s.logprobs_from,
        )
        + ((s.lora,) if s.lora else ())
        for s in microbatch.segments
    ]
