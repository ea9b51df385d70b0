"""The audit finds each way in which the books could stop balancing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace
from simulated_engine import SimulatedEngine, generate, prompt

from engine.core.audit import audit
from engine.core.errors import IntegrityError
from engine.core.memory import KVMemory, PagePool, RadixTree
from engine.core.messages import Abort
from engine.core.scheduler import Books, Place, Scheduler
from engine.core.scheduler.time_limits import TimeLimits

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


def test_a_deadline_that_outlives_its_request_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimeLimits, "end", lambda limits, request: None)
    engine = SimulatedEngine()
    engine.scheduler.step((replace(generate("r", prompt(5), 1), timeout_s=9.0),), 0.0)
    engine.scheduler.step((Abort(rid="r"),), 0.0)
    with pytest.raises(IntegrityError, match="has a time limit, but has ended"):
        audit(engine.scheduler)


def test_a_started_request_that_must_start_in_time_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TimeLimits, "start", lambda limits, request: None)
    engine = SimulatedEngine()
    engine.scheduler.step((replace(generate("r", prompt(5), 1), waiting_timeout_s=9.0),), 0.0)
    with pytest.raises(IntegrityError, match="has started, but still has a limit for its start"):
        audit(engine.scheduler)


@pytest.mark.parametrize(
    "break_it", [forget_pages, forget_unlock, forget_row, forget_release, forget_to_take_out, lock_twice]
)
def test_broken_release_is_found_in_the_step_that_shows_it(break_it: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimulatedEngine(page_size=4)
    engine.step(generate("r", prompt(22), 4))
    for _ in range(3):
        engine.step(completions=1)
    break_it(engine.scheduler, monkeypatch)
    completion = engine.pipeline.next_completion(0)
    engine.scheduler.step((completion,), 0.0)
    with pytest.raises(IntegrityError):
        audit(engine.scheduler)


def test_page_in_two_nodes_is_found_and_the_second_node_is_named() -> None:
    engine = SimulatedEngine(page_size=4)
    engine.run(generate("a", prompt(9), 1), generate("b", prompt(9, 1), 1))
    first, second = engine.scheduler.memory.tree.nodes()
    second.pages[0] = first.pages[0]
    with pytest.raises(IntegrityError, match=f"node {second.id} has pages .* another node has some of these"):
        audit(engine.scheduler)


def test_page_of_a_node_that_is_not_cached_is_found() -> None:
    engine = SimulatedEngine(page_size=4)
    engine.run(generate("a", prompt(9), 1))
    memory = engine.scheduler.memory
    (node,) = memory.tree.nodes()
    memory.pages.evict(node.pages[:1])
    memory.pages.cache(memory.pages.allocate(2)[1:])
    with pytest.raises(IntegrityError, match=f"node {node.id} has pages .* not CACHED"):
        audit(engine.scheduler)


def test_row_of_two_leases_is_found() -> None:
    engine = SimulatedEngine()
    engine.step(generate("a", prompt(9)), generate("b", prompt(9, 1)))
    leases = [request.lease for request in engine.scheduler.books.live()]
    leases[1].row = leases[0].row
    with pytest.raises(IntegrityError, match=r"leases own rows \[0, 0\], but 2 rows are taken"):
        audit(engine.scheduler)


def test_of_many_faults_the_first_by_arrival_is_named() -> None:
    """D10: a replay names the same fault, independently of object addresses."""
    engine = SimulatedEngine(page_size=4, max_running_requests=2)
    engine.step(generate("r", prompt(5)))
    rids = [f"w{number}" for number in range(30)]
    engine.scheduler.step([generate(rid, prompt(5, 1)) for rid in rids], 0.0)
    books = engine.scheduler.books
    for rid in reversed(rids):
        books.requests[rid].in_flight = 7
    with pytest.raises(IntegrityError, match=f"'{books.waiting[0].rid}'"):
        audit(engine.scheduler)
