"""vLLM's scheduler as a machine for the search: takes events as its engine passes them, returns plans and replies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from vllm.distributed.kv_events import NullEventPublisher
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from scripted.core.account import OWN_ENDS
from scripted.core.action import Action, RunLike
from scripted.core.promises import CachedPrefix
from scripted.sdk import (
    Abort,
    Add,
    Answer,
    Batch,
    BatchResult,
    FlushCache,
    Pause,
    PauseMode,
    Refused,
    Resume,
    Signal,
    Sleep,
    Stepped,
    Tokens,
    Violation,
    Wake,
)
from scripted_vllm.actions import (
    END_SESSION,
    HOLD_GRAMMARS,
    RELEASE_GRAMMARS,
    EndSession,
    OfferPrefixes,
    ReleaseCompilation,
    ReleaseConnector,
)
from scripted_vllm.compiling import Grammars
from scripted_vllm.config import VllmSettings
from scripted_vllm.engine_core import EngineCalls, SleepingDevice
from scripted_vllm.engine_objects import new_request, new_scheduler, result_of
from scripted_vllm.grammar import Sampler
from scripted_vllm.hisparse import SparseHost
from scripted_vllm.ids import id_at, rid_of
from scripted_vllm.images import Images, check_whole, encoder_inputs, placed_in
from scripted_vllm.in_flight import PlanInFlight
from scripted_vllm.kv_event_check import not_cached, take_events
from scripted_vllm.left_out import GOES_ON, looking_up, why_left_out, why_looked_up_wrongly
from scripted_vllm.own_connector import Connected
from scripted_vllm.prefix_cache import KnownBlocks
from scripted_vllm.quiet import silence
from scripted_vllm.runner_view import RunnerView
from scripted_vllm.transfers import Transfers

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from scripted.sdk.messages import Event, Reply

_KEEP: Final = PauseMode(name="keep")
_WAIT: Final = PauseMode(name="wait", stops_running=False)
_ABORT: Final = PauseMode(name="abort", aborts=True)
# In these modes vLLM empties its caches once it is idle; its sleep does the same.
_CLEARING: Final = {
    f"{mode.name}-clear": PauseMode(
        name=f"{mode.name}-clear", stops_running=mode.stops_running, aborts=mode.aborts, flushes=True
    )
    for mode in (_KEEP, _WAIT, _ABORT)
}
# The modes of EngineCoreProc.pause_scheduler, and of its sleep.
PAUSE_MODES: Final = (_KEEP, _WAIT, _ABORT, *_CLEARING.values())
SLEEP_MODES: Final = (_ABORT.name, _WAIT.name, _KEEP.name)
# Its levels of sleep: a pause; release of weights and KV, with the weights kept on the host; and without them. The
# memory of KV alone is released by release_kv_cache_memory.
SLEEP_LEVELS: Final = (0, 1, 2)
SLEEP_PARTS: Final = ("kv_cache",)

# vLLM's engine plans again after an empty plan, endlessly. After this many in a row, plans stay empty.
_EMPTY_PLANS: Final = 3


class Subscriber(NullEventPublisher):
    """Stands in for vLLM's publisher. ``said`` has the blocks announced as cached, by group and hash."""

    def __init__(self) -> None:
        self.said: set[tuple[int, Any]] = set()

    def publish(self, events: Any) -> None:
        take_events(self.said, events.events)

    def check(self, coordinator: Any) -> None:
        """Raise Violation for a block that is announced as cached and is not."""
        missing = not_cached(coordinator, self.said)
        if missing:
            groups = sorted({group for group, _ in missing})
            raise Violation(
                f"KV events announce {len(missing)} blocks of group {', '.join(map(str, groups))} that are not in the "
                "prefix cache"
            )


