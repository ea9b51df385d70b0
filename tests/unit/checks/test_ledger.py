"""The state ledger catches an engine that lies to itself: every fault here leaves the engine's own books in balance."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from engine import EngineConfig
from engine.limits import EMBEDDED_FACTS, Limits
from engine.memory import KVMemory, RadixTree
from engine.messages import Completion, Event, FinishReason, Generate, Refusal, RefusalKind, SamplingParams, TokenOutput
from engine.plan import Microbatch, Segment
from engine.scheduler import Books, Scheduler, StepResult
from engine.scheduler.quiescent_calls import QuiescentCalls
from scripted import ScriptedSim, ScriptFailed
from scripted.checks.ledger import Ledger

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
    """A fault in every segment behind the first microbatch."""

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


FAULTS: dict[str, tuple[Tamper, str]] = {
    "a token is told to nobody": (outputs(lambda _: None), "account for the outputs"),
    "another token is told": (outputs(other_token), "account for the outputs"),
    "a request is told to end too early": (outputs(stopped), "account for the outputs"),
    "the answer is counted wrong": (outputs(miscounted), "account for the outputs"),
    "the prompt is counted wrong": (outputs(another_prompt), "account for the outputs"),
    "a stage is told of other pages": (segments(shifted_pages), "page"),
    "a position is computed twice": (segments(lambda s: with_(start=s.start - 1)(s)), "is due at position"),
    "another request's row is used": (segments(lambda s: with_(row=s.row + 3)(s)), "row"),
    "a token comes of nothing": (segments(lambda s: with_(emits=not s.emits)(s)), "emit one is"),
    "a tenant moves in twice": (segments(lambda s: with_(sampling=None)(s)), "row"),
    "a stranger is computed": (segments(with_(rid="nobody")), "not alive"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_that_leaves_the_books_in_balance_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """D02, B05: what crosses the gate is not what the engine's books say."""
    tamper, words = FAULTS[fault]
    follow = Ledger.follow

    def told_lies(self: Ledger, events: tuple[Event, ...], result: StepResult) -> None:
        follow(self, events, tamper(result))

    monkeypatch.setattr(Ledger, "follow", told_lies)
    with ScriptedSim.start(CONFIG) as sim, pytest.raises(ScriptFailed, match=words) as caught:
        sim.run(two_requests)
    assert "IntegrityError" in str(caught.value)


@pytest.mark.parametrize(
    ("counter", "name"),
    [
        ("requests_started", "started"),
        ("requests_refused", "refused"),
        ("requests_finished", "finished"),
        ("requests_aborted", "aborted"),
        ("prompt_tokens", "prompt tokens"),
        ("generated_tokens", "generated tokens"),
        ("forward_ct", "launched"),
    ],
)
def test_totals_that_differ_are_named(monkeypatch: pytest.MonkeyPatch, counter: str, name: str) -> None:
    """D02: what the server's metrics say is what its clients were told."""
    compare = Ledger.compare

    def counted_twice(self: Ledger, scheduler: Scheduler) -> None:
        setattr(scheduler.counters, counter, getattr(scheduler.counters, counter) + 1)
        compare(self, scheduler)

    monkeypatch.setattr(Ledger, "compare", counted_twice)
    with ScriptedSim.start(CONFIG) as sim, pytest.raises(ScriptFailed, match=f"{name}: the ledger says"):
        sim.run(two_requests)


def flush_in_flight(t):
    r = t.start_req(prompt_len=20, max_new_tokens=2)
    yield
    t.flush_cache()
    yield from t.run_until_finished(r)


def test_flush_that_should_have_been_refused_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """G01: at once, not when the result comes back."""
    monkeypatch.setattr(QuiescentCalls, "ask", lambda self, flush, _: self._flush(flush))
    with ScriptedSim.start(CONFIG) as sim, pytest.raises(ScriptFailed, match=r"flushed while microbatches \[0\]"):
        sim.run(flush_in_flight)


def test_idle_predicate_that_overlooks_results_in_flight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """G01: before anybody relies on it."""
    monkeypatch.setattr(Books, "nothing_in_flight", True)
    with ScriptedSim.start(CONFIG) as sim, pytest.raises(ScriptFailed, match="quiescent: the ledger says False"):
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


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(LIMITS)


def test_two_requests_of_one_rid_are_found(ledger: Ledger) -> None:
    """D04"""
    ledger.follow((generate("r"),), result())
    with pytest.raises(AssertionError, match="another request of this rid is alive"):
        ledger.follow((generate("r"),), result())


def test_refusal_of_nothing_is_found(ledger: Ledger) -> None:
    refusal = Refusal(rid="r", kind=RefusalKind.DUPLICATE, message="alive")
    with pytest.raises(AssertionError, match="answers no request"):
        ledger.follow((generate("r"),), result(refusal))


def test_reply_to_nobody_is_found(ledger: Ledger) -> None:
    with pytest.raises(AssertionError, match="account for the outputs"):
        ledger.follow((), result(TokenOutput(rid="r", token_ids=(1,))))


def test_result_of_a_microbatch_that_was_given_up_is_ignored(ledger: Ledger) -> None:
    """B12: it changes no account, so the books of an engine that saw nothing still agree."""
    ledger.follow((Completion(microbatch_id=3),), result())
    ledger.compare(Scheduler(LIMITS))


def test_books_that_differ_are_named(ledger: Ledger) -> None:
    """B05"""
    ledger.follow((generate("r"),), result())
    with pytest.raises(AssertionError, match="waiting: the ledger says 1, the books say 0"):
        ledger.compare(Scheduler(LIMITS))
