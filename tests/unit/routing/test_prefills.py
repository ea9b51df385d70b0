"""Which prefill engine is asked for a prompt: by prefix and load, not while it fails, and tried again after a while."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from partners import IDLE_LOAD

from engine.core.messages import (
    FinishReason,
    Generate,
    PrefillFailed,
    PrefillWanted,
    Refusal,
    RefusalKind,
    SamplingParams,
    TokenOutput,
)
from engine.core.routing.load import Load
from engine.core.routing.prefills import FIRST_RETRY_S, LONGEST_RETRY_S, NEWS_INTERVAL_S, Prefills
from engine.core.stats import EngineStats
from scripted.core.mutant import Mutant
from scripted.core.schedule import Schedule
from scripted.search.execution import execute

A, B = "http://127.0.0.1:1", "http://127.0.0.1:2"
PAGE = 4
VERSION, ORIGIN = "1.2.3", "0a"
LOAD = msgspec.structs.replace(IDLE_LOAD, role="prefill", page_size=PAGE, version=VERSION, kv_origin=ORIGIN)


class Scene:
    """A machine with two engines that were met, and a clock."""

    def __init__(self, capacity: int = 100) -> None:
        self.now = 100.0
        self.prefills = Prefills((A, B), PAGE, capacity, lambda: self.now, version=VERSION, kv_origin=ORIGIN)
        self._rids = iter(range(10_000))
        self._transfers = iter(range(1, 10_000))
        for url in (A, B):
            self.prefills.met(url, LOAD)

    def place(self, *ids: int, **fields: Any) -> str | None:
        """Where a prompt of these pages, and one token more, is computed."""
        tokens = tuple(token for page in ids for token in (page,) * PAGE)
        message = Generate(rid=str(next(self._rids)), prompt_ids=(*tokens, 0), sampling=SamplingParams(), **fields)
        return self.prefills.place(message).prefill_at

    def ask(self, at: str) -> int:
        """Have the scheduler want something, which is asked for."""
        assert self.want(at) is None
        return self.last

    def want(self, at: str) -> PrefillFailed | None:
        self.last = next(self._transfers)
        return self.prefills.wanted(
            PrefillWanted(rid=f"r{self.last}", transfer=self.last, at=at, ids=(1,) * PAGE, first_page=0, weights="")
        )

    def hear(self, transfer: int, finish_reason: FinishReason | None = None) -> None:
        """The request of a transfer goes on, or ends."""
        self.prefills.heard(TokenOutput(rid=f"r{transfer}", token_ids=(), finish_reason=finish_reason))


def test_a_prefix_goes_where_it_went_before() -> None:
    scene = Scene()
    first, other = scene.place(1, 2, 3), scene.place(7, 8)
    assert {first, other} == {A, B}
    assert [scene.place(1, 2, page) for page in (9, 10, 11)] == [first] * 3
    assert scene.place(7, 8, 12) == other


def test_the_choices_of_an_answer_go_to_one_engine() -> None:
    scene = Scene()
    ids = (1,) * PAGE + (0,)
    messages = [Generate(rid=f"r-{one}", prompt_ids=ids, sampling=SamplingParams()) for one in range(4)]
    assert len({scene.prefills.place(one).prefill_at for one in messages}) == 1


def test_a_prefix_is_not_the_same_under_another_salt() -> None:
    scene = Scene()
    assert scene.place(1, 2) != scene.place(1, 2, cache_salt="s")


def test_load_goes_before_a_prefix() -> None:
    """An engine far above the mean gives way; what ends makes room."""
    scene = Scene()
    first = scene.place(1, 2)
    asked = [scene.place(1, 2) for _ in range(20)]
    assert {A, B} == set(asked)
    assert asked[:3] == [first] * 3
    for rid in range(30):
        scene.prefills.heard(TokenOutput(rid=str(rid), token_ids=(1,), finish_reason=None))
    assert scene.place(1, 2) in (A, B)


@pytest.mark.parametrize("fields", [{"lora": "x"}, {"prompt_logprobs_from": 0}])
def test_what_the_decode_engine_computes_anyway_is_not_placed(fields: dict[str, Any]) -> None:
    scene = Scene()
    assert scene.place(1, 2, **fields) is None
    assert scene.prefills.counts.unasked == 0


def test_a_prompt_without_a_full_page_before_its_last_token_is_not_placed() -> None:
    scene = Scene()
    short, long = (
        Generate(rid=str(count), prompt_ids=(1,) * count, sampling=SamplingParams()) for count in (PAGE, PAGE + 1)
    )
    assert scene.prefills.place(short).prefill_at is None
    assert scene.prefills.place(long).prefill_at is not None


def test_nobody_is_asked_before_it_was_met() -> None:
    prefills = Prefills((A,), PAGE, 100, lambda: 0.0, version=VERSION)
    message = Generate(rid="r", prompt_ids=(1,) * 9, sampling=SamplingParams())
    assert prefills.place(message).prefill_at is None
    assert prefills.counts.unasked == 1
    prefills.met(A, LOAD)
    assert prefills.place(message).prefill_at == A


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"role": "both"}, "got one with role='both'; start it with --role prefill"),
        ({"version": "0.9"}, "must be version '1.2.3' as this engine, got '0.9'; run the same on both"),
        ({"page_size": 32}, "must have page_size=4 as this engine, got 32; give both the same"),
        (
            {"kv_origin": "ff"},
            "must have the model and weights of this engine, 0a, got ff; give both the same revision",
        ),
    ],
)
def test_an_engine_that_can_be_no_partner_is_named_and_not_asked(fields: dict[str, Any], words: str) -> None:
    """Not even while its scheduler is too busy to say so again."""
    scene = Scene()
    scene.prefills.met(A, msgspec.structs.replace(LOAD, **fields))
    scene.prefills.busy(A)
    assert {scene.place(page) for page in range(1, 5)} == {B}
    ((url, why),) = scene.prefills.news()
    assert url == A
    assert words in why
    scene.prefills.met(A, LOAD)
    assert scene.prefills.why_not(A) == ""


def test_an_engine_with_updated_weights_is_met_and_asked() -> None:
    """Its digest is of the weights of the start; the scheduler compares the weights with each prompt."""
    numbers = {name: 0 for name in EngineStats.__struct_fields__ if name != "paused"}
    scene, stats = Scene(), EngineStats(paused=None, **numbers)
    updated = msgspec.structs.replace(stats, weights_version=1)
    for one, origin in ((stats, ORIGIN), (updated, "")):
        load = Load.of(one, role="prefill", version=VERSION, kv_origin=ORIGIN)
        assert load.kv_origin == origin
        scene.prefills.met(A, msgspec.structs.replace(load, page_size=PAGE))
        assert scene.prefills.why_not(A) == ""


def test_a_lost_engine_is_asked_when_it_was_met_again() -> None:
    scene = Scene()
    scene.prefills.lost(A, "is gone")
    assert {scene.place(page) for page in range(1, 5)} == {B}
    scene.prefills.lost(B, "is gone")
    assert scene.place(5) is None
    refused = scene.want(A)
    assert refused is not None
    assert refused.error == f"{A} is gone"
    scene.prefills.busy(A)
    assert scene.place(6) == A


def test_a_failure_leaves_an_engine_out_for_a_while_and_then_one_prompt_tries_it() -> None:
    scene = Scene()
    scene.prefills.lost(B, "is gone")
    failed = scene.prefills.failed(scene.ask(A), "is gone (ReadError)")
    assert failed == PrefillFailed(transfer=scene.last, error=f"{A} is gone (ReadError)")
    assert scene.place(1) is None
    assert scene.want(A) is not None, "what was placed there before is not asked for either"
    scene.now += FIRST_RETRY_S
    assert scene.place(1) == A
    assert scene.place(2) is None, "one prompt tries it"
    tried = scene.ask(A)
    assert scene.want(A) is not None
    assert scene.prefills.answered(tried) == 0
    assert scene.place(3) is None, "it says that it has sent a prompt, which has not come"
    scene.hear(tried)
    assert scene.place(3) == A
    assert scene.place(4) == A


def test_an_engine_that_goes_on_failing_is_tried_more_and_more_seldom() -> None:
    scene, waits = Scene(), []
    for _ in range(8):
        begun = scene.now
        scene.prefills.failed(scene.ask(A), "refused", 503)
        while scene.want(A) is not None:
            scene.now += 0.5
        waits.append(scene.now - begun)
        scene.prefills.dropped(scene.last)
    assert waits[:4] == [1, 2, 4, 8]
    assert waits[-1] == LONGEST_RETRY_S


def test_what_fails_together_is_one_failure() -> None:
    scene = Scene()
    for transfer in [scene.ask(A) for _ in range(10)]:
        assert scene.prefills.failed(transfer, "is gone") is not None
    scene.now += FIRST_RETRY_S
    assert scene.want(A) is None


@pytest.mark.parametrize(("status", "is_out"), [(400, False), (413, False), (401, True), (404, True), (503, True)])
def test_a_refusal_of_one_prompt_says_nothing_about_others(status: int, is_out: bool) -> None:
    scene = Scene()
    assert scene.prefills.failed(scene.ask(A), "refused", status) is not None
    assert (scene.want(A) is not None) is is_out


def test_a_late_engine_has_failed_and_a_client_that_leaves_is_no_failure() -> None:
    scene = Scene()
    assert scene.prefills.dropped(scene.ask(A))
    assert scene.want(A) is None
    scene.now += 30
    assert scene.prefills.dropped(scene.last, is_late=True)
    refused = scene.want(A)
    assert refused is not None
    assert "within 30.0 s" in refused.error
    counts = scene.prefills.counts
    assert (counts.asked, counts.dropped, counts.failed) == (3, 1, 2)


@pytest.mark.parametrize("answers", [True, False])
def test_an_engine_that_says_it_has_sent_all_and_sends_nothing_is_left_out(answers: bool) -> None:
    """C01: success is pages, not a status; each request would wait for its whole time."""
    scene, waits = Scene(), []
    for _ in range(4):
        begun = scene.now
        while scene.want(A) is not None:
            scene.now += 0.5
        waits.append(scene.now - begun)
        transfer = scene.last
        if answers:
            assert scene.prefills.answered(transfer) == 0
        scene.now += 30
        assert scene.prefills.dropped(transfer, is_late=True)
    assert waits == [0, 1, 2, 4]
    assert (scene.prefills.counts.failed - 14, scene.prefills.counts.answered) == (4, 0)
    assert scene.prefills.open_calls == 0


@pytest.mark.parametrize("first", ["the answer", "the first token"])
def test_pages_and_an_answer_are_a_success_in_any_order(first: str) -> None:
    scene = Scene()
    scene.prefills.failed(scene.ask(A), "is gone")
    scene.now += FIRST_RETRY_S
    transfer = scene.ask(A)
    if first == "the answer":
        assert scene.prefills.answered(transfer) == 0
        scene.hear(transfer)
    else:
        scene.hear(transfer)
        assert scene.want(A) is not None, "it has not said that it sent all"
        scene.prefills.heard(TokenOutput(rid=f"r{transfer}", token_ids=(1,), finish_reason=None))
        assert scene.prefills.answered(transfer) == 0
    assert (scene.prefills.counts.answered, scene.prefills.open_calls) == (1, 0)
    assert scene.want(A) is None


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.TIMEOUT, FinishReason.ERROR])
def test_a_request_that_ends_before_its_first_token_is_neither_success_nor_failure(reason: FinishReason) -> None:
    scene = Scene()
    scene.prefills.failed(scene.ask(A), "is gone")
    scene.now += FIRST_RETRY_S
    transfer = scene.ask(A)
    assert scene.prefills.answered(transfer) == 0
    scene.hear(transfer, reason)
    assert not scene.prefills.dropped(transfer)
    assert (scene.prefills.counts.answered, scene.prefills.open_calls) == (0, 0)
    assert scene.want(A) is None
    assert scene.want(A) is not None, "it is still tried with one prompt at a time"


def test_what_was_dropped_is_told_to_nobody() -> None:
    """The answer and the drop cross: whichever comes second changes nothing."""
    scene = Scene()
    transfer = scene.ask(A)
    assert scene.prefills.dropped(transfer)
    assert scene.prefills.answered(transfer) is None
    assert scene.prefills.failed(transfer, "is gone") is None
    assert not scene.prefills.dropped(transfer)
    assert scene.prefills.open_calls == 0
    assert scene.want(A) is None


# The pages are there, and a sleep takes them before the request is launched; after the wake it asks again.
ASKED_TWICE = (
    "adapter=lockstep-fleet engines=p0,d0 pp_size=2 page_size=1; "
    '1 begin on=d0 do="start a prompt=2 new=1"; 6 at on=d0 do=sleep'
)
KEPT_CALLS = Mutant(
    name="who-asks-again-keeps-its-first-call",
    origin="a search over fleets",
    bug="the call for pages that a sleep took stays open, and a failed engine is never tried again",
    signature="1 prompts count as asked for",
    test="",
    target="engine.core.routing.prefills:Prefills.wanted",
    cut="if older is not None and not self._calls[older].has_gone_on:",
    becomes="if False:",
)


def test_who_asks_again_has_one_call() -> None:
    failure = execute(Schedule.parse(ASKED_TWICE)).failure
    assert failure is None, failure
    with KEPT_CALLS.switched_on():
        failure = execute(Schedule.parse(ASKED_TWICE)).failure
    assert failure is not None
    assert KEPT_CALLS.signature in failure.text


def test_a_failed_engine_is_tried_again_after_a_request_has_asked_twice() -> None:
    scene = Scene()
    wanted = PrefillWanted(rid="r", transfer=8_000, at=A, ids=(1,) * PAGE, first_page=0, weights="")
    assert scene.prefills.wanted(wanted) is None
    assert scene.prefills.answered(8_000) == 0
    assert scene.prefills.wanted(msgspec.structs.replace(wanted, transfer=8_001)) is None
    assert (scene.prefills.open_calls, scene.prefills.counts.dropped) == (1, 1)
    scene.prefills.failed(8_001, "is gone")
    scene.now += FIRST_RETRY_S
    assert scene.want(A) is None


def test_an_engine_that_fails_is_told_of_once_a_minute() -> None:
    scene = Scene()
    told = []
    for _ in range(int(2.5 * NEWS_INTERVAL_S)):
        scene.prefills.lost(A, "is gone")
        told += scene.prefills.news()
        scene.now += 1
    assert told == [(A, "is gone")] * 3
    scene.prefills.met(A, LOAD)
    assert scene.prefills.news() == [(A, "")]
    assert scene.prefills.news() == []


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    scene = Scene()
    for number in range(50):
        scene.place(number)
    scene.prefills.give_up()
    fleet = scene.prefills._placement.fleet
    assert [fleet.in_flight(url) for url in (A, B)] == [0, 0]
    assert scene.prefills.open_calls == 0


def test_a_refusal_leaves_the_other_request_of_its_rid_its_prefill_engine() -> None:
    """An earlier request's refusal frees no place of the later one, and a later one's ends no earlier call."""
    scene = Scene()
    message = Generate(rid="r1", prompt_ids=(1,) * PAGE + (0,), sampling=SamplingParams())
    refusal = Refusal(rid="r1", kind=RefusalKind.BUSY, message="full")
    at = scene.prefills.place(message).prefill_at
    assert at is not None
    scene.prefills.heard(refusal, is_newest=False)
    assert scene.prefills.in_flight(at) == 1
    transfer = scene.ask(at)
    scene.prefills.heard(refusal)
    assert scene.prefills.answered(transfer) is not None
    assert scene.prefills.open_calls == 1, "its request has not gone on"
    assert scene.prefills.in_flight(at) == 0
