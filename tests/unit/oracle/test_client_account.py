"""The account of clients catches an engine that lies to itself: each fault leaves the engine's own books in balance."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from engine import EngineConfig
from engine.limits import EMBEDDED_FACTS, Limits
from engine.memory import KVMemory, RadixTree
from engine.messages import (
    AbortAll,
    CallAnswer,
    Completion,
    ContinueGeneration,
    Event,
    FinishReason,
    FlushCache,
    Generate,
    Refusal,
    RefusalKind,
    SamplingParams,
    TokenOutput,
    UpdateWeights,
)
from engine.plan import Microbatch, Segment
from engine.scheduler import Scheduler, StepResult
from engine.scheduler.flush_and_update import FlushAndUpdate
from scripted import ScriptedSim, ScriptFailed
from scripted.adapters.lockstep.oracle import step_checks
from scripted.adapters.lockstep.oracle.client_account import ClientAccount
from scripted.adapters.lockstep.oracle.counters import compare_counts
from scripted.adapters.lockstep.oracle.ledger import Ledger
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
    "a token is told to no client": (outputs(lambda _: None), "has a result, but its client was not told"),
    "another token is told": (outputs(other_token), "is told the tokens"),
    "a request is told to end too early": (outputs(stopped), "nothing explains that"),
    "the answer is counted wrong": (outputs(miscounted), "is told the counts"),
    "the prompt is counted wrong": (outputs(another_prompt), "is told the counts"),
    "the cache is credited": (outputs(more_cached), "cached tokens, but began at"),
    "a stage is told of other pages": (segments(shifted_pages), "page"),
    "a position is computed twice": (segments(lambda s: with_(start=s.start - 1)(s)), "is due at position"),
    "another request's row is used": (segments(lambda s: with_(row=s.row + 3)(s)), "row"),
    "a token comes of nothing": (segments(lambda s: with_(emits=not s.emits)(s)), "emits one is"),
    "a tenant moves in twice": (segments(lambda s: with_(sampling=None)(s)), "row"),
    "a stranger is computed": (segments(with_(rid="stranger")), "not alive"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_that_leaves_the_books_in_balance_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """D02, B05: what crosses the gate is not what the engine's books say."""
    tamper, words = FAULTS[fault]
    follow = ClientAccount.follow

    def told_lies(self: ClientAccount, events: tuple[Event, ...], result: StepResult, now: float) -> None:
        follow(self, events, tamper(result), now)

    monkeypatch.setattr(ClientAccount, "follow", told_lies)
    with ScriptedSim.start(CONFIG) as sim, pytest.raises(ScriptFailed, match=words) as caught:
        sim.run(two_requests)
    assert "Violation" in str(caught.value)


@pytest.mark.parametrize(
    "counter",
    [
        "requests_started",
        "requests_refused",
        "requests_finished",
        "requests_aborted",
        "prompt_tokens",
        "cached_tokens",
        "generated_tokens",
        "forward_ct",
        "weights_version",
    ],
)
def test_totals_that_differ_are_named(monkeypatch: pytest.MonkeyPatch, counter: str) -> None:
    """D02: what the server's metrics say is what its clients were told."""

    def counted_twice(ledger: Ledger, scheduler: Scheduler) -> None:
        setattr(scheduler.counters, counter, getattr(scheduler.counters, counter) + 1)
        compare_counts(ledger, scheduler)

    monkeypatch.setattr(step_checks, "compare_counts", counted_twice)
    with (
        ScriptedSim.start(CONFIG) as sim,
        pytest.raises(ScriptFailed, match=f"{counter} is .*, but the clients' count"),
    ):
        sim.run(two_requests)


def flush_in_flight(t):
    r = t.start_req(prompt_len=20, max_new_tokens=2)
    yield
    t.flush_cache()
    yield from t.run_until_finished(r)


def test_flush_that_should_have_been_refused_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """G01: at once, not when the result comes back, even if the engine's own audit is silent."""
    monkeypatch.setattr(FlushAndUpdate, "ask", lambda self, flush, _: self._flush(flush))
    monkeypatch.setattr(FlushAndUpdate, "_drop_cache", lambda self: 0)
    with ScriptedSim.start(CONFIG) as sim, pytest.raises(ScriptFailed, match="flushed while something is in flight"):
        sim.run(flush_in_flight)


