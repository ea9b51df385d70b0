"""The routing policy: what it prefers, what it never does, and the bound on imbalance, over generated histories."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core.routing.placement import (
    Fleet,
    Placement,
    PrefixIndex,
    Prompt,
    Refused,
    ReplicaLoad,
    Rules,
    Ticket,
    choose,
    chunk_hashes,
)

INDEX_CHUNKS = 12
CAPACITY = 6
RULES = Rules(balance_percent=125, balance_slack=2, tokens_a_request=64, holders_seen=3)
# Conversations: all chains with the same first number share that prefix.
CHAINS = st.builds(
    lambda root, own, length: tuple(
        [root * 1000, root * 1000 + 1] + [root * 1000 + own * 10 + n for n in range(2, length)]
    )[:length],
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(0, 6),
)


def router_of(*names: str, rules: Rules = RULES, capacity: int = 100) -> Placement:
    router = Placement(rules, index_chunks=64)
    for name in names:
        router.join(name, capacity)
    return router


def prompt_of(chain: tuple[int, ...] = ()) -> Prompt:
    return Prompt(chain=chain, tokens=16 * len(chain), tokens_a_chunk=16)


def sent(router: Placement, chain: tuple[int, ...], **options: Any) -> Ticket:
    ticket = router.place(prompt_of(chain), **options)
    assert isinstance(ticket, Ticket), ticket
    return ticket


def test_the_longest_prefix_decides() -> None:
    router = router_of("a", "b", "c")
    first = sent(router, (1, 2, 3))
    other = sent(router, (1, 9))
    assert other.replica == first.replica
    assert sent(router, (7, 8)).replica != first.replica
    again = sent(router, (1, 2, 3, 4))
    assert (again.replica, again.held_chunks) == (first.replica, 3)


def test_a_request_without_a_prefix_goes_to_the_one_that_had_none_for_longest() -> None:
    router = router_of("a", "b", "c")
    tickets = [sent(router, ()) for _ in range(3)]
    assert [ticket.replica for ticket in tickets] == ["a", "b", "c"]
    for ticket in (tickets[1], tickets[0], tickets[2]):
        router.ended(ticket)
    assert [sent(router, ()).replica for _ in range(3)] == ["a", "b", "c"]


def test_a_hot_prefix_spreads_when_its_holder_is_too_heavy() -> None:
    router = router_of("a", "b", "c", "d")
    replicas = [sent(router, (1, 2)).replica for _ in range(40)]
    # Two requests more than the mean are allowed for a prefix, and a third one goes to a replica that is idle.
    assert replicas[:4] == ["a", "a", "a", "b"]
    assert set(replicas) == {"a", "b", "c", "d"}
    assert max(map(replicas.count, "abcd")) <= 1.25 * 10 + 1


def test_of_equal_holders_the_lighter_one_is_taken() -> None:
    router = router_of("a", "b")
    for name in ("a", "b"):
        router.index.add(name, (1, 2))
    router.report("a", ReplicaLoad(running=1))
    assert sent(router, (1, 2, 3)).replica == "b"
    router.report("a", ReplicaLoad(running=1, free_pages=9))
    router.report("b", ReplicaLoad(running=1, free_pages=10))
    assert sent(router, (1, 2)).replica == "b"


def test_pending_prompts_weigh_as_well_as_requests() -> None:
    router = router_of("a", "b")
    router.report("a", ReplicaLoad(running=1, pending_prefill_tokens=640))
    router.report("b", ReplicaLoad(running=4))
    assert sent(router, ()).replica == "b"


def test_all_full_and_none_accepting_are_told_apart() -> None:
    router = router_of("a", "b", capacity=1)
    tickets = [sent(router, ()) for _ in range(2)]
    assert router.place(prompt_of()) is Refused.FULL
    router.ended(tickets[0])
    assert sent(router, ()).replica == "a"
    for name in ("a", "b"):
        router.report(name, ReplicaLoad(), accepting=False)
    assert router.place(prompt_of()) is Refused.NONE


def test_what_was_tried_is_left_out() -> None:
    router = router_of("a", "b")
    first = sent(router, (1, 2))
    assert sent(router, (1, 2), left_out=(first.replica,)).replica != first.replica
    assert router.place(prompt_of((1, 2)), ("a", "b")) is Refused.NONE


def test_a_replica_that_came_back_has_nothing() -> None:
    router = router_of("a", "b")
    ticket = sent(router, (1, 2))
    router.leave("a")
    router.join("a", 100)
    router.ended(ticket)
    assert router.fleet.weight("a") == 0
    assert router.index.size("a") == 0


def test_a_flush_is_forgotten_with_its_prefixes() -> None:
    router = router_of("a", "b")
    assert sent(router, (1, 2)).replica == "a"
    router.report("a", ReplicaLoad(running=1), is_flushed=True)
    assert sent(router, (1, 2)).replica == "b"


def test_a_report_counts_what_others_sent_and_not_twice_what_this_router_sent() -> None:
    router = router_of("a")
    tickets = [sent(router, ()) for _ in range(2)]
    router.report("a", ReplicaLoad(running=5))
    assert router.fleet.weight("a") == 5
    router.ended(tickets[0])
    assert router.fleet.weight("a") == 4
    # A report that is older than a request of ours does not hide it.
    sent(router, ())
    router.report("a", ReplicaLoad())
    assert router.fleet.weight("a") == 2


def test_a_wrong_number_is_refused_with_the_rule() -> None:
    with pytest.raises(ValueError, match="balance_percent must be at least 100, got 99"):
        Rules(balance_percent=99)
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        PrefixIndex(0)
    with pytest.raises(ValueError, match="join only once"):
        router_of("a", "a")


@given(st.binary(max_size=200), st.binary(max_size=200), st.integers(1, 40))
def test_equal_beginnings_have_equal_chains(left: bytes, right: bytes, size: int) -> None:
    common = 0
    while common < min(len(left), len(right)) and left[common] == right[common]:
        common += 1
    one, other = chunk_hashes(left, size), chunk_hashes(right, size)
    assert len(one) == len(left) // size
    assert one[: common // size] == other[: common // size]
    assert not set(one[common // size :]) & set(other[common // size :])
    assert not set(chunk_hashes(left, size, b"other model")) & set(one)


@settings(max_examples=60, stateful_step_count=40)
class Histories(RuleBasedStateMachine):
    """Replicas come, go, drain and are flushed; requests come and end. Checked with every choice."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Placement(RULES, index_chunks=INDEX_CHUNKS, seed=7)
        self.draining: set[str] = set()
        self.open: list[Ticket] = []
        self.joined = 0

    @initialize(count=st.integers(1, 5))
    def begin(self, count: int) -> None:
        for _ in range(count):
            self.join()

    @rule()
    def join(self) -> None:
        self.joined += 1
        self.router.join(f"r{self.joined}", CAPACITY)

    @precondition(lambda self: self.router.fleet.names)
    @rule(
        data=st.data(),
        accepting=st.booleans(),
        running=st.integers(0, 9),
        pending=st.integers(0, 300),
        flushed=st.booleans(),
    )
    def report(self, data: st.DataObject, accepting: bool, running: int, pending: int, flushed: bool) -> None:
        name = data.draw(st.sampled_from(self.router.fleet.names))
        load = ReplicaLoad(running=running, pending_prefill_tokens=pending)
        self.router.report(name, load, accepting=accepting, is_flushed=flushed)
        (self.draining.discard if accepting else self.draining.add)(name)
        if flushed:
            assert self.router.index.size(name) == 0

    @precondition(lambda self: self.router.fleet.names)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.router.fleet.names))
        self.router.leave(name)
        self.draining.discard(name)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.router.ended(self.open.pop(data.draw(st.integers(0, len(self.open) - 1))))

    @rule(data=st.data(), chain=CHAINS)
    def route(self, data: st.DataObject, chain: tuple[int, ...]) -> None:
        fleet, index = self.router.fleet, self.router.index
        left_out = data.draw(st.sets(st.sampled_from(fleet.names), max_size=2)) if fleet.names else set()
        before = copy.deepcopy((fleet, index))
        choice = choose(chain, fleet, index, RULES, left_out=left_out, seed=7)
        assert choose(chain, *before, RULES, left_out=left_out, seed=7) == choice
        takers = [name for name in fleet.names if name not in left_out and fleet.can_take(name)]
        if isinstance(choice, Refused):
            assert not takers
            accepting = set(fleet.names) - self.draining - left_out
            assert (choice is Refused.FULL) == bool(accepting)
            return
        replica, held_chunks = choice
        assert replica in takers
        assert replica not in self.draining
        self._check_bound(fleet, replica, held_chunks, takers)
        ticket = self.router.place(prompt_of(chain), left_out)
        assert isinstance(ticket, Ticket)
        assert (ticket.replica, ticket.held_chunks) == choice
        self.open.append(ticket)

    def _check_bound(self, fleet: Fleet, replica: str, held_chunks: int, takers: list[str]) -> None:
        """Not heavier than the bound, which is restated here; or the lightest of those that were left."""
        everyone = [fleet.weight(name) for name in fleet.names if fleet.can_take(name)]
        mean = sum(everyone) / len(everyone)
        weight = fleet.weight(replica)
        assert weight <= max(1.25 * mean, mean + 2) or weight == min(map(fleet.weight, takers))
        if not held_chunks:
            assert weight == min(map(fleet.weight, takers))

    @invariant()
    def sums_are_those_of_the_replicas(self) -> None:
        fleet = self.router.fleet
        takers = [name for name in fleet.names if fleet.can_take(name)]
        assert fleet.available == len(takers)
        assert fleet.total_weight == sum(map(fleet.weight, takers))
        assert not self.draining.intersection(takers)

    @invariant()
    def the_index_is_bounded_and_of_replicas_that_are_there(self) -> None:
        index, fleet = self.router.index, self.router.fleet
        assert all(index.size(name) <= INDEX_CHUNKS for name in fleet.names)
        assert set(index._holders) == {chunk for chunks in index._chunks.values() for chunk in chunks}


test_histories = Histories.TestCase
