"""Well-formed but wrong reports of stages: none ends the scheduler's loop, and none is believed.

The stages are the tests' own ends of the channels, so that each says what it likes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.core.messages import (
    Completion,
    LoraRead,
    PagesReceived,
    PagesSent,
    PipelineFailed,
    TokenLogprob,
    TransferEvent,
    encode,
)
from engine.core.plan import (
    Forward,
    ForwardMode,
    LoraChange,
    LoraOrder,
    LoraUpdate,
    Microbatch,
    ReceivePages,
    Segment,
    SendPages,
    StopTransfer,
    WeightUpdate,
)
from engine.pipeline.channel import MAX_FRAME_BYTES, StageChannel
from engine.pipeline.progress import StageProgress
from engine.pipeline.stage import StageLoop
from engine.pipeline.staged import StagedPipeline
from engine.pipeline.wire import (
    ControlDone,
    Forget,
    Launch,
    LoraShareRead,
    OrderLora,
    OrderTransfer,
    Settle,
    StageView,
    TransferDone,
    decode_stage_message,
    stage_address,
)

WAIT_S = 30.0
SOON_S = 0.02
STAGES = 3
VIEW = StageView(
    seq=1, stage=9, last_microbatch_id=0, microbatches=0, failed=0, tokens=0, slots_written=0, slots_digest=""
)

Wired = tuple[StagedPipeline, list[StageChannel]]


@pytest.fixture
def wired(private_dir: Path) -> Iterator[Wired]:
    pipeline = StagedPipeline(private_dir, STAGES)
    stages = [StageChannel(stage_address(private_dir, stage)) for stage in range(STAGES)]
    yield pipeline, stages
    pipeline.close()
    for stage in stages:
        stage.close()


def segment(row: int) -> Segment:
    return Segment(f"r{row}", row, 0, (1,), 0, (row,), True)


PLAN = Forward(5, ForwardMode.PREFILL, (segment(0), segment(1)))
UPDATE = WeightUpdate(6, "embedded:7")
CHANGE = LoraUpdate(6, LoraChange("x", 1, "/x"))
READ = LoraOrder(3, "x", "/x")
RIGHT = Completion(microbatch_id=5, token_ids=(1, 2))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        encode(Completion(microbatch_id=5, error="not utf8?")).replace(b"utf8?", b"utf8\xff"),
        encode(Completion(microbatch_id=4, token_ids=(1, 2))),
        encode(Completion(microbatch_id=2**60)),
        encode(ControlDone(microbatch_id=5, stage=1, error=None)),
        encode(ControlDone(microbatch_id=77, stage=1, error=None)),
        encode(ControlDone(microbatch_id=5, stage=-1, error=None)),
        encode(VIEW),
    ],
)
def test_a_report_that_nothing_asks_for_is_dropped(
    wired: Wired, frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A05: the result that was asked for comes after it as if nothing had been."""
    pipeline, stages = wired
    pipeline.launch(PLAN)
    with caplog.at_level(logging.WARNING):
        stages[2].send(frame)
        stages[2].send(encode(RIGHT))
        assert pipeline.next_completion(WAIT_S) == RIGHT
    assert "not a report of a stage" in caplog.text
    stages[2].send(encode(RIGHT))
    assert pipeline.next_completion(SOON_S) is None


@pytest.mark.parametrize(
    "wrong",
    [
        Completion(microbatch_id=5),
        Completion(microbatch_id=5, token_ids=(1, 2, 3)),
        Completion(microbatch_id=5, token_ids=(1, 2), logprobs=(TokenLogprob(-1.0),)),
    ],
)
def test_a_result_that_does_not_fit_fails_its_microbatch(wired: Wired, wrong: Completion) -> None:
    """A05: which token is whose is not known; the next microbatch is not touched by it."""
    pipeline, stages = wired
    pipeline.launch(PLAN)
    stages[2].send(encode(wrong))
    failed = pipeline.next_completion(WAIT_S)
    assert isinstance(failed, Completion)
    assert "stage 2 must return 2 tokens for microbatch 5" in str(failed.error)
    assert failed.token_ids == ()


DRAFTED = Forward(
    5,
    ForwardMode.DECODE,
    (
        Segment("r0", 0, 4, (1, 2, 3), 0, (), True, drafts=2),
        Segment("r1", 1, 4, (1, 2), 0, (), True, drafts=1),
        Segment("r2", 2, 4, (1,), 0, (), True),
    ),
)


@pytest.mark.parametrize(
    ("tokens", "accepted"),
    [
        (6, (3, 0)),  # One more than was guessed.
        (6, (0, 3)),
        (6, (1, 2)),  # As many in all as were guessed, and another request's.
        (4, (2, 0)),  # Fewer tokens than hold.
        (6, (2, 0)),
        (3, ()),
        (3, (0,)),
        (4, (0, 0, 1)),
    ],
)
def test_more_than_was_drafted_is_not_believed(wired: Wired, tokens: int, accepted: tuple[int, ...]) -> None:
    """A05: tokens that nobody guessed would go to a request, or one request's to another."""
    pipeline, stages = wired
    pipeline.launch(DRAFTED)
    stages[2].send(encode(Completion(microbatch_id=5, token_ids=(7,) * tokens, accepted=accepted)))
    failed = pipeline.next_completion(WAIT_S)
    assert isinstance(failed, Completion)
    assert f"for each of (2, 1) drafts that holds, and either no logprobs or one for each, got {tokens}" in str(
        failed.error
    )
    assert (failed.token_ids, failed.accepted) == ((), ())


