"""Mutants of speculative decoding: what becomes of guesses that are wrong, and of tokens after the last one."""

from __future__ import annotations

from typing import Final

from scripted.core.mutant import Mutant

__all__ = ["DRAFTING"]

_TESTS: Final = "tests/registered/speculation/test_drafts.py"


DRAFTING: Final = (
    Mutant(
        name="wrong-guesses-count-as-computed",
        origin="vLLM pull request 42722",
        bug="the place of a guess that was wrong counts as computed, so that the next token is put after it",
        signature="but the same request run alone says",
        test=f"{_TESTS}::test_the_output_is_that_of_a_request_alone",
        target="engine.scheduler.scheduler:Scheduler._on_verified",
        cut="request.planned_tokens -= segment.drafts - (len(tokens) - 1)",
        becomes="pass",
    ),
    Mutant(
        name="wrong-guesses-keep-their-pages",
        origin="SGLang issue 13741, sglang-jax issue 1147",
        bug="the pages of guesses that were wrong are not given back",
        signature="has pages for more than",
        test=f"{_TESTS}::test_the_pages_of_wrong_guesses_are_given_back",
        target="engine.memory.kv:KVMemory.trim",
        cut="if not rest:",
        becomes="if True:",
    ),
    Mutant(
        name="tokens-after-a-stop",
        origin="SGLang issue 31599, transformers issue 47912",
        bug="a token that ends the request does not end it when guesses after it hold as well",
        signature="goes on after its stop token",
        test=f"{_TESTS}::test_a_stop_among_the_guesses_ends_the_request",
        target="engine.scheduler.scheduler:Scheduler._on_verified",
        cut="self._take_token(request, token, logprobs[place] if logprobs else None)",
        becomes=(
            "stop_ids = request.stop_ids\n"
            "            request.stop_ids = stop_ids if place == len(tokens) - 1 else frozenset()\n"
            "            self._take_token(request, token, logprobs[place] if logprobs else None)\n"
            "            request.stop_ids = stop_ids"
        ),
    ),
    Mutant(
        name="guesses-are-published",
        origin="vLLM pull request 12193, SGLang pull request 24175",
        bug="pages go to the prefix cache before the guesses in them are verified",
        signature="is CACHED, not HELD",
        test=f"{_TESTS}::test_only_verified_tokens_become_a_prefix",
        target="engine.scheduler.scheduler:Scheduler._on_verified",
        cut="self.counters.drafted_tokens += segment.drafts",
        becomes=(
            "if not request.is_finished:\n"
            "        guesses = segment.token_ids[-segment.drafts :]\n"
            "        self.memory.publish(request.lease, [*request.ids, *guesses], counts=False)\n"
            "    self.counters.drafted_tokens += segment.drafts"
        ),
    ),
    Mutant(
        name="window-slides-past-guesses",
        origin="the class of B18: window pages that go too early",
        bug="window pages are given back as if every guess had held",
        signature="the window pages of",
        test=f"{_TESTS}::test_a_window_slides_with_what_is_verified",
        target="engine.scheduler.scheduler:Scheduler._slide_windows",
        cut="request.planned_tokens if segment.drafts else ",
    ),
    Mutant(
        name="guesses-take-the-last-pages",
        origin="the class of SGLang pull request 2711: retraction with speculation",
        bug="guesses take the pages that running requests need, and these are sent back to the queue for them",
        signature="has guesses that leave",
        test=f"{_TESTS}::test_no_request_gives_way_to_a_guess",
        target="engine.scheduler.drafts:Drafts.take",
        cut="spare_pages=spare_pages",
        becomes="spare_pages=0",
    ),
    Mutant(
        name="failed-guesses-go-on",
        origin="vLLM issues 16258 and 19254: n-gram speculation that is slower than none",
        bug="a request whose guesses fail again and again is guessed for in each of its steps",
        signature="guesses that fail are made again",
        test=f"{_TESTS}::test_guesses_that_fail_rest_longer_each_time",
        target="engine.scheduler.drafts:note_verified",
        cut="request.misses = 0 if held else request.misses + 1",
        becomes="request.misses = 0",
    ),
)
