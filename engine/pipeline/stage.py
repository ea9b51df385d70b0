"""The loop of a stage process: take a plan, wait for hidden states, compute, send the result on.

Owns the stage's sockets and its runner; neither reorders nor decides. The last stage sends completions directly to the
scheduler.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import assert_never

import torch

from engine.core.config import EngineConfig
from engine.core.frames import BadFrameError
from engine.core.limits import Limits
from engine.core.messages import Completion, TransferEvent, encode
from engine.core.plan import Control, Forward
from engine.model.runner import StageRunner
from engine.pipeline.beside import GrammarCompiler, LoraReader
from engine.pipeline.channel import StageChannel
from engine.pipeline.kv_port import KVLinks, KVPort, open_kv_port
from engine.pipeline.progress import Phase, StageProgress
from engine.pipeline.transport import DistributedTransport, HiddenFailed, HiddenTransport, SocketTransport
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
    decode_stage_message,
)
from engine.pipeline.wires import StageWires
from engine.process.control import Loading

logger = logging.getLogger(__name__)

_NO_MICROBATCH = -1


def run_stage(
    config: EngineConfig,
    limits: Limits,
    stage: int,
    private_dir: Path,
    ready: Callable[[], None],
    *,
    on_load: Callable[[Loading], None] | None = None,
    distributed: bool = False,
    wires: StageWires | None = None,
    kv_links: KVLinks | None = None,
    probe: str = "",
) -> None:
    """Run stage ``stage``: load, connect, call ``ready``, loop until EndStage or the scheduler's end.

    Without ``wires`` all stages and the scheduler have their sockets in ``private_dir``. ``kv_links`` connect prefill
    and decode engines on other machines. With ``distributed`` the caller has initialized the process group, with rank =
    stage. ``probe`` names a function that measures the stage's objects. Raises CheckpointError when loading fails
    (before ``ready``), ProcessDiedError when a neighbour dies in the middle of a microbatch.
    """
    wires = wires or StageWires.local(private_dir, stage, limits.pp_size)
    runner = StageRunner(config, limits, stage, on_load=on_load)
    with ExitStack() as owner:
        scheduler = owner.enter_context(closing(StageChannel(wires.scheduler)))
        neighbours = owner.enter_context(
            closing(_open_transport(wires, runner, limits, scheduler, distributed=distributed))
        )
        progress = owner.enter_context(closing(StageProgress(private_dir, limits.pp_size)))

        def answer(event: TransferEvent) -> None:
            scheduler.send(encode(TransferDone(stage=stage, event=event)))

        kv_port = open_kv_port(config, runner.page_images, answer, private_dir, kv_links or KVLinks())
        if kv_port is not None:
            owner.enter_context(closing(kv_port))
        ready()
        StageLoop(runner, neighbours, scheduler, progress, kv_port, probe=probe).run()


class StageLoop:
    """The loop over one stage's messages. Logs and drops frames that are not messages."""

    def __init__(
        self,
        runner: StageRunner,
        neighbours: HiddenTransport,
        scheduler: StageChannel,
        progress: StageProgress,
        kv_port: KVPort | None = None,
        *,
        probe: str = "",
    ) -> None:
        self._probe = probe
        self._kv_port = kv_port
        self._runner = runner
        self._neighbours = neighbours
        self._scheduler = scheduler
        self._progress = progress
        self._compiler = GrammarCompiler(runner.grammars, self._report)
        self._lora_reader = LoraReader(runner, self._report_read)
        # Overwrites the mark of an earlier server in the same folder.
        self._note(_NO_MICROBATCH, Phase.DONE)

    def run(self) -> None:
        """Handle messages in order until EndStage, or until the scheduler is gone and all its messages are read."""
        while (data := self._scheduler.receive()) is not None:
            try:
                message = decode_stage_message(data)
            except BadFrameError as exc:
                logger.warning("dropped a frame of %d bytes that is not a message to a stage: %s", len(data), exc)
                continue
            if not self._handle(message):
                return

    def _handle(self, message: StageMessage) -> bool:
        """Act on one message. Returns False to end the loop."""
        match message:
            case Launch():
                microbatch = message.microbatch
                self._step(microbatch) if isinstance(microbatch, Forward) else self._control(microbatch)
            case Settle():
                self._runner.settle(message.microbatch_id, commit=message.commit)
            case Describe():
                self._report(view_of(self._runner, message.seq, holder=self, probe=self._probe))
            case FailNextStep():
                self._runner.fail_next(on=message.on)
            case OrderGrammar():
                self._compiler.order(message.order)
            case OrderLora():
                self._lora_reader.order(message.order)
            case OrderTransfer():
                assert self._kv_port is not None, f"an engine without a KV port got {message.order}"
                self._kv_port.order(message.order)
            case Forget():
                self._runner.forget()
                if self._kv_port is not None:
                    self._kv_port.forget()
                self._note(_NO_MICROBATCH, Phase.DONE)
            case EndStage():
                return False
            case _:
                assert_never(message)
        return True

    def _control(self, control: Control) -> None:
        self._note(control.id, Phase.COMPUTING)
        error = self._runner.prepare(control)
        self._report(ControlDone(microbatch_id=control.id, stage=self._runner.stage, error=error))
        self._note(control.id, Phase.DONE)

    def _step(self, microbatch: Forward) -> None:
        hidden = None
        if not self._runner.facts.is_first:
            self._note(microbatch.id, Phase.WAITING)
            hidden = self._neighbours.receive(microbatch)
        self._note(microbatch.id, Phase.COMPUTING)
        if isinstance(hidden, HiddenFailed):
            self._runner.skip(microbatch)
            output: torch.Tensor | Completion = Completion(microbatch_id=microbatch.id, error=hidden.error)
        else:
            output = self._runner.forward(microbatch, hidden)
        self._note(microbatch.id, Phase.HANDING_ON)
        self._hand_on(microbatch, output)
        self._note(microbatch.id, Phase.DONE)

    def _note(self, microbatch_id: int, phase: Phase) -> None:
        self._progress.note(self._runner.stage, microbatch_id, phase)

    def _hand_on(self, microbatch: Forward, output: torch.Tensor | Completion) -> None:
        """Send the output to the next stage, or from the last stage to the scheduler. A failure takes the same path, so
        that completions arrive in launch order.
        """
        if not isinstance(output, Completion):
            self._neighbours.send(microbatch, output)
        elif self._runner.facts.is_last:
            self._report(output)
        else:
            assert output.error is not None, f"stage {self._runner.stage} completed microbatch {microbatch.id}"
            self._neighbours.send(microbatch, HiddenFailed(microbatch.id, output.error))

    def _report_read(self, version: int, error: str | None) -> None:
        self._report(LoraShareRead(version=version, stage=self._runner.stage, error=error))

    def _report(self, report: StageReport) -> None:
        self._scheduler.send(encode(report))


def view_of(runner: StageRunner, seq: int, *, holder: object, probe: str) -> StageView:
    """Build a runner's view. A harness's ``probe`` measures the containers of ``holder``."""
    return StageView(
        seq=seq,
        stage=runner.stage,
        last_microbatch_id=runner.counters.last_microbatch_id,
        microbatches=runner.counters.microbatches,
        failed=runner.counters.failed,
        tokens=runner.counters.tokens,
        slots_written=runner.slots_written,
        slots_digest=runner.slots_digest(),
        sizes=pkgutil.resolve_name(probe)(stage=holder) if probe else {},
    )


def _open_transport(
    wires: StageWires, runner: StageRunner, limits: Limits, scheduler: StageChannel, *, distributed: bool
) -> HiddenTransport:
    stage, facts, device = runner.stage, runner.facts, runner.model.device
    if distributed:
        most = max(limits.prefill_budget_tokens, limits.decode_budget_tokens)
        return DistributedTransport(stage, facts, device, most_tokens=most)
    return SocketTransport(wires, stage, facts, device, scheduler)
