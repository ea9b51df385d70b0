"""Mutants of prompt logprobs and of requests that compute a prompt only."""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

import itertools
from collections.abc import Sequence

from engine.messages import Completion, TokenOutput
from engine.plan import Microbatch
from engine.scheduler import Place, Request, Scheduler, planner, scheduler
from engine.scheduler.planner import Plan, Planner
from engine.scheduler.prompt_logprobs import next_asked, parts_told
from engine.scheduler.replies import part_of
from scripted.core.mutant import GALLERY_TESTS, Mutant

__all__ = ["PROMPT_LOGPROBS"]

_add_chunk = Planner._add_chunk
_on_failed_segment = Scheduler._on_failed_segment
_all_but_the_last_token = property(lambda request: len(request.ids) - 1)


def _one_cursor_for_the_living(
    microbatch: Microbatch, requests: Sequence[Request], completion: Completion
) -> list[TokenOutput]:
    values = itertools.chain.from_iterable(completion.prompt_logprobs)
    told: list[TokenOutput] = []
    for segment, request in zip(microbatch.segments, requests, strict=True):
        if segment.logprobs_from < 0 or request.is_finished:
            continue
        request.logprobs_due = segment.logprobs_from + len(segment.targets)
        told.append(part_of(request, tuple(itertools.islice(values, len(segment.targets)))))
    return told


def _nothing_of_those_on_their_way_back(
    microbatch: Microbatch, requests: Sequence[Request], completion: Completion
) -> list[TokenOutput]:
    leaving = {request.rid for request in requests if request.place is Place.RETRACTING}
    return [part for part in parts_told(microbatch, requests, completion) if part.rid not in leaving]


def _ask_within_the_chunk(request: Request, start: int, end: int) -> tuple[int, int]:
    first, _ = next_asked(request, start, end)
    return first, -1


def _add_chunk_that_emits(this: Planner, plan: Plan, request: Request) -> None:
    limit, request.limit_tokens = request.limit_tokens, max(request.limit_tokens, request.prompt_tokens + 1)
    _add_chunk(this, plan, request)
    request.limit_tokens = limit


def _publish_and_fail(this: Scheduler, request: Request, error: str) -> None:
    if request.is_prefilled and request.lease is not None and not request.in_flight:
        this.memory.publish(request.lease, request.ids, counts=True)
    _on_failed_segment(this, request, error)


PROMPT_LOGPROBS = (
    Mutant(
        name="prompt-logprobs-skip-the-cached",
        origin="G29: vLLM issues 3251 and 8268",
        bug="a request that wants its prompt's logprobs hits the cache; positions that are cached have no logits",
        signature="== [0, 48, 80]",
        test=f"{GALLERY_TESTS}/test_g29_prompt_logprobs.py::test_a_cached_prefix",
        owner=Request,
        attribute="hit_limit_tokens",
        replacement=_all_but_the_last_token,
    ),
    Mutant(
        name="prompt-logprobs-of-another",
        origin="G29: SGLang issue 36938",
        bug="a request that has ended takes no values from a result; the next one is told values that are not its own",
        signature="but alone it is told",
        test=f"{GALLERY_TESTS}/test_g29_prompt_logprobs.py::test_an_abort_beside_another_prompt",
        owner=scheduler,
        attribute="parts_told",
        replacement=_one_cursor_for_the_living,
    ),
    Mutant(
        name="prompt-logprobs-lost-with-the-batch",
        origin="G29: vLLM pull request 41411",
        bug="the prompt logprobs of a chunk are lost when its request is sent back before they are here",
        signature="a part of the prompt is lost",
        test=f"{GALLERY_TESTS}/test_g29_prompt_logprobs.py::test_a_retraction_in_the_middle_of_the_prompt",
        owner=scheduler,
        attribute="parts_told",
        replacement=_nothing_of_those_on_their_way_back,
    ),
    Mutant(
        name="prompt-logprobs-end-with-the-chunk",
        origin="G29: vLLM pull requests 4055 and 4139",
        bug="the last position of a chunk gives no logprob, because the token after it is in the next chunk",
        signature="logprobs for 93 tokens of the prompt",
        test=f"{GALLERY_TESTS}/test_g29_prompt_logprobs.py::test_every_token_of_a_split_prompt",
        owner=planner,
        attribute="next_asked",
        replacement=_ask_within_the_chunk,
    ),
    Mutant(
        name="prefill-only-says-a-token",
        origin="G30: SGLang issue 4892, transformers pull request 28579",
        bug="a request of no new token says one all the same, because a prefill always samples",
        signature="== ('length', [])",
        test=f"{GALLERY_TESTS}/test_g30_prefill_only.py::test_nothing_is_said",
        owner=Planner,
        attribute="_add_chunk",
        replacement=_add_chunk_that_emits,
    ),
    Mutant(
        name="failed-prefill-is-cached",
        origin="B04: only KV whose result came is shared",
        bug="a request of no new token leaves its prompt in the cache when its last part fails, too",
        signature="== ('error', 0)",
        test=f"{GALLERY_TESTS}/test_g30_prefill_only.py::test_a_failed_one_leaves_nothing",
        owner=Scheduler,
        attribute="_on_failed_segment",
        replacement=_publish_and_fail,
    ),
)
