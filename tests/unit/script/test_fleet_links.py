"""The links of a fleet: when a message arrives, what holds or loses it, and who learns of a cut and of a death."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from scripted import BadCall
from scripted.core.violation import Violation
from scripted.script.fleet import BaseFleet, Member


class Machine(Member):
    """Notes what it hears and learns."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.heard: list[object] = []
        self.unsent: list[object] = []
        self.met: list[str] = []
        self.parted: list[str] = []
        self.breaks = ""

    def step(self) -> None:
        if self.breaks:
            raise Violation(self.breaks)

    def receive(self, sender: str, message: object) -> None:
        self.heard.append(message)

    def on_unsent(self, receiver: str, message: object) -> None:
        self.unsent.append(message)

    def on_connected(self, other: str) -> None:
        self.met.append(other)

    def on_disconnected(self, other: str) -> None:
        self.parted.append(other)


class Fleet(BaseFleet[Machine]):
    def __init__(self) -> None:
        super().__init__([Machine("a"), Machine("b")])
        self.a, self.b = self.members

    def say(self, *messages: object) -> None:
        self.a.said += [("b", message) for message in messages]
        self.step()

    def heard(self, steps: int = 1) -> list[object]:
        """Return what b hears in the next steps."""
        before = len(self.b.heard)
        for _ in range(steps):
            self.step()
        return self.b.heard[before:]


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_a_message_arrives_in_the_next_step_and_in_order(fleet: Fleet) -> None:
    fleet.say("one", "two")
    assert fleet.b.heard == []
    assert fleet.is_moving
    assert fleet.heard() == ["one", "two"]
    assert not fleet.is_moving


def test_a_slow_link_delays(fleet: Fleet) -> None:
    fleet.slow("a", "b", 2)
    fleet.say("late")
    assert fleet.heard(2) == []
    assert fleet.heard() == ["late"]


def test_a_link_holds_until_it_is_released(fleet: Fleet) -> None:
    fleet.hold("a", "b")
    fleet.say("held")
    assert fleet.heard(5) == []
    assert fleet.held_links == (("a", "b"),)
    fleet.release("a", "b")
    assert fleet.heard() == ["held"]


def test_pages_can_be_held_alone(fleet: Fleet) -> None:
    pages = SimpleNamespace(is_bulk=True)
    fleet.hold_pages("a", "b")
    fleet.say(pages, "words")
    assert fleet.heard(3) == ["words"]
    fleet.release_all()
    assert fleet.heard() == [pages]


def test_a_cut_loses_what_is_on_its_way_and_both_learn_of_it(fleet: Fleet) -> None:
    fleet.say("lost")
    fleet.cut("a", "b")
    assert (fleet.a.parted, fleet.b.parted) == (["b"], ["a"])
    fleet.say("unsent")
    assert fleet.heard(3) == fleet.b.heard == []
    assert fleet.a.unsent == ["unsent"]
    before = len(fleet.a.met), len(fleet.b.met)
    fleet.heal("a", "b")
    assert (fleet.a.met[before[0] :], fleet.b.met[before[1] :]) == (["b"], ["a"])
    fleet.say("again")
    assert fleet.heard() == ["again"]


def test_a_death_loses_what_is_on_its_way_and_the_others_learn_of_it(fleet: Fleet) -> None:
    fleet.say("lost")
    fleet.kill("b")
    assert fleet.living == [fleet.a]
    assert (fleet.a.parted, fleet.b.parted) == (["b"], [])
    fleet.say("unsent")
    assert fleet.a.unsent == ["unsent"]
    with pytest.raises(BadCall, match="takes an engine that lives, and this one was killed before"):
        fleet.kill("b")
    fleet.replace(Machine("b"))
    assert fleet.engine("b").met == ["a"]
    fleet.step()
    assert fleet.engine("b").heard == []


def test_a_broken_promise_names_its_engine(fleet: Fleet) -> None:
    fleet.b.breaks = "a page is lost"
    with pytest.raises(Violation, match="engine b: a page is lost"):
        fleet.step()
