"""A live vLLM as a machine of the SDK: events go in over HTTP, and what its loop plans and says is seen at the gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

import msgspec

from scripted.adapters.vllm.config import VllmSettings
from scripted.adapters.vllm.grammars import Grammars
from scripted.adapters.vllm.ids import id_at, rid_of
from scripted.adapters.vllm.live.clients import HttpCall
from scripted.adapters.vllm.runner_view import RunnerView
from scripted.adapters.vllm.transfers import Transfers
from scripted.core.violation import Violation
from scripted.sdk.messages import (
    Abort,
    Add,
    Answer,
    Batch,
    BatchResult,
    Event,
    FlushCache,
    Pause,
    Refused,
    Reply,
    Resume,
    Stepped,
    Tokens,
)

if TYPE_CHECKING:
    from scripted.adapters.vllm.live.stops import Stops

# What vLLM's front end puts before the name that a client gives.
_PREFIX: Final = "cmpl-"
_ABORT: Final = "abort"
_ALONE: Final = "alone"
_MOST_STEPS: Final = 4000
# vLLM's loop plans again after an empty plan, for ever. A plan that is empty so often in a row stays empty.
_EMPTY_PLANS: Final = 3


class LiveVllm:
    """One script's view of an engine that runs. ``core`` is its EngineCoreProc, whose loop waits at the gate."""

    depth = 1
    # It has no sessions.
    waiting_session: str | None = None

    def __init__(self, core: Any, stops: Stops, port: int) -> None:
        self.scheduler = core.scheduler
        self._stops = stops
        self._gate = stops.gate
        self._port = port
        self._runner = RunnerView(2 if core.scheduler.use_v2_model_runner else 1)
        # Of each request that lives its connection, and what it was told.
        self._clients: dict[str, HttpCall] = {}
        self._told: dict[str, list[int]] = {}
        # The names of calls, by the numbers that vLLM gives them.
        self._calls: dict[int, str] = {}
        self._posts: dict[str, HttpCall] = {}
        self._replies: list[Reply] = []
        # Those whose clients hung up in this step.
        self._gone: set[str] = set()
        self._arrivals = 0
        self._empty = 0
        self._first = stops.batches
        # Without a connector and structured output there are none.
        self.transfers = Transfers(VllmSettings(), None)
        self.grammars = Grammars(0, None)
        # A script begins with an empty cache.
        self._alone([FlushCache(call_id=_ALONE)])

    def step(self, events: Sequence[Event], now: float) -> Stepped:
        """Let in what these events send, let results through, and let the loop run until it waits again."""
        del now
        self._replies, self._gone = [], set()
        self._stops.begin_step()
        for event in events:
            self._take(event)
        if not self._stops.waits_for_result:
            self._gate.go_on()
        batch, preempted = self._planned()
        self._hear()
        self._settle()
        self._empty = 0 if batch is not None or preempted or events else self._empty + 1
        again = self._gate.where == "step" and self._empty < _EMPTY_PLANS and self.scheduler.has_requests()
        return Stepped(microbatch=batch, replies=tuple(self._replies), preempted=preempted, again=again)

    @property
    def is_idle(self) -> bool:
        """No request is there, and the loop waits for messages."""
        return not self.scheduler.requests and self._gate.where == "messages" and not self._stops.inbox.held

    def counts(self) -> Mapping[str, int]:
        """Requests by queue, batches in flight, free blocks: what the live scheduler says."""
        scheduler = self.scheduler
        return {
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "in_flight": int(self._gate.where == "result"),
            "requests": len(scheduler.requests),
            "blocks_free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }

    def say_alone(self, message: Add) -> tuple[int, ...]:
        """What a request is told that has the engine, and an empty cache, for itself."""
        self._alone([FlushCache(call_id=_ALONE)])
        return self._alone([
            Add(
                rid=f"{message.rid}-alone",
                prompt_ids=message.prompt_ids,
                max_new_tokens=message.max_new_tokens,
                stop_token_ids=message.stop_token_ids,
            )
        ])  # fmt: skip

    def close(self) -> None:
        for client in self._clients.values():
            client.hang_up()

    def _alone(self, events: list[Event]) -> tuple[int, ...]:
        said: list[int] = []
        for _ in range(_MOST_STEPS):
            stepped = self.step(events, 0.0)
            said += [token for reply in stepped.replies if isinstance(reply, Tokens) for token in reply.token_ids]
            if any(isinstance(reply, Answer) or getattr(reply, "finish_reason", None) for reply in stepped.replies):
                return tuple(said)
            batch = stepped.microbatch
            events = [] if batch is None else [BatchResult(batch_id=batch.id, token_ids=())]
        raise Violation(f"a request alone does not end within {_MOST_STEPS} steps")

    # -- events --

    def _take(self, event: Event) -> None:
        match event:
            case Add():
                self._start(event)
            case Abort():
                self._abort(event.rid)
            case BatchResult():
                self._stops.released = self._first + event.batch_id
            case FlushCache():
                self._post(event.call_id, f"/reset_prefix_cache?reset_running_requests={str(event.force).lower()}")
            case Pause():
                self._post(event.call_id, f"/pause?mode={event.mode}&clear_cache=false")
            case Resume():
                self._post(event.call_id, "/resume")
            case _:
                raise TypeError(f"a live vLLM has nothing for {event}")

    def _start(self, event: Add) -> None:
        self._arrivals += 1
        body = {
            "model": "tiny",
            "prompt": list(event.prompt_ids),
            "max_tokens": event.max_new_tokens,
            "stop_token_ids": list(event.stop_token_ids),
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            # vLLM serves the lowest number first.
            "priority": -event.priority,
        }
        client = HttpCall(
            self._gate, self._port, "/v1/completions", body, id_at(quote(event.rid, safe=""), self._arrivals)
        )
        self._arrive(client, f"the request {event.rid} at the engine")
        if client.closed:
            self._replies.append(Refused(rid=event.rid, reason=client.text))
        else:
            self._clients[event.rid], self._told[event.rid] = client, []

    def _abort(self, rid: str) -> None:
        client = self._clients.get(rid)
        if client is None or client.closed:
            return
        del self._clients[rid]
        self._gone.add(rid)
        client.hang_up()
        self._gate.wait(lambda: bool(self._stops.inbox.held), f"the abort of {rid} at the engine")
        self._stops.inbox.let_in()
        self._stops.aborts.let_in()

    def _post(self, call_id: str, path: str) -> None:
        post = self._posts[call_id] = HttpCall(self._gate, self._port, path, {})
        for item in self._arrive(post, f"{path} at the engine"):
            self._calls[item[1][1]] = call_id
        if post.closed:
            self._replies.append(Answer(call_id=call_id, ok=False, text=post.text))

    def _arrive(self, call: HttpCall, what: str) -> list[Any]:
        inbox = self._stops.inbox
        self._gate.wait(lambda: bool(inbox.held) or call.closed, what)
        arrived = list(inbox.held)
        inbox.let_in()
        return arrived

    # -- what was seen --

    def _planned(self) -> tuple[Batch | None, tuple[str, ...]]:
        batch = None
        preempted: list[str] = []
        for number, plan in self._stops.plans:
            shares = self._runner.shares_of(plan, ())
            preempted += map(_name, plan.preempted_req_ids or ())
            if shares:
                shares = tuple([_renamed(share) for share in shares])
                batch = Batch(id=number - self._first, shares=shares)
        return batch, tuple(sorted(preempted))

    def _hear(self) -> None:
        for rid in map(_name, self._stops.aborted):
            self._replies.append(Tokens(rid=rid, finish_reason=_ABORT))
        for output in self._stops.outputs:
            for one in output.outputs:
                self._tell(one)
            answer = output.utility_output
            if answer is not None and answer.call_id in self._calls:
                self._answer(self._calls.pop(answer.call_id), answer)

    def _tell(self, output: Any) -> None:
        reason = None if output.finish_reason is None else str(output.finish_reason)
        if reason == _ABORT:
            return  # The scheduler has said so already.
        rid, token_ids = _name(output.request_id), tuple(output.new_token_ids)
        self._told[rid] += token_ids
        self._replies.append(Tokens(rid=rid, token_ids=token_ids, finish_reason=reason))

    def _answer(self, call_id: str, answer: Any) -> None:
        failure = answer.failure_message
        value = None if answer.result is None else answer.result.result
        ok = failure is None and value is not False
        self._replies.append(Answer(call_id=call_id, ok=ok, text=failure or ""))
        post = self._posts.pop(call_id)
        self._gate.wait(lambda: post.closed, f"the answer to {call_id}")

    def _settle(self) -> None:
        """Wait until every client has heard what the engine told it. Raises Violation if it heard something else."""
        ended = {reply.rid: reply.finish_reason for reply in self._replies if isinstance(reply, Tokens)}
        for rid, reason in ended.items():
            client, told = self._clients.get(rid), self._told[rid]
            if client is None or rid in self._gone:
                continue
            self._gate.wait(
                lambda client=client, told=told: client.closed or len(client.token_ids) >= len(told),  # type: ignore[misc]
                f"{len(told)} tokens at the client of {rid}",
            )
            if reason is not None:
                self._gate.wait(lambda client=client: client.closed, f"the end at the client of {rid}")  # type: ignore[misc]
                del self._clients[rid]
            if client.token_ids != told:
                raise Violation(f"the engine tells {rid} {told}, but its client hears {client.token_ids}")


def _name(request_id: str) -> str:
    return unquote(rid_of(request_id).removeprefix(_PREFIX))


def _renamed(share: Any) -> Any:
    return msgspec.structs.replace(share, rid=unquote(share.rid.removeprefix(_PREFIX)))
