"""Endings: one terminal reply each, memory freed once, with anything in flight."""

from __future__ import annotations

import pytest
from simulated_engine import SimulatedEngine, alone, generate, prompt

from engine.core.errors import IntegrityError
from engine.core.messages import Abort, AbortAll, Completion, FinishReason, PipelineFailed
from scripted.core.mutant import Mutant
from scripted.core.schedule import Schedule
from scripted.search.execution import execute

PP4 = {"pp_size": 4, "pp_async_depth": 2, "chunked_prefill_size": 64}


def is_clean(engine: SimulatedEngine) -> bool:
    memory = engine.scheduler.memory
    return engine.scheduler.is_fully_idle and not memory.pages.held and memory.rows.free == memory.rows.total


def test_finished_requests_leave_every_registry() -> None:
    """A finished request leaves every registry (B05)."""
    engine = SimulatedEngine(**PP4)
    engine.run(*[generate(f"r{number}", prompt(30, number)) for number in range(5)])
    books = engine.scheduler.books
    assert [*books.requests, *books.waiting, *books.running, *books.releasing, *books.in_flight] == []
    assert is_clean(engine)


def test_stop_token_ends_and_is_named() -> None:
    engine = SimulatedEngine()
    token = alone(generate("r", prompt(20)))[2]
    engine.step(generate("r", prompt(20), 9, stop_token_ids=(token,)))
    for _ in range(2):
        engine.step(completions=1)
    reply = engine.step(completions=1).replies[0]
    assert (reply.finish_reason, reply.stop_token_id, reply.token_ids) == (FinishReason.STOP, token, (token,))
    assert is_clean(engine)


@pytest.mark.parametrize("landed", range(8))
def test_abort_at_any_moment_frees_once(landed: int) -> None:
    """B11, B12: waiting, partly prefilled, dispatched, running, also when no further step runs."""
    engine = SimulatedEngine(**PP4)
    engine.step(generate("r", prompt(150), 9))
    for _ in range(landed):
        engine.step(completions=1)
    tokens = len(engine.life("r").tokens)
    engine.abort("r")
    engine.abort("r")
    assert engine.life("r").finish_reason is FinishReason.ABORT
    assert is_clean(engine) is (engine.in_flight == 0)
    engine.drain()
    assert is_clean(engine)
    assert len(engine.life("r").tokens) == tokens


def test_abort_between_last_chunk_and_its_result_shows_no_token() -> None:
    """After an abort no token is shown (B14)."""
    engine = SimulatedEngine(**PP4)
    engine.fill_until(generate("r", prompt(125)), chunked=True)
    engine.fill_until(chunked=False)
    replies = engine.abort("r").replies
    assert [(reply.rid, reply.token_ids) for reply in replies] == [("r", ())]
    assert engine.scheduler.memory.pages.held > 0, "the stages still write there"
    assert not engine.step(completions=2).replies
    assert is_clean(engine)


def test_rid_is_free_again_in_the_step_of_its_abort() -> None:
    """B07, D04: the old request is released when its result is back, the new one inherits nothing."""
    engine = SimulatedEngine(**PP4)
    engine.step(generate("r", prompt(50)))
    engine.step(Abort(rid="r"), generate("r", prompt(60, 1)))
    engine.drain()
    assert engine.lives[0].finish_reason is FinishReason.ABORT
    assert engine.lives[1].tokens == alone(generate("r", prompt(60, 1)))
    assert not engine.pipeline.corruptions


def test_abort_all_answers_once() -> None:
    engine = SimulatedEngine(**PP4)
    engine.step(*[generate(f"r{number}", prompt(100, number)) for number in range(3)])
    engine.step(AbortAll(call_id="all"), completions=1)
    assert engine.answers["all"].message == "aborted 3 requests"
    engine.drain()
    assert is_clean(engine)


def test_an_abort_says_whether_there_was_anything_to_abort() -> None:
    engine = SimulatedEngine()
    engine.step(generate("r", prompt(20), 9))
    engine.step(Abort(rid="r", call_id="first"), Abort(rid="r", call_id="second"), completions=1)
    assert engine.answers["first"].message == "r: aborted"
    assert engine.answers["second"].message == "r: not alive, nothing to abort"


