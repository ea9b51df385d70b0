"""The staged pipeline: one process per stage, each of which gets every plan directly from the scheduler.

Lives in the scheduler process and imports no torch. The last stage returns completions in launch order; the stages'
views arrive over the same channels and are kept apart.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.core.errors import EngineError
from engine.core.frames import BadFrameError
from engine.core.messages import (
    Completion,
    GrammarReady,
    LoraRead,
    OrderAnswer,
    PagesReceived,
    PipelineEvent,
    PipelineFailed,
    TransferEvent,
    encode,
)
from engine.core.plan import (
    Forward,
    GrammarOrder,
    LoraOrder,
    Microbatch,
    ReceivePages,
    SendPages,
    StopTransfer,
    TransferOrder,
)
from engine.pipeline.channel import StageChannels
from engine.pipeline.progress import StageProgress
from engine.pipeline.wire import (
    ControlDone,
    Describe,
    EndStage,
    FailNextStep,
    Forget,
    Launch,
    LoraShareRead,
    OrderGrammar,
    OrderLora,
    OrderTransfer,
    Settle,
    StageMessage,
    StageReport,
    StageView,
    TransferDone,
    decode_stage_report,
    stage_address,
)
from engine.process.control import STAGE_PREFIX

DESCRIBE_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Transfer:
    """An order to every stage, and the stages' answers so far."""

    order: ReceivePages | SendPages
    events: dict[int, TransferEvent] = field(default_factory=dict)


