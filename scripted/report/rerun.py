"""A replayed run as reports show it: every step, how it ended, and where it diverged from its recording."""

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
    """Every step of a run of an ``adapter``; its ``error``, as ``Type: text``, and ``where`` that was raised.

    ``schedule`` is the line that was run, ``unreached`` its actions that found nothing to act on, ``config`` its
    settings. ``differs`` says where the run diverged from its recording, ``broken`` where its engine first broke a
    promise. ``recorded_s`` is the time in seconds between the recording's first and last step; None for a schedule.
    ``first_step`` is over 1 if the run began at a checkpoint. ``notes`` lists what a recording lacks.
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
    notes: tuple[str, ...] = ()

    def trace(self, title: str, mutant: str | None = None) -> Trace:
        """Return the run as a trace."""
        # Imported late: trace files need ``lockstep``, adapters do not.
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
        """Whether every promise held and the run followed the recording to its end or to the scheduler's death."""
        followed = self.differs is None and self.error == self.recorded_error
        return followed and (self.broken is None or self.recorded_error is not None)


@runtime_checkable
class ReplaysRecordings(Protocol[RecordIn]):
    """An adapter that reads recordings of its scheduler."""

    def replay_recording(self, path: Path, *, until: int | None, last_steps: int | None) -> Rerun:
        """Repeat the recorded steps, all of them or up to ``until``, and compare them.

        Keeps all steps, or the ``last_steps``. Raises the errors of a damaged file.
        """
        ...

    def schedule_of_recording(self, path: Path, *, until: int | None) -> Translated:
        """Translate the recorded steps into a schedule, as far as a schedule can express them."""
        ...

    def plan_of(self, record: RecordIn) -> object:
        """Return the launch of a step in a form that can be compared across runs; None without a launch."""
        ...


def recording_reader(name: str) -> ReplaysRecordings:
    """Return the adapter of this name. Raises ScriptDefinitionError if it reads no recordings."""
    adapter = adapter_named(name)
    if not isinstance(adapter, ReplaysRecordings):
        raise ScriptDefinitionError(f"the adapter {name} reads no recordings; replay one of its schedules")
    return adapter
