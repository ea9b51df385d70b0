"""The steps of a run as they are shown: who did what, in words, and where every microbatch is.

An adapter makes a log of its own records; table, timeline, Perfetto, reports and traces need nothing else of it. A
microbatch launched at step n is in stage 0 at step n, in stage 1 at n + 1 and so on; after the last stage its result
waits until a step takes it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import PurePath
from typing import Final, NamedTuple, Protocol, runtime_checkable

import msgspec

from scripted.core.machine import ConfigIn, ConfigT, RecordIn
from scripted.core.phrases import printable, short_rid
from scripted.core.protocol import Adapter
from scripted.core.refusals import ScriptDefinitionError

# A text names this many requests or tokens, and counts the others.
_NAMED: Final = 4


def content_of(message: msgspec.Struct) -> int:
    """A check sum of all that a message says but the id of a call, which clients make up."""
    if getattr(message, "call_id", None):
        message = msgspec.structs.replace(message, call_id="")
    return zlib.crc32(msgspec.msgpack.encode(message))


def some(names: list[str]) -> str:
    """The first few, and how many there are beyond them."""
    more = len(names) - _NAMED
    return " ".join(names) if more <= 0 else f"{' '.join(names[:_NAMED])} +{more} more"


class Said(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event that arrived, or one reply: ``text`` names its request ``rid`` as ``short_rid`` does.

    ``kind`` is how it is marked: ``event``, ``strong`` or ``bad`` of a client, ``taken`` or ``bad`` of a microbatch,
    ``token``, ``answer``, ``refused`` or ``bad`` of a reply. ``batch`` is the microbatch whose result it is, and
    ``of_pipeline`` says that it came from the pipeline. ``full`` is the whole text where ``text`` leaves something out.
    ``content`` differs where two of the same text say different things.
    """

    text: str
    kind: str = "event"
    rid: str | None = None
    batch: int | None = None
    of_pipeline: bool = False
    full: str = ""
    content: int = 0

    def naming(self, name: str) -> str:
        """The text with another name for the request."""
        return self.text if self.rid is None else self.text.replace(short_rid(self.rid), name, 1)

    @property
    def in_full(self) -> str:
        text = self.text if self.rid is None else self.naming(printable(self.rid))
        return f"{text} (in full: {self.full})" if self.full else text


