"""Mutants of speculative decoding: what becomes of guesses that are wrong, and of tokens after the last one."""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.memory import KVMemory, Lease
from engine.messages import TokenLogprob
from engine.plan import Segment
from engine.scheduler import Request, Scheduler, scheduler
from engine.scheduler.books import Launched
from engine.scheduler.drafts import Drafts
from scripted.core.mutant import Mutant

__all__ = ["DRAFTING"]

_TESTS = "tests/registered/speculation/test_drafts.py"

_on_verified = Scheduler._on_verified
_take = Drafts.take


def _count_every_draft_as_computed(
    scheduler: Scheduler, request: Request, segment: Segment, tokens: Sequence[int], *rest: Any
) -> None:
    request.planned_tokens += segment.drafts - (len(tokens) - 1)
    _on_verified(scheduler, request, segment, tokens, *rest)


def _trim_nothing(memory: KVMemory, lease: Lease, tokens: int) -> None:
    del memory, lease, tokens


def _end_after_the_run(
    scheduler: Scheduler,
    request: Request,
    segment: Segment,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
) -> None:
    stop_ids = request.stop_ids
    if set(tokens[:-1]) & stop_ids:
        request.stop_ids = frozenset()
    _on_verified(scheduler, request, segment, tokens, logprobs)
    request.stop_ids = stop_ids


def _publish_every_draft(
    scheduler: Scheduler, request: Request, segment: Segment, tokens: Sequence[int], *rest: Any
) -> None:
    if request.lease is not None and not request.is_finished:
        guesses = segment.token_ids[len(segment.token_ids) - segment.drafts :]
        scheduler.memory.publish(request.lease, [*request.ids, *guesses], counts=False)
    _on_verified(scheduler, request, segment, tokens, *rest)


def _slide_past_the_drafts(scheduler: Scheduler, landed: Launched) -> None:
    for segment, request in zip(landed.microbatch.segments, landed.requests, strict=True):
        if request.lease is not None:
            scheduler.memory.slide(request.lease, segment.start + len(segment.token_ids))


def _take_the_last_pages(drafts: Drafts, request: Request, *, spare_pages: int) -> tuple[int, ...]:
    del spare_pages
    return _take(drafts, request, spare_pages=0)


def _never_rest(request: Request, held: int) -> None:
    request.guesses_hold = request.guesses_hold or held > 0


DRAFTING = (
    Mutant(
        name="wrong-guesses-count-as-computed",
        origin="vLLM pull request 42722",
        bug="the place of a guess that was wrong counts as computed, so that the next token is put after it",
        signature="but the same request run alone says",
        test=f"{_TESTS}::test_the_output_is_that_of_a_request_alone",
        owner=Scheduler,
        attribute="_on_verified",
        replacement=_count_every_draft_as_computed,
    ),
    Mutant(
        name="wrong-guesses-keep-their-pages",
        origin="SGLang issue 13741, sglang-jax issue 1147",
        bug="the pages of guesses that were wrong are not given back",
        signature="has pages for more than",
        test=f"{_TESTS}::test_the_pages_of_wrong_guesses_are_given_back",
        owner=KVMemory,
        attribute="trim",
        replacement=_trim_nothing,
    ),
    Mutant(
        name="tokens-after-a-stop",
        origin="SGLang issue 31599, transformers issue 47912",
        bug="a token that ends the request does not end it when guesses after it hold as well",
        signature="goes on after its stop token",
        test=f"{_TESTS}::test_a_stop_among_the_guesses_ends_the_request",
        owner=Scheduler,
        attribute="_on_verified",
        replacement=_end_after_the_run,
    ),
    Mutant(
        name="guesses-are-published",
        origin="vLLM pull request 12193, SGLang pull request 24175",
        bug="pages go to the prefix cache before the guesses in them are verified",
        signature="is CACHED, not HELD",
        test=f"{_TESTS}::test_only_verified_tokens_become_a_prefix",
        owner=Scheduler,
        attribute="_on_verified",
        replacement=_publish_every_draft,
    ),
    Mutant(
        name="window-slides-past-guesses",
        origin="the class of B18: window pages that go too early",
        bug="window pages are given back as if every guess had held",
        signature="the window pages of",
        test=f"{_TESTS}::test_a_window_slides_with_what_is_verified",
        owner=Scheduler,
        attribute="_slide_windows",
        replacement=_slide_past_the_drafts,
    ),
    Mutant(
        name="guesses-take-the-last-pages",
        origin="the class of SGLang pull request 2711: retraction with speculation",
        bug="guesses take the pages that running requests need, and these are sent back to the queue for them",
        signature="has guesses that leave",
        test=f"{_TESTS}::test_no_request_gives_way_to_a_guess",
        owner=Drafts,
        attribute="take",
        replacement=_take_the_last_pages,
    ),
    Mutant(
        name="failed-guesses-go-on",
        origin="vLLM issues 16258 and 19254: n-gram speculation that is slower than none",
        bug="a request whose guesses fail again and again is guessed for in each of its steps",
        signature="guesses that fail are made again",
        test=f"{_TESTS}::test_guesses_that_fail_rest_longer_each_time",
        owner=scheduler,
        attribute="note_verified",
        replacement=_never_rest,
    ),
)
