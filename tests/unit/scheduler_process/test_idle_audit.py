"""The audit of an idle engine in production: only while it is idle, and seldom."""

from __future__ import annotations

import pytest

from engine.core.config import EngineConfig
from engine.core.errors import IntegrityError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import Generate, SamplingParams
from engine.core.scheduler import Scheduler
from engine.server.scheduler_process.live_gate import AUDIT_INTERVAL_S, IdleAudit
from scripted.core.clock import VirtualClock


def engine() -> tuple[Scheduler, VirtualClock, IdleAudit]:
    scheduler, clock = Scheduler(Limits.of(EngineConfig(), EMBEDDED_FACTS)), VirtualClock()
    return scheduler, clock, IdleAudit(scheduler, clock)


def test_broken_books_of_an_idle_engine_are_found() -> None:
    scheduler, _, audit = engine()
    audit.look()
    scheduler.memory.pages.free -= 1
    with pytest.raises(IntegrityError, match="page counts"):
        IdleAudit(scheduler, VirtualClock()).look()


def test_it_is_done_at_most_once_in_its_interval() -> None:
    """A03: it costs as much as what is cached, and a message may come meanwhile."""
    scheduler, clock, audit = engine()
    audit.look()
    scheduler.memory.pages.free -= 1
    clock.advance(AUDIT_INTERVAL_S / 2)
    audit.look()
    clock.advance(AUDIT_INTERVAL_S / 2)
    with pytest.raises(IntegrityError):
        audit.look()


def test_busy_engine_is_left_alone() -> None:
    scheduler, _, audit = engine()
    scheduler.step([Generate(rid="r", prompt_ids=(1, 2, 3), sampling=SamplingParams())], 0.0)
    scheduler.memory.pages.free -= 1
    audit.look()