class VllmMachine:
    """Drives a new scheduler with these settings as ``EngineCore.step_with_batch_queue`` does.

    A step takes a result, then the clients' events, then plans a batch if fewer than ``depth`` are in flight.
    """

    def __init__(self, settings: VllmSettings) -> None:
        silence()
        self.depth = settings.depth
        self.scheduler = self.new_scheduler(settings)
        if settings.enable_kv_cache_events:
            self.scheduler.kv_event_publisher = Subscriber()
        self._settings = settings
        self._host = SparseHost(settings) if settings.hisparse_host_blocks else None
        self._runner = RunnerView(settings, self.scheduler, self._host)
        # In order.
        self._in_flight: deque[PlanInFlight] = deque()
        # The masks of the last plan depend on tokens in flight: vLLM's engine computes the plan and waits for the next
        # result before it samples. Until then nothing but an abort reaches the scheduler.
        self._waits_for_masks = False
        self._late: list[Event] = []
        self._verified: list[tuple[str, int]] = []
        # The internal name of each request.
        self._sessions: dict[str, str] = {}
        self._grammars = Grammars(settings.grammar_steps, self.scheduler.structured_output_manager.backend)
        self.sampler = Sampler(self.scheduler)
        self._images = Images()
        self._transfers = self._host or self.new_transfers(settings)
        self._launched = 0
        self._steps = 0
        self._empty = 0
        self._replies: list[Reply] = []
        # Requests that a flush sent back to the queue in this step; the next plan, possibly in a later step, reports
        # them too.
        self._flushed: set[str] = set()
        # Made at an operator's first call: most runs have none before their end, and copying it takes time.
        self._engine: EngineCalls | None = None
        self._known = KnownBlocks(settings)

    def new_scheduler(self, settings: VllmSettings) -> Any:
        return new_scheduler(settings)

    def new_transfers(self, settings: VllmSettings) -> Any:
        return Transfers(settings, self.scheduler.connector)

    def step(self, events: Sequence[Event], now: float) -> Stepped:
        del now
        self._replies, self._flushed = [], set()
        self._steps += 1
        self._transfers.begin(self._steps)
        if self.scheduler.ec_connector is not None:
            self.scheduler.ec_connector.begin(self._steps)
        self._grammars.begin(self._steps)
        self._verified = []
        self._sessions = {rid: name for rid, name in self._sessions.items() if name in self.scheduler.requests}
        for event in events:
            self._take(event)
            self._empty = 0
        self._answer_when_idle()
        batch, planned = self._plan()
        self._answer_when_idle()
        preempted = tuple(sorted(map(rid_of, self._flushed | planned)))
        if self._settings.enable_kv_cache_events:
            self.scheduler.kv_event_publisher.check(self.scheduler.kv_cache_manager.coordinator)
        moved = batch is not None or preempted or self._transfers.ended
        self._empty = 0 if moved else self._empty + 1
        outside = self.scheduler.ec_connector
        go_on = self._transfers.go_on or self._grammars.go_on or (outside is not None and outside.is_waited_for)
        is_asked = self._engine is not None and self._engine.needs_a_step
        again = (
            (self._empty < _EMPTY_PLANS or go_on)
            and len(self._in_flight) < self.depth
            and not self._waits_for_masks
            and (self.scheduler.has_unfinished_requests() or go_on or is_asked)
        )
        return Stepped(
            microbatch=batch,
            replies=tuple(self._replies),
            preempted=preempted,
            loads=self._transfers.arrived,
            verified=tuple(self._verified),
            again=again,
        )

    @property
    def is_idle(self) -> bool:
        scheduler = self.scheduler
        left = scheduler.requests or scheduler.finished_req_ids or self._transfers.under_way
        return not (left or self._in_flight)

    def counts(self) -> Mapping[str, int]:
        """Return requests by queue, batches in flight, transfers, and free or evictable blocks."""
        scheduler, images = self.scheduler, self.scheduler.encoder_cache_manager
        return {
            "waiting": len(scheduler.waiting) + len(scheduler.kv_holding_waiting),
            "running": len(scheduler.running),
            "in_flight": len(self._in_flight),
            "requests": len(scheduler.requests),
            "transfers": len(self._transfers.under_way),
            "blocks_free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            # vLLM's manager for encoder-decoder models counts places as free once more with every token.
            "images_free": getattr(images, "num_freeable_slots", 0),
        }

    @property
    def engine(self) -> EngineCalls:
        """vLLM's engine core, which carries out operators' calls."""
        if self._engine is None:
            self._engine = EngineCalls(self.scheduler, SleepingDevice(self._images.drop_all), self._in_flight)
        return self._engine

    @property
    def settings(self) -> VllmSettings:
        return self._settings

    @property
    def transfers(self) -> Transfers | SparseHost:
        return self._transfers

    def obstacle(self, run: RunLike) -> Action | None:
        """Return the action against held transfers or grammars, a waiting session, or a connector without an answer."""
        if self._transfers.holds:
            return ReleaseConnector()
        if self._grammars.holds:
            return ReleaseCompilation()
        for rid in self._sessions:
            # The live request may be another one that has taken the name.
            if self.has_session(rid) and (not run.is_live(rid) or self.id_of(rid) != self._sessions[rid]):
                return EndSession(rid=rid)
        if self._transfers.is_unknown and not run.is_settled:
            return OfferPrefixes(tokens=self._settings.kv_offered_tokens)
        return None

    # -- for promises --

    def open_rids(self) -> Collection[str]:
        """Return the rids of the scheduler's requests that have not ended, and of those that wait for a result."""
        named = {rid_of(name) for name, one in self.scheduler.requests.items() if not one.is_finished()}
        return named.union(event.rid for event in self._late if isinstance(event, Add))

    def queries(self) -> Mapping[str, Callable[[], object]]:
        """Return the queries that the engine and its plans make, and the blocks and statistics that none may change.

        A lookup that announces its hits is not a query and is left out.
        """
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        waiting = [] if self._settings.enable_kv_cache_events else [*scheduler.waiting]
        return {
            "counts": lambda: (scheduler.get_request_counts(), scheduler.get_num_unfinished_requests()),
            "busy": lambda: (scheduler.has_requests(), scheduler.has_finished_requests()),
            "usage": scheduler.get_kv_cache_usage,
            "hits": lambda: [manager.get_computed_blocks(one)[1] for one in waiting],
            "common": lambda: [manager.get_num_common_prefix_blocks(one.request_id) for one in scheduler.running],
            "evicted next": lambda: [one.block_id for one in manager.block_pool.free_block_queue.get_all_free_blocks()],
            "statistics": lambda: repr(manager.prefix_cache_stats),
        }

    def cached_prefixes(self) -> Iterator[CachedPrefix]:
        """Yield the blocks of the prefix cache that hold the KV of known tokens."""
        return self._known.prefixes_in(self.scheduler.kv_cache_manager.block_pool)

    # -- events --

    def _take(self, event: Event) -> None:
        is_end = isinstance(event, Signal) and event.name == END_SESSION
        if self._waits_for_masks and (is_end or isinstance(event, (Add, FlushCache, Pause, Resume, Sleep, Wake))):
            self._late.append(event)
            return
        if self._waits_for_masks and isinstance(event, Abort):
            # It takes effect at once and once more in its turn: its request may be among the late events.
            self._late.append(event)
        match event:
            case Add():
                self._add(event)
            case Abort():
                self._end(self.id_of(event.rid))
            case BatchResult():
                self._take_result(event)
            case FlushCache():
                self._flush(event)
            case Signal() if is_end:
                self._end_session(event.rid)
            case Signal() if event.name in (HOLD_GRAMMARS, RELEASE_GRAMMARS):
                self._grammars.take(event)
            case Signal():
                self._transfers.take(event)
            case Pause():
                mode, clear = event.mode.removesuffix("-clear"), event.mode in _CLEARING
                self._ask_engine(event.call_id, lambda: self.engine.pause_scheduler(mode, clear_cache=clear))
            case Resume():
                self._ask_engine(event.call_id, self.engine.resume_scheduler)
            case Sleep() if event.part:
                self._ask_engine(event.call_id, self.engine.release_kv_cache_memory)
            case Sleep():
                self._ask_engine(event.call_id, lambda: self.engine.sleep(level=event.level, mode=event.mode))
            case Wake():
                self._ask_engine(event.call_id, lambda: self.engine.wake_up([event.part] if event.part else None))
            case _:
                raise TypeError(f"vLLM cannot take {event}")

    def _flush(self, event: FlushCache) -> None:
        # vLLM answers with an error and continues if a transfer's blocks are not released.
        self._ask_engine(event.call_id, lambda: self.engine.reset_prefix_cache(reset_running_requests=event.force))

    def _add(self, event: Add) -> None:
        # The engine's front end refuses such requests, so they never reach the scheduler.
        reason = self._why_refused(event)
        if reason:
            self._replies.append(Refused(rid=event.rid, reason=reason))
            return
        request_id, prompt = id_at(event.rid, self._steps), event.prompt_ids
        images = event.images if self._settings.encoder_cache_size else ()
        if event.goes_on and any(_cuts_off(reply, event.rid) for reply in self._replies):
            # Its client has just learned that the session is over.
            return
        if event.session:
            if not event.goes_on:
                # A new session: the client of an old session with this name has left.
                self._end_session(event.rid)
            if self.is_session(event.rid):
                # More input is a request with the same name and the new tokens.
                request_id, prompt, images = self._sessions[event.rid], prompt[-event.session :], ()
            self._sessions[event.rid] = request_id
            self._runner.sessions.add(request_id)
        request = new_request(
            self._settings,
            request_id,
            placed_in(prompt, images),
            max_tokens=event.max_new_tokens,
            stop_token_ids=event.stop_token_ids,
            # vLLM serves the lowest number first.
            priority=-event.priority,
            # Requests of one step arrive at the same time.
            arrival_time=float(self._steps),
            lora=event.lora,
            grammar=event.grammar,
            session=event.session > 0,
            images=encoder_inputs(images, is_encoder_decoder=self._settings.is_encoder_decoder),
        )
        if self._settings.has_connector:
            self.scheduler.connector.arrive(event.rid, request_id)
        self.scheduler.add_request(request)
        self._grammars.add(request.request_id, event)

    def _why_refused(self, event: Add) -> str:
        settings = self._settings
        is_checked = settings.checks_sessions or not event.goes_on
        if len(event.prompt_ids) >= settings.max_model_len and is_checked:
            return f"a prompt of {len(event.prompt_ids)} tokens leaves no room in {settings.max_model_len}"
        if event.lora and not settings.max_loras:
            return f"it names LoRA {event.lora}, but max_loras is 0; set max_loras to 1 or more"
        if event.grammar and not settings.structured_output:
            return "it has a grammar, but structured_output is False; set it to True"
        return ""

    def _end_session(self, rid: str) -> None:
        if self.is_session(rid):
            self.scheduler.add_request(new_request(self._settings, self._sessions.pop(rid), [0], max_tokens=1))

    def is_session(self, rid: str) -> bool:
        """Whether a rid is a live session, which may wait for input."""
        request = self.scheduler.requests.get(self._sessions.get(rid, ""))
        return request is not None and not request.is_finished()

    def has_session(self, rid: str) -> bool:
        return self.is_session(rid) and _waits_for_input(self.scheduler.requests[self._sessions[rid]])

    def _end(self, name: str) -> None:
        silent = self._silent()
        self._tell_aborted(self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED), silent)

    def _silent(self) -> set[str]:
        """Return the sessions that wait for input: they have sent their whole answer."""
        return {request.request_id for request in self.scheduler.requests.values() if _waits_for_input(request)}

    def _tell_aborted(self, ended: Sequence[Any], silent: Collection[str]) -> None:
        for request in ended:
            self._known.note(request)
            if request.request_id not in silent:
                self._replies.append(Tokens(rid=rid_of(request.request_id), finish_reason="abort"))

    def id_of(self, rid: str) -> str:
        """Return a live request's internal name, or a name that vLLM has for no other request.

        An ended request may remain until its transfer ends.
        """
        requests = self.scheduler.requests.values()
        named = [one for one in requests if rid_of(one.request_id) == rid and not one.is_finished()]
        named.sort(key=_waits_for_input)
        return named[0].request_id if named else rid

    def _ask_engine(self, call_id: str, ask: Callable[[], Any]) -> None:
        """Let vLLM's engine carry out an operator's call, and tell the clients of the requests that it aborts."""
        engine, silent = self.engine, self._silent()
        answers = engine.call(call_id, ask)
        ended, engine.ended = engine.ended, []
        self._tell_aborted(ended, silent)
        self._hear_engine(engine, answers)

    def _hear_engine(self, engine: EngineCalls, answers: Sequence[Answer]) -> None:
        self._replies += answers
        self._flushed |= engine.preempted
        engine.preempted = set()

    def _answer_when_idle(self) -> None:
        if self._engine is not None:
            self._hear_engine(self._engine, self._engine.answers_when_idle())

    # -- results --

    def _take_result(self, result: BatchResult) -> None:
        flight = self._in_flight.popleft()
        batch = flight.batch
        assert batch is not None, "empty plans do not wait for results"
        assert batch.id == result.batch_id, f"results come in order: {batch.id} before {result.batch_id}"
        ids = {rid_of(name): name for name in flight.plan.num_scheduled_tokens}
        names = [ids[share.rid] for share in batch.shares]
        tokens = dict(zip(names, result.token_ids, strict=True))
        said = self.sampler.masked(flight.plan, tokens, flight.masks) if flight.masks else tokens
        self._update(flight.plan, result_of(flight.plan, said, flight.transferred))
        drafts = DraftTokenIds(names, [list(guessed) for guessed in result.draft_ids])
        if result.draft_ids and not self._settings.async_scheduling:
            self.scheduler.update_draft_token_ids(drafts)
        if self._waits_for_masks:
            # The worker keeps the guesses of the batch that it sampled last, and no others.
            *sampled, _ = self._in_flight
            is_last = all(flight.batch is None for flight in sampled)
            self._sample_last(drafts if is_last else DraftTokenIds([], []))
        self._skip_empty_plans()

    def _sample_last(self, drafts: DraftTokenIds) -> None:
        """Sample the last plan, whose masks waited for this result."""
        self._waits_for_masks = False
        last = self._in_flight.pop()
        # Copies of this machine share the plan; only these parts of it change.
        last.plan.scheduled_spec_decode_tokens = {name: [*ids] for name, ids in last.guesses.items()}
        if drafts.draft_token_ids:
            self.scheduler.update_draft_token_ids_in_output(drafts, last.plan)
        last = last.with_masks(self.sampler)
        self._in_flight.append(last)
        self._verified += [(rid_of(name), holding) for name, (holding, _) in last.masks.items() if name in last.guesses]
        late, self._late = self._late, []
        for event in late:
            if not (isinstance(event, Add) and event.goes_on and not self.is_session(event.rid)):
                self._take(event)

    def _update(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        requests = {name: self.scheduler.requests.get(name) for name in plan.num_scheduled_tokens}
        for outputs in self.scheduler.update_from_output(plan, output).values():
            for one in outputs.outputs:
                reason = None if one.finish_reason is None else str(one.finish_reason)
                if reason is not None:
                    self._known.note(requests.get(one.request_id))
                self._replies.append(
                    Tokens(rid=rid_of(one.request_id), token_ids=tuple(one.new_token_ids), finish_reason=reason)
                )

    def _skip_empty_plans(self) -> None:
        while self._in_flight and self._in_flight[0].batch is None:
            flight = self._in_flight.popleft()
            self._update(flight.plan, result_of(flight.plan, {}, flight.transferred))

    # -- plans --

    def _plan(self) -> tuple[Batch | None, set[str]]:
        is_full = len(self._in_flight) >= self.depth
        if is_full or self._waits_for_masks or not (self.scheduler.has_requests() or self._transfers.go_on):
            return None, set()
        # Until results arrive, the scheduler counts all guesses as accepted.
        guessing = {rid for earlier in self._in_flight for rid in earlier.plan.scheduled_spec_decode_tokens}
        sessions = looking_up(self.scheduler)
        plan = self.scheduler.schedule()
        if self._settings.keeps_images_whole:
            check_whole(plan, self.scheduler.requests)
        wrong = why_looked_up_wrongly(plan, sessions, self._settings)
        if GOES_ON and not wrong:
            wrong = why_left_out(plan, self.scheduler, self._settings, is_alone=not self._in_flight)
        if wrong:
            raise Violation(wrong)
        transferred = self._transfers.run(plan, self.scheduler.requests)
        planned = PlanInFlight(
            plan=plan,
            shares=self._runner.shares_of(plan, guessing),
            guesses={name: tuple(ids) for name, ids in plan.scheduled_spec_decode_tokens.items()},
            transferred=transferred,
        )
        self._images.take(plan, self.scheduler.requests)
        self._waits_for_masks = plan.pending_structured_output_tokens
        if self._waits_for_masks and not self._in_flight:
            raise Violation("a plan waits for the result before it, but none is in flight: vLLM's engine ends")
        if not self._waits_for_masks:
            planned = planned.with_masks(self.sampler)
        batch = None
        if planned.shares:
            self._launched += 1
            copies = tuple([(one.src_block_id, one.dst_block_id) for one in plan.kv_cache_block_copies or ()])
            mirrored = () if self._host is None else self._host.mirrored
            more = self._images.of_batch()
            batch = Batch(id=self._launched, shares=planned.masked_shares(), copies=copies, mirrored=mirrored, **more)
        self._in_flight.append(msgspec.structs.replace(planned, batch=batch))
        self._skip_empty_plans()
        return batch, plan.preempted_req_ids or set()


class ConnectedMachine(VllmMachine):
    """The machine with the user's own connector, which has files, memory and perhaps threads."""

    def __init__(self, settings: VllmSettings) -> None:
        self._connected = Connected(settings)
        try:
            super().__init__(settings)
        except BaseException:
            self._connected.close()
            raise

    def new_scheduler(self, settings: VllmSettings) -> Any:
        return new_scheduler(settings, self._connected.configured)

    def new_transfers(self, settings: VllmSettings) -> Any:
        del settings
        return self._connected.transfers(self.scheduler)

    def close(self) -> None:
        self._connected.close()


def new_machine(settings: VllmSettings) -> VllmMachine:
    """Make the machine for these settings."""
    return ConnectedMachine(settings) if settings.connector_cls else VllmMachine(settings)


def _waits_for_input(request: Any) -> bool:
    return bool(request.status == RequestStatus.WAITING_FOR_STREAMING_REQ)


def _cuts_off(reply: Reply, rid: str) -> bool:
    """Whether a reply cuts a request off before its own end."""
    return isinstance(reply, Tokens) and reply.rid == rid and reply.finish_reason not in (None, *OWN_ENDS)
