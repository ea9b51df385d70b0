"""The walk over a scheduler: every container is found by its path, in any holder; only growth is a violation."""

from __future__ import annotations

from collections import deque

import pytest
from scripted_lockstep.oracle.growth import check_growth, check_stages

from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.scheduler import Scheduler
from scripted.core.sizes import sizes_of
from scripted.core.violation import Violation

LIMITS = Limits.of(EngineConfig(), EMBEDDED_FACTS)


class Slotted:
    __slots__ = ("items", "unset")

    def __init__(self) -> None:
        self.items = [1, 2]


class Holder(Slotted):
    """Slots of a base, a dict of its own, and what can hold a container without being one."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = ({1}, deque([1, 2, 3]))
        self.by_name = {"a": [1], "b": [2, 3]}
        self.itself = self
        self._replies = [1]
        self.text = "no container"


def test_every_container_has_its_path() -> None:
    """All items of a container share a path; a cycle ends; containers bounded by construction are left out."""
    assert sizes_of(root=Holder()) == {"root.items": 2, "root.pair[]": 4, "root.by_name": 2, "root.by_name[]": 3}


def test_a_container_that_is_reached_twice_is_counted_once() -> None:
    shared = [1, 2, 3]
    assert sizes_of(one=shared, other=shared) == {"one": 3}


def test_a_new_scheduler_has_not_grown() -> None:
    check_growth(Scheduler(LIMITS))


@pytest.mark.parametrize("registry", [{"rid": 1}, [1], {1}, deque([1]), bytearray(1)])
def test_a_registry_that_no_class_declares_is_named(registry: object) -> None:
    """D11: the mutant a-registry-grows, for any type of registry."""
    scheduler = Scheduler(LIMITS)
    scheduler.books.seen = registry
    with pytest.raises(Violation, match=r"scheduler\.books\.seen has 1 entries, in a new engine 0"):
        check_growth(scheduler)


def test_a_registry_that_shrank_has_not_grown() -> None:
    scheduler = Scheduler(LIMITS)
    grown = sizes_of(scheduler=scheduler)
    path = max(grown, key=lambda path: grown[path])
    assert grown[path] > 0
    scheduler.books.seen = {}
    check_growth(scheduler)


def test_stages_may_shrink_and_may_not_grow() -> None:
    check_stages({"stage 0.specs": 2}, {"stage 0.specs": 1})
    with pytest.raises(Violation, match=r"stage 0\.specs has 3 entries, before the first script 2; stage 1\.seen"):
        check_stages({"stage 0.specs": 2}, {"stage 0.specs": 3, "stage 1.seen": 1})
