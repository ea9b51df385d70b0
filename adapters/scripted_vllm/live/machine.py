"""A live vLLM as an SDK machine: sends events over HTTP, and sees its loop's plans and outputs at the gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

import msgspec

from scripted.sdk.live.clients import HttpCall
from scripted.sdk.live.machine import ABORT, LiveEngine
from scripted.sdk.live.weights import WEIGHTS
from scripted.sdk.messages import Add, Batch, FlushCache, Pause, Refused, Resume, Tokens
from scripted_vllm.config import VllmSettings
from scripted_vllm.ids import id_at, rid_of
from scripted_vllm.runner_view import RunnerView

if TYPE_CHECKING:
    from scripted_vllm.live.stops import VllmStops

# vLLM's front end prefixes the client's name with this.
_PREFIX: Final = "cmpl-"


class LiveVllm(LiveEngine):
    """``core`` is vLLM's EngineCoreProc, whose loop waits at the gate."""

    keeping = "keep"

    def __init__(self, core: Any, stops: VllmStops, port: int) -> None:
        self.scheduler = core.scheduler
        self._seen = stops
        settings = VllmSettings(model_runner=2 if core.scheduler.use_v2_model_runner else 1)
        self._runner = RunnerView(settings, core.scheduler)
        # The names of calls by the numbers that vLLM gives them.
        self._calls: dict[int, str] = {}
        self._arrivals = 0
        super().__init__(stops, port)

    @property
    def is_idle(self) -> bool:
        """Whether there is no request and the loop waits for messages."""
        return not self.scheduler.requests and self._gate.where == "messages" and not self._stops.inbox.held

    @property
    def may_go_on(self) -> bool:
        return self._gate.where == "step" and self.scheduler.has_requests()

    def counts(self) -> Mapping[str, int]:
        """Return requests by queue, batches in flight and free blocks of the live scheduler."""
        scheduler = self.scheduler
        return {
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "in_flight": int(self._gate.where == "result"),
            "requests": len(scheduler.requests),
            "blocks_free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }

    # -- events --

    def start(self, event: Add) -> None:
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
        rid = id_at(quote(event.rid, safe=""), self._arrivals)
        client = HttpCall(self._gate, self._port, "/v1/completions", body, rid=rid, read=_read)
        if self.arrived(f"the request {event.rid}", client):
            self._clients[event.rid] = client
        else:
            self._replies.append(Refused(rid=event.rid, reason=client.text))

    def abort(self, rid: str, client: HttpCall) -> None:
        """Close a client's connection."""
        del self._clients[rid]
        self._gone.add(rid)
        client.hang_up()
        self.arrived(f"the abort of {rid}", None)
        self._seen.aborts.let_in()

    def call(self, event: Any) -> None:
        match event:
            case FlushCache():
                path = f"/reset_prefix_cache?reset_running_requests={str(event.force).lower()}"
            case Pause():
                path = f"/pause?mode={event.mode}&clear_cache=false"
            case Resume():
                path = "/resume"
            case _:
                raise TypeError(f"a live vLLM cannot take {event}")
        post = self.post(event.call_id, path)
        for item in self.arrived(path, post):
            self._calls[item[1][1]] = event.call_id
        if post.closed:
            self.answer(event.call_id, ok=False, text=post.text)

    def load(self, folder: str) -> HttpCall:
        body = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        post = HttpCall(self._gate, self._port, "/collective_rpc", body)
        for item in self.arrived("other weights", post):
            self._calls[item[1][1]] = WEIGHTS
        return post

    # -- outputs --

    def planned(self) -> tuple[Batch | None, tuple[str, ...]]:
        batch = None
        preempted: list[str] = []
        for number, plan in self._seen.plans:
            shares = self._runner.shares_of(plan, ())
            preempted += map(_name, plan.preempted_req_ids or ())
            if shares:
                shares = tuple([_renamed(share) for share in shares])
                batch = Batch(id=number - self._first, shares=shares)
        return batch, tuple(sorted(preempted))

    def hear(self) -> None:
        for rid in map(_name, self._seen.aborted):
            self._replies.append(Tokens(rid=rid, finish_reason=ABORT))
        for output in self._seen.outputs:
            for one in output.outputs:
                self._tell(one)
            answer = output.utility_output
            if answer is not None and answer.call_id in self._calls:
                self._answer(self._calls.pop(answer.call_id), answer)

    def _tell(self, output: Any) -> None:
        reason = None if output.finish_reason is None else str(output.finish_reason)
        if reason == ABORT:
            return  # the scheduler has already reported it
        self.tell(_name(output.request_id), output.new_token_ids, reason)

    def _answer(self, call_id: str, answer: Any) -> None:
        if call_id == WEIGHTS:
            self.loaded()
            return
        failure = answer.failure_message
        value = None if answer.result is None else answer.result.result
        ok = failure is None and value is not False
        self.answer(call_id, ok=ok, text=failure or "")


def _read(so_far: list[int], chunk: Any) -> list[int]:
    return so_far + [token for choice in chunk.get("choices", ()) for token in choice.get("token_ids") or ()]


def _name(request_id: str) -> str:
    return unquote(rid_of(request_id).removeprefix(_PREFIX))


def _renamed(share: Any) -> Any:
    return msgspec.structs.replace(share, rid=unquote(share.rid.removeprefix(_PREFIX)))
