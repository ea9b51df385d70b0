"""Bugs of routers, put into this one: each is found by the test that is named, with the words that it says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from scripted.core.mutant import Mutant
from tests.unit.router import test_router_app as app
from tests.unit.routing import test_operators as operators
from tests.unit.routing import test_placement as placement

OPERATORS = "engine.core.routing.operators:Operators"
CACHE = "engine.core.routing.cache_index:FollowedCache"


def mutant(name: str, origin: str, bug: str, signature: str, place: str, cut: str, becomes: str) -> Mutant:
    return Mutant(
        name=name, origin=origin, bug=bug, signature=signature, test="", target=place, cut=cut, becomes=becomes
    )


ACTS = partial(operators.test_acts_with_engines_that_die_are_slow_and_refuse_at_every_step, range(20))

MUTANTS: list[tuple[Mutant, Callable[[], None]]] = [
    (
        mutant(
            "a-mirror-outlives-its-engine",
            "Dynamo pull request 14796 (a router with a stale mirror)",
            "an engine that was started again has told less than the life before, and its mirror keeps those pages",
            "a mirror of an earlier life is used",
            f"{CACHE}.answered",
            "if had and (",
            "if had and batches and (",
        ),
        lambda: placement.test_pages_of_an_earlier_life_are_not_counted_on(3),
    ),
    (
        mutant(
            "a-loss-of-contact-leaves-the-mirror",
            "Dynamo pull request 13898",
            "prompts go to an engine for what it had before its connection broke",
            "a mirror of an earlier life is used",
            f"{CACHE}.doubt",
            "self.is_right = False",
            "pass",
        ),
        lambda: placement.test_pages_of_an_earlier_life_are_not_counted_on(3),
    ),
    (
        mutant(
            "a-gap-is-passed-over",
            "Dynamo pull request 11984",
            "a batch is missing, and the mirror that lacks it is used",
            "a mirror behind a gap is used",
            f"{CACHE}.live",
            "self.is_right = not self._take(batch)",
            "self._take(batch)",
        ),
        placement.test_pages_behind_a_gap_are_not_counted_on,
    ),
    (
        mutant(
            "a-request-that-was-left-weighs-for-ever",
            "Dynamo pull request 10580, as a class: load that is never given back",
            "a client leaves, and its request stays counted where it was",
            "is counted forever",
            "engine.cluster.router.engines:RoutedEngines.ask",
            "if ticket is not None:",
            "if ticket is not None and self.engines[name].why_not:",
        ),
        lambda: app.test_a_client_that_leaves_ends_its_request_in_the_engine(streams=True),
    ),
    (
        mutant(
            "a-stream-is-begun-again",
            "a proxy that tries again whatever was sent, as a class",
            "an engine dies in the middle of a stream, and the request is sent to another one",
            "sent again after the first byte",
            "engine.cluster.router.engines:RoutedEngines.ask",
            "        raise\n    finally:",
            "        async for part in self.ask(replace(request, left_out=(name,))):\n"
            "            if isinstance(part, bytes):\n                yield part\n    finally:",
        ),
        app.test_after_the_first_byte_a_stream_ends_with_an_error_and_is_not_sent_again,
    ),
    (
        mutant(
            "a-client-that-leaves-is-not-noticed",
            "vLLM production-stack, as a class: a proxy that reads on for nobody",
            "a client that waits for a whole answer leaves, and the engine computes on",
            "goes on with a request that its client has left",
            "engine.cluster.router.front:_Front.passed_on",
            "unless_gone(request, answering) if self._access is not None else answering",
            "answering",
        ),
        lambda: app.test_a_client_that_leaves_ends_its_request_in_the_engine(streams=False),
    ),
    (
        mutant(
            "a-failed-act-is-not-taken-back",
            "vLLM issue 37608, as a class: a pause that not every replica agreed to",
            "an engine has refused, and the others stay as the act has left them",
            "was not put back",
            f"{OPERATORS}._decide",
            "engine.before if act.has_failed",
            "(engine.known or engine.before) if act.has_failed",
        ),
        ACTS,
    ),
    (
        mutant(
            "an-engine-is-left-paused",
            "vLLM pull request 38009, as a class: an engine that was paused for an act that failed",
            "an engine that answers after the act has ended is not put back",
            "is said to have done|was not put back|kept out forever",
            f"{OPERATORS}._missing",
            "if known.paused != wanted.paused:",
            "if known.paused is None and wanted.paused:",
        ),
        ACTS,
    ),
    (
        mutant(
            "an-engine-is-left-asleep",
            "vLLM issue 39366, as a class: engines that do not agree on who sleeps",
            "an engine that went to sleep for an act that failed is not woken",
            "is said to have done|was not put back|kept out forever",
            f"{OPERATORS}._missing",
            "if known.sleep_level and not wanted.sleep_level:",
            "if False:",
        ),
        ACTS,
    ),
    (
        mutant(
            "requests-go-on-during-an-update",
            "prime-rl issue 2168, as a class: a request computed by two versions of the weights",
            "new requests are sent to engines while weights are updated",
            "two versions of the weights|flushed under its requests|has no end",
            f"{OPERATORS}.is_closed",
            "return self._act is not None and self._act.order.verb in _QUIET",
            "return False",
        ),
        ACTS,
    ),
    (
        mutant(
            "a-restarted-engine-has-old-weights",
            "vLLM issue 36594, as a class: a replica that was away during an update",
            "an engine that was started again takes requests with the weights of its start",
            "takes requests with the weights of its start",
            f"{OPERATORS}.lost",
            "engine.owed = engine.owed or engine.wanted is not None",
            "pass",
        ),
        operators.test_an_engine_that_restarts_gets_the_weights_of_the_others_before_its_first_request,
    ),
]


@pytest.mark.parametrize(("bug", "test"), MUTANTS, ids=[bug.name for bug, _ in MUTANTS])
def test_a_bug_is_found_with_its_words(bug: Mutant, test: Callable[[], None]) -> None:
    """Without the bug the tests pass in their own files."""
    with bug.switched_on(), pytest.raises(AssertionError, match=bug.signature):
        test()
