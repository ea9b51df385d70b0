"""The oracle catches an engine that lies to itself: each fault leaves the engine's own books in balance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from scripted_lockstep.machine import EngineMachine
from scripted_lockstep.oracle.step_checks import EngineOracle

from engine import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.memory import KVMemory, RadixTree
from engine.core.messages import (
    Abort,
    AbortAll,
    CallAnswer,
    Completion,
    ContinueGeneration,
    Event,
    FinishReason,
    Generate,
    Refusal,
    RefusalKind,
    SamplingParams,
    TokenOutput,
)
from engine.core.plan import Microbatch, Segment
from engine.core.scheduler import Scheduler, StepResult
from engine.core.scheduler.flush_and_update import FlushAndUpdate
from scripted import ScriptedSim, ScriptFailed
from scripted.core.run import Run
from scripted.core.schedule import Schedule
from scripted.core.violation import Violation

CONFIG = EngineConfig(pp_size=2, pp_async_depth=1, chunked_prefill_size=64, page_size=16)
LIMITS = Limits.of(CONFIG, EMBEDDED_FACTS)

Tamper = Callable[[StepResult], StepResult]


def two_requests(t):
    rs = [t.start_req(prompt_len=150, max_new_tokens=20, prompt_seed=seed) for seed in range(2)]
    yield from t.run_until_all_finished(rs)
    again = t.start_req(prompt_len=150, max_new_tokens=3)
    yield from t.run_until_finished(again)
    assert again.cached_tokens


def outputs(change: Callable[[TokenOutput], TokenOutput | None]) -> Tamper:
    """A fault in every output that brings a token."""

    def tamper(result: StepResult) -> StepResult:
        replies = [change(r) if isinstance(r, TokenOutput) and r.token_ids else r for r in result.replies]
        return msgspec.structs.replace(result, replies=tuple(r for r in replies if r is not None))

    return tamper


def segments(change: Callable[[Segment], Segment]) -> Tamper:
    """A fault in every segment after the first microbatch."""

    def tamper(result: StepResult) -> StepResult:
        if result.microbatch is None or result.microbatch.id < 1:
            return result
        changed = tuple(change(segment) for segment in result.microbatch.segments)
        return msgspec.structs.replace(result, microbatch=msgspec.structs.replace(result.microbatch, segments=changed))

    return tamper


def with_(**fields: object) -> Callable[[Segment], Segment]:
    return lambda segment: msgspec.structs.replace(segment, **fields)


def shifted_pages(segment: Segment) -> Segment:
    return msgspec.structs.replace(segment, pages=tuple(page + 1 for page in segment.pages))


def other_order(segment: Segment) -> Segment:
    hits = segment.start and not segment.page_start
    return msgspec.structs.replace(segment, pages=segment.pages[::-1]) if hits else segment


def other_token(output: TokenOutput) -> TokenOutput:
    return msgspec.structs.replace(output, token_ids=(output.token_ids[0] ^ 1,))


def stopped(output: TokenOutput) -> TokenOutput:
    return msgspec.structs.replace(output, finish_reason=FinishReason.STOP)


def miscounted(output: TokenOutput) -> TokenOutput:
    return msgspec.structs.replace(output, completion_tokens=output.completion_tokens + 1)


def another_prompt(output: TokenOutput) -> TokenOutput:
    return msgspec.structs.replace(output, prompt_tokens=output.prompt_tokens - 1)


def more_cached(output: TokenOutput) -> TokenOutput:
    return msgspec.structs.replace(output, cached_tokens=output.cached_tokens + 16)


FAULTS: dict[str, tuple[Tamper, str]] = {
    "a token is told to no client": (outputs(lambda _: None), "rule Result"),
    "another token is told": (outputs(other_token), "rule Result"),
    "a request is told to end too early": (outputs(stopped), "is launched, but has ended"),
    "the answer is counted wrong": (outputs(miscounted), "rule Result"),
    "the prompt is counted wrong": (outputs(another_prompt), "rule Result"),
    "the cache is credited": (outputs(more_cached), "rule Cached tokens"),
    "a stage is told of other pages": (segments(shifted_pages), "page"),
    "a stage is told of shared pages in another order": (segments(other_order), "does not hold its tokens"),
    "a position is computed twice": (segments(lambda s: with_(start=s.start - 1)(s)), "computes position .* again"),
    "another request's row is used": (segments(lambda s: with_(row=s.row + 3)(s)), "row"),
    "a token comes of nothing": (segments(lambda s: with_(emits=not s.emits)(s)), "rule Chunks"),
    "a request gets a row twice": (segments(lambda s: with_(sampling=None)(s)), "rule Sampling"),
    "a stranger is computed": (segments(with_(rid="stranger")), "stranger is launched, but never arrived"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_that_leaves_the_books_in_balance_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """D02, B05: what crosses the gate is not what the engine's books say."""
    tamper, words = FAULTS[fault]
    check_step = EngineOracle.check_step

    def told_lies(
        self: EngineOracle, events: Sequence[Event], result: StepResult, scheduler: Scheduler, **more: Any
    ) -> None:
        check_step(self, events, tamper(result), scheduler, **more)

    monkeypatch.setattr(EngineOracle, "check_step", told_lies)
    with ScriptedSim.start(CONFIG) as sim, pytest.raises(ScriptFailed, match=words):
        sim.run(two_requests)


