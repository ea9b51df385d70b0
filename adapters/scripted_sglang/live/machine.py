"""A live SGLang as an SDK machine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput,
)

from scripted.core.errors import BadCall
from scripted.sdk.live.clients import HttpCall
from scripted.sdk.live.machine import ABORT, LiveEngine
from scripted.sdk.messages import Add, Batch, FlushCache, Pause, Refused, Resume
from scripted_sglang.scheduler_view import Retractions, counts_of, inner_name, rid_of

if TYPE_CHECKING:
    from scripted_sglang.live.stops import SglangStops

# Counts this server's requests over all scripts.
_numbers: Final = itertools.count(1)


class LiveSglang(LiveEngine):
    """A live SGLang; the event loop of its ``scheduler`` waits at the gate."""

    keeping = "in_place"

    def __init__(self, scheduler: Any, stops: SglangStops, port: int) -> None:
        self.scheduler = scheduler
        self.depth = 2 if scheduler.enable_overlap else 1
        self._seen = stops
        self._retractions = Retractions()
        # Open flushes in order; an aborting pause until no request is left; requests that the front end holds back
        # during a pause.
        self._flushes: list[str] = []
        self._ending: str | None = None
        self._is_paused = False
        self._held_back: list[str] = []
        self._abort_sent: set[str] = set()
        # The server's names for requests.
        self._names: dict[str, str] = {}
        super().__init__(stops, port)

    @property
    def is_idle(self) -> bool:
        """Whether the scheduler is idle and the loop waits for messages."""
        return bool(self.scheduler.is_fully_idle()) and self._gate.where == "turn" and not self._stops.inbox.held

    @property
    def may_go_on(self) -> bool:
        return not self._stops.waits_for_result and not self.is_idle

    def counts(self) -> Mapping[str, int]:
        return counts_of(self.scheduler, self._stops.batches - self._stops.released)

    # -- events --

    def start(self, event: Add) -> None:
        # Without ignore_eos, under which SGLang admits a request only if its whole output fits.
        sampling = {
            "temperature": 0,
            "max_new_tokens": event.max_new_tokens,
            "stop_token_ids": list(event.stop_token_ids) or None,
        }
        # Names are unique because SGLang aborts every request with a stream's name two seconds after the stream ends.
        name = self._names[event.rid] = inner_name(event.rid, next(_numbers))
        body: dict[str, Any] = {"rid": name, "input_ids": event.prompt_ids, "sampling_params": sampling}
        body |= {"stream": True}
        if self.scheduler.enable_priority_scheduling:
            body |= {"priority": event.priority}
        client = self._clients[event.rid] = HttpCall(self._gate, self._port, "/generate", body, read=_read)
        self._retractions.begin(event.rid)
        if self._is_paused:
            self._held_back.append(event.rid)
        else:
            self.arrived(f"the request {event.rid}", client, lambda message: _is_start(message, name))
            self._refuse_if_closed(event.rid)

    def _refuse_if_closed(self, rid: str) -> None:
        """Reply with a refusal to a request that the front end answered without the scheduler."""
        if self._clients[rid].closed:
            self._replies.append(Refused(rid=rid, reason=self._clients.pop(rid).text))

    def abort(self, rid: str, client: HttpCall) -> None:
        """Abort a request; the front end passes on only one abort of it."""
        del client
        name = self._names[rid]
        if name not in self._abort_sent:
            self._abort_sent.add(name)
            HttpCall(self._gate, self._port, "/abort_request", {"rid": name})
            self.arrived(f"the abort of {rid}", None, lambda message: _is_abort(message, name))

    def call(self, event: Any) -> None:
        if self._ending is not None:
            raise BadCall(
                "an aborting pause is not answered yet, and SGLang's front end takes no other call until then"
            )
        match event:
            case FlushCache():
                self._flushes.append(event.call_id)
                post = self.post(event.call_id, "/flush_cache")
                self.arrived("the flush", post, lambda message: isinstance(message.of, FlushCacheReqInput))
            case Pause():
                self._is_paused = True
                self.post(event.call_id, "/pause_generation", {"mode": event.mode})
                kind = AbortReq if event.mode == ABORT else PauseGenerationReqInput
                self.arrived("the pause", None, lambda message: isinstance(message.of, kind))
                if event.mode == ABORT:
                    self._ending = event.call_id
                else:
                    self.answer(event.call_id)
            case Resume():
                self._is_paused = False
                self.post(event.call_id, "/continue_generation")
                self._let_in_what_was_held_back()
                self.answer(event.call_id)
            case _:
                super().call(event)

    def load(self, folder: str) -> HttpCall:
        """Load weights; the front end waits until generation is paused or no request runs."""
        post = HttpCall(
            self._gate, self._port, "/update_weights_from_disk", {"model_path": folder, "flush_cache": False}
        )
        self.arrived("other weights", post, lambda message: isinstance(message.of, UpdateWeightFromDiskReqInput))
        return post

    def _let_in_what_was_held_back(self) -> None:
        """Let in the end of a pause, and then the held requests in the order in which clients sent them."""
        rids, self._held_back = self._held_back, []
        names = [self._names[rid] for rid in rids]
        inbox = self._stops.inbox
        self._gate.wait(
            lambda: (
                any(isinstance(message.of, ContinueGenerationReqInput) for message in inbox.held)
                and all(
                    self._clients[rid].closed or any(_is_start(message, name) for message in inbox.held)
                    for rid, name in zip(rids, names, strict=True)
                )
            ),
            "the resume and the requests that the pause held back, at the engine",
        )
        inbox.held.sort(
            key=lambda message: names.index(message.of.rid) + 1 if _is_start(message, message.of.rid) else 0
        )
        inbox.let_in()
        for rid in rids:
            self._refuse_if_closed(rid)

    # -- outputs --

    def planned(self) -> tuple[Batch | None, tuple[str, ...]]:
        shares = self._seen.shares
        batch = Batch(id=self._stops.batches - self._first, shares=shares) if shares else None
        return batch, self._retractions.lost(self.scheduler, self.scheduler.cur_batch_for_debug)

    def hear(self) -> None:
        for output in self._seen.said:
            match output:
                case BatchTokenIDOutput():
                    for rid, reason, ids in zip(output.rids, output.finished_reasons, output.output_ids, strict=True):
                        self.tell(rid_of(rid), ids, None if reason is None else reason["type"])
                case AbortReq():
                    self.tell(rid_of(output.rid), (), ABORT)
                case FlushCacheReqOutput():
                    self.answer(self._flushes.pop(0), ok=output.success)
                case UpdateWeightFromDiskReqOutput():
                    self.loaded()
        self._end_pause()

    def _end_pause(self) -> None:
        """Answer an aborting pause, which repeats its abort until no request is left."""
        if self._ending is None:
            return
        if not self.scheduler.is_fully_idle():
            self._stops.inbox.let_in()
            return
        self.answer(self._ending)
        self._ending = None


def _read(so_far: list[int], chunk: Any) -> list[int]:
    """Return the output so far; every chunk carries all of it."""
    return list(chunk.get("output_ids", so_far))


def _is_abort(message: Any, rid: str) -> bool:
    return isinstance(message.of, AbortReq) and message.of.rid == rid


def _is_start(message: Any, rid: str) -> bool:
    return isinstance(message.of, TokenizedGenerateReqInput) and message.of.rid == rid
