"""Placement by the engines' reports of their caches: reported, expected and outdated prefixes."""

from __future__ import annotations

import random

import pytest

from engine.core.memory.node import page_keys
from engine.core.messages import CacheCleared, CacheEvent, PagesRemoved, PagesStored
from engine.core.routing.cache_index import Batch, FollowedCache
from engine.core.routing.placement import Placement, Prompt, Refused, ReplicaLoad, Rules, Ticket

SIZE = 4
IDS = tuple(range(1, 18))


def stored(ids: tuple[int, ...] = IDS, version: int = 0, lora: str = "") -> PagesStored:
    keys = tuple(page_keys(ids, SIZE, (version, 0)))
    return PagesStored(parent=None, keys=keys, tokens=ids, kv_key=(version, 0), lora_name=lora)


class Engines:
    """A placement over engines that the test plays; each keeps its batches, to send them again."""

    def __init__(self, *names: str, rules: Rules | None = None) -> None:
        self.placement = Placement(rules or Rules(), index_chunks=64)
        self.caches = {name: FollowedCache(SIZE) for name in names}
        self.told: dict[str, list[Batch]] = {name: [] for name in names}
        self.now = 0.0
        for name, cache in self.caches.items():
            self.placement.join(name, 100, cache)
            self.answer(name)

    def tell(self, name: str, *events: CacheEvent, arrives: bool = True) -> None:
        self.now += 1
        self.told[name].append(Batch(len(self.told[name]), self.now, events))
        if arrives:
            self.caches[name].live(self.told[name][-1])

    def answer(self, name: str) -> None:
        for _ in range(3):
            first = self.caches[name].wanted
            if self.caches[name].answered(first, self.told[name][first:]):
                return
        raise AssertionError(f"three answers of {name} did not make its mirror right")

    def restart(self, name: str) -> None:
        """Restart an engine as a new process; its requests have ended."""
        self.told[name].clear()
        self.placement.lost(name)
        self.placement.report(name, ReplicaLoad())

    def place(self, ids: tuple[int, ...] = IDS, **more: str) -> Ticket:
        ticket = self.placement.place(Prompt.of_ids(ids, SIZE, **more))  # type: ignore[arg-type]
        assert isinstance(ticket, Ticket), ticket
        return ticket

    def visit(self, ids: tuple[int, ...] = IDS, **more: str) -> tuple[str, int]:
        """Where a request would go, and how many pages it would find there; it ends at once."""
        ticket = self.place(ids, **more)
        self.placement.ended(ticket)
        return ticket.replica, ticket.held_chunks


def test_the_engine_that_tells_the_longest_prefix_is_taken() -> None:
    engines = Engines("a", "b", "c")
    engines.tell("b", stored(IDS[:8]))
    assert engines.visit() == ("b", 2)
    engines.tell("c", stored())
    assert engines.visit() == ("c", 4)
    engines.tell("c", PagesRemoved(keys=stored().keys[1:]))
    assert engines.visit() == ("b", 2)
    engines.tell("b", CacheCleared())
    assert engines.visit() == ("c", 1)


def test_pages_behind_a_gap_are_not_counted_on() -> None:
    engines = Engines("a", "b")
    engines.tell("b", stored())
    engines.tell("b", CacheCleared(), arrives=False)
    engines.tell("b", stored(IDS[:4]))
    assert engines.visit()[1] == 0, "a mirror behind a gap is used"
    engines.answer("b")
    assert engines.visit() == ("b", 1)


@pytest.mark.parametrize("before", [1, 2, 3])
def test_pages_of_an_earlier_life_are_not_counted_on(before: int) -> None:
    """Whether its numbers are lower, equal or higher than those of the life before."""
    engines = Engines("a", "b")
    for _ in range(before):
        engines.tell("b", stored())
    engines.restart("b")
    assert engines.visit()[1] == 0, "a mirror of an earlier life is used"
    for _ in range(2):
        engines.tell("b", stored((7,) * 8))
    assert engines.visit()[1] == 0, "a mirror of an earlier life is used"
    engines.answer("b")
    assert engines.visit()[1] == 0, "a mirror of an earlier life is used"
    assert engines.visit((7,) * 8) == ("b", 2)


def test_a_prompt_on_its_way_draws_those_that_begin_alike() -> None:
    engines = Engines("a", "b")
    first = engines.place()
    again = engines.place((*IDS, 99, 98, 97))
    assert (again.replica, again.held_chunks) == (first.replica, 4)
    for ticket in (first, again):
        engines.placement.ended(ticket)
    assert engines.visit()[1] == 0, "a request that ended without a word of its pages is counted on"


def test_what_ended_weighs_nothing() -> None:
    engines = Engines("a", "b")
    tickets = [engines.place() for _ in range(5)]
    fleet = engines.placement.fleet
    assert fleet.total_weight == 5
    for ticket in tickets:
        engines.placement.ended(ticket)
    assert fleet.total_weight == 0
    assert not any(followed.flying for followed in engines.placement._followed.values())