@pytest.mark.parametrize("accepted", [(0, 0), (2, 1), (1, 0), (0, 1)])
def test_what_was_drafted_may_hold(wired: Wired, accepted: tuple[int, ...]) -> None:
    pipeline, stages = wired
    pipeline.launch(DRAFTED)
    right = Completion(microbatch_id=5, token_ids=(7,) * (3 + sum(accepted)), accepted=accepted)
    stages[2].send(encode(right))
    assert pipeline.next_completion(WAIT_S) == right


def test_a_count_below_zero_is_no_report(wired: Wired, caplog: pytest.LogCaptureFixture) -> None:
    pipeline, stages = wired
    pipeline.launch(DRAFTED)
    stages[2].send(encode(Completion(microbatch_id=5, token_ids=(7, 7), accepted=(-1, 0))))
    right = Completion(microbatch_id=5, token_ids=(7, 7, 7), accepted=(0, 0))
    stages[2].send(encode(right))
    assert pipeline.next_completion(WAIT_S) == right
    assert "not a report of a stage" in caplog.text


def test_a_stage_that_cannot_be_read_any_more_is_a_failure_of_the_pipeline(wired: Wired) -> None:
    """A06: reported like a death, with the stage's name."""
    pipeline, stages = wired
    pipeline.launch(PLAN)
    stages[1]._socket.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    failed = pipeline.next_completion(WAIT_S)
    assert isinstance(failed, PipelineFailed)
    assert (failed.process, "broken frame" in failed.cause) == ("stage-1", True)


@pytest.mark.parametrize("control", [UPDATE, CHANGE])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_control_is_done_by_all_stages_or_by_none(
    wired: Wired, order: tuple[int, ...], failing: int, control: Microbatch
) -> None:
    """A05: for any failing stage and any order of reports, every stage drops the change that it prepared."""
    pipeline, stages = wired
    pipeline.launch(control)
    for stage in order:
        assert pipeline.next_completion(SOON_S) is None
        error = "cannot" if stage == failing else None
        stages[stage].send(encode(ControlDone(microbatch_id=6, stage=stage, error=error)))
    assert pipeline.next_completion(WAIT_S) == Completion(microbatch_id=6, error="cannot")
    assert [_messages(stage) for stage in stages] == [[Launch(control), Settle(6, commit=False)]] * STAGES


@pytest.mark.parametrize("order", list(permutations(range(STAGES))))
@pytest.mark.parametrize(
    ("errors", "told"),
    [(("a", "b", "c"), "a"), ((None, "b", "c"), "b"), (("a", None, "c"), "a"), (("", "b", None), "")],
)
def test_of_several_errors_that_of_the_first_stage_is_told(
    wired: Wired, order: tuple[int, ...], errors: tuple[str | None, ...], told: str
) -> None:
    """A05: not of the first one to answer, which is another one each time."""
    pipeline, stages = wired
    pipeline.launch(UPDATE)
    for stage in order:
        stages[stage].send(encode(ControlDone(microbatch_id=6, stage=stage, error=errors[stage])))
        if stage != order[-1]:
            assert pipeline.next_completion(SOON_S) is None
    assert pipeline.next_completion(WAIT_S) == Completion(microbatch_id=6, error=told)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
@pytest.mark.parametrize(("errors", "told"), [((None, None, None), None), ((None, "b", "c"), "b")])
def test_a_lora_is_read_when_every_stage_has_read_it_and_not_before(
    wired: Wired, order: tuple[int, ...], errors: tuple[str | None, ...], told: str | None
) -> None:
    """A05: microbatches complete meanwhile, and of several errors that of the first stage is told."""
    pipeline, stages = wired
    pipeline.order_lora(READ)
    for stage in order:
        assert pipeline.answers() == ()
        # Said twice it is still the word of one stage.
        for _ in range(2):
            stages[stage].send(encode(LoraShareRead(version=3, stage=stage, error=errors[stage])))
        assert pipeline.next_completion(SOON_S) is None
    assert pipeline.answers() == (LoraRead(version=3, error=told),)
    pipeline.launch(PLAN)
    stages[2].send(encode(RIGHT))
    assert pipeline.next_completion(WAIT_S) == RIGHT
    assert [_messages(stage) for stage in stages] == [[OrderLora(READ), Launch(PLAN)]] * STAGES


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0)])
def test_views_are_by_stage_whoever_answers_first(wired: Wired, order: tuple[int, ...]) -> None:
    pipeline, stages = wired
    for stage in order:
        stages[stage].send(encode(msgspec.structs.replace(VIEW, stage=stage)))
    assert [view.stage for view in pipeline.describe(timeout_s=WAIT_S)] == [0, 1, 2]


