"""Drafts: what is guessed, how much room guesses take, and that they never change what is said."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_lockstep.simulated.pipeline import SimulatedPipeline
from simulated_engine import SimulatedEngine, generate, limits_of, prompt

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError, IntegrityError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import Completion, ContinueGeneration, PauseGeneration
from engine.core.plan import SamplingSpec
from engine.core.scheduler.core import Core
from engine.core.scheduler.drafts import Drafts, Guessing
from engine.core.scheduler.request import Request

GUESSES = {"speculative_algorithm": "ngram", "speculative_ngram_min": 1}
ALPHABET = 3


def engine_of(**config: object) -> SimulatedEngine:
    """An engine whose model says three different tokens, so that guesses come true, with speculation or without."""
    engine = SimulatedEngine(**config)
    engine.pipeline = SimulatedPipeline(engine.limits, alphabet=ALPHABET)
    return engine


def guesses(ids: list[int], count: int, *, most: int = 4, fewest: int = 1) -> tuple[int, ...]:
    """The drafts of a request with these ids and all the room there is."""
    limits = msgspec.structs.replace(
        limits_of(speculative_algorithm="ngram"), draft_tokens=count, ngram_max=most, ngram_min=fewest
    )
    drafts, request = drafts_for(request_of(ids), limits)
    request.planned_tokens = len(ids) - 1
    drafts.of(request).hold = True
    return drafts.draft(request, spare_pages=0)


def drafts_for(request: Request, limits: Limits) -> tuple[Drafts, Request]:
    """The drafts of an engine of which this request has all the memory that it needs."""
    core = Core(limits)
    request.lease = core.memory.admit("a", request.ids, spare_pages=0)
    assert request.lease is not None
    core.memory.extend(request.lease, len(request.ids))
    return Drafts(core), request


def request_of(ids: list[int]) -> Request:
    return Request(
        rid="a", priority=0, arrival=1, spec=SamplingSpec(seed=0), stop_ids=frozenset(), limit_tokens=10_000,
        ids=ids, prompt_tokens=1,
    )  # fmt: skip


def test_a_request_whose_guesses_fail_again_and_again_rests() -> None:
    """A text in which nothing recurs is not slowed down by guesses in each of its steps; one that held ends it."""
    guessing, rests = Guessing(), list[int]()
    for _ in range(12):
        guessing.note(100, 0)
        rests.append(max(0, guessing.rests_until - 100))
    assert rests == [0, 0, 0, 0, 0, 64, 128, 256, 512, 1024, 1024, 1024]
    guessing.note(100, 2)
    before = guessing.rests_until
    guessing.note(164, 0)
    assert guessing.rests_until == before


def test_a_request_that_rests_is_given_no_drafts() -> None:
    drafts, request = drafts_for(request_of([1, 2, 1, 2, 1]), limits_of(**GUESSES))
    request.planned_tokens = 4
    drafts.of(request).rests_until = 6
    assert drafts.draft(request, spare_pages=0) == ()
    drafts.of(request).rests_until = 5
    assert drafts.draft(request, spare_pages=0) == (2, 1, 2, 1)


@pytest.mark.parametrize(("fewest", "most", "enough"), [(1, 4, 2), (2, 4, 4), (2, 3, 3), (3, 3, 3)])
def test_a_guess_takes_more_of_the_text_until_one_has_held(fewest: int, most: int, enough: int) -> None:
    """Pairs recur in any text, and what followed them does not: that is tried only while guesses hold."""
    limits = limits_of(**GUESSES | {"speculative_ngram_min": fewest, "speculative_ngram_max": most})
    drafts, request = drafts_for(request_of([1, 2, 3, 4, 5]), limits)

    def recurring() -> int:
        """How many of the last tokens must have occurred for a guess."""
        for count in range(1, 6):
            request.ids, drafts.of(request).text = [1, 2, 3, 4, 5, 99, *[1, 2, 3, 4, 5][-count:]], None
            if drafts.draft(request, spare_pages=0):
                return count
        return 0

    found = [recurring()]
    for held in (3, 0, 0, 1):
        drafts.of(request).note(len(request.ids), held)
        found.append(recurring())
    assert found == [enough, fewest, fewest, enough, fewest]


def by_looking(ids: list[int], count: int, *, most: int = 4, fewest: int = 1) -> tuple[int, ...]:
    for length in range(most, fewest - 1, -1):
        for place in range(len(ids) - length - 1, -1, -1):
            if ids[place : place + length] == ids[-length:]:
                text = list(ids)
                for number in range(count):
                    text.append(text[place + length + number])
                return tuple(text[len(ids) :])
    return ()


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2, 3], ()),
        ([7, 8, 9, 5, 7, 8], (9, 5, 7)),
        # The latest occurrence of the most tokens.
        ([1, 2, 3, 9, 2, 4, 1, 2], (3, 9, 2)),
        # A repetition goes on.
        ([5, 6, 6], (6, 6, 6)),
        ([4, 7, 4, 7], (4, 7, 4)),
        # A token whose bytes look like the end of one and the beginning of another.
        ([256, 1, 65536, 256], (1, 65536, 256)),
    ],
)
def test_a_guess_is_what_followed_the_last_tokens(ids: list[int], expected: tuple[int, ...]) -> None:
    assert guesses(ids, 3) == expected


@given(st.lists(st.sampled_from([0, 1, 256, 2**40]), min_size=1, max_size=24), st.integers(1, 6), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_guesses_equal_a_search_token_by_token(ids: list[int], count: int, fewest: int) -> None:
    assert guesses(ids, count, fewest=fewest) == by_looking(ids, count, fewest=fewest)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_said_is_the_same_without_guesses(data: st.DataObject) -> None:
    """Requests beside each other, in memory that is short for them, on one stage and on several."""
    config = {
        "page_size": data.draw(st.sampled_from([1, 4])),
        "pp_size": data.draw(st.sampled_from([1, 3])),
        "max_total_tokens": data.draw(st.sampled_from([48, 400])),
        "chunked_prefill_size": 16,
    }
    messages = [
        generate(
            f"r{number}",
            prompt(data.draw(st.integers(1, 20)), number),
            data.draw(st.integers(1, 24)),
            temperature=data.draw(st.sampled_from([0.0, 1.0])),
            seed=number,
            stop_token_ids=data.draw(st.sampled_from([(), (34,)])),
            frequency_penalty=data.draw(st.sampled_from([0.0, 0.5])),
            min_new_tokens=data.draw(st.integers(0, 3)),
        )
        for number in range(data.draw(st.integers(1, 3)))
    ]
    drafts = {"speculative_num_draft_tokens": data.draw(st.integers(1, 6))}
    guessing = engine_of(**config, **GUESSES, **drafts)
    assert guessing.run(*messages) == engine_of(**config).run(*messages)
    assert not guessing.pipeline.corruptions


def test_the_guesses_of_a_draft_model_are_dropped_with_the_memory() -> None:
    """Guesses from before a retraction are not verified after it: vLLM pull request 31955."""
    draft = {"speculative_algorithm": "draft_model", "speculative_draft_model": "embedded:7"}
    engine, plain = SimulatedEngine(**draft), SimulatedEngine()
    engine.step(generate("a", prompt(20), 30))
    engine.step(completions=1)
    engine.step(PauseGeneration(call_id="p"), completions=1)
    request = engine.scheduler.find_request("a")
    assert request is not None
    assert request.lease is None
    assert not engine.scheduler.features.drafts.of(request).guesses
    engine.drain(ContinueGeneration(call_id="c"))
    assert engine.life("a").tokens == plain.run(generate("a", prompt(20), 30))[0]
    stats = engine.scheduler.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


def test_a_draft_model_needs_its_name() -> None:
    with pytest.raises(ConfigError, match="speculative_draft_model must be set with"):
        EngineConfig(speculative_algorithm="draft_model")
    with pytest.raises(ConfigError, match="speculative_draft_model must be set with"):
        EngineConfig(speculative_draft_model="embedded")


def test_a_draft_model_has_the_same_vocabulary() -> None:
    other = msgspec.structs.replace(EMBEDDED_FACTS, name="other", vocab_size=300)
    with pytest.raises(ConfigError, match="264 tokens, and no window layers, got 'other' with 300"):
        EMBEDDED_FACTS.with_draft(other)
    assert EMBEDDED_FACTS.with_draft(EMBEDDED_FACTS).kv_bytes_per_token == 2 * EMBEDDED_FACTS.kv_bytes_per_token


def test_guesses_save_forwards() -> None:
    message = generate("a", prompt(20), 60)
    guessing, plain = engine_of(**GUESSES), engine_of()
    assert guessing.run(message) == plain.run(message)
    stats = guessing.scheduler.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    # Each guess that holds is a forward less, but for those at the end.
    assert len(guessing.microbatches) <= len(plain.microbatches) - stats.accepted_tokens


def test_a_window_holds_what_is_read() -> None:
    """A window layer needs and keeps the last tokens alone (B18)."""
    config = {"page_size": 4, "chunked_prefill_size": 32, "max_prefill_tokens": 32, "window": 24}
    message = generate("a", prompt(60), 60)
    guessing, plain = engine_of(**config, **GUESSES), engine_of(**config)
    assert guessing.run(message) == plain.run(message)
    assert not guessing.pipeline.corruptions


def test_no_more_is_guessed_than_may_be_said() -> None:
    engine = engine_of(**GUESSES, speculative_num_draft_tokens=8)
    for new in range(1, 12):
        (tokens,) = engine.run(generate("a", (1,) * 20, new, logit_bias=((1, 100.0),)))
        assert tokens == [1] * new
    assert all(segment.drafts <= 8 for batch in engine.microbatches for segment in batch.segments)


def test_a_result_with_more_tokens_than_guesses_is_refused() -> None:
    engine = engine_of(**GUESSES)
    engine.step(generate("a", (1,) * 20, 20, logit_bias=((1, 100.0),)))
    engine.step(completions=1)
    batch = engine.scheduler.last_microbatch
    assert batch is not None
    assert batch.drafts == (4,)
    with pytest.raises(IntegrityError, match="4 drafts"):
        engine.scheduler.step([Completion(microbatch_id=batch.id, token_ids=(1,) * 6, accepted=(5,))], 0.0)


def test_the_shortest_pattern_is_no_longer_than_the_longest() -> None:
    with pytest.raises(ConfigError, match="speculative_ngram_min must be <= speculative_ngram_max=2, got 3"):
        EngineConfig(speculative_ngram_max=2, speculative_ngram_min=3)
