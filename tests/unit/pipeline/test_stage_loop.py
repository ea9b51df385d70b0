"""One stage's loop in this process, message by message: what it computes, hands on, reports and notes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.core.messages import Completion, encode
from engine.core.plan import Forward, ForwardMode, LoraChange, LoraUpdate, Microbatch, ProfileSwitch, WeightUpdate
from engine.pipeline.progress import Phase, StageProgress
from engine.pipeline.stage import StageLoop
from engine.pipeline.transport import HiddenFailed
from engine.pipeline.wire import (
    ControlDone,
    Describe,
    EndStage,
    FailNextStep,
    Forget,
    Launch,
    Settle,
    StageMessage,
    StageView,
    decode_stage_report,
)

STEP = Forward(3, ForwardMode.DECODE, ())
UPDATE = WeightUpdate(4, "embedded:7")
PROFILE = ProfileSwitch(5, None)
CHANGE = LoraUpdate(6, LoraChange("x", 1, "/x"))
RESULT = Completion(microbatch_id=3, token_ids=(8,))


class Counters(msgspec.Struct):
    last_microbatch_id: int = 3
    microbatches: int = 1
    failed: int = 2
    tokens: int = 4


class Runner:
    """Notes its calls; its forward pass returns ``output``."""

    def __init__(self, stage: int, stages: int, output: object) -> None:
        self.stage, self.facts = stage, SimpleNamespace(is_first=stage == 0, is_last=stage == stages - 1)
        self.counters = Counters()
        self.slots_written = 5
        self.grammars = None
        self.output = output
        self.calls: list[object] = []
        self.phases: list[Phase] = []
        self.progress: StageProgress | None = None

    def slots_digest(self) -> str:
        return "digest"

    def forward(self, microbatch: Microbatch, hidden: object) -> object:
        self._see("forward", microbatch.id, hidden)
        return self.output

    def skip(self, microbatch: Microbatch) -> None:
        self._see("skip", microbatch.id)

    def prepare(self, control: Microbatch) -> str | None:
        self._see(control.mode, control.id)
        return "cannot" if control == UPDATE else None

    def settle(self, number: int, *, commit: bool) -> None:
        self._see("settle", number, commit)

    def fail_next(self, **options: object) -> None:
        self._see("fail next")

    def forget(self) -> None:
        self._see("forget")

    def _see(self, *call: object) -> None:
        assert self.progress is not None
        self.phases.append(self.progress.of(self.stage)[1])
        self.calls.append(call[0] if len(call) == 1 else call)


class Neighbours:
    """The stages beside: one hidden state comes in, and what goes out is kept."""

    def __init__(self, hidden: object) -> None:
        self.hidden = hidden
        self.sent: list[object] = []

    def receive(self, microbatch: Microbatch) -> object:
        return self.hidden

    def send(self, microbatch: Microbatch, output: object) -> None:
        self.sent.append((microbatch.id, output))


class Channel:
    """The scheduler's messages in, reports out."""

    def __init__(self, messages: list[StageMessage]) -> None:
        self._frames = [encode(message) for message in messages]
        self.reports: list[object] = []

    def receive(self) -> bytes | None:
        return self._frames.pop(0) if self._frames else None

    def send(self, data: bytes) -> None:
        self.reports.append(decode_stage_report(data))


def played(
    folder: Path,
    *messages: StageMessage,
    stage: int = 0,
    stages: int = 1,
    output: object = RESULT,
    hidden: object = None,
) -> tuple[Runner, Neighbours, Channel, StageProgress]:
    runner, neighbours, channel = Runner(stage, stages, output), Neighbours(hidden), Channel(list(messages))
    runner.progress = progress = StageProgress(folder, stages)
    loop: Any = StageLoop
    loop(runner, neighbours, channel, progress, probe="scripted.core.sizes:sizes_of").run()
    return runner, neighbours, channel, progress


