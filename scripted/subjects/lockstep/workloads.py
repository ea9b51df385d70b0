"""The library of base workloads: small, each with one situation that real engines got wrong.

More workloads find more than more depth: a search that sweeps one event over all of these beats two events over one.
Each is one line of a schedule's own text; write another one in the same way.
"""

# ruff: noqa: E501 - a schedule is one line.

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

__all__ = ["FLAGSHIP", "STOP_TOKENS", "TEXTS"]

FLAGSHIP: Final = "chunked-alone"
# What the prompt of 40 tokens and seed 0 says, token by token.
STOP_TOKENS: Final = (56, 84, 120, 91)

_PP4: Final = "pp_size=4 pp_async_depth=2 chunked_prefill_size=64 max_total_tokens=1024"
_PP1: Final = "chunked_prefill_size=32 max_total_tokens=512"

_SMALL: Final = "page_size=4 chunked_prefill_size=16 max_total_tokens=48"


def _boundaries() -> Iterator[tuple[str, str]]:
    """Every number that a limit is compared with, and its two neighbours: pages, rows, budget, queue, deadline."""
    for beside in (-1, 0, 1):
        name = {-1: "below", 0: "at", 1: "above"}[beside]
        yield (
            f"{name}-all-pages",
            f"page_size=4 max_total_tokens=16; 1 start a prompt={16 + beside} new=1; 9 start b prompt={16 + beside} new=1",
        )
        yield (
            f"{name}-a-page",
            f"page_size=4 chunked_prefill_size=16 max_total_tokens=16; 1 start a prompt={8 + beside} new=4; 2 start b prompt=4 seed=1 new=2",
        )
        yield (
            f"{name}-the-budget",
            f"{_SMALL}; 1 start a prompt={16 + beside} new=2; 1 start b prompt={12 + beside} seed=1 new=2; 2 start c prompt=4 seed=2 new=2",
        )
        yield (
            f"{name}-the-rows",
            f"{_SMALL} max_running_requests=2; "
            + "; ".join(f"1 start r{i} prompt=3 seed={i} new=2" for i in range(2 + beside)),
        )
        yield (
            f"{name}-the-queue",
            (
                f"{_SMALL} max_running_requests=1 max_queued_requests=2; 1 start a prompt=5 new=6; "
                + "; ".join(f"3 start q{i} prompt=5 seed={i + 1} new=1" for i in range(2 + beside))
                + "; 4 abort q0; 5 start z prompt=5 seed=9 new=1"
            ),
        )
        yield (
            f"{name}-the-tries",
            (
                "page_size=4 max_total_tokens=40 chunked_prefill_size=32; 1 start a prompt=28 new=5; "
                + "; ".join(f"2 start big{i} prompt=13 seed={i + 1} new=1" for i in range(16 + beside))
                + "; 2 start fits prompt=2 seed=60 new=1; 5 abort-all"
            ),
        )
        yield (
            f"{name}-the-deadline",
            f"{_SMALL}; 1 start a prompt=9 new=3; 2 hold; 3 flush timeout_s=1.0; 5 advance seconds={1 + beside / 4}; 8 release",
        )


