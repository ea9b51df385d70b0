"""Which of several deaths caused the others, and the report of it. Decides from what processes said; waits for none."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.process.death import EXIT_FAILED, DeathReport, describe_status
from engine.process.watched import WatchedProcess


def is_cause(child: WatchedProcess) -> bool:
    """A process that ended in order, or names another one as its reason, is a victim."""
    return child.status != 0 and (child.dying is None or child.dying.victim_of is None)


def first_death(ended: Sequence[WatchedProcess], alive: Sequence[WatchedProcess]) -> DeathReport:
    """The first of these ends that is not the consequence of another one, or the process that the victims name."""
    child = next(filter(is_cause, ended), None)
    blame = {one.dying.victim_of: one.dying.victim_cause for one in ended if one.dying is not None}
    blamed = next(filter(None, blame), None)
    if child is None and blamed is not None:
        # This process is not dead yet, but the others cannot wait for it any longer.
        stuck = next((one for one in alive if one.name in blame), None)
        if stuck is not None:
            return _report_of(stuck, blame[stuck.name])
        if blamed not in {one.name for one in ended}:  # The process of a victim, as the reader is the front end's.
            return DeathReport(process=blamed, pid=0, cause=blame[blamed], when=time.time())
    child = child or ended[0]
    status = child.status if child.status is not None else EXIT_FAILED
    return _report_of(child, _cause_of(child, status), status)


def _report_of(child: WatchedProcess, cause: str, status: int | None = None) -> DeathReport:
    return DeathReport(
        process=child.name,
        pid=child.pid,
        cause=cause,
        when=time.time(),
        exit_code=status if status is not None and status >= 0 else None,
        signal=-status if status is not None and status < 0 else None,
        node=child.node,
        place=child.place,
    )


def _cause_of(child: WatchedProcess, status: int) -> str:
    if child.dying is None:
        return describe_status(status)
    return child.dying.error if child.dying.expected else child.dying.traceback
