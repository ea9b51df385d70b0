"""SGLang's scheduler as a machine for the search: its own methods in the order of its own event loops.

A loop is cut where it waits for a batch's result or for messages. Only the worker's forward pass is simulated.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from importlib.metadata import version
from types import CodeType, SimpleNamespace
from typing import Any, Final

import torch
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import use_context

from scripted.core.action import Action, RunLike
from scripted.core.promises import CachedPrefix
from scripted.core.refusals import ScriptDefinitionError
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
from scripted.sdk.messages import Event, Reply
from scripted_sglang.actions import ReleaseTiers
from scripted_sglang.config import SglangSettings, new_scheduler
from scripted_sglang.event_loop import request
from scripted_sglang.host import HostTier, NoHost, written_by
from scripted_sglang.roles import LOOPS, role_of
from scripted_sglang.scheduler_view import Retractions, cached_in, counts_of, inner_name, queries_of, rid_of
from scripted_sglang.stand_ins import Dispatcher, Receiver, Sender, SimulatedWorker, keep_nothing
from scripted_sglang.transfers import Launched

_IN_PLACE: Final = PauseMode(name="in_place")
_RETRACT: Final = PauseMode(name="retract")
_ABORT: Final = PauseMode(name="abort", stops_running=False, aborts=True)
# The modes of /pause_generation. The front end carries out the last one by aborting everything.
PAUSE_MODES: Final = (_IN_PLACE, _RETRACT, _ABORT)

# A turn with a batch may follow an empty turn, but never this many consecutive ones without an event.
_EMPTY_TURNS: Final = 3


class _Wait(Enum):
    """The state of a turn of the loop: over, or waiting for a result before or after the launch."""

    NOTHING = "nothing"
    BEFORE_LAUNCH = "before"
    AFTER_LAUNCH = "after"


_FOR_NOTHING, _BEFORE_LAUNCH, _AFTER_LAUNCH = _Wait


# The calls of the loops, in the order written in ``SglangMachine``.
_TURN: Final = frozenset({
    "ingest_requests", "_record_scheduler_state_for_paused_engine", "get_next_batch_to_run", "run_batch",
    "process_batch_result", "on_idle",
})  # fmt: skip
_LOOPS: Final = {
    "event_loop_normal": _TURN,
    "event_loop_overlap": _TURN
    | {"is_disable_overlap_for_batch", "_apply_war_barrier", "launch_batch_sample_if_needed"},
    **LOOPS,
}


def check_loops() -> None:
    """Raise ScriptDefinitionError for a version of SGLang with different loops."""
    for loop, known in _LOOPS.items():
        codes = [inspect.unwrap(getattr(Scheduler, loop)).__code__]
        codes += [one for one in codes[0].co_consts if isinstance(one, CodeType)]
        calls = {name for code in codes for name in code.co_names if callable(getattr(Scheduler, name, None))}
        if calls != known:
            words = [f"{loop} {'calls' if name in calls else 'does not call'} {name}" for name in sorted(calls ^ known)]
            raise ScriptDefinitionError(
                f"the adapter sglang does not fit the installed SGLang {version('sglang')}: {', '.join(words)}; it was "
                "tested with 0.5.23"
            )


class SglangMachine:
    """Steps a new scheduler with these settings as ``event_loop_overlap`` or ``event_loop_normal`` does."""

    def __init__(self, settings: SglangSettings) -> None:
        self.depth = settings.depth
        self.settings = settings
        self._context, self.scheduler = new_scheduler(settings)
        scheduler = self.scheduler
        self.role: Any = role_of(scheduler)
        has_role = self.role.transfers is not None
        self._rows = scheduler.req_to_token_pool.available_size()
        scheduler.enable_skip_finishing_decode = scheduler.enable_overlap and not has_role
        self._front = Sender()
        self._worker = SimulatedWorker(settings.page_size)
        self._connect()
        # Requests for which the router found no prefill server.
        self.unrouted: set[str] = set()
        # The front end's state: open requests, requests whose abort was sent, and during a pause its mode and the
        # requests held back.
        self._alive: dict[str, Add] = {}
        self._abort_sent: set[str] = set()
        self._pause: str | None = None
        self._held: list[Add] = []
        # Whether the loop has taken a turn in this pause.
        self._stands_still = False
        # The call of an aborting pause until no request is left; it holds the lock of all pauses and resumes.
        self._ending: str | None = None
        self._behind: deque[Event] = deque()
        # Messages that the loop takes after the result that it waits for.
        self._inbox: deque[Event] = deque()
        # Batches without their results, with the worker's return values.
        self._in_flight: deque[tuple[Batch, GenerationBatchResult]] = deque()
        # The state of the loop: this turn's batch, whether it was launched, and whether the turn is over.
        self._batch: Any = None
        self._result: Any = None
        self._waits = _FOR_NOTHING
        self._retractions = Retractions()
        self.host = HostTier(scheduler.tree_cache) if scheduler.enable_hierarchical_cache else NoHost()
        self._empty = 0
        self._replies: list[Reply] = []

    def _connect(self) -> None:
        """Replace the scheduler's sockets, its writers, its watchdog and its worker."""
        scheduler = self.scheduler
        scheduler.ipc_channels.recv_from_tokenizer.context.destroy(linger=0)
        scheduler.ipc_channels = SimpleNamespace(
            recv_from_rpc=None, send_to_tokenizer=self._front, send_to_detokenizer=self._front
        )
        scheduler.output_streamer.send_to_detokenizer = self._front
        scheduler.load_snapshot_writer = None
        scheduler.request_receiver = Receiver()
        scheduler.recv_from_tokenizer = scheduler.watchdog = None
        scheduler.record_batch_in_overlap = keep_nothing
        table = scheduler._request_dispatcher._mapping  # noqa: SLF001 - its table
        scheduler._request_dispatcher = Dispatcher(scheduler, table)  # noqa: SLF001 - as above
        scheduler.model_worker = self._worker

    # -- the machine's interface --

    def step(self, events: Sequence[Event], now: float) -> Stepped:
        """Apply events and run the loop up to its next launch or wait."""
        del now
        self._replies = []
        self.host.begin(self._worker.launched, events)
        for event in events:
            self._empty = 0
            if isinstance(event, BatchResult):
                oldest, result = self._in_flight.popleft()
                assert oldest.id == event.batch_id, f"results come in order: {oldest.id} before {event.batch_id}"
                self._worker.know(result.next_token_ids, event.token_ids)
            elif not isinstance(event, Signal):
                self._inbox.append(event)
        with self.inside(), torch.no_grad():
            if self.role.transfers is not None:
                self.role.transfers.take_messages()
            batch = self._turn()
        loads, self.role.loads = tuple(self.role.loads), []
        preempted = self._retractions.lost(self.scheduler, self._batch)
        self._empty = 0 if batch is not None or preempted else self._empty + 1
        copies = self.host.end([one for one, _ in self._in_flight])
        return Stepped(
            microbatch=batch,
            replies=tuple(self._replies),
            preempted=preempted,
            loads=loads,
            copies=copies,
            again=(self._waits is _FOR_NOTHING or self._has_result())
            and not self.is_idle
            and (self._empty < _EMPTY_TURNS or self.host.goes_on),
        )

    @property
    def is_idle(self) -> bool:
        """Whether the scheduler is idle, nothing is in flight, and the front end waits for nothing."""
        with self.inside():
            idle: bool = self.scheduler.is_fully_idle()
        transfers = self.role.transfers
        is_quiet = self.host.is_quiet and (transfers is None or transfers.is_quiet)
        return idle and is_quiet and not (self._in_flight or self._inbox or self._alive or self._ending)

    def inside(self) -> AbstractContextManager[Any]:
        """The context that SGLang's classes read."""
        context: AbstractContextManager[Any] = use_context(self._context)
        return context

    def counts(self) -> Mapping[str, int]:
        """Return requests by queue, batches in flight, and free or evictable rows and pages."""
        return {**counts_of(self.scheduler, len(self._in_flight)), **self.role.queues()}

    @property
    def computed(self) -> int:
        """How many launched batches have been computed."""
        return self._worker.launched - len(self._in_flight)

    def pages_in_flight(self) -> set[int]:
        """Return the pages that batches in flight write."""
        size = self.scheduler.page_size
        shares = [share for batch, _ in self._in_flight for share in batch.shares]
        return {page for share in shares for page in written_by(share, size)}

    def obstacle(self, run: RunLike) -> Action | None:
        """Return the action that releases held copies between tiers; None if none is held."""
        del run
        return ReleaseTiers() if self.host.holds else None

    # -- for promises --

    def open_rids(self) -> Collection[str]:
        """Return the rids of all requests in the scheduler, and of those that the front end has not passed on."""
        scheduler = self.scheduler
        batches = [self._batch, scheduler.last_batch, scheduler.running_batch]
        batches += [batch for batch, _ in scheduler.result_queue]
        reqs = [
            *scheduler.waiting_queue,
            *self.role.reqs(),
            *([scheduler.chunked_req] if scheduler.chunked_req else []),
        ]
        reqs += [req for batch in batches if batch is not None for req in batch.reqs]
        return {*self.held_back(), *[rid_of(req.rid) for req in reqs]}

    def held_back(self) -> list[str]:
        """Return the rids of requests that the front end has not passed on."""
        return [event.rid for event in (*self._inbox, *self._held) if isinstance(event, Add)]

    def queries(self) -> Mapping[str, Callable[[], object]]:
        """Return the queries about load, idleness and the prefix cache that a scheduler and its router poll."""

        def inside(ask: Callable[[], object]) -> Callable[[], object]:
            def answer() -> object:
                with self.inside():
                    return ask()

            return answer

        return {name: inside(ask) for name, ask in queries_of(self.scheduler).items()}

    def cached_prefixes(self) -> Iterator[CachedPrefix]:
        """Yield the pages of each node of the prefix tree that the device holds."""
        return cached_in(self.scheduler)

    # -- a turn of the loop --

    def _turn(self) -> Batch | None:
        """Run from the last wait to the next launch or wait. A turn that waits for a result continues with it."""
        scheduler = self.scheduler
        if self._waits is _AFTER_LAUNCH:
            if not self._has_result():
                return None
            self._process()
            self._end_turn()
        if self._waits is _BEFORE_LAUNCH:
            if not self._has_result():
                return None
            self._process()
            return self._launch(is_processed=True)
        if not self._ingest():
            return None
        self._stands_still = scheduler._engine_paused  # noqa: SLF001 - as the loops ask it
        if self._stands_still:
            scheduler._record_scheduler_state_for_paused_engine()  # noqa: SLF001 - as above
            self._hear()
            return None
        Launched.batches = self._worker.launched
        plan = self.role.plan()
        self._hear()
        scheduler.running_batch = plan.running_batch
        self._batch = scheduler.cur_batch_for_debug = plan.batch_to_run
        if (
            scheduler.enable_overlap
            and self.role.may_wait_before_launch
            and scheduler.is_disable_overlap_for_batch(self._batch, last_batch=scheduler.last_batch)
        ):
            self._waits = _BEFORE_LAUNCH
            return self._turn()
        return self._launch(is_processed=False)

    def _launch(self, *, is_processed: bool) -> Batch | None:
        """Launch the planned batch, if any; then the turn waits for a result, or is over."""
        scheduler, launched = self.scheduler, None
        if self._batch:
            self.host.launch(self._batch, self._worker.launched + 1)
            self._result = scheduler.run_batch(self._batch)
            launched = Batch(id=self._worker.launched, shares=self._worker.shares)
            self._in_flight.append((launched, self._result))
            if scheduler.enable_overlap:
                scheduler.result_queue.append((self._batch.copy(), self._result))
        else:
            scheduler._sched_idled = True  # noqa: SLF001 - as the loops do it
        awaited = scheduler.last_batch if scheduler.enable_overlap else self._batch
        if awaited and not is_processed:
            self._waits = _AFTER_LAUNCH
        else:
            if not self._batch and not scheduler.last_batch:
                scheduler.on_idle()
            self._end_turn()
        return launched

    def _end_turn(self) -> None:
        self.role.end_turn()
        self._hear()
        self.scheduler.last_batch, self._batch, self._result = self._batch, None, None
        self._waits = _FOR_NOTHING

    def _has_result(self) -> bool:
        """Whether the result that the loop takes next is there."""
        queued = self.scheduler.result_queue
        return not self._in_flight if not self.scheduler.enable_overlap else len(queued) > len(self._in_flight)

    def _process(self) -> None:
        """Process a result: ``pop_and_process`` of the overlap loop, or the end of a turn of the normal loop."""
        scheduler = self.scheduler
        batch, result = scheduler.result_queue.popleft() if scheduler.enable_overlap else (self._batch, self._result)
        scheduler.process_batch_result(batch, result)
        self._hear()

    # -- messages --

    def _ingest(self) -> bool:
        """Take messages until there are no more; False if one of them waits for a result."""
        scheduler = self.scheduler
        if self._ending is not None and self._alive:
            # The front end repeats the abort until no request is left.
            self._say(AbortReq(abort_all=True))
        self._end_pause()
        while self._inbox:
            event = self._inbox[0]
            if self._ending is not None and isinstance(event, Pause | Resume):
                self._behind.append(self._inbox.popleft())
                continue
            is_waiting = isinstance(event, Pause) and event.mode == _RETRACT.name and scheduler.enable_overlap
            if is_waiting and scheduler.last_batch and not self._has_result():
                return False
            self._inbox.popleft()
            self._take(event)
        self._say()
        self._end_pause()
        return True

    def _end_pause(self) -> None:
        """Answer an aborting pause once no request is left, and release its lock."""
        if self._ending is not None and not self._alive:
            self._replies.append(Answer(call_id=self._ending, ok=True))
            self._ending = None
            self._inbox.extendleft(reversed(self._behind))
            self._behind.clear()

    def _say(self, *messages: Any) -> None:
        """Give messages to the scheduler, which takes them at once."""
        self.scheduler._deferred_input_requests += messages  # noqa: SLF001 - where its own receiver puts them
        self.scheduler.ingest_requests()
        self._hear()

    def _take(self, event: Event) -> None:
        match event:
            case Add():
                self._add(event)
            case Abort():
                self._abort(event.rid)
            case FlushCache():
                self._flush(event)
            case Pause():
                self._pause = event.mode
                if event.mode == _ABORT.name:
                    self._ending = event.call_id
                    self._say(AbortReq(abort_all=True))
                else:
                    self._say(PauseGenerationReqInput(mode=event.mode))
                    self._replies.append(Answer(call_id=event.call_id, ok=True))
            case Resume():
                self._pause = None
                self._say(ContinueGenerationReqInput())
                self._replies.append(Answer(call_id=event.call_id, ok=True))
                held, self._held = self._held, []
                for one in held:
                    self._add(one)
            case Sleep():
                self._say(ReleaseMemoryOccupationReqInput(tags=[event.part] if event.part else None))
                is_asleep = self.scheduler.weight_updater.offload_tags.issuperset(
                    [event.part] if event.part else GPU_MEMORY_ALL_TYPES
                )
                self._replies.append(Answer(call_id=event.call_id, ok=is_asleep))
            case Wake():
                self._say(ResumeMemoryOccupationReqInput(tags=[event.part] if event.part else None))
                is_awake = not self.scheduler.weight_updater.offload_tags
                self._replies.append(Answer(call_id=event.call_id, ok=is_awake))
            case _:
                raise TypeError(f"SGLang cannot take {event}")

    def _flush(self, event: FlushCache) -> None:
        """Flush. Raises Violation if a pause alone makes the scheduler refuse."""
        scheduler = self.scheduler
        locked = scheduler.tree_cache.protected_size()
        self._say(FlushCacheReqInput())
        self._replies.append(Answer(call_id=event.call_id, ok=self._front.flushed))
        if self._front.flushed and locked:
            raise Violation(f"{event.call_id} empties the cache although {locked} tokens are locked")
        owned = self._rows - scheduler.req_to_token_pool.available_size()
        # With a role, requests that wait for the other server own more than memory. Before the pause's first turn a
        # running loop would refuse the flush too: only a turn drops what has just ended.
        is_paused = scheduler._engine_paused and self._stands_still  # noqa: SLF001 - as the loops ask it
        is_unjust = is_paused and not self._in_flight and not owned
        # A request that is prefetched owns host memory, also after the read while a pause keeps it from being added.
        is_still = self.host.is_known and self.host.is_quiet and not self.host.prefetched
        if not self._front.flushed and is_unjust and self.role.transfers is None and is_still:
            raise Violation(f"{event.call_id} is refused, although no request owns memory")

    def _add(self, event: Add) -> None:
        if self._pause is not None:
            self._held.append(event)
            return
        reason = "the router reaches no prefill server" if event.rid in self.unrouted else self.refusal_of(event)
        self.unrouted.discard(event.rid)
        if reason is not None:
            self._refuse(event.rid, reason)
            return
        self._alive[event.rid] = event
        self._retractions.begin(event.rid)
        priority = event.priority if self.settings.enable_priority_scheduling else None
        message = request(
            self._inner(event.rid),
            event.prompt_ids,
            event.max_new_tokens,
            priority,
            event.stop_token_ids,
            self.settings.min_new_tokens,
            self.scheduler.tokenizer,
        )
        for name, value in self.role.routed(event.rid).items():
            setattr(message, name, value)
        self._say(message)

    def refusal_of(self, event: Add) -> str | None:
        """Return why the front end or the scheduler refuses a request; None if it begins."""
        tokens, new = len(event.prompt_ids), event.max_new_tokens
        if new < self.settings.min_new_tokens:
            return f"its output of {new} tokens is less than min_new_tokens, {self.settings.min_new_tokens}"
        # Refused by the front end, or answered with an error by the scheduler after a prefill of one token.
        if tokens + new > self.settings.context_length or tokens >= self.scheduler.max_req_input_len:
            return f"{tokens} + {new} tokens exceed the context"
        if not self._fits(tokens, new):
            return "SGLang would cut its output to fit into the pool"
        if tokens + new > self.settings.room:
            return "with the tokens kept back for decodes it would never fit into the pool"
        return None

    def _fits(self, tokens: int, new: int) -> bool:
        """Whether a request alone fits into all pages, so that its output is not truncated."""
        scheduler = self.scheduler
        new = min(new, scheduler.max_req_len - tokens - 1)
        most = scheduler.token_to_kv_pool_allocator.max_new_tokens_for_memory(
            tokens,
            new,
            token_capacity=scheduler.max_total_num_tokens,
            sliding_window_size=scheduler.sliding_window_size,
            chunk_size=scheduler.chunked_prefill_size,
        )
        return most is not None and most >= new

    def _abort(self, rid: str) -> None:
        """Pass on the first abort of a request in the front end, held back or not."""
        known = rid in self._alive or any(one.rid == rid for one in self._held)
        if known and rid not in self._abort_sent:
            self._abort_sent.add(rid)
            self._say(AbortReq(rid=self._inner(rid)))

    def _inner(self, rid: str) -> str:
        return rid if self.settings.client_rids else inner_name(rid)

    # -- replies to clients --

    def _hear(self) -> None:
        sent, self._front.sent = self._front.sent, []
        for output in sent:
            match output:
                case BatchTokenIDOutput():
                    for rid, reason, ids in zip(output.rids, output.finished_reasons, output.output_ids, strict=True):
                        self._tell(rid_of(rid), tuple(ids), self._reason_of(rid_of(rid), reason))
                case AbortReq():
                    self._give_up(output)
                case FlushCacheReqOutput():
                    self._front.flushed = output.success
                case ReleaseMemoryOccupationReqOutput() | ResumeMemoryOccupationReqOutput():
                    pass
                case _:
                    raise TypeError(f"the adapter does not know SGLang's {type(output).__name__}")

    def _give_up(self, output: AbortReq) -> None:
        """End a request that the scheduler gave up; without a computed token it counts as refused."""
        rid = rid_of(output.rid)
        if output.finished_reason is not None and output.rid not in self._worker.chosen:
            self._refuse(rid, output.finished_reason["message"])
        else:
            self._tell(rid, (), "abort")

    def _reason_of(self, rid: str, reason: Mapping[str, Any] | None) -> str | None:
        """Return a request's finish reason; an error status that no abort explains is an error."""
        if reason is None:
            return None
        is_error = reason.get("status_code") and rid not in self._abort_sent and self._ending is None
        return "error" if is_error else reason["type"]

    def _tell(self, rid: str, ids: tuple[int, ...], reason: str | None) -> None:
        self._replies.append(Tokens(rid=rid, token_ids=ids, finish_reason=reason))
        if reason is not None:
            self._forget(rid)

    def _refuse(self, rid: str, reason: str) -> None:
        self._replies.append(Refused(rid=rid, reason=reason))
        self._forget(rid)

    def _forget(self, rid: str) -> None:
        self._alive.pop(rid, None)
        self._abort_sent.discard(rid)
        self._worker.chosen.pop(self._inner(rid), None)
        self._retractions.forget(rid)
