"""The audits.

Each way in which the books could stop balancing is found, by the full one and by the one that follows changes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from simulated_engine import SimulatedEngine, generate, prompt

from engine.errors import IntegrityError
from engine.memory import KVMemory, PagePool, RadixTree
from engine.scheduler import Books, Place, Scheduler

Break = Callable[[Scheduler, pytest.MonkeyPatch], None]


def forget_pages(scheduler: Scheduler, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagePool, "release", lambda pool, pages: None)


def forget_unlock(scheduler: Scheduler, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixTree, "unlock", lambda tree, node: None)


def forget_row(scheduler: Scheduler, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(scheduler.memory.rows), "release", lambda rows, row: None)


def forget_release(scheduler: Scheduler, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVMemory, "release", lambda memory, lease: None)


def forget_to_take_out(scheduler: Scheduler, patch: pytest.MonkeyPatch) -> None:
    original = Books.take_out

    def take_out(books: Books, request: object) -> None:
        original(books, request)
        if request.place is Place.RUNNING:
            books.running[request.rid] = request

    patch.setattr(Books, "take_out", take_out)


def lock_twice(scheduler: Scheduler, patch: pytest.MonkeyPatch) -> None:
    original = RadixTree.unlock
    patch.setattr(RadixTree, "unlock", lambda tree, node: (original(tree, node), tree.lock(node)))


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize(
    "break_it", [forget_pages, forget_unlock, forget_row, forget_release, forget_to_take_out, lock_twice]
)
def test_broken_release_is_found_in_the_step_that_shows_it(
    break_it: Break, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SimulatedEngine(page_size=4)
    engine.step(generate("r", prompt(22), 4))
    for _ in range(3):
        engine.step(completions=1)
    break_it(engine.scheduler, monkeypatch)
    completion = engine.pipeline.next_completion(0)
    engine.scheduler.step((completion,), 0.0)
    with pytest.raises(IntegrityError):
        (engine.scheduler.audit if full else engine.scheduler.check_integrity)()


def test_cost_of_a_check_does_not_grow_with_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at the nodes that changed, not at the others."""
    engine = SimulatedEngine(page_size=4, max_total_tokens=4096)
    engine.run(*[generate(f"seed{number}", prompt(21, number), 4) for number in range(40)])
    looked: list[int] = []
    original = RadixTree.check_node
    monkeypatch.setattr(RadixTree, "check_node", lambda tree, node: (looked.append(node.id), original(tree, node)))
    scheduler = engine.scheduler
    scheduler.step((generate("r", prompt(9, 99)),), 0.0)
    scheduler.check_integrity()
    assert len(looked) <= 2
    looked.clear()
    scheduler.audit()
    assert len(looked) == scheduler.memory.tree.node_count >= 40


def test_check_after_a_long_silence_is_a_full_one() -> None:
    """Notes are bounded; when some were lost everything is looked at."""
    engine = SimulatedEngine(page_size=1, max_total_tokens=512)
    scheduler = engine.scheduler
    scheduler.check_integrity()
    for number in range(700):
        scheduler.step((generate(f"r{number}", prompt(9, number), 1),), 0.0)
        assert scheduler.last_microbatch is not None
        engine.pipeline.launch(scheduler.last_microbatch)
        scheduler.step((engine.pipeline.next_completion(0),), 0.0)
    scheduler.check_integrity()
    assert scheduler.is_fully_idle


def test_of_many_faults_the_first_that_changed_is_named() -> None:
    """D10: a replay names the same one, whatever the addresses of requests are."""
    engine = SimulatedEngine(page_size=4, max_running_requests=2)
    engine.step(generate("r", prompt(5)))
    engine.scheduler.check_integrity()
    rids = [f"w{number}" for number in range(30)]
    engine.scheduler.step([generate(rid, prompt(5, 1)) for rid in rids], 0.0)
    books = engine.scheduler.books
    for rid in reversed(rids):
        books.requests[rid].in_flight = 7
    first = next(request.rid for request in books.changed if request.in_flight == 7)
    with pytest.raises(IntegrityError, match=rf"'{first}'"):
        engine.scheduler.check_integrity()
