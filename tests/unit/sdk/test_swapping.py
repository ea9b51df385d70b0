"""Preemption by swap, as the second example has it: the search finds nothing wrong, and four breaks of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from thinned import thinned

from scripted.core.adapters import adapter_named
from scripted.search.campaign import Campaign, SearchReport
from scripted.search.units import SearchPlan

SWAPPING = str(Path(__file__).resolve().parents[3] / "examples/your_scheduler/swapping.py")
# Those in which requests are swapped.
TARGETS = ("full", "full-twins", "priorities", "beside-decodes", "aborted-decodes", "at-the-context")


@pytest.fixture(scope="module")
def scheduler() -> Any:
    """The class of the example's scheduler, as the adapter's file has it."""
    adapter_named(SWAPPING)
    return sys.modules["swapping"].SwappingScheduler


def search(schedules: int | None = None) -> SearchReport:
    return Campaign(SearchPlan(targets=TARGETS, adapter=SWAPPING, schedules=schedules, stop_at_first=True)).run()


@pytest.mark.parametrize("schedules", thinned([1000, None], one_in=2))
def test_nothing_is_wrong_with_it(scheduler: Any, schedules: int | None) -> None:
    """B06: swapped requests say what they say alone."""
    report = search(schedules)
    assert not report.findings, report.findings
    assert report.complete or report.schedules >= 1000


def _copies_that_are_lost(scheduler: Any) -> tuple[Any, ...]:
    scheduler.copies = []
    return ()


def _copies_in_the_wrong_order(scheduler: Any) -> tuple[Any, ...]:
    copies, scheduler.copies = scheduler.copies, []
    return tuple((target, source) for source, target in copies)


def _host_blocks_that_are_kept(scheduler: Any, request: Any) -> None:
    scheduler.swapped.pop(request.id, None)


def _swap_in_at_once(scheduler: Any) -> None:
    while scheduler.waiting and scheduler.waiting[0].id in scheduler.swapped:
        request = scheduler.waiting.popleft()
        scheduler._leave_host(request)
        scheduler.running.append(request)


@pytest.mark.parametrize(
    ("method", "broken", "words"),
    [
        ("take_copies", _copies_that_are_lost, "reads the wrong KV"),
        ("take_copies", _copies_in_the_wrong_order, "reads the wrong KV"),
        ("_leave_host", _host_blocks_that_are_kept, "host_free is"),
        ("_swap_in", _swap_in_at_once, "computes position 0 again"),
    ],
)
def test_a_swap_that_is_broken_is_found(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch, method: str, broken: Any, words: str
) -> None:
    """A mutant is caught (D11)."""
    monkeypatch.setattr(scheduler, method, broken)
    (finding,) = search(schedules=2000).findings.values()
    assert words in finding.failure.text
