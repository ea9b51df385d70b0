"""The watchdog stops what does not end; what computes all the time is not blamed for a process that was stopped."""

from __future__ import annotations

import time

import pytest

from scripted.errors import Overdue
from scripted.script.watchdog import watchdog


def _compute(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_a_process_that_was_stopped_is_given_the_time_again() -> None:
    """A search that was stopped by SIGSTOP for ten seconds had reported the run that it was in as one without end."""
    with watchdog(0.05, is_busy=True):
        time.sleep(0.07)
        _compute(0.01)
    with pytest.raises(Overdue), watchdog(0.05):
        time.sleep(0.5)


@pytest.mark.parametrize("wait", [time.sleep, _compute])
def test_what_computes_or_waits_for_ever_is_stopped(wait: object) -> None:
    assert callable(wait)
    with pytest.raises(Overdue), watchdog(0.05, is_busy=True):
        wait(5.0)
