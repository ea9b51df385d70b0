"""vLLM's scheduler driven by the frames of a flight, without an engine, a model or a GPU."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm.lora.request import LoRARequest
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from scripted.core.phrases import plural
from scripted.core.refusals import ScriptDefinitionError
from scripted.sdk import Answer, Batch, Capabilities, Limits, Stepped, Tokens
from scripted.sdk.flight.frames import (
    Aborted,
    Arrived,
    Called,
    Drafted,
    Event,
    Held,
    Kept,
    Offered,
    Planned,
    Ready,
    Result,
    Start,
)
from scripted.sdk.flight.packed import planned_from
from scripted.sdk.flight.replay import Outside, call_id, name_of
from scripted.sdk.flight.standing import Hint
from scripted_vllm.config import VllmSettings
from scripted_vllm.engine_objects import new_scheduler, request_hasher, result_of
from scripted_vllm.flight.outside import OutsideOfFlight
from scripted_vllm.flight.plans import REPETITIONS, Numbers, packed_of
from scripted_vllm.grammar import Compiler, Followed
from scripted_vllm.quiet import silence
from scripted_vllm.runner_view import RunnerView

# Limits on a header: a hostile one would fill the memory before the first frame.
_MOST_BLOCKS: Final = 1 << 22
_MOST_CONTEXT_TOKENS: Final = 1 << 24
# Empty plans whose results may still report transfers.
_EMPTY_PLANS: Final = 16
# Since 0.33.
_THROTTLES: Final = "throttle_prefills" in inspect.signature(Scheduler.schedule).parameters
_STATES: Final = {"keep": PauseState.PAUSED_ALL, "wait": PauseState.PAUSED_NEW}
_WAITS: Final = {
    "WAITING_FOR_REMOTE_KVS": Hint("load", "the load of its prefix from outside"),
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": Hint("grammar", "its grammar, which is not compiled"),
    "WAITING_FOR_STREAMING_REQ": Hint("peer", "more input from its client"),
}
_UNANSWERED: Final = Hint("load", "its KV connector, which cannot tell yet how much of the prompt it has")


class VllmOfFlight:
    """A new scheduler with these settings, whose requests have the recorded names."""

    def __init__(self, settings: VllmSettings, limits: Limits, can: Capabilities) -> None:
        if settings.num_gpu_blocks > _MOST_BLOCKS or settings.max_model_len > _MOST_CONTEXT_TOKENS:
            raise ScriptDefinitionError(
                f"a replay has at most {_MOST_BLOCKS} blocks and {_MOST_CONTEXT_TOKENS} tokens of context, the flight "
                f"names {settings.num_gpu_blocks} and {settings.max_model_len}"
            )
        silence()
        self.limits = limits
        self.can = can
        self.scheduler = new_scheduler(settings)
        self._settings = settings
        # A KV connector's answers for each request, the last one given, and the requests whose blocks it keeps.
        self._answers: dict[str, deque[Offered]] = {}
        self._answered: dict[str, Offered] = {}
        self._kept: set[str] = set()
        self._outside = OutsideOfFlight()
        self.knows_contents = self.scheduler.connector is None
        if self.scheduler.connector is not None:
            self._answer_connector(self.scheduler.connector)
        self.scheduler.structured_output_manager.backend = Compiler(self.scheduler.requests, Followed)
        self._runner = RunnerView(settings, self.scheduler)
        self._names: dict[int, str] = {}
        self._numbers = Numbers()
        self._plans: dict[int, Any] = {}
        self._empty: deque[int] = deque()
        self._calls = 0
        self._throttles = False
        # The step whose result reported the end of a request's load, and the tokens of its next load.
        self._loaded: dict[str, int] = {}
        self._loads: dict[str, int] = {}
        self._plan = 0
        self._replies: list[Any] = []
        self._flushed: set[str] = set()
        self._batch: Batch | None = None

    # -- the beginning of a ring --

    def begin(self, start: Start) -> None:
        for held in start.held:
            request = self._new_request(held.request)
            request.append_output_token_ids(list(held.said))
            self.scheduler.add_request(request)
            if held.is_running:
                self._go_on(request, held)
            elif held.place == RequestStatus.PREEMPTED.name:
                request.status = RequestStatus.PREEMPTED
                self._runner.know(request.request_id, (), request.num_prompt_tokens)
            for name, count in held.counters.items():
                if name.startswith("num_") and type(vars(request).get(name)) is int:
                    setattr(request, name, count)
        self.scheduler.prev_step_scheduled_req_ids = {
            self._names[one] for flight in start.in_flight[-1:] for one, _ in flight.shares
        }
        for flight in start.in_flight:
            plan = SchedulerOutput.make_empty()
            plan.num_scheduled_tokens = {self._names[one]: count for one, count in flight.shares}
            plan.total_num_scheduled_tokens = sum(plan.num_scheduled_tokens.values())
            plan.scheduled_spec_decode_tokens = {self._names[one]: list(ids) for one, ids in flight.drafts}
            self._plans[flight.plan] = plan
        if start.paused:
            self.scheduler.set_pause_state(_STATES[start.paused])

    def _go_on(self, request: Any, held: Held) -> None:
        """Give a running request blocks for its computed tokens; equal prefixes share blocks."""
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        blocks, hit = manager.get_computed_blocks(request)[:2]
        more = manager.allocate_slots(
            request,
            held.computed - hit,
            num_new_computed_tokens=hit,
            new_computed_blocks=blocks,
            num_lookahead_tokens=scheduler.num_lookahead_tokens,
        )
        if more is None:
            raise ScriptDefinitionError(
                f"the ring's beginning does not fit in {plural(self.limits.blocks, 'block')}: {request.request_id} has "
                f"computed {held.computed} tokens"
            )
        scheduler.waiting.remove_requests([request])
        scheduler.running.append(request)
        request.status = RequestStatus.RUNNING
        tables = manager.get_block_ids(request.request_id)
        self._runner.know(request.request_id, tables, request.num_prompt_tokens)

    # -- events --

    def take(self, event: Event) -> None:
        match event:
            case Arrived():
                self.scheduler.add_request(self._new_request(event))
            case Aborted():
                self._end([self._names[one] for one in event.ids], event.status)
            case Called():
                self._call(event)
            case Ready():
                name = self._names[event.id]
                self._outside.compile(name, self._plan + 1, compiles=event.compiles)
                self.scheduler.structured_output_manager.backend.finish(name, event.compiles)
            case Drafted():
                self._draft(event)
            case Offered():
                self._answers.setdefault(self._names[event.id], deque()).append(event)
            case Kept():
                self._kept.add(self._names[event.id])
                self._outside.keep(self._names[event.id])
            case _:
                raise TypeError(f"results come through land(), not as events: {event}")

    def _answer_connector(self, connector: Any) -> None:
        """Replace a connector's answers with the recorded ones."""
        allocated = connector.update_state_after_alloc

        def matched(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
            answer = self._next_answer(request.request_id)
            self._loads[request.request_id] = (answer.tokens or 0) if answer is not None and answer.is_async else 0
            if answer is None:
                return 0, False
            self._outside.offer(request.request_id, self._plan, num_computed_tokens, answer)
            return answer.tokens, answer.is_async

        def begun(request: Any, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens:
                # The load has begun: a later question is about a new load.
                self._answered.pop(request.request_id, None)
                self._outside.load(request.request_id, request.num_computed_tokens)
            allocated(request, blocks, num_external_tokens)

        def finished(request: Any, block_ids: Any) -> tuple[bool, None]:
            del block_ids
            return request.request_id in self._kept, None

        connector.get_num_new_matched_tokens = matched
        connector.update_state_after_alloc = begun
        connector.request_finished = connector.request_finished_all_groups = finished

    def _next_answer(self, name: str) -> Offered | None:
        """Return the next recorded answer; after the end of the recording the last one, if no load followed from it."""
        answers = self._answers.get(name)
        if answers:
            self._answered[name] = answers.popleft()
        return self._answered.get(name)

    def _new_request(self, event: Arrived) -> Any:
        name = self._names[event.id] = name_of(event)
        self._numbers.add(name, event.id)
        self._outside.arrive(event)
        grammar = StructuredOutputsParams(json_object=True) if event.grammar else None
        least = event.engine.get("min_tokens")
        sampling = SamplingParams(
            max_tokens=event.max_new_tokens,
            min_tokens=least if isinstance(least, int) else 0,
            stop_token_ids=list(event.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            structured_outputs=grammar,
        )
        if REPETITIONS[0] in event.engine:
            found = [event.engine.get(name) for name in REPETITIONS]
            sampling.repetition_detection = RepetitionDetectionParams(*[one for one in found if isinstance(one, int)])
        return Request(
            name,
            list(event.prompt_ids),
            sampling,
            None,
            arrival_time=event.at,
            priority=event.priority,
            lora_request=LoRARequest(f"lora-{event.lora}", event.lora, "nowhere") if event.lora else None,
            cache_salt=event.salt or None,
            block_hasher=request_hasher(self._settings),
        )

    def _end(self, names: Sequence[str], status: str) -> None:
        if status not in RequestStatus.__members__:
            raise ScriptDefinitionError(f"this vLLM has no request status {status!r}")
        for name in names:
            # One by one: vLLM iterates over a set of names in hash order.
            for request in self.scheduler.finish_requests(name, RequestStatus[status]):
                self._outside.end(request.request_id, is_abort=True)
                self._replies.append(Tokens(rid=request.request_id, finish_reason="abort"))

    def _call(self, event: Called) -> None:
        match event.name:
            case "flush":
                self._flush(event)
            case "pause":
                self.scheduler.set_pause_state(_STATES[str(event.arguments.get("mode"))])
                self._answer()
            case "resume":
                self.scheduler.set_pause_state(PauseState.UNPAUSED)
                self._answer()
            case "throttle":
                self._throttles = True
            case _:
                raise ScriptDefinitionError(f"this adapter cannot replay vLLM's call {event.name!r}")

    def _flush(self, event: Called) -> None:
        running = {request.request_id for request in self.scheduler.running}
        ok = self.scheduler.reset_prefix_cache(
            reset_running_requests=bool(event.arguments.get("force")),
            reset_connector=bool(event.arguments.get("connector")),
        )
        self._flushed |= running - {request.request_id for request in self.scheduler.running}
        self._answer(ok=ok)

    def _answer(self, *, ok: bool = True) -> None:
        self._calls += 1
        self._replies.append(Answer(call_id=call_id(self._calls), ok=ok))

    def _draft(self, event: Drafted) -> None:
        if event.plan:
            plan = self._plans[event.plan]
            plan.scheduled_spec_decode_tokens = {self._names[one]: list(ids) for one, ids in event.drafts}
            return
        for one, ids in event.drafts:
            request = self.scheduler.requests.get(self._names[one])
            if request is not None and not request.is_finished():
                request.spec_token_ids = list(ids)

    # -- results and plans --

    def land(self, result: Result, tokens: Mapping[int, Sequence[int]]) -> None:
        # Only a few of many consecutive empty plans are made.
        plan = self._plans.pop(result.plan, None) or SchedulerOutput.make_empty()
        said = {self._names[one]: ids for one, ids in tokens.items()}
        for one in (*result.received, *result.failed):
            self._loaded[self._names[one]] = self._plan
        self._note_transfers(result)
        outputs = self.scheduler.update_from_output(plan, result_of(plan, said, self._transferred(result)))
        for output in outputs.values():
            for one in output.outputs:
                reason = None if one.finish_reason is None else str(one.finish_reason)
                if reason is not None:
                    self._outside.end(one.request_id, is_abort=False)
                self._replies.append(
                    Tokens(rid=one.request_id, token_ids=tuple(one.new_token_ids), finish_reason=reason)
                )

    def _note_transfers(self, result: Result) -> None:
        if not (result.sent or result.received or result.failed or result.lost):
            return
        tables = self.scheduler.kv_cache_manager.get_block_ids
        blocks = {name: tables(name)[0] for name in self.scheduler.requests} if result.lost else {}
        self._outside.land(result, self._names, blocks, self.limits.block_size)

    def outside(self) -> Outside:
        return self._outside.outside(has_connector=self.scheduler.connector is not None)

    def _transferred(self, result: Result) -> KVConnectorOutput | None:
        if self.scheduler.connector is None:
            return None
        names = {
            "finished_sending": {self._names[one] for one in result.sent},
            "finished_recving": {self._names[one] for one in result.received},
        }
        if result.failed:
            names["failed_recving"] = {self._names[one] for one in result.failed}
        return KVConnectorOutput(**names, invalid_block_ids=set(result.lost))

    def plan(self, plan: int, now: float) -> Planned:
        self._plan = plan
        guessing = {name for earlier in self._plans.values() for name in earlier.scheduled_spec_decode_tokens}
        made = self.scheduler.schedule(**({"throttle_prefills": True} if self._throttles and _THROTTLES else {}))
        self._throttles = False
        self._plans[plan] = made
        if not made.num_scheduled_tokens:
            self._empty.append(plan)
            if len(self._empty) > _EMPTY_PLANS:
                self._plans.pop(self._empty.popleft(), None)
        frame = planned_from(packed_of(made, plan, now, self._numbers))
        shares = self._runner.shares_of(made, guessing)
        self._flushed |= made.preempted_req_ids or set()
        copies = tuple([(one.src_block_id, one.dst_block_id) for one in made.kv_cache_block_copies or ()])
        self._batch = Batch(id=plan, shares=shares, copies=copies) if shares else None
        return frame

    def stepped(self) -> Stepped:
        replies, self._replies = tuple(self._replies), []
        preempted, self._flushed = tuple(sorted(self._flushed)), set()
        batch, self._batch = self._batch, None
        return Stepped(microbatch=batch, replies=replies, preempted=preempted)

    def counts(self) -> Mapping[str, int]:
        scheduler = self.scheduler
        return {
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "in_flight": sum([bool(plan.num_scheduled_tokens) for plan in self._plans.values()]),
            "requests": len(scheduler.requests),
            "blocks_free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }

    def hints(self) -> Mapping[str, Hint]:
        hints = {}
        reserved = {
            request.request_id: self.scheduler._request_remaining_blocks(request)  # noqa: SLF001 - not public
            for request in self.scheduler._inflight_prefills  # noqa: SLF001
        }
        for name, request in self.scheduler.requests.items():
            hint = _WAITS.get(request.status.name)
            if hint is not None and hint.kind == "load" and name in self._loaded:
                hint = Hint("nothing", f"nothing: its load ended in step {self._loaded[name]}, and nothing wakes it")
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                answer = self._answered.get(name)
                is_unknown = answer is not None and answer.tokens is None
                hint = _UNANSWERED if is_unknown else self._reservation(name, reserved)
            if hint is not None:
                hints[name] = hint
        return hints

    def _reservation(self, name: str, reserved: Mapping[str, int]) -> Hint | None:
        """Return the hint for a load that has no room beside the blocks reserved for prefills; None if it has room.

        vLLM also reserves blocks for a request whose load has failed, and lets its next load find room beside them.
        """
        needs = -(-self._loads.get(name, 0) // self.limits.block_size)
        free, all_reserved = self.counts()["blocks_free"], sum(reserved.values())
        if not needs or not all_reserved or needs <= free - all_reserved:
            return None
        text = f"{plural(needs, 'block')} for its load: {free} free, {all_reserved} of them reserved for "
        if name in reserved:
            over = f", whose load of step {self._loaded[name]} has failed" if name in self._loaded else ""
            return Hint("blocks", f"{text}{name} itself{over}")
        return Hint("blocks", f"{text}{', '.join(sorted(reserved))}", tuple(reserved))
