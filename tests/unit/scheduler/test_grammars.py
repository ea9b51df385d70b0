"""The grammars that the scheduler knows: the orders to the last stage to compile and to forget."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engine import SimulatedEngine, limits_of

from engine.core.checkpoint import CheckpointParts
from engine.core.messages import Grammar, GrammarKind, GrammarReady
from engine.core.plan import GrammarOrder, SamplingSpec
from engine.core.recording.checkpoint import checkpoint_of
from engine.core.scheduler.core import Core
from engine.core.scheduler.grammars import Grammars
from engine.core.scheduler.ports import StepShare
from engine.core.scheduler.request import Request

A, B, C = (Grammar(GrammarKind.REGEX, text) for text in "abc")


def request(rid: str = "r") -> Request:
    spec = SamplingSpec(seed=0)
    return Request(
        rid=rid, priority=0, arrival=1, spec=spec, stop_ids=frozenset(), limit_tokens=9, ids=[1], prompt_tokens=1
    )


def taken(grammars: Grammars, grammar: Grammar) -> Request:
    one = request()
    grammars.take(one, grammar)
    return one


def grammars_of(kept: int) -> Grammars:
    return Grammars(Core(limits_of(max_cached_grammars=kept)))


def orders(grammars: Grammars) -> tuple[GrammarOrder, ...]:
    """The orders since the last call, as a step reports them."""
    share: StepShare = {}
    grammars.report(share)
    return share.get("grammars", ())


@pytest.fixture
def grammars() -> Grammars:
    return grammars_of(1)


def test_two_requests_of_one_grammar_have_it_compiled_once() -> None:
    """A hit is a request that finds it compiled, not one that waits beside another."""
    grammars = grammars_of(1)
    counters = grammars._counters
    first, second = taken(grammars, A), taken(grammars, A)
    assert orders(grammars) == (GrammarOrder(1, A),)
    assert orders(grammars) == ()
    assert (first.spec.grammar_id, second.spec.grammar_id) == (1, 1)
    assert (grammars.waiting, counters.grammar_hits) == (2, 0)
    assert grammars.on_ready(GrammarReady(grammar_id=1)) == ()
    taken(grammars, A)
    assert (grammars.waiting, counters.grammar_hits, counters.grammars_compiled) == (0, 1, 1)


def test_others_start_while_one_waits_for_its_grammar(grammars: Grammars) -> None:
    free, waits = request("free"), taken(grammars, A)
    assert grammars.startable([waits, free]) == [free]
    grammars.on_ready(GrammarReady(grammar_id=1))
    assert grammars.startable([waits, free]) == [waits, free]


def test_the_grammar_that_was_used_longest_ago_is_forgotten_first(grammars: Grammars) -> None:
    first, second = taken(grammars, A), taken(grammars, B)
    orders(grammars)
    grammars.forget(second)
    assert orders(grammars) == ()
    grammars.forget(first)
    assert orders(grammars) == (GrammarOrder(2, None),)
    assert [one.grammar for one in grammars.entries] == [A]


def test_a_grammar_that_is_used_again_is_not_forgotten(grammars: Grammars) -> None:
    grammars.forget(taken(grammars, A))
    again, other = taken(grammars, A), taken(grammars, B)
    orders(grammars)
    grammars.forget(other)
    grammars.flush()
    assert orders(grammars) == (GrammarOrder(2, None),)
    assert again.spec.grammar_id == 1


def test_a_failure_ends_its_requests_and_is_forgotten(grammars: Grammars) -> None:
    """The next request of the same grammar has it compiled again, under another id."""
    first, second = taken(grammars, A), taken(grammars, A)
    taken(grammars, B)
    assert grammars.on_ready(GrammarReady(grammar_id=1, error="no")) == (first, second)
    grammars.forget(first)
    grammars.forget(second)
    assert (grammars.known, grammars.waiting) == (1, 1)
    orders(grammars)
    assert taken(grammars, A).spec.grammar_id == 3
    assert orders(grammars) == (GrammarOrder(3, A),)


def test_an_answer_that_nothing_waits_for_changes_nothing(grammars: Grammars) -> None:
    """The grammar was dropped during its compilation, or is ready already."""
    counters = grammars._counters
    one = taken(grammars, A)
    grammars.forget(one)
    grammars.flush()
    grammars.on_ready(GrammarReady(grammar_id=1))
    taken(grammars, B)
    grammars.on_ready(GrammarReady(grammar_id=2))
    assert grammars.on_ready(GrammarReady(grammar_id=2, error="late")) == ()
    assert (grammars.known, counters.grammars_compiled) == (1, 1)


def test_a_new_engine_takes_over_what_was_kept(grammars: Grammars) -> None:
    taken_first = taken(grammars, A)
    grammars.on_ready(GrammarReady(grammar_id=1))
    grammars.forget(taken_first)
    parts, again = CheckpointParts(), CheckpointParts()
    grammars.snapshot(parts)
    idle = checkpoint_of(SimulatedEngine().scheduler)
    assert idle is not None
    other = grammars_of(1)
    other.restore(msgspec.structs.replace(idle, **parts))
    other.snapshot(again)
    assert again == parts == {"last_grammar": 1, "grammars": ((1, A, True),)}
    assert taken(other, A).spec.grammar_id == 1
    assert orders(other) == ()
    assert taken(other, B).spec.grammar_id == 2


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.sampled_from([A, B, C])),
            st.tuples(st.just("go"), st.integers(0, 5)),
            st.tuples(st.just("ready"), st.booleans()),
            st.tuples(st.just("forget"), st.none()),
        ),
        max_size=40,
    ),
    st.integers(0, 2),
)
def test_any_order_of_events_keeps_the_books(steps: list[tuple[str, object]], kept: int) -> None:
    """The stage's view, from the orders alone: what is used is there, and no more unused ones than may be kept."""
    grammars, live = grammars_of(kept), list[Request]()
    stage: OrderedDict[int, Grammar] = OrderedDict()
    compiling: list[int] = []
    for what, value in steps:
        if what == "take":
            assert isinstance(value, Grammar)
            live.append(taken(grammars, value))
        elif what == "go" and live:
            assert isinstance(value, int)
            grammars.forget(live.pop(value % len(live)))
        elif what == "ready" and compiling:
            number, failed = compiling.pop(0), bool(value)
            gone = grammars.on_ready(GrammarReady(grammar_id=number, error="no" if failed else None))
            if failed:
                stage.pop(number, None)
            for one in gone:
                live.remove(one)
                grammars.forget(one)
        elif what == "forget":
            grammars.flush()
        for order in orders(grammars):
            if order.grammar is None:
                del stage[order.id]
            else:
                stage[order.id] = order.grammar
                compiling.append(order.id)
        used = {one.spec.grammar_id for one in live}
        assert stage == {one.id: one.grammar for one in grammars.entries}
        assert used <= stage.keys()
        assert len(stage.keys() - used) <= (0 if what == "forget" else kept)
        assert grammars.waiting == sum(map(grammars.is_waited_for_by, live))
        assert len(set(stage.values())) == len(stage)