def test_abort_by_a_stop_string_counts_as_a_finish() -> None:
    engine = SimulatedEngine()
    engine.step(generate("r", prompt(20), 9))
    engine.step(Abort(rid="r", finish_reason=FinishReason.STOP), completions=1)
    stats = engine.scheduler.stats()
    assert engine.life("r").finish_reason is FinishReason.STOP
    assert (stats.requests_finished, stats.requests_aborted) == (1, 0)


def test_failed_microbatch_fails_its_own_requests_only() -> None:
    """A failure stays alone and never ends the process (A05)."""
    engine = SimulatedEngine(pp_size=4, chunked_prefill_size=32)
    engine.step(generate("good", prompt(20), 9))
    engine.pipeline.fail_next_step(2)
    engine.step(generate("bad", prompt(80, 1), 9))
    engine.drain()
    assert engine.life("bad").finish_reason is FinishReason.ERROR
    assert "stage 2" in str(engine.life("bad").error)
    assert engine.life("good").tokens == alone(generate("good", prompt(20), 9))
    assert not engine.pipeline.corruptions
    assert is_clean(engine)


def test_dead_pipeline_ends_every_request_with_its_cause() -> None:
    """A06: in flight, running, waiting: no stream ends in silence or as if it were complete."""
    engine = SimulatedEngine(**PP4, max_running_requests=2)
    engine.step(*[generate(f"r{number}", prompt(100, number)) for number in range(4)])
    engine.step()
    engine.abort("r0")
    engine.pipeline.kill_stage(1)
    engine.step(completions=1)
    assert [life.finish_reason for life in engine.lives] == [FinishReason.ABORT] + [FinishReason.ERROR] * 3
    assert all("stage-1" in str(life.error) for life in engine.lives[1:])
    assert is_clean(engine)


def test_late_result_of_a_microbatch_that_was_given_up_is_dropped() -> None:
    """A late result is dropped (B12)."""
    engine = SimulatedEngine()
    engine.step(generate("r", prompt(20)))
    engine.apply(PipelineFailed(process="stage 0", cause="gone"))
    assert not engine.apply(Completion(microbatch_id=0, token_ids=(65,))).replies


def test_results_out_of_order_are_an_integrity_error() -> None:
    """B12: results carry their microbatch's id."""
    engine = SimulatedEngine(**PP4)
    engine.step(generate("r", prompt(125)))
    engine.step()
    with pytest.raises(IntegrityError, match=r"microbatch 1 came back, but \(0, 1\) are in flight"):
        engine.scheduler.step((Completion(microbatch_id=1),), 0.0)


@pytest.mark.parametrize("tokens", [(), (65, 66)])
def test_result_with_the_wrong_number_of_tokens_is_an_integrity_error(tokens: tuple[int, ...]) -> None:
    engine = SimulatedEngine()
    engine.step(generate("r", prompt(20)))
    with pytest.raises(IntegrityError, match="1 of its segments"):
        engine.scheduler.step((Completion(microbatch_id=0, token_ids=tokens),), 0.0)


def test_usage_counts_prompt_cached_and_completion_tokens() -> None:
    engine = SimulatedEngine()
    engine.run(generate("a", prompt(40)))
    engine.step(generate("b", prompt(40), 1))
    reply = engine.step(completions=1).replies[0]
    assert (reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens) == (40, 32, 1)


def test_the_first_death_is_the_cause_of_all_that_follows() -> None:
    """Stages die one after another; the first is named, also to those who come after the second."""
    schedule = "pp_size=2; 1 start a prompt=30 new=5; 3 kill stage=1; 4 kill; 6 start b prompt=5 new=2"
    assert execute(Schedule.parse(schedule)).failure is None
    with Mutant(
        name="the-last-death-counts",
        origin="attack",
        bug="a second death replaces the cause",
        signature="",
        test="",
        target="engine.core.scheduler.scheduler:Scheduler._on_pipeline_failed",
        cut="self.failure = self.failure or failed",
        becomes="self.failure = failed",
    ).switched_on():
        failure = execute(Schedule.parse(schedule)).failure
    assert failure is not None
    assert "stage-0" in failure.text
