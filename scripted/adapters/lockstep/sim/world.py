"""The world of the sim tier: simulated clients and a simulated pipeline, in this process. Nothing in it waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engine.errors import EngineError
from engine.limits import Limits
from engine.messages import (
    ClientMessage,
    GrammarReady,
    PipelineEvent,
    Reply,
)
from engine.pipeline.wire import StageView
from scripted.adapters.lockstep.script.stop_strings import ByteDecoder
from scripted.adapters.lockstep.sim.clients import SimClients
from scripted.adapters.lockstep.simulated.pipeline import SimulatedPipeline
from scripted.errors import BadCall

__all__ = ["SimWorld"]


class SimWorld:
    """The world of the sim tier."""

    tier = "sim"

    def __init__(self, limits: Limits, model_name: str) -> None:
        self._limits = limits
        self.pipeline = SimulatedPipeline(limits)
        self.clients = SimClients(limits, model_name)
        self._grammars: dict[int, GrammarReady] = {}

    def limit_waits(self, seconds: float) -> None:
        pass

    def take_messages(self) -> list[ClientMessage]:
        """What the clients sent."""
        return self.clients.take_sent()

    def decoder(self) -> ByteDecoder:
        return ByteDecoder()

    def wait(self) -> None:
        """Never needed: what can come is there."""
        raise EngineError("a verb waits for a message that its client never sent")

    def take_completion(self, microbatch_id: int) -> PipelineEvent:
        """The completion of the oldest microbatch."""
        event = self.pipeline.next_completion(0)
        assert event is not None, f"microbatch {microbatch_id} is due, but the pipeline has nothing"
        return event

    def take_grammar(self, grammar_id: int) -> GrammarReady:
        """Compiled when it was ordered."""
        self._grammars.update({ready.grammar_id: ready for ready in self.pipeline.ready_grammars()})
        return self._grammars.pop(grammar_id)

    def answer(self, replies: Sequence[Reply]) -> None:
        """Hand replies to the clients."""
        self.clients.send(replies)

    def corruptions(self) -> Sequence[str]:
        """What requests read that was not theirs."""
        return self.pipeline.corruptions

    def kill_stage(self, stage: int) -> PipelineEvent:
        self.pipeline.kill_stage(stage)
        event = self.pipeline.next_completion(0)
        assert event is not None
        return event

    def kill_scheduler(self, is_told: Callable[[], bool]) -> None:  # noqa: ARG002 - there are no such clients
        """Refused: the scheduler is an object here."""
        raise BadCall(
            "kill_scheduler() needs a scheduler in a process of its own, and in sim it is the test's process; "
            "write @scripted(config, tiers=('server',))"
        )

    def stall_stage(self, stage: int) -> None:
        self.pipeline.stall_stage(stage)

    def resume_stage(self, stage: int) -> None:
        """Let a stage go on."""
        self.pipeline.resume_stage(stage)

    def slow_link(self, stage: int, delay_s: float) -> None:  # noqa: ARG002 - there are no links, as below
        """Refused: the stages are objects here."""
        raise _without_links("slow_link")

    def cut_link(self, stage: int) -> None:  # noqa: ARG002
        raise _without_links("cut_link")

    def heal_link(self, stage: int) -> None:  # noqa: ARG002
        raise _without_links("heal_link")

    def lose_node(self, stage: int) -> PipelineEvent:  # noqa: ARG002
        raise _without_links("lose_node")

    def await_loss(self, stage: int) -> PipelineEvent:  # noqa: ARG002
        raise _without_links("await_loss")

    def fail_next_step(self, stage: int) -> None:
        """Make the stage's next microbatch fail."""
        self.pipeline.fail_next_step(stage)

    def spare_next_step(self) -> None:
        """Take back a failure that no microbatch has met."""
        self.pipeline.spare_next_step()

    def describe_stage(self, stage: int) -> StageView:
        """The stage's own view."""
        return self.pipeline.describe()[stage]

    def stage_sizes(self) -> Mapping[str, int]:
        """Nothing: the simulated stages are new for each script."""
        return {}

    def start_over(self) -> None:
        """Clear the pipeline; no request owns any KV of it now."""
        self.pipeline.forget()


def _without_links(verb: str) -> BadCall:
    return BadCall(
        f"{verb}() needs stages that joined over TCP, and in sim the stages are objects in the test's process; "
        "write @scripted(config, tiers=('server',), placement='join')"
    )
