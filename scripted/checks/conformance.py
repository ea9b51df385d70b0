"""Conformance: compares what the engine did in each step with what the executable specification requires.

It decides nothing itself. The first difference names its rule in the words of docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.limits import Limits
from engine.messages import (
    CallAnswer,
    EngineStats,
    Event,
    Refusal,
    Reply,
    StartProfile,
    StatsAnswer,
    StopProfile,
    TokenOutput,
)
from engine.plan import Microbatch, Segment
from engine.scheduler import Scheduler, StepResult
from scripted.checks.expected import Expected, ExpectedSegment
from scripted.checks.specification import Specification
from scripted.subject.violation import Violation

__all__ = ["RULES", "Conformance", "Nonconformance", "why_not_covered"]

# The rules that a difference can be named by, each with the sentence of docs/architecture.md that states it.
RULES: Final = {
    "Again": "A step that changed something asks for another one while a slot is free and there is work",
    "Calls": "Every call is answered once, in the step that carries it out or refuses it",
    "Cached tokens": "A client is told how many prompt tokens its request hit when it was first admitted",
    "Chunks": "A prompt is launched in parts, each as large as the rest of the budget allows",
    "Counters": "Each request, token and retraction is counted once, in the step in which it happens",
    "Deferred": "A call that waits is carried out in the first step whose events leave the engine quiescent",
    "Drafts": "A decode without prompts beside it carries guesses of its next tokens",
    "End": "A request ends with the token that stops it, the one that fills its length, an abort or an error",
    "Grammar": "A request with a grammar is tried when that is ready; no other waits for it",
    "Hit": "A request hits the longest cached prefix in full pages, but never its last token",
    "Kept": "A grammar that no request uses is kept, up to max_cached_grammars of them",
    "Launch": "A step launches a microbatch when generation goes on, a slot is free and there is work that has room",
    "Mixed": "Without mixed_chunk a microbatch has prompts or decodes, never both",
    "Order": "The queue is tried in the order of its policy, ties by arrival",
    "Places": "Every live request is in exactly one place",
    "Publish": "Full pages of confirmed KV are published",
    "Refuse": "A request is refused for the first of these reasons",
    "Result": "A token is sent to the client in the step of its result, in the order of the segments",
    "Retract": "A request is sent back by a pause, by a decode that has no page, or by a more urgent request",
    "Room": "A request owns one row and the pages of the tokens that are planned, no more",
    "Sampling": "The last stage learns a request's sampling with the first part after each admission",
    "Told": "The stages are told of a page once, and again where the cache's page takes its place",
    "Turns": "Of the running requests that are in no microbatch, those launched longest ago decode first",
    "Verify": "The guesses before the first wrong one hold; the pages of the others are given back",
    "Weight update": "An update is launched in the step that accepts it",
}
_OF_STATS: Final = {
    "forward_ct": "Launch",
    "waiting": "Places",
    "chunked": "Places",
    "running": "Places",
    "in_flight": "Places",
    "paused": "Calls",
    "pages_free": "Room",
    "pages_held": "Room",
    "pages_cached": "Publish",
    "rows_free": "Room",
    "retractions": "Retract",
    "drafted_tokens": "Verify",
    "accepted_tokens": "Verify",
    "cached_tokens": "Cached tokens",
    "waiting_for_grammar": "Grammar",
    "grammar_hits": "Kept",
}
_MEANING: Final = tuple(_OF_STATS)
_OF_OUTPUT: Final = {"finish_reason": "End", "stop_token_id": "End", "error": "End", "cached_tokens": "Cached tokens"}


class Nonconformance(Violation):
    """A step of the engine differs from the specification. ``rule`` is the name of the rule."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"rule {rule}: {what}; docs/architecture.md says: {RULES[rule]}")
        self.rule = rule


def why_not_covered(limits: Limits) -> str | None:
    """Why the specification does not cover an engine with these limits; None when it does."""
    return "window layers have a second pool" if limits.window_tokens else None


class Conformance:
    """Follows one scheduler, from new on. ``is_over`` is set by the first event that is not specified."""

    def __init__(self, limits: Limits) -> None:
        self._specification = Specification(limits)
        self.is_over = why_not_covered(limits) is not None

    def check(self, events: Sequence[Event], now: float, result: StepResult, scheduler: Scheduler) -> None:
        """Compare a step that just ran. Raises Nonconformance."""
        for event in events:
            if type(event) is StartProfile or type(event) is StopProfile:
                self.is_over = True
        if self.is_over:
            return
        expected = self._specification.step(events, now)
        _compare_replies(expected.replies, result.replies)
        _compare_plan(expected, result.microbatch)
        if events or result.replies or result.microbatch is not None or expected.again:
            _compare_stats(self._specification.stats(), scheduler.stats())
        if expected.grammars != result.grammars:
            _must_be_equal("Kept", "what the last stage is told of grammars", expected.grammars, result.grammars)
        if (expected.deadline, expected.again) != (result.deadline, result.again):
            _must_be_equal("Deferred", "the deadline of the call that waits", expected.deadline, result.deadline)
            _must_be_equal("Again", "whether the loop goes on at once", expected.again, result.again)


