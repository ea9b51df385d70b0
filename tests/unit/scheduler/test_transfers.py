"""Transfers in the scheduler alone: orders to the stages and the prefill engine, and the owners of pages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from engine.core.audit import audit
from engine.core.config import EngineConfig
from engine.core.errors import IntegrityError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import (
    Abort,
    Completion,
    Delivery,
    Event,
    FinishReason,
    Generate,
    PagesReceived,
    PagesSent,
    PauseGeneration,
    PauseMode,
    PipelineFailed,
    PrefillDropped,
    PrefillFailed,
    PrefillWanted,
    Refusal,
    RefusalKind,
    SamplingParams,
    TokenOutput,
)
from engine.core.plan import ReceivePages, SendPages, StopTransfer
from engine.core.scheduler import Place, Scheduler, StepResult

PAGE = 4
TIMEOUT_S = 30.0


class Engine:
    """A scheduler whose pipeline and transfers are played by the test; audited after every step."""

    def __init__(self, role: str, **config: object) -> None:
        sizes = {"page_size": PAGE, "chunked_prefill_size": 16, "max_total_tokens": 256, "pp_async_depth": 0}
        self.scheduler = Scheduler(Limits.of(EngineConfig(role=role, **sizes | config), EMBEDDED_FACTS))
        self.now = 0.0

    def step(self, *events: Event) -> StepResult:
        result = self.scheduler.step(events, self.now)
        audit(self.scheduler)
        return result

    def land(self, *tokens: int) -> StepResult:
        """The first microbatch in flight comes back."""
        first = self.scheduler.books.in_flight[0].microbatch.id
        return self.step(Completion(microbatch_id=first, token_ids=tokens))

    @property
    def held(self) -> int:
        return self.scheduler.memory.pages.held

    def place(self, rid: str) -> Place:
        request = self.scheduler.find_request(rid)
        assert request is not None
        return request.place


def prompt(tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((seed * 31 + place * place * 7 + place) % 200 for place in range(tokens))


def wanting(rid: str, tokens: int = 30, *, new: int = 4, **more: object) -> Generate:
    ids = more.pop("ids", None) or prompt(tokens, len(rid) + ord(rid[0]))
    return Generate(
        rid=rid, prompt_ids=ids, sampling=SamplingParams(max_new_tokens=new, temperature=0.0), prefill_at="p0", **more
    )


def delivery(rid: str, tokens: int = 40, **more: object) -> Generate:
    deliver = Delivery(**{"to": ("d0",), "transfer": 7} | more)
    return Generate(
        rid=rid, prompt_ids=prompt(tokens), sampling=SamplingParams(max_new_tokens=0, temperature=0.0), deliver=deliver
    )


def ends(result: StepResult) -> dict[str, FinishReason]:
    outputs = [reply for reply in result.replies if isinstance(reply, TokenOutput)]
    return {one.rid: one.finish_reason for one in outputs if one.finish_reason is not None}


def told(result: StepResult) -> Sequence[object]:
    return [reply for reply in result.replies if isinstance(reply, PrefillWanted | PrefillDropped)]


# -- what is asked for --


def test_a_request_asks_for_its_full_pages_and_has_room_for_them() -> None:
    engine = Engine("decode")
    message = wanting("a", priority=3, cache_salt="s")
    result = engine.step(message)
    assert told(result) == [
        PrefillWanted(
            rid="a",
            transfer=1,
            at="p0",
            ids=message.prompt_ids[:28],
            first_page=0,
            weights="",
            priority=3,
            cache_salt="s",
        )
    ]
    (order,) = result.transfers
    assert isinstance(order, ReceivePages)
    assert (order.transfer, len(order.pages), len(set(order.pages)), engine.held) == (1, 7, 7, 7)
    assert (result.microbatch, result.deadline) == (None, TIMEOUT_S)
    assert engine.place("a") is Place.RECEIVING


@pytest.mark.parametrize(
    "message",
    [
        msgspec.structs.replace(wanting("a"), prefill_at=None),
        wanting("a", tokens=4),
        wanting("a", prompt_logprobs_from=0),
    ],
    ids=["no prefill engine", "no full page before the last token", "prompt logprobs"],
)
def test_a_request_computes_all_by_itself(message: Generate) -> None:
    result = Engine("decode").step(message)
    assert (result.transfers, told(result)) == ((), [])
    assert result.microbatch is not None


def test_the_page_of_the_last_token_is_computed_here() -> None:
    result = Engine("decode").step(wanting("a", tokens=8))
    assert len(result.transfers[0].pages) == 1


def test_what_is_cached_is_not_asked_for() -> None:
    engine = Engine("decode")
    engine.step(msgspec.structs.replace(wanting("a", tokens=12, new=1), prefill_at=None))
    engine.land(5)
    result = engine.step(wanting("b", ids=wanting("a", tokens=12).prompt_ids + prompt(20, 9)))
    (wanted,) = told(result)
    assert (wanted.first_page, len(wanted.ids), len(result.transfers[0].pages)) == (3, 28, 4)


# -- what came --


@pytest.mark.parametrize(("pages", "start"), [(7, 28), (6, 24), (4, 16), (0, 0)])
def test_a_request_goes_on_after_what_came(pages: int, start: int) -> None:
    engine = Engine("decode")
    engine.step(wanting("a"))
    result = engine.step(PagesReceived(transfer=1, pages=pages))
    (segment,) = result.microbatch.segments
    assert (segment.start, len(segment.token_ids)) == (start, min(16, 30 - start))
    assert segment.sampling is not None
    assert (segment.page_start, len(segment.pages)) == (0, engine.held)
    assert result.deadline is None
    assert engine.scheduler.find_request("a").may_be_received is (pages == 7)


def test_more_than_was_asked_for_is_an_error() -> None:
    engine = Engine("decode")
    engine.step(wanting("a"))
    with pytest.raises(IntegrityError, match=r"8 pages arrived for .*, but 7 were requested"):
        engine.step(PagesReceived(transfer=1, pages=8))


def test_the_end_of_a_transfer_that_is_not_open_means_nothing() -> None:
    engine = Engine("decode")
    before = engine.step()
    after = engine.step(PagesReceived(transfer=3, pages=2), PagesSent(transfer=4), PrefillFailed(transfer=5, error=""))
    assert (after.transfers, after.replies) == (before.transfers, before.replies)


def test_those_that_received_go_on_in_the_order_of_their_admission() -> None:
    """Several whole prompts in one microbatch, and only its first one in part."""
    engine = Engine("decode")
    for rid in "abc":
        engine.step(wanting(rid))
    result = engine.step(
        PagesReceived(transfer=3, pages=6), PagesReceived(transfer=2, pages=0), PagesReceived(transfer=1, pages=7)
    )
    assert [segment.rid for segment in result.microbatch.segments] == ["a"]
    assert engine.place("b") is engine.place("c") is Place.RECEIVING
    second = engine.land(5)
    assert [(one.rid, len(one.token_ids)) for one in second.microbatch.segments] == [("b", 16)]
    third = engine.land()
    assert [(one.rid, len(one.token_ids)) for one in third.microbatch.segments] == [("b", 14)]
    fourth = engine.land(6)
    assert [one.rid for one in fourth.microbatch.segments] == ["c"]


def test_a_step_that_only_orders_asks_for_another_one_while_there_is_work() -> None:
    engine = Engine("decode", max_running_requests=1, priority_preemption=False)
    assert not engine.step(wanting("a")).again
    assert engine.step(wanting("b")).transfers == ()
    stopped = engine.step(PrefillFailed(transfer=1, error="gone"))
    assert stopped.transfers == (StopTransfer(1),)
    assert stopped.again, "b waits for the row, and could be tried"


# -- what fails, and what is late --


def test_a_transfer_is_stopped_once_and_ends_once() -> None:
    engine = Engine("decode")
    engine.step(wanting("a"))
    first = engine.step(PrefillFailed(transfer=1, error="gone"))
    assert (first.transfers, told(first), first.deadline) == ((StopTransfer(1),), [PrefillDropped(transfer=1)], None)
    again = engine.step(PrefillFailed(transfer=1, error="gone"))
    assert (again.transfers, told(again), again.microbatch) == ((), [], None)
    assert engine.step(PagesReceived(transfer=1, pages=7)).microbatch is not None
    assert not engine.scheduler.find_request("a").may_be_received


def test_the_gate_is_told_when_the_first_transfer_is_late() -> None:
    engine = Engine("decode")
    engine.step(wanting("a"))
    engine.now = 10.0
    assert engine.step(wanting("b")).deadline == TIMEOUT_S
    assert engine.step(PagesReceived(transfer=1, pages=7)).deadline == 10.0 + TIMEOUT_S
    engine.now = 39.999
    assert engine.step().transfers == ()
    engine.now = 40.0
    late = engine.step()
    assert (late.transfers, late.deadline) == ((StopTransfer(2),), None)


# -- who leaves --


def test_an_aborted_receiver_gives_its_pages_back_when_the_stages_are_done() -> None:
    engine = Engine("decode")
    engine.step(wanting("a"))
    result = engine.step(Abort(rid="a"))
    assert ends(result) == {"a": FinishReason.ABORT}
    assert (result.transfers, told(result)) == ((StopTransfer(1),), [PrefillDropped(transfer=1)])
    assert (engine.held, engine.scheduler.books.is_quiescent) == (7, False)
    engine.step(PagesReceived(transfer=1, pages=3))
    assert (engine.held, engine.scheduler.is_fully_idle) == (0, True)


def test_a_receiver_that_is_sent_back_asks_again_only_when_all_had_come() -> None:
    engine = Engine("decode")
    for rid in "ab":
        engine.step(wanting(rid))
    paused = engine.step(PauseGeneration(call_id="p", mode=PauseMode.RETRACT))
    assert paused.transfers == (StopTransfer(1), StopTransfer(2))
    engine.step(PagesReceived(transfer=1, pages=7), PagesReceived(transfer=2, pages=6))
    assert (engine.held, engine.place("a"), engine.place("b")) == (0, Place.WAITING, Place.WAITING)
    engine.scheduler.books.paused = None
    result = engine.step()
    assert [one.rid for one in told(result)] == ["a"]
    assert result.transfers[0].transfer == 3, "a number was used again"


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_death_leaves_no_transfer(is_aborted: bool) -> None:
    engine = Engine("decode")
    engine.step(wanting("a"), wanting("b"))
    if is_aborted:
        engine.step(Abort(rid="a"))
    died = engine.step(PipelineFailed(process="stage-0", cause="killed"))
    assert ends(died)["b"] is FinishReason.ERROR
    assert (engine.held, [*engine.scheduler.features.transfers.in_flight()], died.deadline) == (0, [], None)


# -- a prefill engine --


def test_each_page_is_sent_once_as_it_is_confirmed() -> None:
    engine = Engine("prefill")
    engine.step(delivery("a", first_page=1))
    orders = [order for _ in range(3) for order in engine.land().transfers]
    assert [(one.transfer, one.first, len(one.pages), one.to, one.to_transfer) for one in orders] == [
        (1, 0, 3, ("d0",), 7),
        (2, 3, 4, ("d0",), 7),
        (3, 7, 2, ("d0",), 7),
    ]
    assert len({page for one in orders for page in one.pages}) == 9
    assert engine.place("a") is Place.DELIVERING
    assert ends(engine.step(PagesSent(transfer=2), PagesSent(transfer=1))) == {}
    assert ends(engine.step(PagesSent(transfer=3))) == {"a": FinishReason.LENGTH}
    assert engine.scheduler.is_fully_idle


def test_nothing_is_sent_before_the_first_page_that_is_wanted() -> None:
    engine = Engine("prefill")
    engine.step(delivery("a", first_page=9))
    assert [engine.land().transfers for _ in range(2)] == [(), ()]
    (order,) = engine.land().transfers
    assert (order.first, len(order.pages)) == (0, 1)


def test_a_send_that_fails_ends_the_request_and_stops_the_others() -> None:
    engine = Engine("prefill")
    engine.step(delivery("a"))
    for _ in range(3):
        engine.land()
    failed = engine.step(PagesSent(transfer=2, error="the decode engine is gone"))
    assert ends(failed) == {"a": FinishReason.ERROR}
    assert failed.transfers == (StopTransfer(1), StopTransfer(3))
    own = engine.held
    assert ends(engine.step(PagesSent(transfer=1, error="stopped"))) == {}
    assert engine.held == own > 0
    engine.step(PagesSent(transfer=3))
    assert (engine.held, engine.scheduler.is_fully_idle) == (0, True)


def test_a_retraction_stops_no_send_and_sends_nothing_again() -> None:
    engine = Engine("prefill")
    engine.step(delivery("a", tokens=56))
    first = engine.land().transfers
    paused = engine.step(PauseGeneration(call_id="p", mode=PauseMode.RETRACT))
    assert paused.transfers == ()
    second = engine.land().transfers
    engine.step(PagesSent(transfer=1), PagesSent(transfer=2))
    assert engine.place("a") is Place.WAITING
    engine.scheduler.books.paused = None
    result, orders = engine.step(), [*first, *second]
    while engine.scheduler.books.in_flight:
        result = engine.land()
        orders += result.transfers
    assert [(one.first, len(one.pages)) for one in orders] == [(0, 4), (4, 4), (8, 4), (12, 2)]
    assert all(isinstance(one, SendPages) for one in orders)


@pytest.mark.parametrize(
    ("role", "more", "says"),
    [
        ("decode", {}, "role='prefill'"),
        ("both", {}, "role='prefill'"),
        ("prefill", {"to": ("d0", "d0")}, "which has 2 stages, this engine has 1"),
        ("prefill", {"weights": "embedded:7"}, "the weights 'embedded:7', this engine has 'those of the start'"),
    ],
)
def test_kv_that_cannot_be_delivered_is_refused(role: str, more: dict[str, object], says: str) -> None:
    (refusal,) = Engine(role).step(delivery("a", **more)).replies
    assert isinstance(refusal, Refusal)
    assert refusal.kind is RefusalKind.UNAVAILABLE
    assert says in refusal.message


# -- the audit --


def test_the_audit_finds_a_transfer_that_its_request_does_not_count() -> None:
    engine = Engine("decode")
    engine.step(wanting("a"))
    engine.scheduler.find_request("a").in_flight = 0
    with pytest.raises(IntegrityError, match="another number of microbatches and transfers"):
        audit(engine.scheduler)


def test_the_audit_finds_a_transfer_of_a_request_that_is_gone() -> None:
    engine = Engine("decode")
    engine.step(wanting("a"))
    request = engine.scheduler.find_request("a")
    engine.scheduler.books.take_out(request)
    with pytest.raises(IntegrityError, match="are in flight, but in no place"):
        audit(engine.scheduler)


@pytest.mark.parametrize("place", [Place.RECEIVING, Place.DELIVERING, Place.RUNNING])
def test_the_audit_finds_a_request_that_is_not_where_it_says(place: Place) -> None:
    engine = Engine("decode")
    engine.step(wanting("a"), wanting("b"))
    books = engine.scheduler.books
    books.transferring["b"].place = place
    if place is not Place.RUNNING:
        books.transferring["b"], books.transferring["a"] = books.transferring["a"], books.transferring["b"]
    with pytest.raises(IntegrityError):
        audit(engine.scheduler)


def test_the_audit_finds_a_delivery_of_which_nothing_is_on_its_way() -> None:
    engine = Engine("prefill")
    engine.step(delivery("a"))
    for _ in range(3):
        engine.land()
    engine.scheduler.features.transfers.lose_pipeline()
    with pytest.raises(IntegrityError, match="delivering"):
        audit(engine.scheduler)


def test_stages_that_are_gone_get_no_orders() -> None:
    """The stop of a transfer that ends in the step in which the pipeline is lost."""
    engine = Engine("decode")
    assert engine.step(wanting("a")).transfers
    assert not engine.step(Abort(rid="a"), PipelineFailed(process="stage-0", cause="killed")).transfers
