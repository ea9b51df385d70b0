"""The world that a scripted gate talks to: one small interface, so that a script runs unchanged in both tiers.

``sim`` implements it in one process with a simulated pipeline and simulated clients; ``server_world`` with real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from engine.frontend.answer import Decoder
from engine.messages import ClientMessage, GrammarReady, PipelineEvent, Reply
from engine.pipeline.wire import StageView
from scripted.adapters.lockstep.actions import AdministrativeCall
from scripted.script.clients import Call, ClientView

__all__ = ["Clients", "World"]


class Clients(Protocol):
    """All clients of the engine, played for a script."""

    def generate(self, rid: str, body: dict[str, Any]) -> ClientView:
        """POST ``body`` to ``/generate``."""
        ...

    def call(self, action: AdministrativeCall) -> Call:
        """Make an administrative call."""
        ...

    def disconnect(self, view: ClientView) -> None:
        """Drop the connection of a request."""
        ...

    def settle(self, replies: Sequence[Reply], views: Mapping[str, ClientView], calls: Mapping[str, Call]) -> None:
        """Wait until the clients have received what these replies bring; ``views`` are by rid, ``calls`` by call id."""
        ...

    def forget(self) -> None:
        """Drop every connection that is still open, before the next script."""
        ...


class World(Protocol):
    """Clients, pipeline and faults of one tier. Every wait in it has a bound and raises when it is over."""

    tier: str

    @property
    def clients(self) -> Clients:
        """All clients of the engine."""
        ...

    def limit_waits(self, seconds: float) -> None:
        """From now on, a process that must answer at once and is silent for ``seconds`` counts as hung."""
        ...

    def take_messages(self) -> list[ClientMessage]:
        """Client messages that have arrived, in order, without waiting."""
        ...

    def decoder(self) -> Decoder:
        """The front end's tokenizer, as far as it turns tokens into text."""
        ...

    def wait(self) -> None:
        """Wait until a message may have arrived or a client has heard something."""
        ...

    def take_completion(self, microbatch_id: int) -> PipelineEvent:
        """Wait for the completion of the oldest microbatch in flight; PipelineFailed when a stage died instead."""
        ...

    def take_grammar(self, grammar_id: int) -> GrammarReady:
        """Wait until the last stage has compiled the grammar that was ordered first."""
        ...

    def answer(self, replies: Sequence[Reply]) -> None:
        """Send replies outside a step: refusals, which change nothing in the scheduler."""
        ...

    def corruptions(self) -> Sequence[str]:
        """What requests read from KV that was not theirs, as far as this tier can tell."""
        ...

    def kill_stage(self, stage: int) -> PipelineEvent:
        """Kill a stage and wait until its death is known."""
        ...

    def kill_scheduler(self, is_told: Callable[[], bool]) -> None:
        """Kill the scheduler's process, and go on without one as soon as its clients are told, or should have been.

        Raises BadCall where the scheduler has no process of its own.
        """
        ...

    def stall_stage(self, stage: int) -> None: ...

    def resume_stage(self, stage: int) -> None:
        """Let a stopped stage go on."""
        ...

    def slow_link(self, stage: int, delay_s: float) -> None:
        """Make every byte from and to a stage take longer. Without links this and the next four raise BadCall."""
        ...

    def cut_link(self, stage: int) -> None:
        """Let no byte from or to a stage through; its connections stay open."""
        ...

    def heal_link(self, stage: int) -> None:
        """Let bytes through at once again, those that were held back first."""
        ...

    def lose_node(self, stage: int) -> PipelineEvent:
        """Kill a stage and its agent and reset their connections, all at once, and wait until that is known."""
        ...

    def await_loss(self, stage: int) -> PipelineEvent:
        """Wait until the heartbeats have found that a stage's link is cut."""
        ...

    def fail_next_step(self, stage: int) -> None:
        """Make the stage's next forward pass fail."""
        ...

    def spare_next_step(self) -> None:
        """Take ``fail_next_step`` back where no forward pass has met it."""
        ...

    def describe_stage(self, stage: int) -> StageView:
        """The stage's own view."""
        ...

    def stage_sizes(self) -> Mapping[str, int]:
        """Entries of every container of the stages and of the pipeline to them, by path; none where none is real.

        The stages forget first what they count and remember. The engine is idle and flushed.
        """
        ...

    def start_over(self) -> None:
        """Forget what the last script left: connections, counters of stages. The engine is idle."""
        ...