def _must_be_equal(rule: str, what: str, expected: object, found: object) -> None:
    if expected != found:
        raise Nonconformance(rule, f"{what} must be {expected!r}, but is {found!r}")


# -- plans --


def _compare_plan(expected: Expected, microbatch: Microbatch | None) -> None:
    if microbatch is None:
        if expected.mode is not None:
            rids = [segment.rid for segment in expected.segments]
            raise Nonconformance("Launch", f"a {expected.mode} microbatch of {rids} must be launched, but none is")
        return
    if expected.mode is None:
        raise Nonconformance("Launch", f"nothing may be launched, but {microbatch.mode} of {microbatch.rids} is")
    rule = "Weight update" if microbatch.is_control else "Mixed"
    rids = [segment.rid for segment in expected.segments]
    what = f"microbatch {microbatch.id}"
    for one, other in zip(expected.segments, microbatch.segments, strict=False):
        _compare_segment(what, one, other)
    if list(microbatch.rids) != rids:
        longer = expected.segments[len(microbatch.segments) :]
        which = "Turns" if (longer or microbatch.segments[len(rids) :])[0].sampling is None else "Order"
        raise Nonconformance(which, f"{what} must be of {rids}, but is of {list(microbatch.rids)}")
    _must_be_equal(rule, f"the mode of {what}", expected.mode, microbatch.mode)
    _must_be_equal("Weight update", f"the weights of {what}", expected.weights, microbatch.weights)
    _must_be_equal("Launch", "the number of the microbatch", expected.number, microbatch.id)


def _compare_segment(what: str, expected: ExpectedSegment, segment: Segment) -> None:
    if segment.rid != expected.rid:
        rule = "Turns" if expected.sampling is None and segment.sampling is None else "Order"
        raise Nonconformance(rule, f"{what} must go on with {expected.rid}, but goes on with {segment.rid}")
    pages = len(segment.pages)
    found = (
        *(expected.rid, segment.start, segment.token_ids, segment.page_start),
        *(pages, segment.emits, segment.sampling, segment.drafts),
    )
    if found == expected:
        return
    what = f"{what}, {expected.rid}"
    _must_be_equal("Hit", f"{what}: its first position", expected.start, segment.start)
    _must_be_equal("Drafts", f"{what}: its drafts", expected.drafts, segment.drafts)
    if expected.drafts:
        _must_be_equal("Drafts", f"{what}: its token ids", expected.token_ids, segment.token_ids)
    _must_be_equal("Chunks", f"{what}: its tokens", len(expected.token_ids), len(segment.token_ids))
    _must_be_equal("Result", f"{what}: its token ids", expected.token_ids, segment.token_ids)
    _must_be_equal("Chunks", f"{what}: whether it emits a token", expected.emits, segment.emits)
    _must_be_equal("Sampling", f"{what}: its sampling", expected.sampling, segment.sampling)
    told = (expected.page_start, expected.pages)
    _must_be_equal("Told", f"{what}: place and number of its pages", told, (segment.page_start, pages))


# -- replies --


def _compare_replies(expected: Sequence[Reply], replies: Sequence[Reply]) -> None:
    if not expected and not replies:
        return
    for one, other in zip(expected, replies, strict=False):
        if one != other:
            _compare_reply(one, other)
    if len(expected) != len(replies):
        rest = [*expected[len(replies) :], *replies[len(expected) :]]
        missing = "is missing" if len(expected) > len(replies) else "must not be told"
        raise Nonconformance(_rule_of(rest[0]), f"{rest[0]} {missing}")


def _compare_reply(expected: Reply, reply: Reply) -> None:
    if type(expected) is not type(reply):
        raise Nonconformance(_rule_of(expected), f"{expected} must be told, but {reply} is")
    if isinstance(expected, StatsAnswer) and isinstance(reply, StatsAnswer):
        _compare_stats(expected.stats, reply.stats)
    for name in expected.__struct_fields__:
        one, other = getattr(expected, name), getattr(reply, name)
        if name == "message":
            if one not in other:
                raise Nonconformance(_rule_of(expected), f"{other!r} must say {one!r}")
        elif one != other:
            rule = _OF_OUTPUT.get(name, "Result") if isinstance(expected, TokenOutput) else _rule_of(expected)
            raise Nonconformance(rule, f"{name} of {reply} must be {one!r}")


def _rule_of(reply: Reply) -> str:
    if isinstance(reply, TokenOutput):
        return "Result" if reply.finish_reason is None else "End"
    return "Refuse" if isinstance(reply, Refusal) else "Calls" if isinstance(reply, CallAnswer) else "Counters"


# -- sizes and counters --


def _compare_stats(expected: EngineStats, stats: EngineStats) -> None:
    if expected == stats:
        return
    differing = [name for name in stats.__struct_fields__ if getattr(expected, name) != getattr(stats, name)]
    # A counter says more of what went wrong than the sizes that follow from it.
    first = max(differing, key=lambda name: _MEANING.index(name) if name in _MEANING else len(_MEANING))
    _must_be_equal(_OF_STATS.get(first, "Counters"), first, getattr(expected, first), getattr(stats, first))
