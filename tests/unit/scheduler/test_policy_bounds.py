"""The policies by themselves: each order, and the bound on being overtaken that goes with it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from simulated_engine import POLICIES, SimulatedEngine, generate, limits_of, prompt

from engine.core.memory import KVMemory
from engine.core.scheduler import Request, Scheduler
from engine.core.scheduler.admission import Admission
from engine.core.scheduler.policy import LPM_QUEUE_LIMIT_REQUESTS, OVERTAKEN_LIMIT_REQUESTS, policy_named


def queue(*priorities: int, overdue: Sequence[int] = ()) -> list[Request]:
    scheduler = Scheduler(limits_of())
    admission = Admission(scheduler, scheduler.features)
    requests = [
        admission.request_of(generate(f"r{number}", prompt(20, number), priority=priority), number)
        for number, priority in enumerate(priorities)
    ]
    for number in overdue:
        requests[number].overtaken = OVERTAKEN_LIMIT_REQUESTS
    return requests


def memory() -> KVMemory:
    return KVMemory(total_pages=64, page_size=4, rows=4, radix_cache=True)


def cache(into: KVMemory, ids: Sequence[int]) -> None:
    lease = into.admit("seed", ids, spare_pages=0)
    assert lease is not None
    assert into.extend(lease, len(ids))
    into.publish(lease, ids, counts=True)
    into.release(lease)


def order(name: str, requests: Sequence[Request], into: KVMemory | None = None) -> list[int]:
    return [request.arrival for request in policy_named(name).order(requests, into or memory())]


def test_orders() -> None:
    """Policies and limits hold at every size (B17)."""
    cached = memory()
    cache(cached, prompt(20, 2))
    requests = queue(0, 1, 0, 1)
    assert order("fcfs", requests) == [0, 1, 2, 3]
    assert order("lpm", requests, cached) == [2, 0, 1, 3]
    assert order("priority", requests) == [1, 3, 0, 2]


def test_overdue_requests_go_first_by_arrival() -> None:
    """Passing over and overtaking have bounds (B10)."""
    cached = memory()
    cache(cached, prompt(20, 3))
    assert order("lpm", queue(0, 0, 0, 0, overdue=[1, 2]), cached) == [1, 2, 3, 0]
    assert order("dfs-weight", queue(0, 0, 0, 0, overdue=[1, 2]), cached) == [1, 2, 3, 0]
    assert order("priority", queue(0, 0, 5, 9, overdue=[1]), cached) == [1, 3, 2, 0]


def test_a_long_queue_is_served_by_arrival() -> None:
    cached = memory()
    cache(cached, prompt(20, 3))
    long = queue(*[0] * (LPM_QUEUE_LIMIT_REQUESTS + 1))
    assert order("lpm", long, cached)[:4] == order("dfs-weight", long, cached)[:4] == [0, 1, 2, 3]


def test_a_walk_through_the_tree() -> None:
    """B17: the heavier branch, of equal ones the earlier request's, what goes deeper before what ends."""
    trunk, left, right = (1,) * 4, (2,) * 4, (3,) * 8
    cached = memory()
    cache(cached, trunk + left)
    cache(cached, trunk + right)
    prompts = [
        (9,) * 6,
        (*trunk, 9),
        (*trunk, *right, 9),
        (*trunk, *left, 8),
        (*trunk, *left, 9),
        (*trunk, *right[:4], 9),
    ]
    scheduler = Scheduler(limits_of())
    admission = Admission(scheduler, scheduler.features)
    requests = [admission.request_of(generate(f"r{at}", prompt), at) for at, prompt in enumerate(prompts)]
    assert order("dfs-weight", requests, cached) == [2, 5, 3, 4, 1, 0]
    assert order("dfs-weight", [*requests[:2], *requests[3:]], cached) == [3, 4, 5, 1, 0]
    assert order("dfs-weight", requests) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("name", "counted"), [("fcfs", [0, 1]), ("lpm", [0, 1]), ("dfs-weight", [0, 1]), ("priority", [0])]
)
def test_whom_a_start_counts_against(name: str, counted: list[int]) -> None:
    """B10: all that came before; under priority the one that has waited longest."""
    requests = queue(0, 0, 0, 0)
    started = requests.pop(2)
    assert [one.arrival for one in policy_named(name).overtaken_by(started, requests)] == counted
    assert list(policy_named(name).overtaken_by(requests[0], requests[1:])) == []


@pytest.mark.parametrize("name", POLICIES)
def test_a_request_that_does_not_fit_is_overtaken_no_more_often_than_its_bound(name: str) -> None:
    """B10: under every policy the others then wait for it, and a start resets the count."""
    engine = SimulatedEngine(
        page_size=4, max_total_tokens=64, max_running_requests=4, schedule_policy=name, chunked_prefill_size=64
    )
    engine.step(generate("runs", prompt(10), 30))
    engine.step(generate("large", prompt(55, 1), 2), completions=1)
    large = engine.scheduler.find_request("large")
    assert large is not None
    small = [generate(f"s{number}", prompt(3, number + 2), 3, priority=1) for number in range(40)]
    engine.step(*small, completions=1)
    most = 0
    while not large.is_finished:
        engine.step(completions=1)
        most = max(most, large.overtaken)
    started = list(dict.fromkeys(rid for microbatch in engine.microbatches for rid in microbatch.rids))
    assert started.index("large") - 1 == most == OVERTAKEN_LIMIT_REQUESTS
    assert large.overtaken == 0
    engine.drain()


def test_a_preempted_request_keeps_its_bound() -> None:
    """B06, B10: with preemption a request of low priority gets at least a token each time it has its turn."""
    engine = SimulatedEngine(schedule_policy="priority", priority_preemption=True, max_running_requests=1)
    engine.step(generate("low", prompt(20), 3))
    for number in range(4 * OVERTAKEN_LIMIT_REQUESTS):
        engine.step(generate(f"high{number}", prompt(20, number + 1), 1, priority=5), completions=1)
        if engine.life("low").ended:
            break
        engine.step(completions=1)
        engine.step(completions=1)
    assert engine.life("low").ended, "it starves"
    engine.drain()