@pytest.mark.parametrize("control", [UPDATE, CHANGE])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_control_is_done_when_every_stage_is_ready_and_not_before(
    wired: Wired, order: tuple[int, ...], control: Microbatch
) -> None:
    pipeline, stages = wired
    pipeline.launch(control)
    for stage in order[:-1]:
        # Said twice it is still the word of one stage.
        for _ in range(2):
            stages[stage].send(encode(ControlDone(microbatch_id=6, stage=stage, error=None)))
        assert pipeline.next_completion(SOON_S) is None
    stages[order[-1]].send(encode(ControlDone(microbatch_id=6, stage=order[-1], error=None)))
    assert pipeline.next_completion(WAIT_S) == Completion(microbatch_id=6)
    assert [_messages(stage) for stage in stages] == [[Launch(control), Settle(6, commit=True)]] * STAGES


RECEIVE = ReceivePages(3, (4, 5, 6))
SEND = SendPages(4, (4, 5), ("a", "b", "c"), 9, 0)


def _come(pages: int) -> PagesReceived:
    return PagesReceived(transfer=3, pages=pages)


def _gone(error: str | None) -> PagesSent:
    return PagesSent(transfer=4, error=error)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize(
    ("ordered", "events", "expected"),
    [
        (RECEIVE, [_come(3), _come(3), _come(3)], _come(3)),
        (RECEIVE, [_come(3), _come(1), _come(2)], _come(1)),
        (RECEIVE, [_come(3), _come(3), _come(0)], _come(0)),
        (SEND, [_gone(None), _gone(None), _gone(None)], _gone(None)),
        (SEND, [_gone(None), _gone("b"), _gone("c")], _gone("b")),
        (SEND, [_gone("a"), _gone("b"), _gone(None)], _gone("a")),
    ],
)
def test_a_transfer_has_one_answer_when_every_stage_has_given_its_own(
    wired: Wired,
    order: tuple[int, ...],
    ordered: ReceivePages | SendPages,
    events: list[TransferEvent],
    expected: TransferEvent,
) -> None:
    """For any last stage, stopped in between or not; every stage gets the stop."""
    pipeline, stages = wired
    pipeline.order_transfer(ordered)
    for stage in order:
        assert pipeline.next_completion(SOON_S) is None
        assert pipeline.answers() == ()
        # Said twice it is still the word of one stage.
        for _ in range(2):
            stages[stage].send(encode(TransferDone(stage=stage, event=events[stage])))
        if stage == order[0]:
            pipeline.order_transfer(StopTransfer(ordered.transfer))
    while not (answers := pipeline.answers()):
        assert pipeline.next_completion(SOON_S) is None
    assert answers == (expected,)
    told = [OrderTransfer(ordered), OrderTransfer(StopTransfer(ordered.transfer))]
    assert [_messages(stage) for stage in stages] == [told] * STAGES
    assert pipeline.next_completion(SOON_S) is None
    assert pipeline.answers() == ()


@pytest.mark.parametrize(
    "event", [PagesReceived(transfer=5, pages=1), _come(4), PagesSent(transfer=3), PagesReceived(transfer=4, pages=1)]
)
def test_the_end_of_a_transfer_that_nothing_asks_for_is_dropped(
    wired: Wired, event: TransferEvent, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline, stages = wired
    pipeline.order_transfer(RECEIVE)
    pipeline.order_transfer(SEND)
    with caplog.at_level(logging.WARNING):
        for stage in range(STAGES):
            stages[stage].send(encode(TransferDone(stage=stage, event=event)))
            assert pipeline.next_completion(SOON_S) is None
    assert caplog.text.count("is not awaited from stage") == STAGES
    assert pipeline.answers() == ()


def _messages(stage: StageChannel) -> list[object]:
    """The launch, and what follows it."""
    return [decode_stage_message(frame) for _ in range(2) if (frame := stage.receive()) is not None]


class Script:
    """A channel from which a stage reads these frames."""

    def __init__(self, frames: list[bytes]) -> None:
        self._frames = iter(frames)

    def receive(self) -> bytes | None:
        return next(self._frames, None)


def test_a_frame_that_is_no_message_does_not_end_a_stage(private_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A05: what comes after it is done."""
    done: list[str] = []
    runner: Any = SimpleNamespace(stage=0, grammars=None, forget=lambda: done.append("forget"))
    bad: list[Callable[[], bytes]] = [lambda: b"", lambda: b"\xc1", lambda: b"\x81\xa4type\xa6F\xffrget"]
    frames = [frame for make in bad for frame in (make(), encode(Forget()))]
    with caplog.at_level(logging.WARNING):
        StageLoop(runner, None, Script(frames), StageProgress(private_dir, 1)).run()  # type: ignore[arg-type]
    assert done == ["forget"] * 3
    assert caplog.text.count("not a message to a stage") == 3
