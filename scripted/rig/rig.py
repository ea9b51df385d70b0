"""The rig: one engine under a script, as both the gate and ``t`` use it.

Owns the virtual clock, the results that are held back, the history, the handles, and the events that the next step will
see. It runs no step and knows no script.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.messages import (
    ClientMessage,
    Completion,
    Event,
    FlushCache,
    Generate,
    OperatorEvent,
    PipelineEvent,
    PipelineFailed,
    Refusal,
    Reply,
    ended_by,
)
from engine.scheduler import Scheduler, Step
from scripted.core.clock import VirtualClock
from scripted.core.results import Results
from scripted.core.violation import Violation
from scripted.errors import BadCall
from scripted.rig.grammars import HeldGrammars
from scripted.rig.history import Handles, History
from scripted.rig.start_over import start_over
from scripted.rig.world import World

__all__ = ["HARNESS_CALL", "Rig", "check_nothing"]

_SCHEDULER = "scheduler"
# The call id of what the harness itself asks for: no client waits for the answer.
HARNESS_CALL = "harness"


class Rig:
    """``arrived`` are the client messages that the next step will see, ``last_replies`` the replies of the last one.

    ``landed`` are the ids of the microbatches whose results the last step got. ``failure`` is the death of a stage;
    ``kills`` says that a script caused it, ``is_dead`` that it killed the scheduler.
    """

    def __init__(self, scheduler: Scheduler, world: World) -> None:
        self.scheduler = scheduler
        self.world = world
        self.clock = VirtualClock()
        self.history = History()
        self.handles = Handles()
        self.results = Results(scheduler.limits.depth)
        self.grammars = HeldGrammars()
        self.arrived: list[ClientMessage] = []
        self.last_replies: tuple[Reply, ...] = ()
        self.landed: tuple[int, ...] = ()
        self.failure: PipelineFailed | None = None
        self.kills = self.is_dead = False
        # Told of a request that is refused before a step sees it, and of what arrived ahead of it. Raises Violation.
        self.check_refusal: Callable[[Generate, Refusal, Sequence[ClientMessage]], None] = check_nothing
        self._injected: list[Event] = []
        self._interventions: list[OperatorEvent] = []
        # Stages whose link a script has slowed or cut.
        self._touched_links: set[int] = set()

    # -- for the queries --

    @property
    def arrived_requests(self) -> tuple[Generate, ...]:
        """The requests that no step has seen yet."""
        return tuple(message for message in self.arrived if isinstance(message, Generate))

    @property
    def has_unseen(self) -> bool:
        """True while something is here that no step has seen: a client's message, or the death of a stage."""
        return bool(self.arrived) or (self.failure is not None and self.scheduler.failure is None)

    # -- for the verbs --

    def await_arrival(
        self,
        matches: Callable[[ClientMessage], bool],
        *,
        refused: Callable[[], bool] = lambda: False,
    ) -> ClientMessage | None:
        """Wait until the message of a verb is here; None when the server refused the call instead.

        A request that the scheduler would refuse is refused at once: that changes nothing in it, whenever it is told.
        """
        if self.is_dead:
            raise BadCall("the scheduler was killed, so nothing arrives at it any more; ask what its clients were told")
        while True:
            for message in self.world.take_messages():
                self.arrived.append(message)
                if not matches(message):
                    continue
                if isinstance(message, Generate) and self._refuse(message):
                    break
                return message
            if refused():
                return None
            self.world.wait()

    def inject(self, *events: Event) -> None:
        """Give events of the harness itself to the next step."""
        self._injected += events

    def intervene(self, event: OperatorEvent) -> None:
        """Apply an operator's event now, between two steps; the next step counts it as its first."""
        self.scheduler.pressure.intervene(event)
        self._interventions.append(event)

    def kill_stage(self, stage: int) -> None:
        """Kill a stage; the next step sees the failure first."""
        self._lose(stage, self.world.kill_stage(stage))

    def slow_link(self, stage: int, delay_s: float) -> None:
        """Slow a stage's link; its results come when they come, in the steps in which they are due."""
        self.world.slow_link(stage, delay_s)
        self._touched_links.add(stage)

    def cut_link(self, stage: int) -> None:
        """Cut a stage's link; nothing completes until it is healed or found to be lost."""
        self.world.cut_link(stage)
        self._touched_links.add(stage)
        self.results.cut.add(stage)

    def heal_link(self, stage: int) -> None:
        """Take a delay or a cut back."""
        self.world.heal_link(stage)
        self._touched_links.discard(stage)
        self.results.cut.discard(stage)

    def lose_node(self, stage: int) -> None:
        """Lose a stage's node; the next step sees the failure first."""
        self._lose(stage, self.world.lose_node(stage))

    def await_loss(self, stage: int) -> None:
        """Wait until a cut is found; the next step sees the failure first."""
        self._lose(stage, self.world.await_loss(stage))

    def kill_scheduler(self) -> None:
        """Kill the scheduler's process; no step runs after it. Raises Violation for a client that is not told so."""
        streams = [handle for handle in self.handles.all if not handle.client.closed]
        calls = [call for call in self.handles.calls if not call.done]
        self.world.kill_scheduler(
            lambda: all(handle.client.closed for handle in streams) and all(call.done for call in calls)
        )
        self.is_dead = True
        untold = [handle.rid for handle in streams if _SCHEDULER not in (handle.client.error or "")]
        untold += [f"POST {call.name}" for call in calls if not call.done]
        if untold:
            raise Violation(
                "the scheduler was killed, and these clients were not told so in time: "
                f"{', '.join(untold)}; {[handle.client for handle in streams]}"
            )

    def flush(self) -> None:
        """Flush the cache in the next step; the engine is idle."""
        self.inject(FlushCache(call_id=HARNESS_CALL))

    # -- for the gate --

    def compose(self) -> Step:
        """The next step's events: interventions, completions that are due, messages in the order of their arrival."""
        events: list[Event] = [*self._interventions]
        if self.failure is not None and self.scheduler.failure is None:
            events.append(self.failure)
        self.landed = ()
        for microbatch_id in self.results.take_due(self.scheduler.step_number + 1):
            self.landed = (*self.landed, microbatch_id)
            event = self.world.take_completion(microbatch_id)
            events.append(event)
            if isinstance(event, PipelineFailed):
                self._fail(event)
                break
            assert isinstance(event, Completion)
            assert event.microbatch_id == microbatch_id, f"{event} came back, microbatch {microbatch_id} was due"
        if self.failure is None:
            events += [self.grammars.answer(self.world.take_grammar(number)) for number in self.grammars.take_due()]
        events += self._injected
        events += self.arrived
        self._injected, self.arrived, self._interventions = [], [], []
        return Step(tuple(events), self.clock.now())

    def let_go(self) -> None:
        """Release what a script holds back or has stopped, and take back a failure that no step has met."""
        self.world.spare_next_step()
        self.results.release(None)
        self.grammars.release(None)
        self.grammars.spare_next()
        for stage in sorted(self.results.stalled):
            self.world.resume_stage(stage)
        self.results.stalled.clear()
        for stage in sorted(self._touched_links):
            self.heal_link(stage)

    def start_over(self) -> None:
        """Become as good as new. The engine must be fully idle."""
        self.world.start_over()
        self.world.take_messages()
        start_over(self.scheduler)
        self.clock.reset()
        self.results.start_over()
        self.grammars.start_over()
        self.landed = ()
        self.history.start_over()
        self.handles.start_over()
        self.history.recording = True

    def _lose(self, stage: int, event: PipelineEvent) -> None:
        assert isinstance(event, PipelineFailed), f"losing stage {stage} brought {event}"
        self.kills = True
        self._fail(event)

    def _fail(self, failed: PipelineFailed) -> None:
        self.failure = failed
        self.results.lose()
        self.grammars.lose()

    def _rids_when_it_is_seen(self, message: Generate) -> tuple[frozenset[str], frozenset[str]]:
        """The rids that arrived ahead of a message and will live when it is seen, and those that will have ended."""
        taken: set[str] = set()
        freed: set[str] = set()
        for other in self.arrived:
            if other is message:
                break
            if isinstance(other, Generate):
                taken.add(other.rid)
            ended = ended_by(other, taken | self.scheduler.books.requests.keys())
            taken.difference_update(ended)
            freed.update(ended)
        return frozenset(taken), frozenset(freed)

    def _refuse(self, message: Generate) -> bool:
        taken, freed = self._rids_when_it_is_seen(message)
        refusal = self.scheduler.refusal_of(message, queued=len(taken), taken=taken, freed=freed)
        if refusal is None:
            return False
        self.check_refusal(message, refusal, self.arrived[: self.arrived.index(message)])
        self.arrived.remove(message)
        self.world.answer([refusal])
        return True


def check_nothing(message: Generate, refusal: Refusal, ahead: Sequence[ClientMessage]) -> None:
    """Where no account of clients is kept."""
