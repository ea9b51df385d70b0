"""Admission: what is refused with which numbers, and who may pass whom in the queue."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from simulated_engine import SimulatedEngine, generate, prompt

from engine.core.messages import (
    Abort,
    ContinueGeneration,
    FinishReason,
    Generate,
    GetStats,
    PauseGeneration,
    PauseMode,
    PipelineFailed,
    Refusal,
    RefusalKind,
    StatsAnswer,
)
from engine.core.scheduler.policy import OVERTAKEN_LIMIT_REQUESTS


def refusal(engine: SimulatedEngine, message: object) -> Refusal:
    reply = engine.step(message).replies[-1]
    assert isinstance(reply, Refusal)
    return reply


@pytest.mark.parametrize(
    ("config", "length", "new", "numbers"),
    [
        ({"context_length": 64}, 64, 1, ["64", "63"]),
        ({"max_total_tokens": 64, "page_size": 16}, 50, 16, ["5 pages", "50 prompt", "16 new", "has 4"]),
        ({"chunked_prefill_size": -1, "max_prefill_tokens": 40}, 41, 1, ["41", "40"]),
        ({}, 0, 1, ["empty"]),
    ],
)
def test_request_that_never_fits_is_refused_with_its_numbers(
    config: dict[str, object], length: int, new: int, numbers: list[str]
) -> None:
    """B09: at admission, and no state is left."""
    engine = SimulatedEngine(**config)
    reply = refusal(engine, generate("r", prompt(length), new))
    assert reply.kind is RefusalKind.INVALID
    assert all(number in reply.message for number in numbers), reply.message
    assert engine.scheduler.is_fully_idle
    assert engine.scheduler.find_request("r") is None


def test_request_for_no_tokens_needs_room_for_the_one_that_is_computed() -> None:
    """B09: 17 tokens of prompt never fit into one page of 16."""
    engine = SimulatedEngine(max_total_tokens=16, page_size=16)
    assert refusal(engine, generate("r", prompt(17), 0)).kind is RefusalKind.INVALID


def test_largest_request_that_fits_runs_to_its_end() -> None:
    """B09: the limit itself is not refused; the KV of the last token is never written."""
    engine = SimulatedEngine(max_total_tokens=64, page_size=16)
    assert len(engine.run(generate("r", prompt(50), 15))[0]) == 15


def test_context_length_clamps_and_finishes() -> None:
    """The context length clamps every place that schedules (B03)."""
    engine = SimulatedEngine(context_length=8)
    assert len(engine.run(generate("r", prompt(5), 26))[0]) == 3
    assert engine.life("r").finish_reason is FinishReason.LENGTH


def test_live_rid_is_refused_and_its_owner_goes_on() -> None:
    """A client that leaves costs no more steps, and a live rid is refused (C05)."""
    engine = SimulatedEngine()
    engine.step(generate("r", prompt(20)))
    assert refusal(engine, generate("r", prompt(9))).kind is RefusalKind.DUPLICATE
    engine.drain()
    assert [len(life.tokens) for life in engine.lives] == [4, 0]


def test_queue_limit_plus_one_is_refused_and_leaves_no_state() -> None:
    """Policies and limits hold at every size (B17).

    A full or draining engine refuses at once, and keeps nothing (C07).
    """
    engine = SimulatedEngine(max_queued_requests=2)
    engine.step(*[generate(f"r{number}", prompt(20, number)) for number in range(3)])
    assert [life.refusal for life in engine.lives] == [None, None, RefusalKind.BUSY]
    engine.drain()
    assert [len(life.tokens) for life in engine.lives] == [4, 4, 0]
    assert engine.scheduler.stats().requests_refused == 1


def test_aborted_request_leaves_its_place_in_the_queue_to_the_next_one_of_the_same_step() -> None:
    """Policies and limits hold at every size (B17).

    A full or draining engine refuses at once, and keeps nothing (C07).
    """
    engine = SimulatedEngine(max_queued_requests=2)
    engine.step(PauseGeneration(call_id="p", mode=PauseMode.IN_PLACE))
    engine.step(generate("a", prompt(9)), generate("b", prompt(9, 1)))
    engine.step(Abort(rid="a"), generate("c", prompt(9, 2)), generate("d", prompt(9, 3)))
    assert [life.refusal for life in engine.lives] == [None, None, None, RefusalKind.BUSY]
    engine.drain(ContinueGeneration(call_id="c"))
    assert [len(life.tokens) for life in engine.lives] == [0, 4, 4, 0]


def choices(rid: str, count: int) -> list[Generate]:
    """The choices of one answer, as the front end sends them."""
    rids = [f"{rid}-{number}" for number in range(count)]
    return [msgspec.structs.replace(generate(one, prompt(9)), choices=count, first_choice=rids[0]) for one in rids]


def test_choices_enter_the_queue_together_or_not_at_all() -> None:
    """C07: an answer was refused with 429 when its last choice came to a full queue, after the others had begun."""
    engine = SimulatedEngine(max_queued_requests=4)
    engine.step(PauseGeneration(call_id="p", mode=PauseMode.IN_PLACE))
    engine.step(*[generate(f"r{number}", prompt(20, number)) for number in range(2)])
    engine.step(*choices("a", 3))
    assert [life.refusal for life in engine.lives[2:]] == [RefusalKind.BUSY] * 3
    first, second = choices("b", 2)
    engine.step(first)
    # The place of the second is the answer's, whoever else comes.
    engine.step(generate("r2", prompt(20, 2)), second, generate("r3", prompt(20, 3)))
    assert [life.refusal for life in engine.lives[5:]] == [None, None, None, RefusalKind.BUSY]


def test_more_choices_than_may_ever_wait_are_told_so() -> None:
    engine = SimulatedEngine(max_queued_requests=2)
    refused = engine.scheduler.refusal_of(choices("a", 3)[0])
    assert refused is not None
    assert refused.message == "3 choices must wait together, max_queued_requests is 2; ask for fewer in one request"


def test_refusal_of_counts_what_is_on_its_way() -> None:
    engine = SimulatedEngine(max_queued_requests=2)
    message = generate("r", prompt(20))
    scheduler = engine.scheduler
    assert scheduler.refusal_of(message, queued=1) is None
    busy = scheduler.refusal_of(message, queued=2)
    assert busy is not None
    assert busy.kind is RefusalKind.BUSY
    taken = scheduler.refusal_of(message, taken=frozenset(["r"]))
    assert taken is not None
    assert taken.kind is RefusalKind.DUPLICATE


def test_nothing_is_admitted_once_the_pipeline_is_gone() -> None:
    """A dead or late stage ends every stream with an error (A06)."""
    engine = SimulatedEngine()
    engine.apply(PipelineFailed(process="stage 2", cause="killed by signal 9"))
    reply = refusal(engine, generate("r", prompt(20)))
    assert reply.kind is RefusalKind.UNAVAILABLE
    assert "stage 2" in reply.message


def test_max_running_requests_bounds_the_rows() -> None:
    """Policies and limits hold at every size (B17)."""
    engine = SimulatedEngine(max_running_requests=2)
    engine.step(*[generate(f"r{number}", prompt(20, number)) for number in range(5)])
    assert engine.microbatches[0].rids == ("r0", "r1")
    engine.drain()
    assert all(len(life.tokens) == 4 for life in engine.lives)


def test_oversize_head_is_passed_but_not_forever() -> None:
    """B10: those after it run, and after a bound all wait until it fits."""
    engine = SimulatedEngine(page_size=4, max_total_tokens=64, max_running_requests=4)
    engine.step(generate("runs", prompt(10), 30))
    engine.step(generate("head", prompt(55, 1), 2), completions=1)
    small = [generate(f"s{number}", prompt(3, number + 2), 3) for number in range(40)]
    engine.step(*small, completions=1)
    engine.drain()
    started = list(dict.fromkeys(rid for microbatch in engine.microbatches for rid in microbatch.rids))
    assert started.index("head") - 1 == OVERTAKEN_LIMIT_REQUESTS
    assert all(life.finish_reason is FinishReason.LENGTH for life in engine.lives)


def test_longest_prefix_match_goes_first() -> None:
    """Policies and limits hold at every size (B17)."""
    engine = SimulatedEngine(schedule_policy="lpm", page_size=4, chunked_prefill_size=64)
    engine.run(generate("seed", prompt(40)))
    prompts = {"none": prompt(40, 1), "some": prompt(20) + prompt(20, 2), "most": prompt(40)}
    engine.step(*[generate(rid, ids) for rid, ids in prompts.items()])
    engine.drain()
    started = list(dict.fromkeys(rid for microbatch in engine.microbatches for rid in microbatch.rids))
    assert started == ["seed", "most", "some", "none"]


def test_highest_priority_goes_first() -> None:
    """Policies and limits hold at every size (B17)."""
    engine = SimulatedEngine(schedule_policy="priority", max_running_requests=1)
    engine.step(*[generate(f"r{number}", prompt(9, number), 1, priority=number % 3) for number in range(6)])
    engine.drain()
    assert [microbatch.rids[0] for microbatch in engine.microbatches] == ["r2", "r5", "r1", "r4", "r0", "r3"]


def test_stats_answer() -> None:
    engine = SimulatedEngine()
    engine.step(generate("r", prompt(20)))
    reply = engine.step(GetStats(call_id="stats")).replies[0]
    assert isinstance(reply, StatsAnswer)
    assert (reply.stats.in_flight, reply.stats.requests_started, reply.stats.prompt_tokens) == (1, 1, 20)


class Untouchable(list[int]):
    """Tokens of a request that no code has a reason to look at."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("a step walked the tokens of a request that is not in its batch")

    def __getitem__(self, _: object) -> int:  # type: ignore[override]
        raise AssertionError("a step read the tokens of a request that is not in its batch")


def test_a_step_touches_its_batch_alone() -> None:
    """B16: adding requests computes nothing and takes no memory; decoding one never looks at those that wait."""
    engine = SimulatedEngine(max_running_requests=1)
    engine.step(generate("runs", prompt(10), 6))
    free = engine.scheduler.memory.pages.free
    result = engine.step(*[generate(f"r{i}", prompt(40, i + 1), 2) for i in range(50)])
    assert result.microbatch is None or result.microbatch.rids == ("runs",)
    assert engine.scheduler.memory.pages.free == free
    waiting = engine.scheduler.books.waiting
    assert len(waiting) == 50
    kept = [request.ids for request in waiting]
    for request in waiting:
        request.ids = Untouchable(request.ids)
    while len(engine.life("runs").tokens) < 5:
        engine.step(completions=1)
    for request, ids in zip(waiting, kept, strict=True):
        request.ids = ids
    engine.drain()
    assert all(engine.life(f"r{i}").ended for i in range(50))
