"""The steps of a run as they are shown: events and replies in words, and the position of every microbatch.

An adapter converts its records to a log; the table, the timeline, Perfetto, reports and traces need nothing else. A
microbatch launched at step n is in stage 0 at step n, in stage 1 at n + 1 and so on; after the last stage its result
waits until a step takes it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import PurePath
from typing import Annotated, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec

from scripted.core.machine import ConfigIn, ConfigT, RecordIn
from scripted.core.phrases import printable, short_rid
from scripted.core.protocol import Adapter
from scripted.core.refusals import ScriptDefinitionError

# A text names this many requests or tokens and counts the others.
_NAMED: Final = 4
# A trace may be anybody's file: a number in it is one that every format of a page can hold, and a pipeline has a size
# that can be drawn.
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=4096)]


def content_of(message: msgspec.Struct) -> int:
    """Return a checksum of a message, without a call's id, which clients choose."""
    if getattr(message, "call_id", None):
        message = msgspec.structs.replace(message, call_id="")
    return zlib.crc32(msgspec.msgpack.encode(message))


def some(names: list[str]) -> str:
    """Join the first few names and count the rest."""
    more = len(names) - _NAMED
    return " ".join(names) if more <= 0 else f"{' '.join(names[:_NAMED])} +{more} more"


