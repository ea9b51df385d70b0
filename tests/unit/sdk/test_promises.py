"""Promises of every scheduler: each is broken by a machine that breaks no other, and kept by the healthy one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from scripted.core.adapters import adapter_named
from scripted.core.common_actions import ReleaseResults
from scripted.core.promises import CachedPrefix
from scripted.core.promises.cached_prefixes import check_prefixes
from scripted.core.promises.waste import EmptySteps, Preemptions
from scripted.core.run import Run
from scripted.core.schedule import Schedule
from scripted.core.violation import Violation

EXAMPLE = Path("examples/your_scheduler")
HEALTHY = str(EXAMPLE / "fixed.py")
ONE = "default; 1 start a prompt=20 new=8"
LONG = "default; 1 start a prompt=5 new=30"
TWO = "default; 1 start a prompt=20 new=8; 2 start b prompt=9 seed=1 new=4"
TURNS = "default; 1 start a prompt=5 new=3; 12 start b after=a prompt=2"


def _example() -> Any:
    adapter_named(HEALTHY)
    return sys.modules["fixed"]


def _failure(machine: Callable[..., Any], line: str) -> str | None:
    """Run a schedule on the example's scheduler in this machine. Returns the text of the violation."""
    adapter = _example().adapter_of("promised", machine)
    schedule = Schedule.parse(line, of=HEALTHY)
    run = Run(schedule, parts=adapter.new_parts(schedule.config, record=False))
    try:
        adapter.drive(run)
    except Violation as exc:
        return str(exc)
    return None


def _only(monkeypatch: pytest.MonkeyPatch, promise: str, machine: Callable[..., Any], line: str) -> str:
    """Return the violation of a promise, which is the only one that this machine breaks."""
    with monkeypatch.context() as patched:
        patched.setattr(promise, lambda *_, **__: None)
        assert _failure(machine, line) is None, "another promise is broken as well"
    failure = _failure(machine, line)
    assert failure is not None, "the promise is kept"
    return failure


def _preempting(times: int, *, only_for_another: bool) -> type:
    """Make a machine whose scheduler takes the blocks of a request this often, for nobody or for one that waits."""
    fixed = _example()

    class Scheduler(fixed.FixedScheduler):  # type: ignore[misc, name-defined]
        left = times

        def schedule(self) -> Any:
            victims = [one for one in self.running if not one.in_flight and self.left] if self._is_wanted else []
            for victim in victims[:1]:
                self.left -= 1
                self.running.remove(victim)
                self._give_back(victim)
                self.waiting.append(victim)
                # Nothing of its work is found again.
                self.block_of.clear()
                self.prefix_of.clear()
            batch = super().schedule()
            self.preempted = [*[victim.id for victim in victims[:1]], *self.preempted]
            return batch

        @property
        def _is_wanted(self) -> bool:
            return bool(self.waiting) or not only_for_another

    class Machine(fixed.FixedMachine):  # type: ignore[misc, name-defined]
        depth = 1

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.scheduler = Scheduler(config.blocks, config.block_size, config.batch_tokens, config.batch_requests)

    return Machine


def _healthy() -> type:
    fixed = _example().FixedMachine

    class Machine(fixed):  # type: ignore[misc, valid-type]
        """The example's machine, which can be asked all that the promises ask."""

        def open_rids(self) -> Any:
            return self.scheduler.requests.keys()

        def queries(self) -> dict[str, Callable[[], object]]:
            waiting = [*self.scheduler.waiting]
            return {"hits": lambda: [self.scheduler._cached(request) for request in waiting]}

        def cached_prefixes(self) -> Iterator[CachedPrefix]:
            blocks, size = self.scheduler.block_of, self.scheduler.block_size
            for prefix in blocks:
                path = [blocks.get(prefix[:end]) for end in range(size, len(prefix) + 1, size)]
                if None not in path:
                    yield CachedPrefix(prefix, tuple(path))

    return Machine


@pytest.mark.parametrize("line", [ONE, TWO, TURNS])
def test_a_healthy_scheduler_keeps_them(line: str) -> None:
    assert _failure(_healthy(), line) is None


def test_a_request_that_is_dropped_is_named_at_once() -> None:
    """At the end it would count as one that waits forever, without the step that lost it."""

    class Drops(_healthy()):  # type: ignore[misc]
        """The end of one request ends the one behind it too, silently."""

        def step(self, events: Any, now: float) -> Any:
            before = len(self.scheduler.requests)
            stepped = super().step(events, now)
            if len(self.scheduler.requests) < before and "b" in self.scheduler.requests:
                self.scheduler._end(self.scheduler.requests["b"])
            return stepped

    line = "default; 1 start a prompt=5 new=1; 1 start b prompt=9 seed=1 new=9"
    assert _failure(Drops, line) == "the scheduler has dropped b, and no reply told the client of an end"


def test_a_query_that_moves_a_cursor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counts(_healthy()):  # type: ignore[misc]
        """Each query adds the store's tokens for a request to a cursor."""

        cursor = 0

        def queries(self) -> dict[str, Callable[[], object]]:
            def stored() -> int:
                self.cursor += 4
                return self.cursor

            return {"stored": stored}

    failure = _only(monkeypatch, "scripted.core.run.check_queries", Counts, ONE)
    assert failure == "the query stored changed something: it answered 4, and then 8"


