"""Records vLLM's scheduler inside its own engine: each call from outside is a frame, in any of the engine's loops.

The calls are wrapped on the scheduler object; nothing in vLLM is edited. A call that the scheduler makes itself is not
recorded, because a replay makes it again. Of the engine only its exceptions and its end are noted.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.request import RequestStatus

from scripted.sdk.flight.ending import stop_engines
from scripted.sdk.flight.frames import (
    Aborted,
    AnyFrame,
    Arrived,
    Called,
    Drafted,
    Held,
    InFlight,
    Kept,
    Offered,
    Planned,
    Ready,
    Result,
    Scalar,
    Start,
    shape_of,
)
from scripted.sdk.flight.hooks import Hooks
from scripted.sdk.flight.of_machine import header_of
from scripted.sdk.flight.packed import Beginning, packed, packed_result, unpacked
from scripted.sdk.flight.recorder import FlightRecorder, NotRecordedError
from scripted_vllm.flight.plans import REPETITIONS, Numbers, packed_of, preempted_of
from scripted_vllm.flight.settings import settings_of
from scripted_vllm.versions import installed_version

_log = logging.getLogger(__name__)

_NAME: Final = "vllm"
_PAUSES: Final = {PauseState.PAUSED_ALL: "keep", PauseState.PAUSED_NEW: "wait"}
_LOST: Final = ("the prefix cache of ended requests", "the order of free blocks")
# What an engine does: an exception of a worker, of the output or of another rank passes through one of these.
_ENGINE_CALLS: Final = ("step", "step_with_batch_queue", "post_step", "run_busy_loop")


def hook_engine() -> None:
    """Record each scheduler that this process makes from now on. Hooking twice is harmless."""
    own = Scheduler.__init__
    if hasattr(own, "__wrapped__") and own.__module__ == __name__:
        return

    @functools.wraps(own, assigned=("__doc__",))
    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        try:
            attach(self)
        except Exception:  # noqa: BLE001 - an engine must start without its recorder
            # A vLLM that the hooks do not fit serves without the recorder.
            _log.exception("this scheduler is not recorded")

    Scheduler.__init__ = recorded
    for engine in (EngineCore, EngineCoreProc, DPEngineCoreProc):
        for name in _ENGINE_CALLS:
            if name in vars(engine):
                setattr(engine, name, _leaving_crash(vars(engine)[name]))
    CoreEngineProcManager.shutdown = _stopping_first(CoreEngineProcManager.shutdown)


def attach(scheduler: Any) -> FlightRecorder | None:
    """Record a scheduler as the environment asks."""
    words, notes = settings_of(scheduler)
    return _Hooks(scheduler).attach(header_of(_NAME, words, installed_version(), notes))


def _leaving_crash(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a call of the engine: write the crash before the engine reports it, because the front end then kills the
    engine.
    """

    @functools.wraps(own)
    def call(engine: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return own(engine, *args, **kwargs)
        except Exception as exc:
            hooks = _hooks.get(id(engine.scheduler))
            if hooks is not None:
                hooks.leave_outside_crash(exc)
            raise

    return call


def _stopping_first(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the end of engines in the process that started them: with no time to drain requests, it kills at once."""

    @functools.wraps(own)
    def call(manager: Any, *args: Any, **kwargs: Any) -> Any:
        # From now on the end of an engine is no failure.
        manager.manager_stopped.set()
        try:
            stop_engines(manager.processes)
        except Exception:  # noqa: BLE001 - engines must end without their recorders
            _log.exception("the engines may leave no flight")
        return own(manager, *args, **kwargs)

    return call


class _Hooks(Hooks):
    """The hooks of vLLM's scheduler. A call that it makes inside another one is left out."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._arrived: dict[str, Arrived] = {}
        self._numbers_of = Numbers()
        # Plans without results, by identity, which is unique while the engine holds them.
        self._flights: dict[int, tuple[int, Any]] = {}
        self._compiling: set[str] = set()
        self._ended: set[str] = set()
        # A KV connector's last recorded answer for each request. A replay repeats it for every question up to the next
        # one, so a server that waits for its connector writes nothing.
        self._answered: dict[str, tuple[int | None, bool]] = {}
        # The packed result that the scheduler is processing, and whether it has output for a request.
        self._landing: tuple[bytes, bool] | None = None
        self._is_inside = False

    def wrap_calls(self) -> None:
        """Wrap the calls. The input of a call is noted before it, because the call may change it or crash on it; its
        decisions are noted after it.
        """
        scheduler = self._scheduler
        _hooks[id(scheduler)] = self
        before: dict[str, Callable[..., None]] = {
            "add_request": self._arrive,
            "update_from_output": self._land,
            "set_pause_state": self._pause,
            "shutdown": self._shut_down,
        }
        after: dict[str, Callable[..., None]] = {
            "finish_requests": self._abort,
            "schedule": self._plan,
            "update_from_output": self._landed,
            "reset_prefix_cache": self._flush,
            "update_draft_token_ids": self._draft,
            "update_draft_token_ids_in_output": self._draft_late,
        }
        for name in before | after:
            own = getattr(scheduler, name)
            setattr(scheduler, name, self._outermost(own, before=before.get(name), after=after.get(name)))
        if scheduler.connector is not None:
            self._follow_connector(scheduler.connector)

    def _outermost(
        self, own: Callable[..., Any], *, before: Callable[..., None] | None, after: Callable[..., None] | None
    ) -> Callable[..., Any]:
        """Wrap a call, except inside another wrapped call: a replay makes those again."""
        noted = self.wrapped(own, before=before, after=after)

        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside or not self.recorder.is_on:
                return own(*args, **kwargs)
            self._is_inside = True
            try:
                return noted(*args, **kwargs)
            finally:
                self._is_inside = False

        return call

    def leave_crash(self, exc: Exception) -> None:
        """Also write the result that was being processed."""
        self.note(self._landed)
        super().leave_crash(exc)

    def leave_outside_crash(self, exc: Exception) -> None:
        """Write the recording for an exception of the engine; the scheduler's own has been written already."""
        self.recorder.leave("crash", f"outside the scheduler: {type(exc).__name__}: {exc}")

    # -- inputs --

    def _arrive(self, request: Any) -> None:
        if request.resumable or request.request_id in self._arrived:
            raise NotRecordedError("streaming sessions are not recorded")
        if request.pooling_params is not None or request.prompt_token_ids is None:
            raise NotRecordedError("requests that do not generate from tokens are not recorded")
        if request.mm_features:
            raise NotRecordedError("images and other inputs beside tokens are not recorded")
        self._requests += 1
        self._arrived[request.request_id] = frame = _arrived(request, self._requests)
        self._numbers_of.add(request.request_id, self._requests)
        if request.use_structured_output:
            self._compiling.add(request.request_id)
        self.recorder.event(frame)

    def _abort(self, returned: Sequence[Any], request_ids: Any, finished_status: Any) -> None:
        """Note ended requests in the order in which they ended: vLLM turns the names into a set."""
        del request_ids
        ids = tuple([self._arrived[one.request_id].id for one in returned if one.request_id in self._arrived])
        if ids:
            self.recorder.event(Aborted(ids=ids, status=finished_status.name))

    def _pause(self, pause_state: Any) -> None:
        mode = _PAUSES.get(pause_state)
        self.recorder.event(Called(name="resume") if mode is None else Called(name="pause", arguments={"mode": mode}))

    def _flush(self, returned: bool, reset_running_requests: bool = False, reset_connector: bool = False) -> None:
        arguments: dict[str, Scalar] = {"force": reset_running_requests, "connector": reset_connector}
        self.recorder.event(Called(name="flush", arguments=arguments, answer=returned))

    def _land(self, scheduler_output: Any, model_runner_output: Any) -> None:
        number, plan = self._flights.pop(id(scheduler_output))
        names, moved = plan.num_scheduled_tokens, model_runner_output.kv_connector_output
        rows = list(map(model_runner_output.req_id_to_index.get, names))
        data = packed_result(number, rows, model_runner_output.sampled_token_ids)
        if moved is not None:
            frame = self._with_transfers(unpacked(data), moved)
            data = packed(frame)
        if names or (moved is not None and frame != Result(plan=number)):
            self._landing = data, bool(names)

    def _landed(self, *_: Any) -> None:
        """Write a result after the connector's answers during its processing: a replay needs the answers first."""
        if self._landing is not None:
            (data, moves), self._landing = self._landing, None
            self.recorder.packed_event(data, moves=moves)

    def _with_transfers(self, result: AnyFrame, moved: Any) -> AnyFrame:
        return msgspec.structs.replace(
            result,
            sent=self._numbers(moved.finished_sending or ()),
            received=self._numbers(moved.finished_recving or ()),
            failed=self._numbers(getattr(moved, "failed_recving", None) or ()),
            lost=tuple(sorted(moved.invalid_block_ids or ())),
        )

    def _numbers(self, names: Iterable[str]) -> tuple[int, ...]:
        return tuple(sorted([self._arrived[name].id for name in names if name in self._arrived]))

    def _draft(self, _: None, draft_token_ids: Any) -> None:
        requests = self._scheduler.requests
        drafts = [
            (self._arrived[name].id, tuple(requests[name].spec_token_ids))
            for name in draft_token_ids.req_ids
            if name in requests
        ]
        self.recorder.event(Drafted(drafts=tuple(drafts)))

    def _draft_late(self, _: None, draft_token_ids: Any, scheduler_output: Any) -> None:
        del draft_token_ids
        number, plan = self._flights[id(scheduler_output)]
        self.recorder.event(Drafted(plan=number, drafts=self._drafts_of(plan)))

    def _shut_down(self) -> None:
        """Note an engine that ends with open requests."""
        if self._scheduler.requests:
            self.recorder.leave("exit")
        self.recorder.close()

    def _follow_connector(self, connector: Any) -> None:
        """Note a KV connector's answers, which come from workers and other engines that a replay lacks."""
        matched, finished = connector.get_num_new_matched_tokens, connector.request_finished
        allocated = connector.update_state_after_alloc
        finished_all = getattr(connector, "request_finished_all_groups", None)

        def noting_matched(request: Any, num_computed_tokens: int) -> Any:
            tokens, is_async = matched(request, num_computed_tokens)
            self.note(self._offer, request.request_id, tokens, is_async)
            return tokens, is_async

        def noting_allocated(request: Any, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens:
                # The load begins: a later question is about a new load.
                self._answered.pop(request.request_id, None)
            allocated(request, blocks, num_external_tokens)

        def noting(own: Callable[..., Any]) -> Callable[..., Any]:
            def call(request: Any, block_ids: Any) -> Any:
                is_kept, more = own(request, block_ids)
                if is_kept:
                    self.note(self._keep, request.request_id)
                return is_kept, more

            return call

        connector.get_num_new_matched_tokens = noting_matched
        connector.update_state_after_alloc = noting_allocated
        connector.request_finished = noting(finished)
        if finished_all is not None:
            connector.request_finished_all_groups = noting(finished_all)

    def _offer(self, name: str, tokens: int | None, is_async: bool) -> None:
        answer = tokens, is_async
        if self._answered.get(name) != answer:
            self._answered[name] = answer
            self.recorder.event(Offered(id=self._arrived[name].id, tokens=tokens, is_async=is_async))

    def _keep(self, name: str) -> None:
        self.recorder.event(Kept(id=self._arrived[name].id))

    # -- outputs --

    def _plan(self, plan: Any, throttle_prefills: bool = False) -> None:
        if throttle_prefills:
            self.recorder.event(Called(name="throttle"))
        for name in [name for name in self._compiling if not self._compiles(name)]:
            self._compiling.discard(name)
            self.recorder.event(Ready(id=self._arrived[name].id))
        self._plans += 1
        self._flights[id(plan)] = self._plans, plan
        self._note_plan(plan)
        # Some requests keep their blocks until a transfer ends, and later results name them.
        self._ended |= plan.finished_req_ids
        for name in [name for name in self._ended if name not in self._scheduler.requests]:
            self._ended.discard(name)
            self._arrived.pop(name, None)
            self._answered.pop(name, None)
            self._numbers_of.by_name.pop(name, None)

    def _note_plan(self, plan: Any) -> None:
        recorder, live = self.recorder, self._open_requests()
        if plan.num_scheduled_tokens:
            recorder.packed_plan(packed_of(plan, self._plans, recorder.now, self._numbers_of), live)
        elif plan.preempted_req_ids:
            preempted = preempted_of(plan, self._numbers_of)
            frame = Planned(
                plan=self._plans, now=recorder.now, shape=shape_of((), preempted), preempted=tuple(preempted)
            )
            recorder.planned(frame, live)
        else:
            recorder.planned_nothing(self._plans, recorder.now, live)

    def _open_requests(self) -> int:
        """Count the requests that vLLM could run and, once its queues are empty, the requests in none of them."""
        queued: int = self._scheduler.get_num_unfinished_requests()
        # During a pause none of them counts.
        if queued or any(self._scheduler.get_request_counts()):
            return queued
        return sum([not one.is_finished() for one in self._scheduler.requests.values()])

    def _compiles(self, name: str) -> bool:
        request = self._scheduler.requests.get(name)
        return request is not None and request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR

    def snapshot(self) -> Beginning:
        """Describe the requests and the plans in flight."""
        scheduler = self._scheduler
        # Earlier frames may be lost, and with them the answers.
        self._answered.clear()
        running = list(scheduler.running)
        known = set(map(id, running))
        waiting = [one for one in scheduler.requests.values() if id(one) not in known and not one.is_finished()]
        queued = {one.request_id: place for place, one in enumerate(scheduler.waiting)}
        waiting.sort(key=lambda one: queued.get(one.request_id, -1))
        flights = [
            InFlight(plan=number, shares=self._shares_of(plan), drafts=self._drafts_of(plan))
            for number, plan in self._flights.values()
        ]
        requests = [*running, *waiting]
        start = Start(
            plan=self._plans + 1,
            now=self.recorder.now,
            held=tuple([self._held(one, is_running=place < len(running)) for place, one in enumerate(requests)]),
            in_flight=tuple([one for one in flights if one.shares]),
            paused=_PAUSES.get(scheduler.pause_state, ""),
            lost=_LOST,
        )
        return Beginning(start, [(one.output_token_ids, len(one.output_token_ids)) for one in requests])

    def _held(self, request: Any, *, is_running: bool) -> Held:
        return Held(
            request=self._arrived[request.request_id],
            is_running=is_running,
            computed=request.num_computed_tokens,
            place=request.status.name,
            counters={name: count for name, count in vars(request).items() if type(count) is int},
        )

    def _shares_of(self, plan: Any) -> tuple[tuple[int, int], ...]:
        return tuple(
            [
                (self._arrived[name].id, count)
                for name, count in plan.num_scheduled_tokens.items()
                if name in self._arrived
            ]
        )

    def _drafts_of(self, plan: Any) -> tuple[tuple[int, tuple[int, ...]], ...]:
        drafts = plan.scheduled_spec_decode_tokens
        return tuple([(self._arrived[name].id, tuple(ids)) for name, ids in drafts.items() if name in self._arrived])


# The hooks by scheduler, which they keep alive: no other scheduler has that identity meanwhile.
_hooks: Final[WeakValueDictionary[int, _Hooks]] = WeakValueDictionary()


def _arrived(request: Any, number: int) -> Arrived:
    sampling = request.sampling_params
    ends = () if sampling.eos_token_id is None else (sampling.eos_token_id,)
    engine: dict[str, Scalar] = {"min_tokens": sampling.min_tokens} if sampling.min_tokens else {}
    if sampling.repetition_detection is not None:
        engine |= {name: getattr(sampling.repetition_detection, name) for name in REPETITIONS}
    return Arrived(
        id=number,
        rid=request.request_id,
        prompt_ids=request.prompt_token_ids,
        max_new_tokens=request.max_tokens,
        stop_token_ids=(*(sampling.stop_token_ids or ()), *ends),
        priority=request.priority,
        at=request.arrival_time,
        lora=0 if request.lora_request is None else request.lora_request.lora_int_id,
        grammar=request.use_structured_output,
        salt=request.cache_salt or "",
        engine=engine,
    )