def test_prefix_that_holds_other_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree and its audit agree that the pages are cached; that they hold something else only the ledger knows."""
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
    with ScriptedSim.start(CONFIG) as sim, pytest.raises(ScriptFailed, match="does not hold its tokens"):
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


def quiet_step(step: int) -> StepResult:
    return StepResult(step, None, (), again=False, deadline=None)


@pytest.fixture
def clients() -> ClientAccount:
    return ClientAccount(LIMITS)


def test_two_requests_of_one_rid_are_found(clients: ClientAccount) -> None:
    """D04"""
    clients.follow((generate("r"),), result(), 0.0)
    with pytest.raises(Violation, match="r must be refused as duplicate, but is not"):
        clients.follow((generate("r"),), quiet_step(2), 0.0)


def test_refusal_of_nothing_is_found(clients: ClientAccount) -> None:
    refusal = Refusal(rid="r", kind=RefusalKind.DUPLICATE, message="alive")
    with pytest.raises(Violation, match="r is refused as duplicate, but nothing is in its way"):
        clients.follow((generate("r"),), result(refusal), 0.0)


def test_refusal_for_a_full_queue_is_judged(clients: ClientAccount) -> None:
    """A 429 before the queue is at its limit is one too many, and a request beyond the limit needs one."""
    small = ClientAccount(msgspec.structs.replace(LIMITS, max_queued_requests=1))
    busy = Refusal(rid="b", kind=RefusalKind.BUSY, message="1 requests wait")
    small.follow((generate("a"), generate("b")), result(busy), 0.0)
    with pytest.raises(Violation, match="b is refused as busy"):
        clients.follow((generate("a"), generate("b")), result(busy), 0.0)
    with pytest.raises(Violation, match="c must be refused as busy"):
        small.follow((generate("c"),), quiet_step(2), 0.0)


def test_reply_to_a_stranger_is_found(clients: ClientAccount) -> None:
    with pytest.raises(Violation, match="r gets a reply after its terminal one, or without being alive"):
        clients.follow((), result(TokenOutput(rid="r", token_ids=(1,))), 0.0)


def test_result_of_a_microbatch_that_was_given_up_is_ignored(clients: ClientAccount) -> None:
    """B12: it changes no account, so the books of an engine that saw nothing still agree."""
    clients.follow((Completion(microbatch_id=3),), result(), 0.0)
    compare_counts(clients.ledger, Scheduler(LIMITS))


def test_books_that_differ_are_named(clients: ClientAccount) -> None:
    """B05"""
    clients.follow((generate("r"),), result(), 0.0)
    with pytest.raises(Violation, match="waiting is 1 by the account, 0 by the books"):
        compare_counts(clients.ledger, Scheduler(LIMITS))


ANSWERS = {
    "an answer without a call": ((), CallAnswer(call_id="x", ok=True, message=""), "no call is open"),
    "a call without an answer": ((ContinueGeneration(call_id="x"),), None, "not answered in its step"),
    "an abort that cannot be done": (
        (AbortAll(call_id="x"),),
        CallAnswer(call_id="x", ok=False, message="no"),
        "can always be done",
    ),
    "a flush of an idle engine that is refused": (
        (FlushCache(call_id="x"),),
        CallAnswer(call_id="x", ok=False, message="no"),
        "refused although nothing is in flight",
    ),
    "an update that was never launched": (
        (UpdateWeights(call_id="x", model_path="embedded:1"),),
        CallAnswer(call_id="x", ok=True, message=""),
        "its result is not back",
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_are_answered_once_and_truthfully(clients: ClientAccount, name: str) -> None:
    events, answer, words = ANSWERS[name]
    with pytest.raises(Violation, match=words):
        clients.follow(events, result() if answer is None else result(answer), 0.0)


def test_a_rid_has_a_new_owner_while_the_old_one_is_in_flight() -> None:
    """What the engine counts for the request that was aborted is not what its successor has."""
    text = "chunked_prefill_size=16; 2 start a prompt=17 new=1; 3 hold; 3 abort a; 3 start a prompt=1 new=1; 5 release"
    gate = Run(Schedule.parse(text))
    gate.adapter.drive(gate)
