"""A run that was made again, as it is shown: every step, how it ended, and where a recording was left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from scripted.core.adapters import OWN
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
    adapter: str = OWN
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