class StagedPipeline:
    """Talks to ``pp_size`` stage processes over sockets in ``private_dir``; they may start before or after it.

    A dead stage is silent here; the supervisor notices its death and tells the gate. Logs and drops reports that cannot
    be decoded or that no launched microbatch awaits. ``stage_pids`` are in stage order, if known and on this machine.
    With ``handed`` the stages' connections come over that socket, see ``StageChannels``.
    """

    def __init__(
        self, private_dir: Path, pp_size: int, stage_pids: Sequence[int] = (), handed: socket.socket | None = None
    ) -> None:
        self._pp_size = pp_size
        self._stage_pids = tuple(stage_pids)
        self._progress = StageProgress(private_dir, pp_size)
        addresses = [stage_address(private_dir, stage) if handed is None else None for stage in range(pp_size)]
        self._channels = StageChannels(addresses, handed)
        # In launch order. A control completes with the last stage's report, which may arrive after the results of
        # microbatches that were launched later.
        self._launched: deque[int] = deque()
        # The shape of each awaited result, see ``_awaited_of``.
        self._awaited: dict[int, tuple[int, tuple[int, ...], list[int]]] = {}
        self._completions: dict[int, Completion] = {}
        self._views: dict[int, StageView] = {}
        # The stages' reports of each launched control, by its number.
        self._controls: dict[int, dict[int, str | None]] = {}
        # The ids of grammars that the last stage compiles.
        self._compiling: set[int] = set()
        # The stages' reports of each LoRA that they read, by its version.
        self._reading: dict[int, dict[int, str | None]] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._answers: list[OrderAnswer] = []
        self._describes = 0
        self._closed = False

    def launch(self, microbatch: Microbatch) -> None:
        self._launched.append(microbatch.id)
        if isinstance(microbatch, Forward):
            self._awaited[microbatch.id] = _awaited_of(microbatch)
        else:
            self._controls[microbatch.id] = {}
        self._broadcast(Launch(microbatch))

    def next_completion(self, timeout_s: float | None) -> PipelineEvent | None:
        """Return the next completion in launch order, None after ``timeout_s`` seconds (None: no limit).

        Once a stage's connection is broken, every call returns PipelineFailed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.ready:
            in_time = self._receive(deadline)
            for stage, why in self._channels.broken.items():
                return PipelineFailed(process=f"{STAGE_PREFIX}{stage}", cause=f"it sent a broken frame: {why}")
            if not in_time:
                return None
        return self._completions.pop(self._launched.popleft())

    @property
    def ready(self) -> bool:
        """Return whether the next completion has been read already."""
        return bool(self._launched) and self._launched[0] in self._completions

    @property
    def takes_more(self) -> bool:
        return False

    def stuck(self, microbatch_id: int) -> tuple[str, str]:
        """Find the process that holds up an overdue microbatch, and describe its state."""
        stage, doing = self._progress.stuck(microbatch_id, self._stage_pids)
        return f"{STAGE_PREFIX}{stage}", doing

    def stage_times(self, microbatch_id: int) -> tuple[tuple[float, float], ...]:
        """Return when each stage on this machine began and ended a recent microbatch; empty if unknown."""
        return self._progress.times(microbatch_id)

    def wake_sources(self) -> Sequence[int]:
        return (self._channels.fileno(),)

    def order_grammar(self, order: GrammarOrder) -> None:
        """Send a grammar order to the last stage, in order with the plans."""
        if order.grammar is not None:
            self._compiling.add(order.id)
        self._send(self._pp_size - 1, OrderGrammar(order))

    def order_lora(self, order: LoraOrder) -> None:
        """Send a LoRA's order to every stage, in order with the plans."""
        if order.path is not None:
            self._reading[order.version] = {}
        self._broadcast(OrderLora(order))

    def order_transfer(self, order: TransferOrder) -> None:
        """Send a transfer order to every stage, in order with the plans. A stage does not answer a stop."""
        if not isinstance(order, StopTransfer):
            self._transfers[order.transfer] = _Transfer(order)
        self._broadcast(OrderTransfer(order))

    def answers(self) -> Sequence[OrderAnswer]:
        """Take the compiled grammars, and the LoRAs and transfers that all stages have finished."""
        if not self._answers:
            return ()
        answers, self._answers = tuple(self._answers), []
        return answers

    def answer_source(self) -> int | None:
        """Return None: answers come over the same channels as completions."""
        return None

    def fail_next_step(self, stage: int) -> None:
        self._send(stage, FailNextStep())

    def spare_next_step(self) -> None:
        """Cancel ``fail_next_step`` in every stage where it has not taken effect."""
        self._broadcast(FailNextStep(on=False))

    def forget(self) -> None:
        """Reset counters and slot records of every stage; only after a flush."""
        self._broadcast(Forget())

    def describe(self, *, timeout_s: float = DESCRIBE_TIMEOUT_S) -> tuple[StageView, ...]:
        """Return every stage's view after all launched microbatches. Keeps completions for ``next_completion``.

        Raises EngineError, which names the stages that did not answer in time.
        """
        self._describes += 1
        self._views.clear()
        self._broadcast(Describe(self._describes))
        deadline = time.monotonic() + timeout_s
        while len(self._views) < self._pp_size:
            if not self._receive(deadline):
                silent = sorted(set(range(self._pp_size)) - set(self._views))
                raise EngineError(f"stages must describe themselves within {timeout_s} s, stages {silent} did not")
        views = tuple(self._views[stage] for stage in range(self._pp_size))
        self._views.clear()
        return views

    def close(self) -> None:
        """Tell every stage to end and release the sockets; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._broadcast(EndStage())
        self._channels.close()
        self._progress.close()

    def _broadcast(self, message: StageMessage) -> None:
        self._channels.broadcast(encode(message))

    def _send(self, stage: int, message: StageMessage) -> None:
        if not 0 <= stage < self._pp_size:
            raise EngineError(f"stage must be in 0..{self._pp_size - 1}, got {stage}")
        self._channels.send(stage, encode(message))

    def _receive(self, deadline: float | None) -> bool:
        """Wait for reports and sort them. Returns False when none came before the deadline."""
        frames = self._channels.receive(None if deadline is None else max(0.0, deadline - time.monotonic()))
        for frame in frames:
            try:
                self._sort(decode_stage_report(frame))
            except BadFrameError as exc:
                logger.warning("dropped a frame of %d bytes that is not a report of a stage: %s", len(frame), exc)
        return bool(frames) or deadline is None or time.monotonic() < deadline

    def _sort(self, report: StageReport) -> None:
        if isinstance(report, Completion):
            self._note_completion(report)
        elif isinstance(report, GrammarReady):
            self._note_grammar(report)
        elif not 0 <= report.stage < self._pp_size:
            raise BadFrameError(f"stage must be in 0..{self._pp_size - 1}, got {report}")
        elif isinstance(report, ControlDone):
            self._note_control(report)
        elif isinstance(report, LoraShareRead):
            self._note_read(report)
        elif isinstance(report, TransferDone):
            self._note_transfer(report.stage, report.event)
        elif report.seq == self._describes:
            self._views[report.stage] = report

    def _note_completion(self, completion: Completion) -> None:
        """Note a result. A wrong shape fails the microbatch: its tokens cannot be assigned to requests."""
        number, tokens = completion.microbatch_id, len(completion.token_ids)
        if number not in self._awaited:
            raise BadFrameError(f"microbatch {number} is not awaited")
        awaited, drafts, targets = self._awaited.pop(number)
        accepted = completion.accepted
        fits = len(accepted) == len(drafts) and all(map(int.__le__, accepted, drafts))
        fits = fits and len(completion.guesses) in (0, awaited)
        fits = fits and tokens == awaited + sum(accepted) and len(completion.logprobs) in (0, tokens)
        if completion.error is None and not fits:
            error = (
                f"stage {self._pp_size - 1} must return {awaited} tokens for microbatch {number} and one for each "
                f"of {drafts} drafts that holds, and either no logprobs or one for each, got {tokens} with "
                f"{accepted} and {len(completion.logprobs)}"
            )
            completion = Completion(microbatch_id=number, error=error)
        elif completion.error is None and [len(part) for part in completion.prompt_logprobs] != targets:
            error = (
                f"stage {self._pp_size - 1} must return prompt logprobs of {targets} tokens for microbatch {number}, "
                f"got {[len(part) for part in completion.prompt_logprobs]}"
            )
            completion = Completion(microbatch_id=number, error=error)
        self._completions[number] = completion

    def _note_grammar(self, ready: GrammarReady) -> None:
        if ready.grammar_id not in self._compiling:
            raise BadFrameError(f"grammar {ready.grammar_id} is not being compiled")
        self._compiling.remove(ready.grammar_id)
        self._answers.append(ready)

    def _note_transfer(self, stage: int, event: TransferEvent) -> None:
        """Note a stage's answer. With the last one, report the pages that all stages have, or the first error."""
        one = self._transfers.get(event.transfer)
        if one is None or stage in one.events or not _answers(event, one.order):
            raise BadFrameError(f"{event} is not awaited from stage {stage}")
        one.events[stage] = event
        if len(one.events) < self._pp_size:
            return
        del self._transfers[event.transfer]
        # The answer of the stage with the fewest pages, or of the first stage with an error.
        events = [one.events[number] for number in range(self._pp_size)]
        self._answers.append(min(events, key=_shortfall))

    def _note_control(self, report: ControlDone) -> None:
        """Note a stage's report of a control. With the last one, all stages commit the change or none does.

        The decision goes over the plan channels, so it applies to every microbatch launched from now on.
        """
        number = report.microbatch_id
        if not self._note_stage(self._controls, number, report):
            return
        error = _first_error(self._controls.pop(number))
        self._broadcast(Settle(number, commit=error is None))
        self._completions[number] = Completion(microbatch_id=number, error=error)

    def _note_read(self, report: LoraShareRead) -> None:
        """Note that a stage has read its share of a LoRA. With the last one, tell the scheduler."""
        if self._note_stage(self._reading, report.version, report):
            error = _first_error(self._reading.pop(report.version))
            self._answers.append(LoraRead(version=report.version, error=error))

    def _note_stage(
        self, orders: dict[int, dict[int, str | None]], number: int, report: ControlDone | LoraShareRead
    ) -> bool:
        """Note a stage's report about an order to all stages; return whether it is the last. Raises BadFrameError."""
        if (errors := orders.get(number)) is None:
            raise BadFrameError(f"no stage has an order {number}")
        if report.stage in errors:
            raise BadFrameError(f"stage {report.stage} has reported {number} before")
        errors[report.stage] = report.error
        return len(errors) == self._pp_size


def _awaited_of(microbatch: Forward) -> tuple[int, tuple[int, ...], list[int]]:
    """Return the shape of a microbatch's result: its tokens, its drafts, and the prompt logprobs of segments."""
    segments = microbatch.segments
    targets = [len(segment.targets) for segment in segments if segment.logprobs_from >= 0]
    return sum([segment.emits for segment in segments]), microbatch.drafts, targets


def _first_error(errors: dict[int, str | None]) -> str | None:
    """Return the error of the first stage that has one, whichever stage answered first."""
    return next((errors[stage] for stage in sorted(errors) if errors[stage] is not None), None)


def _answers(event: TransferEvent, order: ReceivePages | SendPages) -> bool:
    """Return whether an event can be the answer to an order."""
    if isinstance(event, PagesReceived):
        return isinstance(order, ReceivePages) and event.pages <= len(order.pages)
    return isinstance(order, SendPages)


def _shortfall(event: TransferEvent) -> int:
    return event.pages if isinstance(event, PagesReceived) else event.error is None
