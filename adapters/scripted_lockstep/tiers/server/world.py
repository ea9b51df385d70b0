"""The world of the server tier: real clients, real stage processes, faults by signals.

It lives in the scheduler's process. Every wait also listens to the supervisor, so a death ends it at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import psutil

from engine.core.config import embedded_seed
from engine.core.errors import EngineError, ProcessDiedError
from engine.core.messages import (
    ClientMessage,
    GrammarReady,
    LoraRead,
    PagesReceived,
    PagesSent,
    PipelineEvent,
    PipelineFailed,
    Reply,
    TransferEvent,
)
from engine.frontend.text.answer import Decoder
from engine.frontend.text.tokenizer import load_tokenizer
from engine.process.control import STAGE_PREFIX, ProcessDied, Shutdown
from engine.process.settings import ServerSettings
from engine.server.scheduler_process.gate_context import GateContext
from scripted.core.errors import BadCall, NoAnswer
from scripted.core.sizes import sizes_of
from scripted.script.options import DEFAULT_RESULT_TIMEOUT_S
from scripted_lockstep.script.followed_answers import ByteDecoder
from scripted_lockstep.script.world import StageLink, StagePipeline, World
from scripted_lockstep.tiers.server.clients import HttpClients
from scripted_lockstep.tiers.server.forked_script import survive
from scripted_lockstep.tiers.server.links import order_link
from scripted_lockstep.tiers.server.loop_thread import poll

DEATH_TIMEOUT_S: Final = 15.0
# No timeout detects a death: the front end learns of it at once. These bounds leave room for a busy machine.
TOLD_WITHIN_S: Final = 10.0


def decoder_of(settings: ServerSettings) -> Decoder:
    """Return the detokenizer of a server."""
    if embedded_seed(settings.model, settings.seed) is not None:
        return ByteDecoder()
    return load_tokenizer(settings)[0]


def _just_wake() -> None:
    """Do nothing: the waiter itself reads the source."""


class ShutdownAsked(Exception):
    """The supervisor ordered this process to end in the middle of a script."""


class ServerWorld(World):
    """The clients, the stages and the links of a real server."""

    tier = "server"
    clients: HttpClients

    def __init__(self, context: GateContext, relay_path: Path | None = None) -> None:
        self._context = context
        # Where the relay of the stages' links takes orders; None for stages that were forked beside this process.
        self._relay_path = relay_path
        self._control = context.control
        self.pipeline = cast(StagePipeline, context.pipeline)
        self._dead_stage: PipelineFailed | None = None
        # True in the copy of a killed process.
        self._is_alone = False
        self._answer_timeout_s = DEFAULT_RESULT_TIMEOUT_S
        self.clients = HttpClients(context.base_url, pause=self._pause)
        # Answers of the stages that no caller has taken yet.
        self._grammars: dict[int, GrammarReady] = {}
        self._loras: dict[int, LoraRead] = {}
        self._transfers: dict[int, TransferEvent] = {}
        # Results that came during a wait for an answer.
        self._early: deque[PipelineEvent] = deque()

    @property
    def private_dir(self) -> Path:
        """The server's folder."""
        return self._context.private_dir

    @property
    def answer_timeout_s(self) -> float:
        """The longest silence of a process that must answer at once."""
        return self._answer_timeout_s

    def limit_waits(self, seconds: float) -> None:
        self._answer_timeout_s = self.clients.answer_timeout_s = seconds

    def take_messages(self) -> list[ClientMessage]:
        return self._context.inbox.drain()

    def decoder(self) -> Decoder:
        """Load the tokenizer when a script first needs it; the embedded model's needs no loading."""
        return decoder_of(self._context.settings)

    def wait(self) -> None:
        """Wait for a message or for news of a client."""
        if not self._pause(self._answer_timeout_s):
            raise NoAnswer(
                f"nothing arrived at the gate within {self._answer_timeout_s} s of a call: the front end hangs"
            )

    def take_completion(self, microbatch_id: int) -> PipelineEvent:
        came: list[PipelineEvent] = []

        def has_come() -> bool:
            completion = self._early.popleft() if self._early else self.pipeline.next_completion(0)
            came.extend([] if completion is None else [completion])
            return bool(came)

        what = f"microbatch {microbatch_id} did not come back"
        self._await(has_come, self.pipeline.wake_sources(), what, ": a stage hangs")
        return came[0] if came else cast(PipelineFailed, self._dead_stage)

    def take_grammar(self, grammar_id: int) -> GrammarReady:
        """Wait for the answer to the oldest open order."""
        self._await_answer(grammar_id, self._grammars, f"grammar {grammar_id} was not compiled")
        return self._grammars.pop(grammar_id, GrammarReady(grammar_id=grammar_id, error="a stage died"))

    def take_lora(self, version: int) -> LoraRead:
        """Wait for the answer to the oldest open order."""
        self._await_answer(version, self._loras, f"version {version} of a LoRA was not read")
        return self._loras.pop(version, LoraRead(version=version, error="a stage died"))

    def take_transfer(self, number: int) -> TransferEvent | None:
        """Wait for the end of a transfer; None when a stage died instead."""
        self._await_answer(number, self._transfers, f"transfer {number} did not end")
        return self._transfers.pop(number, None)

    def _await_answer(self, number: int, answers: Mapping[int, object], what: str) -> None:
        """Wait until an answer is there or a stage has died."""

        def has_come() -> bool:
            if number in answers:
                return True
            if self._context.stage_pids and (early := self.pipeline.next_completion(0)) is not None:
                self._early.append(early)
            for answer in self.pipeline.answers():
                match answer:
                    case PagesSent() | PagesReceived():
                        self._transfers[answer.transfer] = answer
                    case LoraRead():
                        self._loras[answer.version] = answer
                    case GrammarReady():
                        self._grammars[answer.grammar_id] = answer
            return number in answers

        own = self.pipeline.answer_source()
        self._await(has_come, [*self.pipeline.wake_sources(), *([] if own is None else [own])], what)

    def _await(self, has_come: Callable[[], bool], sources: Iterable[Any], what: str, why: str = "") -> None:
        """Wait until a condition holds or a stage has died. Raises NoAnswer."""
        deadline = time.monotonic() + self._answer_timeout_s
        while self._dead_stage is None and not has_come():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise NoAnswer(f"{what} within {self._answer_timeout_s} s{why}")
            poll({self._control.fileno(): self._listen, **dict.fromkeys(sources, _just_wake)}, left_s)

    def answer(self, replies: Sequence[Reply]) -> None:
        self._context.outbox.send(replies)

    def kill_stage(self, stage: int) -> PipelineEvent:
        """Kill the process and wait until the supervisor reports it."""
        self._signal(stage, signal.SIGKILL)
        return self._await_death(f"stage {stage} was killed", DEATH_TIMEOUT_S)

    def lose_node(self, stage: int) -> PipelineEvent:
        """Reset the connections and kill the processes, in random order, as when a machine fails."""
        node: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            # Looked up while they live: a stage ends by itself when its link does.
            process = psutil.Process(self._pid(stage))
            node = [*process.parents()[:1], process]
        self.set_link(StageLink(stage=stage, is_dropped=True), "lose_node")
        for process in node:
            with contextlib.suppress(psutil.NoSuchProcess):  # Already dead.
                process.kill()
        return self._await_death(f"the node of stage {stage} was lost", DEATH_TIMEOUT_S)

    def await_loss(self, stage: int) -> PipelineEvent:
        """Wait for the heartbeat timeout, plus the time to notice a death."""
        within_s = self._context.settings.heartbeat_timeout_s + DEATH_TIMEOUT_S
        return self._await_death(f"the link of stage {stage} was cut", within_s)

    def kill_scheduler(self, is_told: Callable[[], bool]) -> None:
        """Kill this process; a copy of it continues with the clients alone."""
        self.clients.stop()
        survive(self._context.private_dir, self._control)
        self.clients.go_on()
        self._is_alone = True
        deadline = time.monotonic() + TOLD_WITHIN_S
        while not is_told() and (left_s := deadline - time.monotonic()) > 0:
            self._pause(left_s)

    def stall_stage(self, stage: int) -> None:
        """Stop the process. A single stage lives in this process, which continues: the gate holds its results."""
        if self._context.stage_pids:
            self._signal(stage, signal.SIGSTOP)

    def resume_stage(self, stage: int) -> None:
        if self._context.stage_pids:
            self._signal(stage, signal.SIGCONT)

    def set_link(self, link: StageLink, verb: str) -> None:
        if self._relay_path is None:
            raise BadCall(
                f"{verb}() needs stages that joined over TCP, and those of this server were forked beside it; "
                "write @scripted(config, placement='join'), or run pytest with --placement join"
            )
        order_link(self._relay_path, link)

    def stage_sizes(self) -> Mapping[str, int]:
        """Return the sizes of the stages after a reset, and of this process's queues for them."""
        self.pipeline.forget()
        sizes = dict(sizes_of(pipeline=self.pipeline))
        for view in self.pipeline.describe():
            sizes |= {path.replace("stage", f"stage {view.stage}", 1): size for path, size in view.sizes.items()}
        return sizes

    def close(self) -> None:
        self.clients.close()

    def _await_death(self, cause: str, within_s: float) -> PipelineEvent:
        deadline = time.monotonic() + within_s
        while self._dead_stage is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise EngineError(f"{cause}, but the supervisor sent nothing for {within_s} s")
            self._pause(left_s)
        return self._dead_stage

    def _signal(self, stage: int, number: signal.Signals) -> None:
        """Signal a stage's process. Harmless if it has ended, for example because it lost the link to a dead stage."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid(stage), number)

    def _pid(self, stage: int) -> int:
        """Return the process of a stage; a single stage lives in this very process."""
        pids = self._context.stage_pids
        return pids[stage] if pids else os.getpid()

    def pause(self, timeout_s: float, sources: Mapping[Any, Callable[[], object]]) -> bool:
        """Wait until one of these sources is readable, and call its callback. Returns whether one was."""
        return poll({self._control.fileno(): self._listen, **sources}, timeout_s)

    def _pause(self, timeout_s: float) -> bool:
        """Wait for any event. Returns whether there was one."""
        heard: dict[Any, Callable[[], object]] = {self.clients.fileno(): self.clients.clear}
        if self._is_alone:  # All other sources belong to the killed process.
            return poll(heard, timeout_s)
        return self.pause(timeout_s, {self._context.inbox.socket: _just_wake, **heard})

    def _listen(self) -> None:
        """Read the supervisor's message: a dead stage is an event, any other death ends this process."""
        message = self._control.receive()
        if isinstance(message, ProcessDied) and message.process.startswith(STAGE_PREFIX):
            self._dead_stage = PipelineFailed(process=message.process, cause=message.cause, node=message.node)
        elif isinstance(message, ProcessDied):
            raise ProcessDiedError(message.process, message.cause, message.node)
        elif isinstance(message, Shutdown):
            raise ShutdownAsked("the supervisor ended the server in the middle of a script")
