"""The pipeline of one stage: the model runs in the scheduler process, by a direct call.

On a CPU ``launch`` only queues and ``next_completion`` computes, so that the loop takes messages in between. A
microbatch that the runner can launch without waiting for its device is launched at once, in order.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from engine.core.errors import EngineError
from engine.core.messages import Completion, LoraRead, OrderAnswer, PipelineEvent, TransferEvent
from engine.core.plan import Forward, GrammarOrder, LoraOrder, Microbatch, TransferOrder
from engine.model.runner import StageRunner
from engine.model.sampler_output import LaunchedStep
from engine.pipeline.beside import GrammarCompiler, LoraReader
from engine.pipeline.kv_port import KVPort
from engine.pipeline.stage import view_of
from engine.pipeline.wire import StageView


class LocalPipeline:
    """Runs ``runner``, which must hold all layers. ``kv_port`` opens its KV port, if any.

    ``kv_port`` is called with the function that takes the port's answers.
    """

    def __init__(
        self,
        runner: StageRunner,
        *,
        probe: str = "",
        kv_port: Callable[[Callable[[TransferEvent], None]], KVPort | None] | None = None,
    ) -> None:
        if not (runner.facts.is_first and runner.facts.is_last):
            raise EngineError(f"a local pipeline needs a runner of all layers, got stage {runner.stage}; use pp_size=1")
        self._runner = runner
        self._probe = probe
        # Microbatches on the device, then microbatches that wait here for all earlier ones.
        self._launched: deque[LaunchedStep] = deque()
        self._queued: deque[Microbatch] = deque()
        # Completions computed before ``next_completion`` was called.
        self._completed: deque[Completion] = deque()
        self._describes = 0
        self._compiler = GrammarCompiler(runner.grammars, self._note_answer)
        self._lora_reader = LoraReader(runner, self._note_read)
        # The threads of the compiler, the reader and the port append to it; the eventfd wakes the gate.
        self._answers: deque[OrderAnswer] = deque()
        self._answer_lock = Lock()
        self._answer_file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._kv_port = None if kv_port is None else kv_port(self._note_answer)

    def launch(self, microbatch: Microbatch) -> None:
        """Queue a microbatch, and launch it on the device if that does not block."""
        self._queued.append(microbatch)
        self._launch_queued()

    def next_completion(self, timeout_s: float | None) -> PipelineEvent | None:
        """Compute or await the oldest microbatch. Returns None at once without one: no other thread launches any."""
        del timeout_s
        return self._completed.popleft() if self._completed else self._compute_next()

    def _compute_next(self) -> Completion | None:
        if self._launched:
            return self._runner.finish(self._launched.popleft())
        if not self._queued:
            return None
        completion = self._computed(self._queued.popleft())
        self._launch_queued()
        return completion

    def _catch_up(self) -> None:
        """Compute all launched microbatches, as a stage process does before it reads the next message."""
        while (completion := self._compute_next()) is not None:
            self._completed.append(completion)

    def _launch_queued(self) -> None:
        while self._queued and self._runner.can_launch(self._queued[0]):
            self._launched.append(self._runner.launch(self._queued.popleft()))

    def _computed(self, microbatch: Microbatch) -> Completion:
        if not isinstance(microbatch, Forward):
            error = self._runner.prepare(microbatch)
            self._runner.settle(microbatch.id, commit=error is None)
            return Completion(microbatch_id=microbatch.id, error=error)
        output = self._runner.forward(microbatch)
        assert isinstance(output, Completion), "the only stage returned hidden states"
        return output

    @property
    def ready(self) -> bool:
        """Whether a microbatch is in flight or a completion waits to be taken."""
        return bool(self._completed or self._launched or self._queued)

    @property
    def takes_more(self) -> bool:
        """Whether the next microbatch can be launched before the oldest one's result is known.

        Otherwise the oldest is computed first, so that requests whose results arrive one by one share a batch again.
        """
        if self._completed:
            return False
        return bool(self._launched) or (bool(self._queued) and self._runner.can_be_followed(self._queued[0]))

    def wake_sources(self) -> Sequence[Any]:
        return ()

    def order_grammar(self, order: GrammarOrder) -> None:
        self._compiler.order(order)

    def order_lora(self, order: LoraOrder) -> None:
        self._lora_reader.order(order)

    def order_transfer(self, order: TransferOrder) -> None:
        """Send or receive KV concurrently with the computation, or stop a transfer."""
        assert self._kv_port is not None, f"an engine without a KV port got {order}"
        self._kv_port.order(order)

    def answers(self) -> Sequence[OrderAnswer]:
        """Take the grammars compiled, LoRAs read and transfers ended since the last call."""
        if not self._answers:
            return ()
        with self._answer_lock:
            answers = tuple(self._answers)
            self._answers.clear()
            os.eventfd_read(self._answer_file)
        return answers

    def answer_source(self) -> int | None:
        """Return a descriptor that is readable while there are answers."""
        return self._answer_file

    def _note_read(self, version: int, error: str | None) -> None:
        self._note_answer(LoraRead(version=version, error=error))

    def _note_answer(self, answer: OrderAnswer) -> None:
        with self._answer_lock:
            self._answers.append(answer)
            if self._answer_file >= 0:
                os.eventfd_write(self._answer_file, 1)

    def fail_next_step(self, stage: int) -> None:
        if stage != 0:
            raise EngineError(f"stage must be 0, the only one of a local pipeline, got {stage}")
        self._catch_up()
        self._runner.fail_next()

    def spare_next_step(self) -> None:
        self._catch_up()
        self._runner.fail_next(on=False)

    def forget(self) -> None:
        """Reset the stage's counters and slot records; only after a flush."""
        self._runner.forget()
        if self._kv_port is not None:
            self._kv_port.forget()

    def describe(self) -> tuple[StageView, ...]:
        """Compute all launched microbatches and return the stage's view. Keeps the completions."""
        self._catch_up()
        self._describes += 1
        return (view_of(self._runner, self._describes, holder=self, probe=self._probe),)

    def close(self) -> None:
        """Drop the microbatches in flight and end all transfers; idempotent."""
        if self._kv_port is not None:
            self._kv_port.close()
        self._completed.clear()
        self._launched.clear()
        self._queued.clear()
        with self._answer_lock:
            if self._answer_file >= 0:
                os.close(self._answer_file)
                self._answer_file = -1
