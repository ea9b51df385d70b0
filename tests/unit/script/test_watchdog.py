"""The watchdog stops what does not end; what computes all the time is not blamed for a process that was stopped."""

from __future__ import annotations

import contextlib
import signal
import time
from types import FrameType, SimpleNamespace

import pytest

from scripted.core.errors import Overdue
from scripted.script.watchdog import _watched_s, unwatched, watchdog


def _compute(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_a_process_that_was_stopped_is_given_the_time_again() -> None:
    """A search that was stopped by SIGSTOP for ten seconds had reported the run that it was in as one without end."""
    with watchdog(0.2, is_busy=True):
        time.sleep(0.25)
        _compute(0.02)
    with pytest.raises(Overdue), watchdog(0.05):
        time.sleep(0.5)


def test_a_process_that_is_starved_for_long_is_given_the_time_again_and_again() -> None:
    """On a machine with more to do than cores a run of one second of work had been reported as one without end."""
    with watchdog(0.2, is_busy=True):
        for _ in range(10):
            time.sleep(0.07)
            _compute(0.005)


def test_a_process_that_gets_no_processor_is_given_the_time_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nice 19 on a machine with twenty things to do it computes for less than a hundredth of the time."""
    monkeypatch.setattr("scripted.script.watchdog._ran_or_waited_s", time.monotonic)
    with watchdog(0.05, is_busy=True):
        time.sleep(0.3)


def test_what_is_made_once_in_a_process_is_not_watched_and_what_follows_is() -> None:
    """On a busy machine the first scheduler of a process had been reported as one that does not return."""
    with watchdog(0.1, is_busy=True):
        with unwatched():
            _compute(0.15)
        _compute(0.01)
    with unwatched():
        pass
    with pytest.raises(Overdue), watchdog(0.1, is_busy=True):
        _compute(5.0)


@pytest.mark.parametrize("wait", [time.sleep, _compute])
def test_what_computes_or_waits_forever_is_stopped(wait: object) -> None:
    assert callable(wait)
    with pytest.raises(Overdue), watchdog(0.05, is_busy=True):
        wait(5.0)


def test_what_catches_every_exception_is_stopped_all_the_same() -> None:
    def loop() -> None:
        while True:
            with contextlib.suppress(Exception):
                _compute(5.0)

    with pytest.raises(Overdue), watchdog(0.05, is_busy=True):
        loop()


def test_the_place_that_is_owner_is_looked_for() -> None:
    """A loop over what another one yields forever is in either of both when it is looked at."""
    looks = []

    def is_owner(frame: FrameType | None) -> bool:
        looks.append(frame)
        return len(looks) > 3

    with pytest.raises(Overdue, match=r"^in _compute$"), watchdog(0.05, "in {name}", is_busy=True, is_owner=is_owner):
        _compute(5.0)
    assert len(looks) == 4


def test_a_timer_that_ran_before_goes_on_afterwards() -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 3000.0)
        with watchdog(60.0):
            pass
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 1000.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_time_outside_of_the_watch_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1.0)
    monkeypatch.setattr("scripted.script.watchdog.time.process_time", lambda: clock.now)
    before = _watched_s()
    with unwatched():
        clock.now += 5.0
    assert _watched_s() == pytest.approx(before)
    clock.now += 2.0
    assert _watched_s() == pytest.approx(before + 2.0)
