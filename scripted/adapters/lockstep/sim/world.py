"""The world of the sim tier: simulated clients and a simulated pipeline, in this process. Nothing in it waits."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import EngineError
from engine.limits import Limits
from engine.messages import ClientMessage, GrammarReady, PipelineEvent, Reply
from scripted.adapters.lockstep.script.followed_answers import ByteDecoder
from scripted.adapters.lockstep.script.world import World
from scripted.adapters.lockstep.sim.clients import SimClients
from scripted.adapters.lockstep.simulated.pipeline import SimulatedPipeline


class SimWorld(World):
    tier = "sim"
    clients: SimClients
    pipeline: SimulatedPipeline

    def __init__(self, limits: Limits, model_name: str) -> None:
        self.pipeline = SimulatedPipeline(limits)
        self.clients = SimClients(limits, model_name)
        self._grammars: dict[int, GrammarReady] = {}

    def take_messages(self) -> list[ClientMessage]:
        return self.clients.take_sent()

    def decoder(self) -> ByteDecoder:
        return ByteDecoder()

    def wait(self) -> None:
        raise EngineError("a verb waits for a message that its client never sent")

    def take_completion(self, microbatch_id: int) -> PipelineEvent:
        event = self.pipeline.next_completion(0)
        assert event is not None, f"microbatch {microbatch_id} is due, but the pipeline has nothing"
        return event

    def take_grammar(self, grammar_id: int) -> GrammarReady:
        self._grammars.update({ready.grammar_id: ready for ready in self.pipeline.ready_grammars()})
        return self._grammars.pop(grammar_id)

    def answer(self, replies: Sequence[Reply]) -> None:
        self.clients.send(replies)

    def corruptions(self) -> Sequence[str]:
        return self.pipeline.corruptions

    def kill_stage(self, stage: int) -> PipelineEvent:
        self.pipeline.kill_stage(stage)
        event = self.pipeline.next_completion(0)
        assert event is not None
        return event

    def stall_stage(self, stage: int) -> None:
        self.pipeline.stall_stage(stage)

    def resume_stage(self, stage: int) -> None:
        self.pipeline.resume_stage(stage)
