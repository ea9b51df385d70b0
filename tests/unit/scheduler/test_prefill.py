"""Prefill: chunks, the token budget, the prefix cache, and what is batched together."""

from __future__ import annotations

import pytest
from simulated_engine import SimulatedEngine, alone, generate, prompt

from engine.core.plan import ForwardMode


def parts(engine: SimulatedEngine, rid: str) -> list[tuple[int, int, bool]]:
    """(start, tokens, emits) of each prefill segment of a request."""
    return [
        (segment.start, len(segment.token_ids), segment.emits)
        for microbatch in engine.microbatches
        if microbatch.mode is not ForwardMode.DECODE
        for segment in microbatch.segments
        if segment.rid == rid
    ]


def test_batch_larger_than_one() -> None:
    """B01: requests that run together are computed together."""
    engine = SimulatedEngine()
    engine.run(*[generate(f"r{number}", prompt(20, number)) for number in range(3)])
    assert [microbatch.rids for microbatch in engine.microbatches[:2]] == [("r0", "r1", "r2")] * 2


def test_only_the_scheduled_chunk_is_sent_and_only_the_last_emits() -> None:
    """A prompt is computed chunk by chunk, and only the last yields a token (B02)."""
    engine = SimulatedEngine(chunked_prefill_size=64)
    engine.run(generate("r", prompt(150)))
    assert parts(engine, "r") == [(0, 64, False), (64, 64, False), (128, 22, True)]
    assert engine.microbatches[1].segments[0].token_ids == prompt(150)[64:128]


def test_next_chunk_is_launched_while_earlier_ones_are_in_flight() -> None:
    engine = SimulatedEngine(pp_size=4, chunked_prefill_size=64)
    engine.step(generate("r", prompt(150)))
    assert engine.scheduler.books.chunked is engine.scheduler.find_request("r")
    engine.step()
    engine.step()
    assert engine.in_flight == 3
    assert engine.scheduler.books.chunked is None, "cleared when the last chunk is dispatched"
    assert not engine.scheduler.books.running, "it runs when the result is processed"
    engine.step(completions=2)
    assert not engine.scheduler.books.running
    engine.step(completions=1)
    assert list(engine.scheduler.books.running) == ["r"]


@pytest.mark.parametrize(("length", "chunks"), [(64, 0), (125, 2), (300, 5)])
def test_chunks_done_counts_the_parts_of_a_split_prompt(length: int, chunks: int) -> None:
    engine = SimulatedEngine(pp_size=4, pp_async_depth=2, chunked_prefill_size=64)
    engine.fill_until(generate("r", prompt(length)), chunked=False)
    request = engine.scheduler.find_request("r")
    assert request is not None
    assert request.chunks_done == chunks


def test_fully_cached_prompt_computes_one_token() -> None:
    """A prompt that is cached whole computes one token, and who waits holds no page (B04)."""
    engine = SimulatedEngine(page_size=1)
    message = generate("r", prompt(50))
    first = engine.run(message)
    assert engine.run(message) == first
    assert parts(engine, "r")[1:] == [(49, 1, True)]


def test_deferred_request_keeps_no_lock_and_no_page() -> None:
    """B04: what an attempt to admit took is given back when the request does not fit yet."""
    engine = SimulatedEngine(page_size=4, max_total_tokens=48, chunked_prefill_size=64)
    engine.run(generate("seed", prompt(9)))
    engine.step(generate("big", prompt(30, 1), 10))
    engine.step(generate("later", prompt(9) + prompt(20, 2), 2), completions=1)
    for _ in range(5):
        engine.step()
    memory = engine.scheduler.memory
    assert [request.rid for request in engine.scheduler.books.waiting] == ["later"]
    assert [node.lock_ref for node in memory.tree.nodes() if node.tokens[:4] == prompt(4)] == [0]
    engine.drain()
    assert len(engine.life("later").tokens) == 2


def test_hit_counts_settle_at_two_for_prompt_and_one_for_output() -> None:
    engine = SimulatedEngine(page_size=4, chunked_prefill_size=8)
    engine.run(generate("r", prompt(16), 9))
    nodes = engine.scheduler.memory.tree.nodes()
    assert [(len(node.pages), node.hit_count) for node in nodes] == [(2, 2), (2, 2), (2, 1)]


def test_published_only_when_confirmed() -> None:
    """B13: a prompt that is launched but not back cannot be matched by another request."""
    engine = SimulatedEngine(pp_size=4, page_size=4)
    engine.step(generate("a", prompt(40)))
    engine.step(generate("b", prompt(40)))
    assert parts(engine, "b") == [(0, 40, True)]
    engine.step(completions=1)
    engine.step(generate("c", prompt(40)))
    assert parts(engine, "c") == [(36, 4, True)]
    engine.drain()
    assert not engine.pipeline.corruptions


