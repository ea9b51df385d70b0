"""The cost of promises: the clock is around the checks of every promise, and is gone after the measurement."""

from __future__ import annotations

import pytest

from benchmarks import promise_cost
from scripted.core.promises import waste

# A timer's check runs only where a machine sets one; this engine sets none.
SILENT = {"timers"}


def test_the_checks_of_every_promise_are_clocked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promise_cost, "_CALLS", 10)
    monkeypatch.setattr(promise_cost, "_WARM_UP", 1)
    before = waste.Preemptions.begin
    _, costs = promise_cost.measure("lockstep", 8)
    assert {cost.promise for cost in costs if not cost.calls} == SILENT
    assert waste.Preemptions.begin is before, "the clock stays around a check"


def test_a_check_that_raises_is_counted() -> None:
    clock = promise_cost.Clock()
    with pytest.raises(ZeroDivisionError):
        clock.around("waste", lambda: 1 // 0)()
    assert clock.calls["waste"] == 1
