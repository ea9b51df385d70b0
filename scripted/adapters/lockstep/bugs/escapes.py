"""Mutants that escaped: bugs that search and scripts passed before each step was compared with a specification.

They are part of the gallery, under a heading of their own. The search finds each of them unaided.
"""

from __future__ import annotations

import functools
from typing import Final

from scripted.core.mutant import Mutant

__all__ = ["ESCAPES"]

_TESTS: Final = "tests/registered/invariants/test_escapes.py"
_of: Final = functools.partial(Mutant, origin="found by review of this project's own suites")


ESCAPES: Final = (
    _of(
        name="a-registry-grows",
        bug="the books remember every request for ever",
        signature="it has grown: scheduler.books.seen",
        test=f"{_TESTS}::test_an_idle_engine_is_as_small_as_a_new_one",
        target="engine.scheduler.books:Books.enqueue",
        cut="request.place = WAITING",
        becomes='self.__dict__.setdefault("seen", {})[request.arrival] = request.rid\n    request.place = WAITING',
    ),
    _of(
        name="a-neighbour-is-skipped",
        bug="the second of the requests that could decode is left out",
        signature="some did not decode",
        test=f"{_TESTS}::test_all_that_can_decode_decode_in_one_microbatch",
        target="engine.scheduler.planner:Planner._ready",
        cut="return [request for request in self._books.running.values() if not request.in_flight]",
        becomes=(
            "ready = [request for request in self._books.running.values() if not request.in_flight]\n"
            "    return ready[:1] + ready[2:]"
        ),
    ),
    _of(
        name="an-exact-fit-is-no-fit",
        bug="a prompt that ends with a page is counted one page more",
        signature="did not finish within",
        test=f"{_TESTS}::test_a_prompt_that_fills_all_pages_runs",
        target="engine.memory.kv:KVMemory.pages_for",
        cut="-(-tokens // self._page_size)",
        becomes="tokens // self._page_size + 1",
    ),
    _of(
        name="most-recently-used-goes-first",
        bug="eviction takes what was used last",
        signature="the wrong prefix was evicted",
        test=f"{_TESTS}::test_what_was_not_used_for_longest_is_evicted",
        target="engine.memory.radix:RadixTree._least_recently_used",
        cut="while self._heap:",
        becomes=(
            "leaves = [node for node in self.nodes() if not node.children and node.lock_ref == 0]\n"
            "    return max(leaves, key=lambda node: node.last_used, default=None)\n"
            "    while self._heap:"
        ),
    ),
    _of(
        name="the-urgent-give-way",
        bug="the latest to arrive gives way, whatever its priority",
        signature="the urgent one gave way",
        test=f"{_TESTS}::test_the_less_urgent_gives_way",
        target="engine.scheduler.planner:Planner._latest",
        cut="(request.priority, -request.arrival)",
        becomes="-request.arrival",
    ),
    _of(
        name="a-seed-restarts",
        bug="after a retraction a request draws from another seed",
        signature="was told another sampling",
        test=f"{_TESTS}::test_sampling_is_the_same_after_a_retraction",
        target="engine.scheduler.planner:Planner.retract",
        cut="self._books.enqueue(request)",
        becomes=(
            "import msgspec\n"
            "    request.spec = msgspec.structs.replace(request.spec, seed=request.spec.seed + 1)\n"
            "    self._books.enqueue(request)"
        ),
    ),
    _of(
        name="penalties-forget-the-output",
        bug="after a retraction penalties count from where the request was",
        signature="was told another sampling",
        test=f"{_TESTS}::test_sampling_is_the_same_after_a_retraction",
        target="engine.scheduler.planner:Planner.retract",
        cut="self._books.enqueue(request)",
        becomes=(
            "import msgspec\n"
            "    request.spec = msgspec.structs.replace(request.spec, prompt_tokens=len(request.ids))\n"
            "    self._books.enqueue(request)"
        ),
    ),
    _of(
        name="the-first-token-never-stops",
        bug="a stop token ends a request only from its second token on",
        signature="assert 'length' == 'stop'",
        test=f"{_TESTS}::test_a_stop_token_ends_a_request_wherever_it_comes",
        target="engine.scheduler.scheduler:Scheduler._why_finished",
        cut="if token in request.stop_ids:",
        becomes="if token in request.stop_ids and len(request.ids) > request.prompt_tokens + 1:",
    ),
    _of(
        name="hits-add-up",
        bug="what a request hits after a retraction is added to what it was told",
        signature="was told other hits",
        test=f"{_TESTS}::test_hits_are_told_once",
        target="engine.scheduler.planner:Planner._admit",
        cut="request.place = CHUNKED",
        becomes=(
            "if request.retractions:\n"
            "        request.cached_tokens += request.prefill_start\n"
            "    request.place = CHUNKED"
        ),
    ),
    _of(
        name="a-statistic-drifts",
        bug="a prompt is counted again with each retraction",
        signature="the prompt was counted again",
        test=f"{_TESTS}::test_a_retraction_counts_no_prompt",
        target="engine.scheduler.planner:Planner.retract",
        cut="self._counters.retractions += 1",
        becomes="self._counters.retractions += 1\n    self._counters.prompt_tokens += request.prompt_tokens",
    ),
    _of(
        name="a-digest-without-pages",
        bug="the digest of plans leaves the pages out",
        signature="the digest of plans leaves out",
        test=f"{_TESTS}::test_digests_stand_for_every_field",
        target="engine.instruments.digest:plan_shape",
        cut="            s.pages,\n",
    ),
    _of(
        name="a-deadline-met-exactly-is-missed",
        bug="a call whose deadline is now is still waiting",
        signature="it was due",
        test=f"{_TESTS}::test_a_deadline_that_is_met_exactly_is_over",
        target="engine.scheduler.flush_and_update:FlushAndUpdate.answer_due",
        cut="now < self.deadline",
        becomes="now <= self.deadline",
    ),
    _of(
        name="the-aborted-fill-the-queue",
        bug="requests that were aborted count against the limit of the queue",
        signature="the queue is full",
        test=f"{_TESTS}::test_what_was_aborted_leaves_room_in_the_queue",
        target="engine.scheduler.scheduler:Scheduler.refusal_of",
        cut="queued=queued",
        becomes="queued=queued + self.counters.requests_aborted",
    ),
)
