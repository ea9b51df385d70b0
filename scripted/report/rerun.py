"""A run that was made again, as it is shown: every step, how it ended, and where a recording was left."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.machine import RecordIn
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.translation import Translated
from scripted.report.step_log import StepLog

if TYPE_CHECKING:
    from scripted.report.trace import Trace


class Rerun(msgspec.Struct, frozen=True):
    """Every step of a run of an ``adapter``, and what it died of, as ``Type: text``, and ``where`` that was raised.

    ``schedule`` is the line that was run, and ``unreached`` are its actions that met nothing to act on; ``config`` are
    its settings.
    ``differs`` says where a recording was left, ``broken`` where its engine first broke a promise. ``recorded_s`` are
    the seconds from the first to the last of its steps that ran; None for a schedule. ``first_step`` is over 1 when it
    began at a checkpoint.
    """

    log: StepLog
    error: str | None = None
    differs: str | None = None
    recorded_error: str | None = None
    recorded_s: float | None = None
    first_step: int = 1
    broken: str | None = None
    adapter: str = DEFAULT_ADAPTER
    config: dict[str, str | int | float | bool | None] = {}
    schedule: str = ""
    unreached: tuple[str, ...] = ()
    where: str = ""

    def trace(self, title: str, mutant: str | None = None) -> Trace:
        """The run as a file that is viewed."""
        # It is written with the engine's own files, which an adapter does not import.
        from scripted.report.trace import Trace, TraceHeader

        header = TraceHeader(
            title=title,
            adapter=self.adapter,
            config=self.config,
            outcome=self.differs or self.error or self.broken or "passed",
            mutant=mutant,
            died=self.error is not None and bool(self.log.steps) and self.log.steps[-1].error is not None,
            schedule=self.schedule,
        )
        return Trace(header, self.log)

    @property
    def passed(self) -> bool:
        """Every promise was kept, and a recording was followed to its end or its death."""
        followed = self.differs is None and self.error == self.recorded_error
        return followed and (self.broken is None or self.recorded_error is not None)


@runtime_checkable
class ReplaysRecordings(Protocol[RecordIn]):
    """An adapter that reads recordings of its scheduler."""

    def replay_recording(self, path: Path, *, until: int | None, last_steps: int | None) -> Rerun:
        """Do the recorded steps again, all of them or up to ``until``, and compare them.

        ``last_steps`` of them are kept, or all. Raises what a bad file raises.
        """
        ...

    def schedule_of_recording(self, path: Path, *, until: int | None) -> Translated:
        """The recorded steps as a schedule, as far as a schedule can say them."""
        ...

    def plan_of(self, record: RecordIn) -> object:
        """The launch of a step, in a form in which two runs can be compared; None for nothing."""
        ...


def recording_reader(name: str) -> ReplaysRecordings:
    """The adapter of this name, which reads recordings. Raises ScriptDefinitionError for any other."""
    adapter = adapter_named(name)
    if not isinstance(adapter, ReplaysRecordings):
        raise ScriptDefinitionError(f"the adapter {name} reads no recordings; replay a schedule of it")
    return adapter