class Said(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event that arrived, or one reply: ``text`` names its request ``rid`` as ``short_rid`` does.

    ``kind`` selects its mark: ``event``, ``strong`` or ``bad`` for a client's event, ``taken`` or ``bad`` for a result,
    ``token``, ``answer``, ``refused`` or ``bad`` for a reply. ``batch`` is the microbatch of a result; ``of_pipeline``
    marks an event of the pipeline. ``full`` is the whole text if ``text`` is shortened. ``content`` tells apart
    messages with equal text.
    """

    text: str
    kind: str = "event"
    rid: str | None = None
    batch: Number | None = None
    of_pipeline: bool = False
    full: str = ""
    content: Number = 0

    def naming(self, name: str) -> str:
        """Return the text with another name for the request."""
        return self.text if self.rid is None else self.text.replace(short_rid(self.rid), name, 1)

    @property
    def in_full(self) -> str:
        text = self.text if self.rid is None else self.naming(printable(self.rid))
        return f"{text} (in full: {self.full})" if self.full else text


class ShownShare(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request's part of a microbatch: ``positions`` in the request, a ``note``, and ``detail`` as a long text."""

    rid: str
    positions: str
    note: str = ""
    detail: str = ""

    def text(self, name: str) -> str:
        return f"{name}{self.positions}{self.note}"


class ShownBatch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A launched microbatch; without shares it carries ``order`` to the stages."""

    id: Number
    kind: str
    shares: tuple[ShownShare, ...] = ()
    tokens: Number = 0
    order: str = ""
    content: Number = 0

    @property
    def rids(self) -> tuple[str, ...]:
        """Its requests, in order."""
        return tuple(share.rid for share in self.shares)

    @property
    def text(self) -> str:
        """``#1 prefill a[64:125] last chunk``, ``#2 decode a@125 b@40``."""
        return f"#{self.id} {self.order or f'{self.kind} {some([s.text(short_rid(s.rid)) for s in self.shares])}'}"

    @property
    def in_full(self) -> str:
        """The text with every request, and nothing shortened."""
        shares = " ".join(share.text(printable(share.rid)) for share in self.shares)
        return f"#{self.id} {self.order or f'{self.kind} {shares}'}"


class ShownStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step: its input and output, and the state in which it left queues, pipeline and memory.

    ``in_flight`` has microbatch ids in launch order. ``digest`` covers this step and all earlier ones. ``error`` is the
    exception, as ``Type: text``, of the step in which the scheduler died; ``broken`` is the promise or assertion that
    failed after a step that the scheduler survived.
    """

    step: Number
    now: float = 0.0
    arrived: tuple[Said, ...] = ()
    launched: ShownBatch | None = None
    answered: tuple[Said, ...] = ()
    waiting: tuple[str, ...] = ()
    chunked: str | None = None
    running: tuple[str, ...] = ()
    transferring: tuple[str, ...] = ()
    in_flight: tuple[Number, ...] = ()
    memory: dict[str, Number] = {}
    digest: str = ""
    error: str | None = None
    broken: str | None = None

    @property
    def failure(self) -> str | None:
        """Why the run ended in this step: the scheduler died, or a promise did not hold."""
        return self.error or self.broken

    @property
    def queues_are_clear(self) -> bool:
        """Whether no request waits, is partly prefilled or runs."""
        return not self.waiting and self.chunked is None and not self.running

    @property
    def in_window(self) -> bool:
        """Whether the window of the flush race is open: every queue is clear, yet something is in flight."""
        return bool(self.in_flight) and self.queues_are_clear


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """A remark on one step: a window that was open, or the ``line`` of ``file`` that acted before it."""

    step: Number
    text: str
    file: str = ""
    line: Number = 0

    def place(self, own: str = "") -> str:
        """Return the line number, with the file's name unless it is the script's ``own``; empty for a window."""
        if not self.line:
            return ""
        return str(self.line) if self.file == own else f"{PurePath(self.file).name}:{self.line}"

    @property
    def in_full(self) -> str:
        return f"{self.place()} {self.text}".strip()


def own_file(notes: Sequence[Note]) -> str:
    """Return the script's own file: that of the last line that acted, since helpers act before it."""
    return next((note.file for note in reversed(notes) if note.line), "")


class Launch(NamedTuple):
    """A microbatch and the step that launched it."""

    batch: ShownBatch
    step: int


class ShownPipeline(NamedTuple):
    """The pipeline after one step: the microbatch in each stage, if any, and the microbatches whose results wait."""

    stages: tuple[int | None, ...]
    results: tuple[int, ...]


class StepLog(msgspec.Struct, frozen=True):
    """The steps of one run on a pipeline of ``stages``, with at most ``depth`` microbatches in flight."""

    stages: Size
    depth: Size
    steps: tuple[ShownStep, ...] = ()

    def until(self, count: int | None) -> StepLog:
        """Return the log of the first ``count`` steps, or of all."""
        return self if count is None else StepLog(self.stages, self.depth, self.steps[:count])

    def failing(self, why: str, step: int | None = None) -> StepLog:
        """Return the log with the failure at ``step``, or at the last one; a step that has a failure keeps it."""
        steps = list(self.steps)
        index = len(steps) - 1 if step is None else next((n for n, one in enumerate(steps) if one.step == step), -1)
        if index >= 0 and steps[index].failure is None:
            steps[index] = msgspec.structs.replace(steps[index], broken=why)
        return StepLog(self.stages, self.depth, tuple(steps))

    def launches(self) -> dict[int, Launch]:
        return {one.launched.id: Launch(one.launched, one.step) for one in self.steps if one.launched is not None}

    def pipeline_at(self, step: ShownStep, launched: dict[int, Launch]) -> ShownPipeline:
        """Return the pipeline after one step. Microbatches from before the first step have left the last stage."""
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
    """A message between engines, sent in step ``sent``; ``arrived`` is None while in transit or if lost."""

    sender: str
    receiver: str
    text: str
    sent: Number
    arrived: Number | None = None
    lost: bool = False

    @property
    def in_full(self) -> str:
        how = "lost" if self.lost else "on its way"
        fate = how if self.arrived is None else f"arrives in step {self.arrived}"
        return f"step {self.sent}: {self.sender} -> {self.receiver}: {self.text}, {fate}"


class EngineLog(msgspec.Struct, frozen=True):
    """The steps of one engine in a fleet, numbered as the fleet's steps."""

    name: str
    log: StepLog
    notes: tuple[Note, ...] = ()


class FleetLog(msgspec.Struct, frozen=True):
    """The engines of a run in order, and their messages in the order of sending."""

    engines: tuple[EngineLog, ...]
    messages: tuple[Message, ...] = ()

    def failing(self, why: str) -> FleetLog:
        """Return the log with the failure at the fleet's last step, in each engine that took it."""
        last = max((one.log.steps[-1].step for one in self.engines if one.log.steps), default=0)
        engines = [msgspec.structs.replace(one, log=one.log.failing(why, last)) for one in self.engines]
        return FleetLog(tuple(engines), self.messages)


@runtime_checkable
class ShowsSteps(Protocol[ConfigIn, RecordIn]):
    """An adapter whose records can be shown."""

    def as_log(self, records: Sequence[RecordIn], config: ConfigIn) -> StepLog:
        """Describe the steps in words."""
        ...


def log_of_adapter(adapter: Adapter[ConfigT], records: Sequence[object], config: ConfigT) -> StepLog:
    """Describe the recorded steps of a run. Raises ScriptDefinitionError for an adapter without step logs."""
    if not isinstance(adapter, ShowsSteps):
        raise ScriptDefinitionError(f"the steps of {adapter.name} cannot be shown; give its adapter as_log()")
    return adapter.as_log(records, config)
