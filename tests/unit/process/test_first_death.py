"""Which of several deaths caused the others: by what the processes said, not by the order in which they were seen."""

from __future__ import annotations

import signal
from itertools import permutations

import pytest

from engine.process.control import ChildMessage, Dying, SupervisorMessage
from engine.process.watched import WatchedProcess, first_death


class Ended(WatchedProcess):
    """A process that was seen to end with a status, or one that lives, with what it said before."""

    def __init__(self, name: str, status: int | None, dying: Dying | None = None) -> None:
        super().__init__(name, pid=1)
        self.status, self.dying = status, dying

    def fileno(self) -> int:
        raise NotImplementedError

    def send(self, message: SupervisorMessage) -> None:
        raise NotImplementedError

    def listen(self) -> ChildMessage | None:
        raise NotImplementedError

    def look_for_stop(self) -> None:
        raise NotImplementedError

    def end(self, why: str) -> None:
        raise NotImplementedError

    def signal(self, number: signal.Signals) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def victim(name: str, of: str, cause: str = "it hangs") -> Ended:
    return Ended(name, 1, Dying(error="lost", traceback="", expected=True, victim_of=of, victim_cause=cause))


KILLED = Ended("stage-1", -9)
IN_ORDER = Ended("frontend", 0)
FAILED = Ended("stage-2", 1, Dying(error="E", traceback="Traceback: E", expected=False))


@pytest.mark.parametrize("ended", list(permutations([victim("scheduler", "stage-1"), IN_ORDER, KILLED])))
def test_the_cause_is_told_and_not_a_consequence_that_was_seen_first(ended: tuple[Ended, ...]) -> None:
    report = first_death(ended, [])
    assert (report.process, report.signal) == ("stage-1", 9)


def test_of_two_causes_the_first_is_told() -> None:
    assert first_death([FAILED, KILLED], []).process == "stage-2"
    assert first_death([KILLED, FAILED], []).process == "stage-1"
    assert first_death([FAILED], []).cause == "Traceback: E"


def test_a_process_that_hangs_is_told_by_its_victims() -> None:
    stuck = Ended("stage-1", None)
    report = first_death([victim("scheduler", "stage-1"), IN_ORDER], [Ended("stage-0", None), stuck])
    assert (report.process, report.cause) == ("stage-1", "it hangs")


def told(name: str, dying: Dying | None) -> Ended:
    """A process that has told its end, and lives on until its last replies have left."""
    return Ended(name, None, dying)


def test_a_victim_that_is_about_to_end_is_no_cause() -> None:
    """A06: a stage blames the scheduler that closed its connections because another stage hangs."""
    closed = victim("stage-3", "scheduler", "it closed its connection to the stages")
    scheduler, stuck = told("scheduler", victim("scheduler", "stage-2").dying), Ended("stage-2", None)
    report = first_death([closed], [Ended("stage-0", None), stuck, scheduler])
    assert (report.process, report.cause) == ("stage-2", "it hangs")


def test_a_cause_that_is_about_to_end_is_told_in_its_own_words() -> None:
    closed = victim("stage-3", "scheduler", "it closed its connection to the stages")
    report = first_death([closed], [told("scheduler", FAILED.dying)])
    assert (report.process, report.cause) == ("scheduler", "Traceback: E")


def test_a_process_of_a_victim_is_told_without_being_watched() -> None:
    report = first_death([IN_ORDER, victim("frontend", "reader", "it was killed")], [])
    assert (report.process, report.pid, report.cause) == ("reader", 0, "it was killed")