def test_mixed_chunk_decodes_first_and_gives_the_rest_of_the_budget_to_the_prompt() -> None:
    """B10: a running request gets a token with every chunk of a long prompt."""
    engine = SimulatedEngine(chunked_prefill_size=16, mixed_chunk=True)
    engine.step(generate("a", prompt(10), 9))
    engine.step(generate("b", prompt(40, 1)), completions=1)
    engine.step(completions=1)
    engine.step(completions=1)
    first, second, third = engine.microbatches[1:4]
    for microbatch, tokens in zip((first, second, third), (16, 16, 11), strict=True):
        assert (microbatch.mode, microbatch.rids, microbatch.tokens) == (ForwardMode.MIXED, ("b", "a"), tokens)
    engine.drain()
    assert engine.life("a").tokens == alone(generate("a", prompt(10), 9))


def test_many_decodes_leave_a_page_of_the_budget_to_the_prompt() -> None:
    """B10: neither keeps the other out."""
    engine = SimulatedEngine(chunked_prefill_size=8, page_size=4, max_total_tokens=512, mixed_chunk=True)
    engine.step(*[generate(f"r{number}", prompt(2, number), 30) for number in range(7)])
    while any(not life.tokens for life in engine.lives):
        engine.step(completions=1)
    engine.step(generate("long", prompt(40, 9), 2), completions=1)
    beside = engine.microbatches[-1]
    assert (beside.mode, beside.tokens, len(beside.rids)) == (ForwardMode.MIXED, 8, 5)
    assert beside.segments[0].rid == "long"
    engine.drain()
    assert not engine.pipeline.corruptions


def test_prompt_that_may_not_be_split_gets_the_budget_before_decodes() -> None:
    engine = SimulatedEngine(chunked_prefill_size=-1, max_prefill_tokens=32, mixed_chunk=True)
    engine.step(generate("a", prompt(10), 9))
    engine.step(generate("b", prompt(32, 1)), completions=1)
    engine.step(generate("c", prompt(31, 2)), completions=1)
    assert [batch.rids for batch in engine.microbatches[1:]] == [("b",), ("c", "a")]
    engine.drain()


def test_budget_of_one_token_goes_to_the_prompt() -> None:
    engine = SimulatedEngine(chunked_prefill_size=1, mixed_chunk=True)
    engine.step(generate("a", prompt(1), 4))
    engine.step(generate("b", prompt(3, 1)), completions=1)
    engine.drain()
    assert [len(life.tokens) for life in engine.lives] == [4, 4]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 2, 64, -1])
def test_chunk_and_page_sizes_do_not_change_the_output(chunk: int, page_size: int) -> None:
    """A prompt is computed chunk by chunk, and only the last yields a token (B02).

    Policies and limits hold at every size (B17).
    """
    engine = SimulatedEngine(pp_size=2, chunked_prefill_size=chunk, page_size=page_size, max_total_tokens=512)
    messages = [generate(f"r{number}", prompt(33, number // 2), 6) for number in range(4)]
    assert engine.run(*messages) == [alone(message) for message in messages]
    assert not engine.pipeline.corruptions


def test_decodes_are_spread_over_the_stages() -> None:
    engine = SimulatedEngine(pp_size=4, max_prefill_tokens=500)
    engine.run(*[generate(f"r{number}", prompt(10, number), 8) for number in range(8)])
    decodes = [len(microbatch.segments) for microbatch in engine.microbatches if microbatch.mode is ForwardMode.DECODE]
    assert max(decodes) == 2
    assert sum(decodes) == 8 * 7


def test_spec_goes_out_once_for_each_stay_in_a_row() -> None:
    """Also when a page is swapped for the tree's own, so that a stage does not take it for a new request."""
    engine = SimulatedEngine(pp_size=2, page_size=4)
    engine.step(generate("a", prompt(8), 9))
    engine.step(generate("b", prompt(8), 9))
    engine.drain()
    segments = [segment for microbatch in engine.microbatches for segment in microbatch.segments if segment.rid == "b"]
    assert any(segment.page_start == 0 for segment in segments[1:]), "no page was swapped"
    assert [segment.sampling is not None for segment in segments] == [True] + [False] * (len(segments) - 1)
    spec = segments[0].sampling
    assert spec is not None
    assert spec.prompt_tokens == 8