def flush_in_flight(t):
    r = t.start_req(prompt_len=20, max_new_tokens=2)
    yield
    t.flush_cache()
    yield from t.run_until_finished(r)


def test_flush_that_should_have_been_refused_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """G01: at once, not when the result comes back, even if the engine's own audit is silent."""
    monkeypatch.setattr(FlushAndUpdate, "ask", lambda self, flush, _: self._do(flush))
    monkeypatch.setattr(FlushAndUpdate, "_drop_cache", lambda self: 0)
    with ScriptedSim.start(CONFIG) as sim, pytest.raises(ScriptFailed, match="rule Calls: ok of CallAnswer"):
        sim.run(flush_in_flight)


def test_prefix_that_holds_other_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree and its audit agree that the pages are cached; that they hold something else it cannot know."""
    publish = KVMemory.publish

    def swapped(self: KVMemory, lease, ids, *, counts):
        first, second, *rest = (ids[start : start + 16] for start in range(0, len(ids), 16))
        publish(self, lease, [*second, *first, *(token for page in rest for token in page)], counts=counts)

    def script(t):
        r = t.start_req(prompt_len=48, max_new_tokens=1)
        yield from t.run_until_finished(r)
        ids = list(r.prompt_ids)
        monkeypatch.setattr(KVMemory, "publish", publish)
        later = t.start_req(prompt_ids=ids[16:32] + ids[:16] + [1, 2], max_new_tokens=1)
        yield from t.run_until_finished(later)

    monkeypatch.setattr(KVMemory, "publish", swapped)
    with ScriptedSim.start(CONFIG) as sim, pytest.raises(ScriptFailed, match="rule Hit"):
        sim.run(script)


def test_page_that_is_evicted_under_a_reader_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RadixTree, "lock", lambda *_: None)
    monkeypatch.setattr(RadixTree, "unlock", lambda *_: None)
    with ScriptedSim.start(CONFIG) as sim, pytest.raises(ScriptFailed, match="Integrity"):
        sim.run(two_requests)


# -- by hand --


def generate(rid: str, tokens: int = 4) -> Generate:
    sampling = SamplingParams(max_new_tokens=2, temperature=0.0)
    return Generate(rid=rid, prompt_ids=tuple(range(tokens)), sampling=sampling)


def result(*replies: object, microbatch: Microbatch | None = None) -> StepResult:
    return StepResult(1, microbatch, replies, False, None)  # type: ignore[arg-type]


def after(checks: EngineOracle, *events: Event, replies: tuple[object, ...] = ()) -> None:
    """Check a step by the promises of every scheduler, without the specification."""
    checks.conformance = None
    checks.check_step(events, result(*replies), Scheduler(LIMITS))


@pytest.fixture
def checks() -> EngineOracle:
    return EngineOracle(LIMITS)


def test_two_requests_of_one_rid_are_found(checks: EngineOracle) -> None:
    """A reused rid inherits nothing (D04)."""
    after(checks, generate("r"))
    with pytest.raises(Violation, match="two requests of one rid are alive: r"):
        after(checks, generate("r"))


def test_a_rid_is_free_in_the_step_that_ends_its_owner(checks: EngineOracle) -> None:
    """B12: the client that aborted the old request gets its answer first."""
    after(checks, generate("r"))
    after(checks, Abort(rid="r"), generate("r"), replies=(TokenOutput(rid="r", finish_reason=FinishReason.ABORT),))
    assert [life.end for life in checks.account.lives] == ["abort", None]


def test_the_second_of_two_requests_of_one_rid_is_refused(checks: EngineOracle) -> None:
    refusal = Refusal(rid="r", kind=RefusalKind.DUPLICATE, message="alive")
    after(checks, generate("r"), generate("r"), replies=(refusal,))
    assert [life.end for life in checks.account.lives] == [None, "refused"]


def test_refusal_of_nothing_is_found(checks: EngineOracle) -> None:
    refusal = Refusal(rid="r", kind=RefusalKind.DUPLICATE, message="alive")
    with pytest.raises(Violation, match="r is refused, but there is no such request"):
        after(checks, replies=(refusal,))


def test_reply_to_a_stranger_is_found(checks: EngineOracle) -> None:
    with pytest.raises(Violation, match=r"r is told \[1\] \(None\), but there is no such request"):
        after(checks, replies=(TokenOutput(rid="r", token_ids=(1,)),))


def test_an_end_that_nothing_explains_is_found(checks: EngineOracle) -> None:
    after(checks, generate("a"), generate("b"))
    with pytest.raises(Violation, match="a ends with abort, but nothing aborted it"):
        after(checks, replies=(TokenOutput(rid="a", finish_reason=FinishReason.ABORT),))
    with pytest.raises(Violation, match="b ends with an error, but no batch of it failed"):
        after(checks, replies=(TokenOutput(rid="b", finish_reason=FinishReason.ERROR),))


def test_result_of_a_microbatch_that_was_given_up_is_ignored(checks: EngineOracle) -> None:
    """B12: it changes no account."""
    after(checks, Completion(microbatch_id=3))
    assert checks.is_settled


def test_calls_are_answered_once(checks: EngineOracle) -> None:
    answer = CallAnswer(call_id="x", ok=True, message="")
    with pytest.raises(Violation, match="the call x is answered, but it was never made"):
        after(checks, replies=(answer,))
    after(checks, ContinueGeneration(call_id="x"), replies=(answer,))
    with pytest.raises(Violation, match="the call x is answered, but it was answered before"):
        after(checks, replies=(answer,))
    after(checks, AbortAll(call_id="y"))
    with pytest.raises(Violation, match="something waits forever: y"):
        checks.at_rest(EngineMachine(LIMITS, digests=False))


REFUSALS = {
    "in nobody's way": ((), Refusal(rid="r", kind=RefusalKind.DUPLICATE, message="'r' is alive"), "due is None"),
    "of another rule": ((generate("r"),), Refusal(rid="r", kind=RefusalKind.BUSY, message=""), "due is duplicate"),
    "without its rule": ((generate("r"),), Refusal(rid="r", kind=RefusalKind.DUPLICATE, message="no"), "must say"),
    "after an abort": (
        (generate("r"), Abort(rid="r")),
        Refusal(rid="r", kind=RefusalKind.DUPLICATE, message="'r' is alive"),
        "due is None",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_by_the_front_end_is_judged_by_what_is_ahead_of_it(checks: EngineOracle, name: str) -> None:
    ahead, refusal, words = REFUSALS[name]
    with pytest.raises(Violation, match=words):
        checks.check_refusal(generate("r"), refusal, ahead)


def test_a_rid_has_a_new_owner_while_the_old_one_is_in_flight() -> None:
    """The counts of an aborted request are not its successor's."""
    text = "chunked_prefill_size=16; 2 start a prompt=17 new=1; 3 hold; 3 abort a; 3 start a prompt=1 new=1; 5 release"
    gate = Run(Schedule.parse(text))
    gate.adapter.drive(gate)


def test_of_two_requests_of_one_rid_the_first_may_be_the_refused_one() -> None:
    """A refusal says a rid alone; the second one is computed, which nobody has aborted."""
    gate = Run(Schedule.parse("default; 1 start a prompt=1 new=1 lora=x; 1 abort a; 1 start a prompt=1 new=1"))
    gate.adapter.drive(gate)
    assert [life.end for life in gate.oracle.account.lives] == ["refused", "length"]
