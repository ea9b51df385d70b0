"""The world around a scripted gate: a small interface, so that a script runs unchanged in both tiers.

In ``sim`` it is one process with a simulated pipeline and simulated clients; in ``server`` everything is real.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Protocol

import msgspec

from engine.core.messages import ClientMessage, Generate, GrammarReady, LoraRead, PipelineEvent, Reply, TransferEvent
from engine.core.scheduler.ports import Pipeline
from engine.frontend.text.answer import Decoder
from engine.pipeline.wire import StageView
from scripted.core.errors import BadCall
from scripted.script.clients import Call, ClientView
from scripted_lockstep.actions import EngineCall
from scripted_lockstep.simulated.grammar import HeldGrammars
from scripted_lockstep.simulated.held_orders import HeldOrders
from scripted_lockstep.simulated.transfers import SimulatedTransfers


class StageLink(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a placed stage's link. Every byte from and to the stage takes ``delay_s`` longer.

    ``is_cut``: arriving bytes are held back, connections stay open, and new ones lead nowhere. ``is_dropped``:
    connections are reset, and new ones too.
    """

    stage: int
    delay_s: float = 0.0
    is_cut: bool = False
    is_dropped: bool = False


class Clients(Protocol):
    """Plays all clients of the engine for a script."""

    def generate(self, rid: str, body: dict[str, Any], first_page: int | None = None) -> ClientView:
        """POST ``body`` to ``/generate``, or with a ``first_page`` to ``/prefill``."""
        ...

    def call(self, action: EngineCall) -> Call: ...

    def disconnect(self, view: ClientView) -> None: ...

    def settle(self, replies: Sequence[Reply], views: Mapping[str, ClientView], calls: Mapping[str, Call]) -> None:
        """Wait until the clients have received these replies; ``views`` are by rid, ``calls`` by call id."""
        ...

    def forget(self) -> None:
        """Drop every connection that is still open, before the next script."""
        ...


class StagePipeline(Pipeline, Protocol):
    """The methods of a pipeline that the harness needs in addition to the loop's protocol."""

    def fail_next_step(self, stage: int) -> None: ...

    def spare_next_step(self) -> None:
        """Cancel an injected failure that no forward pass has hit."""
        ...

    def forget(self) -> None:
        """Reset the counts and records of the stages. No request owns any KV."""
        ...

    def describe(self) -> tuple[StageView, ...]: ...


class World(ABC):
    """Clients, pipeline and faults of one tier. Every wait is bounded and raises at its bound.

    Faults that need processes are refused here: ``kill_scheduler``, and all faults of links.
    """

    tier: ClassVar[str]
    clients: Clients
    pipeline: StagePipeline
    grammars: HeldGrammars
    loras: HeldOrders

    def limit_waits(self, seconds: float) -> None:  # noqa: B027 - a tier without waits has nothing to limit
        """Set the bound after which a silent process that must answer at once counts as hung."""

    @abstractmethod
    def take_messages(self) -> list[ClientMessage]:
        """Take the client messages that have arrived, in order, without waiting."""

    @abstractmethod
    def decoder(self) -> Decoder:
        """Return the decoder of the front end's tokenizer."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until a message may have arrived or a client has received something."""

    @abstractmethod
    def take_completion(self, microbatch_id: int) -> PipelineEvent:
        """Wait for the completion of the oldest microbatch in flight; PipelineFailed if a stage died instead."""

    @abstractmethod
    def take_grammar(self, grammar_id: int) -> GrammarReady:
        """Wait until the last stage has compiled the oldest ordered grammar."""

    @abstractmethod
    def take_lora(self, version: int) -> LoraRead:
        """Wait until all stages have read the oldest ordered LoRA."""

    @abstractmethod
    def answer(self, replies: Sequence[Reply]) -> None:
        """Send replies outside a step: refusals, which change nothing in the scheduler."""

    @property
    def transfers(self) -> SimulatedTransfers:
        """The account of KV on its way to and from other engines. Raises BadCall."""
        raise BadCall("an engine of role='both' has no transfers; set the role")

    def ended_transfers(self, replies: Sequence[Reply], prompts: Sequence[Generate]) -> Sequence[TransferEvent]:
        """Take the ends of transfers. ``replies`` are the last step's; ``prompts`` may be sent."""
        del replies, prompts
        return ()

    def corruptions(self) -> Sequence[str]:
        """Return the reads of foreign KV that this tier notices."""
        return ()

    @abstractmethod
    def kill_stage(self, stage: int) -> PipelineEvent:
        """Kill a stage and wait until its death is known."""

    def stall_stage(self, stage: int) -> None:  # noqa: B027 - without stage processes, the run holds results back
        """Stop a stage."""

    def resume_stage(self, stage: int) -> None:  # noqa: B027
        """Resume a stopped stage."""

    def kill_scheduler(self, is_told: Callable[[], bool]) -> None:
        """Kill the scheduler's process, and continue once its clients got an error or should have."""
        del is_told
        raise BadCall(
            f"kill_scheduler() needs a scheduler in a process of its own, and in {self.tier} it is the test's process; "
            "write @scripted(config, tiers=('server',))"
        )

    def set_link(self, link: StageLink, verb: str) -> None:
        """Set the state of a stage's link, on behalf of this verb."""
        del link
        self._refuse_link(verb)

    def lose_node(self, stage: int) -> PipelineEvent:
        """Kill a stage and its agent and reset their connections, all at once, and wait until the loss is noticed."""
        del stage
        self._refuse_link("lose_node")

    def await_loss(self, stage: int) -> PipelineEvent:
        """Wait until the heartbeats have noticed the cut of a stage's link."""
        del stage
        self._refuse_link("await_loss")

    def fail_next_step(self, stage: int) -> None:
        """Make the stage's next forward pass fail; actions use this object as the device."""
        self.pipeline.fail_next_step(stage)

    def stage_sizes(self) -> Mapping[str, int]:
        """Count the entries of every container of real stages and of their pipeline, by path.

        The stages first reset their counts and records. The engine is idle and flushed.
        """
        return {}

    def _refuse_link(self, verb: str) -> NoReturn:
        raise BadCall(
            f"{verb}() needs stages that joined over TCP, and in {self.tier} the stages are objects in the test's "
            "process; write @scripted(config, tiers=('server',), placement='join')"
        )