def test_the_only_stage_reports_its_result(private_dir: Path) -> None:
    runner, neighbours, channel, progress = played(private_dir, Launch(STEP))
    assert runner.calls == [("forward", 3, None)]
    assert runner.phases == [Phase.COMPUTING]
    assert (channel.reports, neighbours.sent) == ([RESULT], [])
    assert progress.of(0) == (3, Phase.DONE)


def test_a_stage_between_others_hands_on(private_dir: Path) -> None:
    runner, neighbours, channel, progress = played(
        private_dir, Launch(STEP), stage=1, stages=3, hidden="from before", output="for the next"
    )
    assert runner.calls == [("forward", 3, "from before")]
    assert (channel.reports, neighbours.sent) == ([], [(3, "for the next")])
    assert progress.of(1) == (3, Phase.DONE)


@pytest.mark.parametrize(("stage", "is_last"), [(1, False), (2, True)])
def test_what_failed_before_is_not_computed_and_goes_on_as_a_failure(
    private_dir: Path, stage: int, is_last: bool
) -> None:
    """A failure stays alone and never ends the process (A05)."""
    failed = HiddenFailed(3, "broken")
    runner, neighbours, channel, _ = played(private_dir, Launch(STEP), stage=stage, stages=3, hidden=failed)
    assert runner.calls == [("skip", 3)]
    assert channel.reports == ([Completion(microbatch_id=3, error="broken")] if is_last else [])
    assert neighbours.sent == ([] if is_last else [(3, failed)])


def test_a_failure_here_goes_on_as_one(private_dir: Path) -> None:
    """A failure stays alone and never ends the process (A05)."""
    error = Completion(microbatch_id=3, error="here")
    _, neighbours, channel, _ = played(private_dir, Launch(STEP), stages=2, output=error)
    assert (channel.reports, neighbours.sent) == ([], [(3, HiddenFailed(3, "here"))])


def test_controls_are_done_in_order_and_reported(private_dir: Path) -> None:
    messages = [Launch(UPDATE), Settle(4, commit=False), Launch(PROFILE), Settle(5, commit=True), FailNextStep()]
    runner, _, channel, progress = played(private_dir, *messages, stage=1, stages=2)
    assert runner.calls == [("update", 4), ("settle", 4, False), ("profile", 5), ("settle", 5, True), "fail next"]
    assert runner.phases[0] == runner.phases[2] == Phase.COMPUTING
    assert channel.reports == [
        ControlDone(microbatch_id=4, stage=1, error="cannot"),
        ControlDone(microbatch_id=5, stage=1, error=None),
    ]
    assert progress.of(1) == (5, Phase.DONE)


def test_loras_are_read_reported_and_taken(private_dir: Path) -> None:
    messages = [Launch(CHANGE), Settle(6, commit=True), Launch(CHANGE), Settle(6, commit=False)]
    runner, _, channel, progress = played(private_dir, *messages, stage=1, stages=2)
    assert runner.calls == [("lora", 6), ("settle", 6, True), ("lora", 6), ("settle", 6, False)]
    assert channel.reports == [ControlDone(microbatch_id=6, stage=1, error=None)] * 2
    assert progress.of(1) == (6, Phase.DONE)


def test_a_view_carries_its_number_and_what_was_done(private_dir: Path) -> None:
    _, _, channel, _ = played(private_dir, Describe(9))
    (view,) = channel.reports
    assert isinstance(view, StageView)
    assert view.sizes["stage._runner.phases"] == 0
    assert [msgspec.structs.replace(view, sizes={})] == [
        StageView(
            seq=9,
            stage=0,
            last_microbatch_id=3,
            microbatches=1,
            failed=2,
            tokens=4,
            slots_written=5,
            slots_digest="digest",
        )
    ]


def test_to_forget_takes_the_mark_along_and_nothing_comes_after_the_end(private_dir: Path) -> None:
    runner, _, channel, progress = played(private_dir, Launch(STEP), Forget(), EndStage(), Launch(STEP))
    assert runner.calls == [("forward", 3, None), "forget"]
    assert len(channel.reports) == 1
    assert progress.of(0) == (-1, Phase.DONE)