TEXTS: Final[dict[str, str]] = {
    # The flagship: between the last chunk and its result every queue is empty.
    FLAGSHIP: f"{_PP4}; 1 start a prompt=125 new=2",
    "one-stage": f"{_PP1}; 1 start a prompt=70 new=3",
    "names-with-a-common-prefix": f"{_PP1} pp_size=2; 1 start r-1 prompt=20 new=4; 1 start r-10 prompt=20 seed=1 new=4",
    "deferred-flush": f"{_PP4}; 1 start a prompt=125 new=2; 3 flush timeout_s=5.0",
    "one-stage-deep": f"{_PP1} pp_async_depth=2; 1 start a prompt=70 new=3; 2 start b prompt=40 seed=1 new=3",
    "warm-prefix": f"{_PP4}; 1 start warm prompt=96 new=1; 16 start a prompt=125 new=2",
    # Equal prompts of full pages: a fully cached prompt must still compute one token.
    "twins": f"{_PP1}; 1 start a prompt=48 new=2; 8 start b prompt=48 new=2; 9 start c prompt=48 new=3",
    "chunked-beside-decodes": (
        "pp_size=2 chunked_prefill_size=32 max_total_tokens=512; 1 start a prompt=10 new=8; 1 start b prompt=9 seed=1 new=8; "
        "5 start c prompt=100 seed=2 new=2"
    ),
    "mixed-chunk": (
        "pp_size=2 pp_async_depth=1 mixed_chunk=True chunked_prefill_size=32 max_total_tokens=512; "
        "1 start a prompt=10 new=8; 1 start b prompt=9 seed=1 new=8; 5 start c prompt=75 seed=2 new=3"
    ),
    # Chunks that end in the middle of a page.
    "ragged-chunks": "pp_size=2 chunked_prefill_size=24 max_total_tokens=256; 1 start a prompt=61 new=2; 2 start b prompt=40 new=2",
    "single-token-pages": (
        "pp_size=2 page_size=1 chunked_prefill_size=5 max_total_tokens=40; 1 start a prompt=12 new=3; 3 start b prompt=9 new=3"
    ),
    # Decodes run out of pages: some go back to the queue.
    "full-pages": (
        "pp_size=2 page_size=4 chunked_prefill_size=16 max_total_tokens=44; 1 start a prompt=13 new=10; "
        "1 start b prompt=12 seed=1 new=10; 3 start c prompt=9 seed=2 new=6"
    ),
    "full-rows": (
        "pp_size=2 max_running_requests=2 chunked_prefill_size=32 max_total_tokens=512; 1 start a prompt=20 new=4; "
        "1 start b prompt=20 seed=1 new=4; 1 start c prompt=40 seed=2 new=3; 2 start d prompt=20 new=3"
    ),
    # One place only, and a prompt of several chunks in it.
    "one-row": (
        "pp_size=2 max_running_requests=1 chunked_prefill_size=16 max_total_tokens=256; 1 start a prompt=45 new=2; "
        "2 start b prompt=20 seed=1 new=2"
    ),
    "priorities": (
        "schedule_policy=priority priority_preemption=True max_running_requests=2 page_size=4 chunked_prefill_size=16 "
        "max_total_tokens=48; 1 start a prompt=13 new=8; 1 start b prompt=12 seed=1 new=8; "
        "5 start c prompt=14 seed=2 new=3 priority=2; 6 start d prompt=6 seed=3 new=2 priority=1"
    ),
    "priorities-in-line": (
        "schedule_policy=priority max_running_requests=1 chunked_prefill_size=32 max_total_tokens=256; 1 start a prompt=20 new=3; "
        "2 start b prompt=20 seed=1 priority=1; 2 start c prompt=20 seed=2 priority=5"
    ),
    "prefix-in-line": (
        "schedule_policy=lpm max_running_requests=1 chunked_prefill_size=32 max_total_tokens=256; 1 start a prompt=40 new=3; "
        "2 start b prompt=40 seed=1; 2 start c prompt=60"
    ),
    # The second token of this prompt, at which it stops.
    "stops": f"{_PP4}; 1 start a prompt=125 new=5 stop=92",
    "longest-prefix": (
        "schedule_policy=lpm max_running_requests=2 chunked_prefill_size=32 max_total_tokens=512; 1 start a prompt=40 new=3; "
        "2 start b prompt=40 seed=1 new=2; 2 start c prompt=60 new=2"
    ),
    "no-cache": f"{_PP1} radix_cache=False pp_size=2; 1 start a prompt=40 new=3; 2 start b prompt=40 new=3",
    "no-chunks": "pp_size=2 chunked_prefill_size=-1 max_total_tokens=256; 1 start a prompt=70 new=3; 2 start b prompt=33 new=3",
    # Room for one page less than all requests need: eviction of what none of them holds.
    "eviction": (
        "page_size=4 chunked_prefill_size=16 max_total_tokens=40; 1 start a prompt=17 new=2; 9 start b prompt=20 seed=1 new=3; "
        "16 start c prompt=17 new=3"
    ),
    "at-the-context-limit": (
        "context_length=40 chunked_prefill_size=16 max_total_tokens=256; 1 start a prompt=35 new=30; 1 start b prompt=12 seed=1 new=2"
    ),
    "short-queue": (
        "max_queued_requests=2 max_running_requests=1 chunked_prefill_size=32 max_total_tokens=256; 1 start a prompt=20 new=3; "
        "2 start b prompt=20 seed=1; 2 start c prompt=20 seed=2; 3 start d prompt=20 seed=3"
    ),
    "oversize": (
        "page_size=4 max_total_tokens=40 chunked_prefill_size=16; 1 start a prompt=50 new=2; 1 start b prompt=20 seed=1 new=2; "
        "2 start c prompt=30 seed=2 new=20; 3 start d prompt=6 seed=3 new=2"
    ),
    # A big one waits for pages while small ones pass it.
    "passed-over": (
        "page_size=4 max_total_tokens=40 chunked_prefill_size=16; 1 start a prompt=18 new=8; 2 start big prompt=33 seed=1 new=2; "
        "2 start c prompt=5 seed=2 new=2; 3 start d prompt=5 seed=3 new=2"
    ),
    "same-rid-again": f"{_PP1} pp_size=2; 1 start a prompt=40 new=3; 4 abort a; 4 start a prompt=50 seed=1 new=2",
    "deferred-flush-gives-up": f"{_PP4}; 1 start a prompt=125 new=2; 2 hold; 3 flush timeout_s=1.0; 5 advance seconds=2.0; 8 release",
    "paused-with-a-queue": (
        "pp_size=2 max_running_requests=2 chunked_prefill_size=32 max_total_tokens=256; 1 start a prompt=20 new=5; "
        "1 start b prompt=20 seed=1 new=5; 1 start c prompt=20 seed=2 new=2; 6 pause mode=retract; 12 flush; 14 continue"
    ),
    "paused-mid-prompt": (
        "pp_size=2 chunked_prefill_size=16 max_total_tokens=256; 1 start a prompt=60 new=2; 3 pause mode=retract; 7 continue"
    ),
    "paused-in-place": f"{_PP1} pp_size=2; 1 start a prompt=20 new=6; 5 pause mode=in_place; 12 continue",
    # What a failed microbatch wrote must not become a shared prefix.
    "failed-chunk": f"{_PP1} pp_size=2; 1 start a prompt=70 new=2; 2 fail; 8 start b prompt=70 new=2",
    "weight-update": f"{_PP4}; 1 start a prompt=70 new=2; 22 update; 30 start b prompt=70 new=2",
    "failed-update": f"{_PP1} pp_size=2; 1 start a prompt=70 new=2; 5 update timeout_s=1.0; 6 fail; 20 start b prompt=70 new=2",
    # Window layers: prompts of several windows, a prefix hit after one, and a pool smaller than what all need.
    "windowed": (
        "model=embedded-window pp_size=2 chunked_prefill_size=32 max_total_tokens=1024; 1 start a prompt=150 new=8; "
        "9 start b prompt=150 new=3; 12 start c prompt=170 seed=2 new=3"
    ),
    "windowed-tight": (
        "model=embedded-window pp_size=2 pp_async_depth=1 page_size=4 chunked_prefill_size=64 max_prefill_tokens=64 "
        "max_total_tokens=512 max_window_tokens=360; 1 start a prompt=150 new=6; 3 start b prompt=150 seed=1 new=6; "
        "20 start c prompt=150 new=3"
    ),
    # Guesses that are verified several at once: alone, beside others, in little memory, over window layers.
    "drafts": (
        "speculative_algorithm=ngram page_size=4 chunked_prefill_size=16 max_total_tokens=160; 1 start a prompt=20 new=20; "
        "3 start b prompt=9 seed=1 new=14; 20 start c prompt=20 new=9"
    ),
    "drafts-deep": (
        "pp_size=4 pp_async_depth=1 speculative_algorithm=ngram speculative_ngram_min=1 page_size=4 chunked_prefill_size=16 "
        "max_total_tokens=200; 1 start a prompt=13 new=16; 2 start b prompt=12 seed=1 new=12; 3 start c prompt=30 seed=2 new=8"
    ),
    "drafts-tight": (
        "pp_size=2 speculative_algorithm=ngram speculative_ngram_min=1 speculative_num_draft_tokens=6 page_size=4 "
        "chunked_prefill_size=16 max_total_tokens=48; 1 start a prompt=13 new=14; 1 start b prompt=12 seed=1 new=14"
    ),
    "drafts-stop": (
        "speculative_algorithm=ngram speculative_ngram_min=1 page_size=4 chunked_prefill_size=32 max_total_tokens=128; "
        "1 start a prompt=20 new=20 stop=35; 2 start b prompt=20 seed=3 new=20 stop=34"
    ),
    # Guesses of a draft model, among them tokens at which a request stops.
    "drafts-of-a-model": (
        "speculative_algorithm=draft_model speculative_draft_model=embedded page_size=4 chunked_prefill_size=64 "
        "max_total_tokens=200; 1 start a prompt=40 new=8 stop=120; 2 start b prompt=40 new=14; 12 start c prompt=40 new=8 stop=91; "
        "13 start d prompt=44 seed=1 new=20"
    ),
    "drafts-windowed": (
        "model=embedded-window speculative_algorithm=ngram speculative_ngram_min=1 page_size=4 chunked_prefill_size=64 "
        "max_prefill_tokens=64 max_total_tokens=512 max_window_tokens=280; 1 start a prompt=100 new=16; 9 start b prompt=90 seed=1 new=12"
    ),
    # An operator presses on pages, rows and locks while requests come and go, and evicts.
    "pressed": (
        "pp_size=2 page_size=4 chunked_prefill_size=16 max_total_tokens=64; 1 start a prompt=13 new=6; 4 pressure pages=2; "
        "5 start b prompt=13 new=3; 7 pressure rows=0; 8 start c prompt=9 seed=1 new=2; 12 relieve; 20 pressure unlocked=0; "
        "21 start d prompt=9 seed=2 new=2; 24 relieve; 26 evict; 27 start e prompt=13 new=2"
    ),
    "late-results": f"{_PP4}; 1 start a prompt=100 new=3; 2 hold; 3 start b prompt=100 new=2; 12 release count=1; 14 release",
    "full-pages-deep": (
        "pp_size=4 pp_async_depth=2 page_size=4 chunked_prefill_size=16 max_total_tokens=48; 1 start a prompt=13 new=8; "
        "1 start b prompt=12 seed=1 new=8; 1 start c prompt=9 seed=2 new=8; 6 start d prompt=11 seed=3 new=4"
    ),
    "priorities-deep": (
        "pp_size=4 pp_async_depth=1 schedule_policy=priority priority_preemption=True page_size=4 chunked_prefill_size=16 "
        "max_total_tokens=56; 1 start a prompt=13 new=8; 2 start b prompt=12 seed=1 new=8; "
        "9 start c prompt=22 seed=2 new=4 priority=2"
    ),
    # Small ones keep coming past a big one that waits for pages: for a while, not for ever.
    "passed-over-often": (
        "page_size=4 max_total_tokens=40 chunked_prefill_size=8 pp_async_depth=1; 1 start a prompt=5 new=27; 2 start big prompt=33 seed=1 new=2; "
        + "; ".join(f"{3 + i} start s{i} prompt=2 seed={i + 2} new=1" for i in range(20))
    ),
    # Prompts that are cached keep coming past one that is not: for a while, not for ever.
    "overtaken-often": (
        "schedule_policy=lpm max_running_requests=1 chunked_prefill_size=64 max_total_tokens=512; 1 start warm prompt=40 new=1; "
        "2 start z prompt=20 seed=1 new=1; " + "; ".join(f"2 start s{i} prompt=40 new=1" for i in range(20))
    ),
    # Prompts that leave room for a few of the decodes: these take turns.
    "mixed-turns": (
        "mixed_chunk=True chunked_prefill_size=16 max_total_tokens=512; "
        + "; ".join(f"1 start r{i} prompt=3 seed={i} new=6" for i in range(4)) + "; "
        + "; ".join(f"{4 + i} start p{i} prompt=15 seed={i + 9} new=1" for i in range(4))
    ),
    # Prompts that leave one another in the middle of what is cached, again and again.
    "branches": (
        "page_size=4 chunked_prefill_size=32 max_total_tokens=128; 1 start a prompt=25 new=1; 3 start b prompt=25 shared=13 tail=1 new=1; "
        "5 start c prompt=25 shared=6 tail=2 new=1; 7 start d prompt=25 shared=21 tail=3 new=2; 9 start e prompt=25 new=2"
    ),
    # Profiles take a place in the pipeline beside requests; one at a time.
    "profiled": (
        f"{_PP1} pp_size=2; 1 start a prompt=40 new=4; 2 profile; 3 profile; 5 profile-end; 6 profile-end; 7 start b prompt=20 seed=1 new=2; "
        "8 profile; 9 pause mode=in_place; 11 profile-end; 13 continue; 20 profile"
    ),
    # A draw depends on the seed, the position and the output so far, also after a retraction.
    "sampled": (
        f"{_SMALL}; 1 start a prompt=13 new=10 temperature=0.8 draw=7 penalty=0.5; "
        "1 start b prompt=12 seed=1 new=10 temperature=1.0 draw=8 penalty=1.5; 3 start c prompt=9 seed=2 new=6 temperature=0.5 penalty=0.5"
    ),
    # Grammars that are new, known, shared, and late; beside requests without one.
    "grammars": (
        f"{_PP1} pp_size=2; 1 start a prompt=20 new=9 regex=[a-c]{{5}}; 1 start b prompt=20 seed=1 new=4; "
        "2 start c prompt=40 seed=2 new=9 regex=[a-c]{5}; 4 start d prompt=9 seed=3 new=3 regex=[p-z]{4}; 14 start e prompt=9 seed=4 new=4 regex=[a-c]{5}"
    ),
    "grammars-held": (
        f"{_PP1}; 1 hold-grammars; 1 start a prompt=20 new=6 regex=[a-c]{{3}}; 1 start b prompt=20 seed=1 new=6 regex=[a-c]{{3}}; "
        "2 start c prompt=20 seed=2 new=3; 3 start d prompt=9 seed=3 new=4 regex=[p-z]{2}; 9 release-grammars count=1; 12 release-grammars"
    ),
    # The request that asked first for a grammar goes, the other one stays; another grammar cannot be compiled.
    "grammars-in-vain": (
        f"{_PP1}; 1 hold-grammars; 1 start a prompt=20 new=6 regex=[a-c]{{3}}; 1 start b prompt=20 seed=1 new=6 regex=[a-c]{{3}}; "
        "3 abort a; 5 release-grammars; 14 fail-grammar; 14 start c prompt=20 seed=2 new=3 regex=[x-z]{2}; 14 start d prompt=9 seed=3 new=3"
    ),
    # The automaton goes on where the output was, after a retraction, in a pool that is too small.
    "grammars-full-pages": (
        "pp_size=2 page_size=4 chunked_prefill_size=16 max_total_tokens=44; 1 start a prompt=13 new=10 regex=[a-z]{3}x[0-9]{5}; "
        "1 start b prompt=12 seed=1 new=10; 3 start c prompt=9 seed=2 new=10 regex=[a-z]{3}x[0-9]{5}"
    ),
    # No grammar is kept without a user, and users take turns.
    "grammars-forgotten": (
        "max_cached_grammars=0 max_running_requests=1 chunked_prefill_size=32 max_total_tokens=256; 1 start a prompt=20 new=5 regex=[a-c]{2}; "
        "1 start b prompt=20 seed=1 new=5 regex=[a-c]{2}; 2 start c prompt=20 seed=2 new=5 regex=[p-z]{2}; 20 start d prompt=20 seed=3 new=5 regex=[a-c]{2}"
    ),
    # One prompt, several answers.
    "choices": f"{_PP1} pp_size=2; " + "; ".join(f"1 start n{i} prompt=40 new=4 temperature=1.0 draw={i}" for i in range(4)),
    # Urgent and other requests decode in a pool that is too small for them.
    "priorities-without-pages": (
        "pp_size=2 schedule_policy=priority page_size=4 chunked_prefill_size=16 max_total_tokens=44; "
        "1 start a prompt=13 new=10; 1 start b prompt=12 seed=1 new=10 priority=1; 3 start c prompt=9 seed=2 new=6 priority=1"
    ),
    "many-decodes": "chunked_prefill_size=32 max_total_tokens=256; " + "; ".join(f"1 start r{i} prompt=5 seed={i} new=6" for i in range(5)),
    **{
        f"stops-at-{place}": f"{_PP1} pp_size=2; 1 start a prompt=40 new=4 stop={token}; 2 start b prompt=20 seed=1 new=4"
        for place, token in enumerate(STOP_TOKENS, 1)
    },
    **dict(_boundaries()),
}  # fmt: skip
