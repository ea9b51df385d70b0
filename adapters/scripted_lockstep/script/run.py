"""The run of scripts on the engine, in both tiers: one engine under a script, with its clients and its stages.

A script starts with an idle engine in its initial state, and ends with an idle one: open requests are aborted.
Afterwards the outputs of its requests are compared with the same requests run alone.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, cast

import msgspec

from engine.core.audit import audit
from engine.core.errors import ProcessDiedError
from engine.core.messages import (
    Abort,
    ClientMessage,
    Completion,
    Event,
    FlushCache,
    Generate,
    OperatorEvent,
    PipelineEvent,
    PipelineFailed,
    PrefillFailed,
    Refusal,
    Reply,
    ended_by,
)
from engine.core.plan import ForwardMode
from engine.core.routing.cache_index import CacheMirror
from engine.core.scheduler import Scheduler, Step, StepRecord, StepResult
from scripted.core.adapters import DEFAULT_ADAPTER
from scripted.core.clock import VirtualClock
from scripted.core.errors import BadCall, NotIdle, Overdue, RequestRefused
from scripted.core.violation import Violation
from scripted.script.clients import Call, ClientView
from scripted.script.execution import ScriptExecution, ScriptSource
from scripted.script.handles import Choices
from scripted.script.json_values import as_json
from scripted.script.run import ScriptedRun
from scripted.script.state import MicrobatchInFlight, mode_of
from scripted.script.values import Listed
from scripted.script.wait import Steps
from scripted_lockstep.actions import EngineCall
from scripted_lockstep.machine import EngineMachine
from scripted_lockstep.oracle.growth import check_growth, check_sizes, check_stages
from scripted_lockstep.oracle.step_checks import EngineOracle
from scripted_lockstep.script.causes import causes_of_holds, causes_of_memory, causes_of_the_engine
from scripted_lockstep.script.context import ScriptContext
from scripted_lockstep.script.execution import EngineExecution
from scripted_lockstep.script.fleet import Fleet
from scripted_lockstep.script.followed_answers import FollowedAnswers
from scripted_lockstep.script.handle import RequestHandle
from scripted_lockstep.script.history import EngineHandles, check_answers, record_step
from scripted_lockstep.script.reset import HARNESS_CALL, drain, flush, reset, restore_weights, warm_up
from scripted_lockstep.script.solo_runs import SoloRuns
from scripted_lockstep.script.state import EngineState, take_state
from scripted_lockstep.script.world import StageLink, World
from scripted_lockstep.simulated.grammar import HeldGrammars
from scripted_lockstep.simulated.held_orders import HeldOrders

_SCHEDULER: Final = "scheduler"
_MOST_SHOWN_CHARS: Final = 64
_NO_STEP: Final = (
    "the scheduler was killed, so no step can run; ask what its clients were told, for instance r.client.error"
)


class EngineRun(ScriptedRun):
    """Runs scripts on one engine and resets it in between: in the server tier the engine outlives a script.

    ``arrived`` are the client messages that the next step will see, ``last_replies`` the replies of the last one,
    ``landed`` the microbatches whose results it got. ``failure`` is the death of a stage; ``kills`` is true if a script
    caused it, ``is_dead`` if a script killed the scheduler.
    """

    context_type = ScriptContext
    fatal: ClassVar[tuple[type[Exception], ...]] = (ProcessDiedError,)
    arrived: list[ClientMessage]

    def __init__(self, scheduler: Scheduler, world: World, source: ScriptSource | None) -> None:
        machine = EngineMachine(scheduler.limits, digests=True, scheduler=scheduler)
        super().__init__(
            None, DEFAULT_ADAPTER, source, parts=(machine, world, EngineOracle(scheduler.limits, restores=True))
        )
        self.world, self.tier = world, world.tier
        self.handles: EngineHandles = EngineHandles()
        self.grammars = world.grammars = HeldGrammars()
        self.loras = world.loras = HeldOrders()
        self.last_replies: tuple[Reply, ...] = ()
        self.landed: tuple[int, ...] = ()
        self.failure: PipelineFailed | None = None
        self.kills = self.is_dead = False
        self.recording = True
        self._answers = FollowedAnswers(world.decoder)
        self._alone = SoloRuns(self)
        # True while the steps of a script are checked; in the reset before it, only the books are audited.
        self._judged = False
        # The sizes of the stages before the first script.
        self._stage_sizes: Mapping[str, int] | None = None
        # The router's view of the cache, from the engine's KV events.
        self.mirror = CacheMirror(scheduler.limits.page_size)
        # The prompts whose KV other engines of a fleet want.
        self.deliveries: list[Generate] = []
        # Makes a fleet of these names with this clock; None if scripts cannot have other engines.
        self.new_fleet: Callable[[Sequence[str], VirtualClock], Fleet] | None = None
        # The fleet that the script started, or to which this engine belongs.
        self.fleet: Fleet | None = None
        self.member_of: Fleet | None = None
        self._composed: Step | None = None
        self._injected: list[Event] = []
        self._interventions: list[OperatorEvent] = []
        # The links that a script has slowed or cut, by their stages.
        self._links: dict[int, StageLink] = {}

    # -- looking --

    @property
    def scheduler(self) -> Scheduler:
        scheduler: Scheduler = self.machine.scheduler
        return scheduler

    def take_state(self) -> EngineState:
        return take_state(self)

    @property
    def arrived_requests(self) -> tuple[Generate, ...]:
        """The requests that no step has seen yet."""
        return tuple(message for message in self.arrived if isinstance(message, Generate))

    @property
    def has_unseen(self) -> bool:
        """True if a client's message, the death of a stage or the end of a LoRA's read awaits a step."""
        return bool(self.arrived or self.loras) or (self.failure is not None and self.scheduler.failure is None)

    @property
    def is_fully_idle(self) -> bool:
        return self.scheduler.is_fully_idle and not self.has_unseen

    def last_batch(self) -> MicrobatchInFlight | None:
        last = self.scheduler.last_microbatch
        if last is None or (last.id not in self.landed and last.id not in self.scheduler.books.in_flight_ids()):
            return None
        due = self.results.due_steps().get(last.id, self.step)
        return MicrobatchInFlight(
            id=last.id,
            mode=mode_of(last.mode),
            rids=Listed(last.rids),
            tokens=last.tokens,
            launched_at_step=due - self.scheduler.limits.depth,
            due_at_step=due,
        )

    def decoding_in(self, batch: MicrobatchInFlight) -> set[str]:
        if batch.mode == ForwardMode.DECODE.value:
            return set(batch.rids)
        return set(self.scheduler.books.running) if batch.mode == ForwardMode.MIXED.value else set()

    idle_words: ClassVar[str] = "the engine is fully idle, so no further step can change anything"

    @property
    def is_at_rest(self) -> bool:
        """Return whether messages may still arrive: an engine of a fleet may hear from another."""
        return self.fleet is None and self.member_of is None and super().is_at_rest

    def did_something(self, record: StepRecord) -> bool:
        return bool(record.events or record.replies or record.microbatch is not None)

    def can_fail(self, record: StepRecord) -> bool:
        failed = any(isinstance(event, Completion) and event.error is not None for event in record.events)
        return failed or record.microbatch is not None

    def causes(self) -> Iterable[str]:
        own = self.own_causes()
        fleet = self.member_of if self.fleet is None else self.fleet
        if fleet is None or not (others := list(fleet.causes(self))):
            return own
        return [*(cause for cause in own if cause != self.idle_words), *others]

    def own_causes(self) -> list[str]:
        """Return this engine's causes, without the causes of other engines of a fleet."""
        scheduler = self.scheduler
        causes = [*causes_of_holds(self.results, self.grammars, self.loras)]
        if scheduler.books.open_transfers and self.world.transfers.holds_some:
            causes.append("transfers of KV are held, until t.release_transfers()")
        causes += [*causes_of_memory(scheduler), *causes_of_the_engine(scheduler)]
        if scheduler.books.is_fully_idle and not self.has_unseen:
            causes.append(self.idle_words)
        return causes

    # -- for the verbs --

    def start(self, body: dict[str, Any], first_page: int | None = None) -> RequestHandle | Choices:
        """POST a request; returns when its messages have arrived. Raises RequestRefused, or Violation.

        With a ``first_page`` it is a prompt for a prefill engine, which sends its pages from there on.
        """
        rid = body["rid"]
        view = self.world.clients.generate(rid, body, first_page)
        rids = {choice.rid for choice in view.choices}
        messages = self.await_arrivals(
            lambda m: isinstance(m, Generate) and m.rid in rids, count=len(rids), refused=lambda: view.closed
        )
        if self._are_refused(messages, view):
            answers = {choice.terminal_answers for choice in view.choices}
            if answers != {1}:
                raise Violation(f"the client of {rid}, refused, got {answers} terminal answers: {view}")
            raise RequestRefused(f"request {_shown(rid)}", view.status or 0, view.choices[0].error or view.text)
        handles = [RequestHandle(cast(Generate, m), one) for m, one in zip(messages, view.choices, strict=True)]
        for handle in handles:
            handle.together = handles
            self.handles.start(handle)
        if len(handles) == 1:
            return handles[0]
        self.handles.several.append(Choices(rid, handles, view))
        return self.handles.several[-1]

    def _are_refused(self, messages: Sequence[Any], view: ClientView) -> bool:
        """Return whether the front end or the scheduler refused a request; the front end aborts its other choices."""
        if not messages:
            return True
        refusals = [refusal for message in messages if (refusal := self._refusal_of(message)) is not None]
        if not refusals:
            return False
        self.world.answer(refusals)
        left = {message.rid for message in messages} - {refusal.rid for refusal in refusals}
        self.await_arrivals(lambda m: isinstance(m, Abort) and m.rid in left, count=len(left))
        while not view.closed:
            self.world.wait()
        return True

    def call(self, action: EngineCall) -> Call:
        """Make an administrative call; returns when its message has arrived. Raises RequestRefused."""
        for name, value in (action.body or {}).items():
            as_json(f"POST {action.route}", name, value)
        call = self.world.clients.call(action)
        messages = self.await_arrivals(action.is_sent_as, refused=lambda: call.done)
        if not messages:
            raise RequestRefused(f"POST {action.path}", call.status, call.text)
        (message,) = messages
        assert not isinstance(message, Generate | PrefillFailed), f"POST {action.path} arrived as {message}"
        call.arrived, call.call_id = True, message.call_id
        self.handles.calls.append(call)
        return call

    def await_arrivals(
        self, matches: Callable[[ClientMessage], bool], *, count: int = 1, refused: Callable[[], bool] = lambda: False
    ) -> list[ClientMessage]:
        """Wait until ``count`` messages of a verb have arrived; none if the server refused the call."""
        if self.is_dead:
            raise BadCall("the scheduler was killed, so nothing arrives at it any more; ask what its clients were told")
        found: list[ClientMessage] = []
        while len(found) < count:
            messages = self.world.take_messages()
            self._arrive(messages)
            found += filter(matches, messages)
            if not messages:
                if refused():
                    return []
                self.world.wait()
        return found

    def _arrive(self, messages: Sequence[ClientMessage]) -> None:
        """Keep messages for the next step, and note the requests that they end: for a rid, the newest one."""
        self.arrived += messages
        for message in messages:
            if not isinstance(message, Generate | PrefillFailed):
                live = {handle.rid: handle for handle in self.handles.all if not handle.finished}
                for rid in ended_by(message, live):
                    live[rid].is_ending = True

    def inject(self, *events: Event) -> None:
        """Give the harness's own events to the next step."""
        self._injected += events

    def happened(self, event: OperatorEvent) -> None:
        """Note an event that took effect between two steps, which the next step has as its first."""
        self._interventions.append(event)

    def join_fleet(self, clock: VirtualClock) -> None:
        """Join a fleet: use its clock, and check every step from the first on."""
        self.clock, self._judged = clock, True

    def kill_stage(self, stage: int) -> None:
        """Kill a stage; the next step sees the failure first."""
        self._lose(stage, self.world.kill_stage(stage))

    def slow_link(self, stage: int, delay_s: float) -> None:
        """Slow a stage's link. Its results still arrive in the steps in which they are due."""
        self._set_link("slow_link", stage, delay_s=delay_s)

    def cut_link(self, stage: int) -> None:
        """Cut a stage's link. Nothing completes until it is healed or its loss is detected."""
        self._set_link("cut_link", stage, is_cut=True)
        self.results.cut.add(stage)

    def _set_link(self, verb: str, stage: int, **changes: Any) -> None:
        link = msgspec.structs.replace(self._links.get(stage, StageLink(stage=stage)), **changes)
        self.world.set_link(link, verb)
        self._links[stage] = link

    def heal_link(self, stage: int) -> None:
        """Restore a stage's link."""
        self.world.set_link(StageLink(stage=stage), "heal_link")
        self._links.pop(stage, None)
        self.results.cut.discard(stage)

    def lose_node(self, stage: int) -> None:
        """Lose a stage's node; the next step sees the failure first."""
        self._lose(stage, self.world.lose_node(stage))

    def await_loss(self, stage: int) -> None:
        """Wait until a cut is detected; the next step sees the failure first."""
        self._lose(stage, self.world.await_loss(stage))

    def kill_scheduler(self) -> None:
        """Kill the scheduler's process; no step runs after it. Raises Violation if a client gets no error for it."""
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

    # -- one script --

    def warm_up(self) -> Steps:
        return warm_up(self)

    def before_script(self, script: ScriptExecution) -> Steps:
        options = script.options
        self.fleet = None
        self.world.limit_waits(min(options.result_timeout_s, options.timeout_s))
        self._judged = False
        yield from reset(self)
        if self._stage_sizes is None:
            self._stage_sizes = self.world.stage_sizes()
        self.oracle = EngineOracle(self.scheduler.limits, restores=True)
        self._judged = options.check_every_step

    def after_script(self, script: ScriptExecution) -> Steps:
        assert isinstance(script, EngineExecution)
        assert script.context is not None
        script.note_end(self)
        if self.fleet is not None:
            yield from self.fleet.finish()
        if self.is_dead:
            check_answers(self.handles.all)
        elif self.failure is None:
            yield from drain(self)
            check_answers(self.handles.all)
            if self._judged:
                self.oracle.at_rest(self.machine)
            yield from flush(self)
            check_sizes(self.scheduler)
            check_growth(self.scheduler)
            assert self._stage_sizes is not None
            check_stages(self._stage_sizes, self.world.stage_sizes(), loras=self.scheduler.features.loras.resident)
        script.context.check_reached()
        if script.options.oracle and self.failure is None and not self.is_dead:
            handles = list(self.handles.all)
            if self.fleet is not None and self.world.tier == "server":
                handles += self.fleet.handles
            compared = yield from self._alone.compare(handles, lambda: restore_weights(self))
            compared.outputs += self.fleet.compared if self.fleet is not None and self.world.tier == "sim" else 0
            script.comparison = compared

    def check_can_step(self, script: ScriptExecution) -> None:
        if self.is_dead:
            self._stop(script, BadCall(_NO_STEP))

    def as_found(self, exc: Exception) -> Exception:
        """Blame a failure before a script's beginning on an earlier script."""
        begun = self.script is None or self.script.context is not None
        if begun or isinstance(exc, (NotIdle, Overdue)):
            return exc
        dirty = NotIdle(f"the engine could not be reset: {type(exc).__name__}: {exc}")
        dirty.__cause__ = exc
        return dirty

    def note_death(self, exc: BaseException) -> None:
        recorded = self.records[-1].step if self.records else 0
        if self._composed is not None and self.scheduler.step_number > recorded and self.recording:
            result = StepResult(self.scheduler.step_number, None, (), again=False, deadline=None)
            error = f"{type(exc).__name__}: {exc}"
            self.records.append(record_step(self._composed, result, self.scheduler, error=error))

    # -- one step --

    def compose(self, previous: StepResult | None) -> Step:
        """Compose the next step: interventions, due completions, then messages in order of arrival."""
        del previous
        if self.fleet is not None:
            self.fleet.step()
        self.step = self.scheduler.step_number + 1
        events: list[Event] = [*self._interventions]
        if self.failure is not None and self.scheduler.failure is None:
            events.append(self.failure)
        self.landed = ()
        for microbatch_id in self.results.take_due(self.step):
            self.landed = (*self.landed, microbatch_id)
            event = self.world.take_completion(microbatch_id)
            events.append(event)
            if isinstance(event, PipelineFailed):
                self._fail(event)
                break
            assert isinstance(event, Completion)
            assert event.microbatch_id == microbatch_id, f"{event} came back, microbatch {microbatch_id} was due"
        if self.failure is None:
            if self.scheduler.limits.pp_size - 1 not in self.results.stalled:
                events += [self.grammars.answer(self.world.take_grammar(number)) for number in self.grammars.take_due()]
            if not self.results.stalled:
                events += [self.world.take_lora(version) for version in self.loras.take_due()]
            own = [handle.message for handle in self.handles.all if handle.message.deliver is not None]
            prompts = own + self.deliveries
            events += self.world.ended_transfers(self.last_replies, prompts)
        events += self._injected
        events += self.arrived
        self._injected, self.arrived, self._interventions = [], [], []
        self._composed = Step(tuple(events), self.clock.now())
        return self._composed

    def take_step(self, stepped: StepResult) -> None:
        assert self._composed is not None
        if stepped.microbatch is not None:
            self.results.launched(stepped.microbatch.id, stepped.step)
            self.launches += 1
        self.mirror.take(self.mirror.next, self._composed.now, stepped.cache_events)
        self.grammars.ordered([order.id for order in stepped.grammars if order.grammar is not None])
        self.loras.ordered([order.version for order in stepped.loras if order.path is not None])
        self.last_replies = stepped.replies
        self._alone.note(self._composed.events, stepped.replies)
        if self.recording:
            self.records.append(record_step(self._composed, stepped, self.scheduler))
        live = self.handles.live()
        launched = () if stepped.microbatch is None else stepped.microbatch.rids
        self.handles.update(stepped.replies, self.scheduler, launched)
        ended: list[Abort] = []
        if stepped.replies:
            shown, ended = self._answers.follow(stepped.replies, live)
            views = {rid: handle.client for rid, handle in live.items()}
            self.world.clients.settle(shown, views, self.handles.open_calls())
        self._arrive(self._messages_with(ended))
        self._check_stages()
        self._judge_step(stepped)

    def _judge_step(self, stepped: StepResult) -> None:
        """Check a step; in the reset before a script, only audit the engine's books. Raises Violation."""
        assert self._composed is not None
        if self._judged:
            self.oracle.check_step(self._composed.events, stepped, self.scheduler, corruptions=self.world.corruptions())
        elif self.script is None or self.script.options.check_every_step:
            audit(self.scheduler)

    def _messages_with(self, aborts: list[Abort]) -> list[ClientMessage]:
        """Return the arrivals, then the front end's aborts, in the order of the outputs that cause them."""
        messages = self.world.take_messages()
        while not all(abort in messages for abort in aborts):
            self.world.wait()
            messages += self.world.take_messages()
        return [message for message in messages if message not in aborts] + aborts

    def _check_stages(self) -> None:
        """Fail the script if a stage died without being killed by it."""
        failure = self.scheduler.failure
        if failure is not None and not self.kills:
            raise ProcessDiedError(failure.process, failure.cause, failure.node)

    # -- between scripts --

    def let_go(self) -> None:
        """Release everything that a script holds or has stopped, and cancel an injected failure without effect."""
        self.world.pipeline.spare_next_step()
        self.results.release(None)
        self.grammars.release(None)
        self.grammars.spare_next()
        self.loras.release(None)
        if self.scheduler.features.transfers.begun:
            self.world.transfers.is_holding = False
        for stage in sorted(self.results.stalled):
            self.world.resume_stage(stage)
        self.results.stalled.clear()
        for stage in sorted(self._links):
            self.heal_link(stage)

    def start_over(self) -> None:
        """Return to the initial state. Raises IntegrityError unless the engine is fully idle."""
        self.world.pipeline.forget()
        self.world.take_messages()
        self.machine.start_over()
        self.clock.reset()
        self.results.start_over()
        self.grammars.start_over()
        self.loras.start_over()
        self.landed = ()
        self.records.clear()
        self.handles.start_over()
        self.step = self.launches = 0
        self.recording = True

    # -- inside --

    def _lose(self, stage: int, event: PipelineEvent) -> None:
        assert isinstance(event, PipelineFailed), f"losing stage {stage} brought {event}"
        self.kills = True
        self._fail(event)

    def _fail(self, failed: PipelineFailed) -> None:
        self.failure = failed
        self.results.lose()
        self.grammars.lose()
        self.loras.lose()

    def _rids_when_it_is_seen(self, message: Generate) -> tuple[frozenset[str], frozenset[str]]:
        """Return the rids that arrive before a message and will be live in its step, and the ended ones."""
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

    def _refusal_of(self, message: Generate) -> Refusal | None:
        """Refuse a request at once if the scheduler would refuse it, because a refusal changes nothing."""
        taken, freed = self._rids_when_it_is_seen(message)
        refusal = self.scheduler.refusal_of(message, queued=len(taken), taken=taken, freed=freed)
        if refusal is None:
            return None
        ahead = self.arrived[: self.arrived.index(message)]
        unseen = sum(isinstance(one, Generate) and one.rid == message.rid for one in ahead)
        refusal = msgspec.structs.replace(refusal, behind=refusal.behind + unseen)
        self._check_refusal(message, refusal, ahead)
        self.arrived.remove(message)
        return refusal

    def _check_refusal(self, message: Generate, refusal: Refusal, ahead: Sequence[ClientMessage]) -> None:
        if self._judged:
            self.oracle.check_refusal(message, refusal, ahead)


def _shown(rid: Any) -> str:
    """Return a rid for an error message: unchanged, unless it is empty, long or not plain text."""
    plain = isinstance(rid, str) and rid.isprintable() and 0 < len(rid) <= _MOST_SHOWN_CHARS
    return rid if plain else reprlib.repr(rid)