def test_the_last_output_in_the_cache_is_found_without_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing continues the request, so nothing reads the block whose last slot was never computed."""

    class Remembers(_healthy()):  # type: ignore[misc]
        def step(self, events: Any, now: float) -> Any:
            scheduler = self.scheduler
            running = [(request, list(request.blocks)) for request in scheduler.running]
            stepped = super().step(events, now)
            for request, blocks in running:
                prefix = tuple(request.tokens)
                if request.ended and len(prefix) == len(blocks) * scheduler.block_size:
                    scheduler.block_of[prefix], scheduler.prefix_of[blocks[-1]] = blocks[-1], prefix
            return stepped

    line = "default; 1 start a prompt=5 new=3"
    failure = _only(monkeypatch, "scripted.core.run.check_prefixes", Remembers, line)
    assert "in a prefix of 8 tokens" in failure
    assert "does not hold their KV" in failure


def test_steps_that_do_nothing_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Looks(_healthy()):  # type: ignore[misc]
        """Reads its queues thirty times before each batch."""

        looks = 0

        def step(self, events: Any, now: float) -> Any:
            if self.looks < 30 and not self.is_idle:
                self.looks += 1
                with monkeypatch.context() as patched:
                    patched.setattr(self.scheduler, "schedule", list)
                    return replace(super().step(events, now), again=True)
            self.looks = 0
            return super().step(events, now)

    line = "default; 1 start a prompt=5 new=16"
    failure = _only(monkeypatch, "scripted.core.promises.waste.EmptySteps.count", Looks, line)
    assert "did nothing and asked for another step" in failure


def test_a_preemption_for_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _preempting(12, only_for_another=False)
    line = "batch_tokens=4; 1 start a prompt=11 new=2"
    failure = _only(monkeypatch, "scripted.core.promises.waste.Preemptions.begin", machine, line)
    assert failure.startswith("a lost its blocks 7 times in a row for nothing")


def test_requests_that_take_blocks_from_one_another_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each preemption lets another request begin, but none gets further."""
    machine = _preempting(360, only_for_another=True)
    line = "batch_requests=1 batch_tokens=4; 1 start a prompt=11 new=3; 1 start b prompt=11 seed=1 new=3"
    failure = _only(monkeypatch, "scripted.core.promises.liveness.Liveness.check", machine, line)
    assert failure.startswith("nothing has happened from outside for")


def _losing(gain: Callable[[Preemptions], None]) -> str:
    """Return the complaint about a request that lost its blocks once and began again, after this happened."""
    preemptions = Preemptions(4, 0)
    preemptions.begin("a")
    preemptions.lose("a")
    gain(preemptions)
    preemptions.begin("a")
    return preemptions.wasted


@pytest.mark.parametrize(
    "gain",
    [lambda one: one.begin("b"), lambda one: one.end("b"), lambda one: one.compute(2, 3)],
    ids=["a begin", "an end", "a block"],
)
def test_what_another_request_gains_excuses_a_loss(gain: Callable[[Preemptions], None]) -> None:
    assert _losing(gain) == ""


@pytest.mark.parametrize("gain", [lambda _: None, lambda one: one.compute(1, 3)], ids=["nothing", "a block's rest"])
def test_what_needs_no_block_excuses_none(gain: Callable[[Preemptions], None]) -> None:
    assert _losing(gain).startswith("a lost its blocks 1 times in a row for nothing")


def test_a_loss_under_a_hold_is_no_waste(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Schedule.parse(ONE, of=HEALTHY)
    run = Run(schedule, parts=adapter_named(HEALTHY).new_parts(schedule.config, record=False))
    run.oracle.account.preemptions.wasted = "a lost its blocks"
    with monkeypatch.context() as patched:
        patched.setattr(Run, "obstacle", ReleaseResults())
        run._check_waste()
    run.oracle.account.preemptions.wasted = "a lost its blocks"
    with pytest.raises(Violation, match="a lost its blocks"):
        run._check_waste()


def test_a_request_that_an_ended_pressure_lets_go_on_lost_its_blocks_for_something() -> None:
    """It had lost them twice: nobody else went on, and then the run ended the pressure, which was in its way."""
    line = "page_size=1 max_total_tokens=12; 1 start a prompt=2 new=1; 1 start b prompt=1; 1 start c prompt=1 new=12"
    schedule = Schedule.parse(f"{line}; 4 pressure unlocked=0")
    run = Run(schedule, parts=adapter_named("lockstep").new_parts(schedule.config, record=False))
    adapter_named("lockstep").drive(run)
    assert ("relieve", 15) in [(placed.action.kind, placed.step) for placed in run.implied]


def test_losses_before_an_action_from_outside_do_not_count_after_it() -> None:
    """A save was held for 200 losses; the request lost its blocks once more before the released save arrived."""
    preemptions = Preemptions(4, 1)
    for is_first in (True, False):
        if not is_first:
            preemptions.disturb()
        preemptions.begin("a")
        preemptions.lose("a")
        preemptions.begin("a")
        assert preemptions.wasted == ""
    preemptions.lose("a")
    preemptions.begin("a")
    assert preemptions.wasted.startswith("a lost its blocks 2 times in a row for nothing")


def test_launches_allow_further_empty_steps() -> None:
    empty = EmptySteps()
    empty.launched = 10
    for _ in range(256 + 8 * 10):
        empty.count()
    with pytest.raises(Violation, match="of at most 336 beside 10 launches"):
        empty.count()


def test_a_wrong_block_may_be_the_first_of_the_pool() -> None:
    machine = SimpleNamespace(cached_prefixes=lambda: [CachedPrefix((1, 2), (0,))])
    with pytest.raises(Violation, match="the prefix cache has block 0"):
        check_prefixes(machine, SimpleNamespace(wrong_block=lambda _: 0))