class ShownShare(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request's part of a microbatch: ``positions`` in the request, a ``note``, and ``detail`` for a long text."""

    rid: str
    positions: str
    note: str = ""
    detail: str = ""

    def text(self, name: str) -> str:
        return f"{name}{self.positions}{self.note}"


class ShownBatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A microbatch that was launched; one without shares carries ``order`` to the stages."""

    id: int
    kind: str
    shares: tuple[ShownShare, ...] = ()
    tokens: int = 0
    order: str = ""
    content: int = 0

    @property
    def rids(self) -> tuple[str, ...]:
        """The requests that it computes, in its order."""
        return tuple(share.rid for share in self.shares)

    @property
    def text(self) -> str:
        """``#1 prefill a[64:125] last chunk``, ``#2 decode a@125 b@40``."""
        return f"#{self.id} {self.order or f'{self.kind} {some([s.text(short_rid(s.rid)) for s in self.shares])}'}"

    @property
    def in_full(self) -> str:
        """The same with every request, and nothing shortened."""
        shares = " ".join(share.text(printable(share.rid)) for share in self.shares)
        return f"#{self.id} {self.order or f'{self.kind} {shares}'}"


class ShownStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step: what went in, what came out, and how it left queues, pipeline and memory.

    ``in_flight`` holds microbatch ids in launch order. ``digest`` stands for this step and all before it. ``error`` is
    the exception, as ``Type: text``, of the step that the scheduler died in.
    """

    step: int
    now: float = 0.0
    arrived: tuple[Said, ...] = ()
    launched: ShownBatch | None = None
    answered: tuple[Said, ...] = ()
    waiting: tuple[str, ...] = ()
    chunked: str | None = None
    running: tuple[str, ...] = ()
    transferring: tuple[str, ...] = ()
    in_flight: tuple[int, ...] = ()
    memory: dict[str, int] = {}
    digest: str = ""
    error: str | None = None

    @property
    def queues_are_clear(self) -> bool:
        """No request waits, is partly prefilled or runs."""
        return not self.waiting and self.chunked is None and not self.running

    @property
    def in_window(self) -> bool:
        """The window of the flush race: every queue is clear, yet something is in flight."""
        return bool(self.in_flight) and self.queues_are_clear


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """A remark on one step: a window that was reached, or the ``line`` of a script's ``file`` that acted before it."""

    step: int
    text: str
    file: str = ""
    line: int = 0

    def place(self, own: str = "") -> str:
        """The line's number, with its file's name where that is not the script's ``own``; empty for a window."""
        if not self.line:
            return ""
        return str(self.line) if self.file == own else f"{PurePath(self.file).name}:{self.line}"

    @property
    def in_full(self) -> str:
        return f"{self.place()} {self.text}".strip()


def own_file(notes: Sequence[Note]) -> str:
    """The script's own file among those whose lines acted: that of the last one; a helper's line comes before."""
    return next((note.file for note in reversed(notes) if note.line), "")


class Launch(NamedTuple):
    """A microbatch and the step that launched it."""

    batch: ShownBatch
    step: int


class ShownPipeline(NamedTuple):
    """What is in flight after one step: the microbatch in each stage, if any, and those whose results wait."""

    stages: tuple[int | None, ...]
    results: tuple[int, ...]


class StepLog(msgspec.Struct, frozen=True):
    """The steps of one run on a pipeline of so many ``stages``, with at most ``depth`` microbatches in flight."""

    stages: int
    depth: int
    steps: tuple[ShownStep, ...] = ()

    def until(self, count: int | None) -> StepLog:
        """The first steps, or all."""
        return self if count is None else StepLog(self.stages, self.depth, self.steps[:count])

    def launches(self) -> dict[int, Launch]:
        return {one.launched.id: Launch(one.launched, one.step) for one in self.steps if one.launched is not None}

    def pipeline_at(self, step: ShownStep, launched: dict[int, Launch]) -> ShownPipeline:
        """The pipeline as one step left it. A launch from before the first step is taken to be through all stages."""
        where: list[int | None] = [None] * self.stages
        results: list[int] = []
        for batch in step.in_flight:
            age = step.step - launched[batch].step if batch in launched else self.stages
            if 0 <= age < self.stages:
                where[age] = batch
            else:
                results.append(batch)
        return ShownPipeline(tuple(where), tuple(results))


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one engine said to another in the step ``sent``; ``arrived`` is None for what has not, or was lost."""

    sender: str
    receiver: str
    text: str
    sent: int
    arrived: int | None = None
    lost: bool = False

    @property
    def in_full(self) -> str:
        how = "lost" if self.lost else "on its way"
        fate = how if self.arrived is None else f"arrives in step {self.arrived}"
        return f"step {self.sent}: {self.sender} -> {self.receiver}: {self.text}, {fate}"


class EngineLog(msgspec.Struct, frozen=True):
    """The steps of one engine of a fleet, counted as those of the fleet are."""

    name: str
    log: StepLog
    notes: tuple[Note, ...] = ()


class FleetLog(msgspec.Struct, frozen=True):
    """The engines of a run in their order, and what they said to each other in the order in which they said it."""

    engines: tuple[EngineLog, ...]
    messages: tuple[Message, ...] = ()


@runtime_checkable
class ShowsSteps(Protocol[ConfigIn, RecordIn]):
    """An adapter whose records can be shown."""

    def as_log(self, records: Sequence[RecordIn], config: ConfigIn) -> StepLog:
        """The steps in words."""
        ...


def log_of_adapter(adapter: Adapter[ConfigT], records: Sequence[object], config: ConfigT) -> StepLog:
    """The recorded steps of a run, in words. Raises ScriptDefinitionError for an adapter that shows none."""
    if not isinstance(adapter, ShowsSteps):
        raise ScriptDefinitionError(f"the steps of {adapter.name} cannot be shown; give its adapter as_log()")
    return adapter.as_log(records, config)
