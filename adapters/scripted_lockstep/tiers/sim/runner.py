"""The sim tier: the same loop, gate and scripts over a simulated pipeline and simulated clients, in one process.

No torch, no HTTP, no sockets; a script takes milliseconds. Its front end uses the real one's rules for bodies, text and
stop strings.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from engine.core.config import EngineConfig
from engine.core.errors import EngineError, ProcessDiedError
from engine.core.limits import Limits
from engine.core.messages import (
    ClientMessage,
    Generate,
    GrammarReady,
    LoraRead,
    PipelineEvent,
    PipelineFailed,
    Reply,
    TransferEvent,
)
from engine.core.scheduler import Scheduler, Step, StepResult, carry_out, run_loop
from scripted.core.base_adapter import config_text
from scripted.core.clock import VirtualClock
from scripted.script.execution import OneScript, run_one
from scripted.script.harness import ScriptedSim
from scripted.script.options import ScriptOptions
from scripted.script.source import ScriptFunction
from scripted.script.watchdog import unwatched
from scripted_lockstep.configs import config_values, limits_of
from scripted_lockstep.mutants import mutant_named
from scripted_lockstep.script.context import ScriptContext
from scripted_lockstep.script.execution import EngineExecution, ScriptSucceeded
from scripted_lockstep.script.fleet import Fleet, FleetEngine, config_of
from scripted_lockstep.script.followed_answers import ByteDecoder
from scripted_lockstep.script.run import EngineRun
from scripted_lockstep.script.world import World
from scripted_lockstep.simulated.pipeline import SimulatedPipeline
from scripted_lockstep.simulated.transfers import SimulatedTransfers
from scripted_lockstep.tiers.sim.clients import SimClients


class SimWorld(World):
    tier = "sim"
    clients: SimClients
    pipeline: SimulatedPipeline

    def __init__(self, limits: Limits, model_name: str) -> None:
        self.pipeline = SimulatedPipeline(limits)
        self.clients = SimClients(limits, model_name)
        self._grammars: dict[int, GrammarReady] = {}
        self._loras: dict[int, LoraRead] = {}

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
        self._take_answers()
        return self._grammars.pop(grammar_id)

    def take_lora(self, version: int) -> LoraRead:
        self._take_answers()
        return self._loras.pop(version)

    def _take_answers(self) -> None:
        for answer in self.pipeline.answers():
            if isinstance(answer, GrammarReady):
                self._grammars[answer.grammar_id] = answer
            elif isinstance(answer, LoraRead):
                self._loras[answer.version] = answer

    @property
    def transfers(self) -> SimulatedTransfers:
        return self.pipeline.transfers

    def ended_transfers(self, replies: Sequence[Reply], prompts: Sequence[Generate]) -> Sequence[TransferEvent]:
        self.pipeline.transfers.want(replies)
        return self.pipeline.ended_transfers(prompts)

    def answer(self, replies: Sequence[Reply]) -> None:
        self.clients.send(replies)

    def carry_out(self, step: Step, result: StepResult) -> None:
        """Pass on the orders, launches and replies of a step of a fleet's engine."""
        del step
        carry_out(result, self.pipeline, self.clients)

    def corruptions(self) -> Sequence[str]:
        return self.pipeline.corruptions

    def kill_stage(self, stage: int) -> PipelineEvent:
        self.pipeline.kill_stage(stage)
        event = self.pipeline.next_completion(0)
        assert isinstance(event, PipelineFailed)
        self.clients.refuse(ProcessDiedError(event.process, event.cause))
        return event


class EngineSim(ScriptedSim[EngineConfig, ScriptSucceeded]):
    """Every script gets a scheduler and a simulated pipeline of its own."""

    outcome_type = ScriptSucceeded

    def __init__(self, config: EngineConfig, *, mutant: str | None = None) -> None:
        super().__init__(config, mutant=mutant)
        self._limits = limits_of(config)

    def _run(
        self, script: ScriptFunction, args: tuple[object, ...], kwargs: dict[str, object], options: ScriptOptions
    ) -> ScriptSucceeded:
        if not self.usable:
            raise EngineError("this sim was shut down; start another one")
        execution = EngineExecution(script, args, kwargs, options)
        return run_in_this_process(execution, self._run_loop, self.config, self.mutant)

    def _run_loop(self, source: OneScript) -> None:
        with unwatched():  # building the engine takes none of the script's time
            scheduler, world = new_engine(self.config, copy.deepcopy(self._limits))
        run = EngineRun(scheduler, world, source)
        run.new_fleet = functools.partial(new_fleet, self.config)
        run_loop(run, scheduler, world.pipeline, world.clients)

    def shutdown(self) -> None:
        self.usable = False


def run_in_this_process(
    execution: EngineExecution, run_loop: Callable[[OneScript], None], config: EngineConfig, mutant: str | None
) -> ScriptSucceeded:
    """Run one script in an engine's loop, in this process. Raises ScriptError."""
    execution.config_text = config_text(config_values(config))
    source = OneScript(execution, mutant)
    run_one(source, run_loop, nullcontext() if mutant is None else mutant_named(mutant).switched_on())
    return execution.succeeded()


def new_engine(config: EngineConfig, limits: Limits) -> tuple[Scheduler, SimWorld]:
    """Make a new engine with its world."""
    scheduler, world = Scheduler(limits), SimWorld(limits, config.model)
    world.clients.scheduler = scheduler if config.role != "both" else None
    return scheduler, world


def new_fleet(config: EngineConfig, names: Sequence[str], clock: VirtualClock) -> Fleet:
    """Make engines of these names, each in the role of its name, with one clock."""

    def make(name: str) -> FleetEngine:
        own = config_of(name, config)
        scheduler, world = new_engine(own, limits_of(own))
        world.transfers.is_imagined = False
        run = EngineRun(scheduler, world, None)
        run.join_fleet(clock)
        return FleetEngine(name, run, ScriptContext(run, rid_prefix=name))

    return Fleet(names, make)