def test_a_lost_engine_takes_nothing_until_its_next_report() -> None:
    engines = Engines("a", "b")
    engines.tell("a", stored())
    engines.placement.lost("a")
    assert {engines.visit()[0] for _ in range(3)} == {"b"}
    engines.placement.lost("b")
    assert engines.placement.place(Prompt.of_ids(IDS, SIZE)) is Refused.NONE
    engines.placement.report("a", ReplicaLoad())
    engines.answer("a")
    assert engines.visit() == ("a", 4)
    engines.placement.report("a", ReplicaLoad(), accepting=False)
    assert engines.placement.place(Prompt.of_ids(IDS, SIZE)) is Refused.NONE


def test_loras_and_salts_share_nothing_and_each_engine_numbers_its_own() -> None:
    engines = Engines("a", "b")
    engines.tell("a", stored(version=1, lora="other"), stored(version=2, lora="x"))
    engines.tell("b", stored(IDS[:8], version=1, lora="x"))
    assert engines.visit(lora="x") == ("a", 4)
    assert engines.visit()[1] == 0
    engines.tell("a", CacheCleared())
    assert engines.visit(lora="x") == ("b", 2)
    salted = engines.placement.place(Prompt.of_ids(IDS, SIZE, salt=7))
    assert isinstance(salted, Ticket)
    assert salted.held_chunks == 0


def test_a_prefix_on_a_loaded_engine_is_computed_elsewhere() -> None:
    engines = Engines("a", "b", rules=Rules(balance_slack=2))
    engines.tell("a", stored())
    taken = [engines.place().replica for _ in range(8)]
    assert taken[:3] == ["a", "a", "a"]
    assert "b" in taken


def test_without_prefixes_engines_take_turns() -> None:
    engines = Engines("a", "b", "c", rules=Rules(by_prefix=False))
    engines.tell("a", stored())
    assert [engines.place().replica for _ in range(4)] == ["a", "b", "c", "a"]
    engines.placement.lost("b")
    assert [engines.place().replica for _ in range(3)] == ["c", "a", "c"]


def test_engines_that_tell_and_engines_that_do_not_are_one_fleet() -> None:
    engines = Engines("a")
    engines.placement.join("quiet", 100)
    engines.placement.index.add("quiet", Prompt.of_ids(IDS, SIZE).chain)
    assert engines.visit() == ("quiet", 4)
    engines.tell("a", stored((*IDS, 18, 19, 20)))
    assert engines.visit((*IDS, 18, 19, 20)) == ("a", 5)


def test_a_prompt_whose_ids_are_not_known_goes_by_what_was_sent() -> None:
    engines, prompt = Engines("a", "b"), Prompt(chain=(1, 2), tokens=8, tokens_a_chunk=4)
    first = engines.placement.place(prompt)
    again = engines.placement.place(prompt)
    assert isinstance(first, Ticket)
    assert isinstance(again, Ticket)
    assert (again.replica, again.held_chunks) == (first.replica, 2)


def test_a_choice_of_ten_thousand_is_the_longest_prefix_that_is_light_enough() -> None:
    """The rule restated over all engines, with prompts, evictions, gaps, restarts, deaths and ends by chance."""
    rng = random.Random(2)
    names = ("a", "b", "c")
    engines = Engines(*names, rules=Rules(balance_slack=0))
    fleet = engines.placement.fleet
    open_ones: list[Ticket] = []
    prompts = [tuple(rng.randrange(3) for _ in range(SIZE * 3)) for _ in range(100)]
    seen = {"held": 0, "told": 0, "heavy": 0, "none": 0}
    for _ in range(10_000):
        name, ids, kind = rng.choice(names), rng.choice(prompts), rng.random()
        if kind < 0.2:
            engines.tell(name, stored(ids), arrives=rng.random() > 0.05)
        elif kind < 0.3:
            engines.tell(name, PagesRemoved(keys=stored(ids).keys[1:]), arrives=rng.random() > 0.05)
        elif kind < 0.4:
            engines.answer(name)
        elif kind < 0.42:
            engines.restart(name)
        elif kind < 0.45:
            load = ReplicaLoad(running=rng.choice((0, 0, 0, 30)))
            engines.placement.report(name, load, accepting=rng.random() > 0.2)
        elif kind < 0.7 and open_ones:
            engines.placement.ended(open_ones.pop(rng.randrange(len(open_ones))))
        else:
            prompt = Prompt.of_ids(ids, SIZE)
            weights = {one: fleet.weight(one) for one in names if fleet.can_take(one)}
            held = {one: engines.placement._held(engines.placement._followed[one], prompt) for one in weights}
            ticket = engines.placement.place(prompt)
            if isinstance(ticket, Refused):
                assert not weights
                seen["none"] += 1
                continue
            open_ones.append(ticket)
            mean = sum(weights.values()) / len(weights)
            light = [one for one in weights if weights[one] <= 1.25 * mean]
            best = max(held[one] for one in light)
            assert ticket.held_chunks == best
            seen["heavy"] += best < max(held.values())
            if ticket.held_chunks:
                assert held[ticket.replica] == best
                seen["held"] += 1
                seen["told"] += engines.caches[ticket.replica].cached_pages(ids) == best
            else:
                assert weights[ticket.replica] == min(weights.values())
    for ticket in open_ones:
        engines.placement.ended(ticket)
    assert not any(followed.flying for followed in engines.placement._followed.values())
    assert min(seen.values()) > 20, seen
