"""Records SGLang's scheduler inside its own process: messages as they are dispatched, batches as they run, results.

The calls are wrapped on the scheduler object; nothing in SGLang is edited. The hooks wait for a device only where
SGLang is about to wait for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Final

from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenizedGenerateReqInput,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
)

from scripted.sdk.flight.frames import Aborted, Arrived, Called, Scalar, Start
from scripted.sdk.flight.hooks import Hooks
from scripted.sdk.flight.of_machine import header_of
from scripted.sdk.flight.packed import Beginning, packed_result
from scripted.sdk.flight.recorder import FlightRecorder, NotRecordedError
from scripted_sglang.flight.plans import packed_of, samples
from scripted_sglang.flight.settings import settings_of, version

_NAME: Final = "sglang"
# The number of plans after which requests that ended without a result are dropped.
_FORGET_EVERY: Final = 256
# Fields of requests for features that the adapter's scheduler lacks.
_REFUSED: Final = (
    "mm_inputs", "session_params", "input_embeds", "lora_id", "custom_logit_processor", "bootstrap_room",
    "return_hidden_states", "return_logprob", "positional_embed_overrides",
)  # fmt: skip
_REFUSED_SAMPLING: Final = ("stop_strs", "stop_regex_strs", "json_schema", "regex", "ebnf", "structural_tag")
# Messages that change plans and have no frame.
_NOT_TAKEN: Final = frozenset({
    "BatchTokenizedEmbeddingReqInput", "TokenizedEmbeddingReqInput", "OpenSessionReqInput", "CloseSessionReqInput",
    "UpdateWeightFromDiskReqInput", "UpdateWeightsFromDistributedReqInput", "UpdateWeightsFromTensorReqInput",
    "UpdateWeightsFromIPCReqInput", "ReleaseMemoryOccupationReqInput", "ResumeMemoryOccupationReqInput",
    "LoadLoRAAdapterReqInput", "UnloadLoRAAdapterReqInput", "SetInternalStateReq", "ClearHiCacheReqInput",
})  # fmt: skip


def attach(scheduler: Any) -> FlightRecorder | None:
    """Record a scheduler as the environment asks; among several ranks only the first, because all plan alike."""
    words, notes = settings_of(scheduler)
    if words is None:
        return None
    return _Hooks(scheduler).attach(header_of(_NAME, words, version(), notes))


class _Hooks(Hooks):
    """The hooks of SGLang's scheduler. Its loop is wrapped too, so an exception passes through several calls."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._ids: dict[str, int] = {}
        # Batches without processed results, by the result's identity: number, result, and which requests get a token.
        self._flights: dict[int, tuple[int, Any, list[bool]]] = {}
        self._samples: list[bool] = []
        self._has_died = False

    def wrap_calls(self) -> None:
        """Wrap the calls. The input of a call is noted before it, because the call may change it or crash on it; its
        decisions are noted after it.
        """
        scheduler = self._scheduler
        dispatcher = scheduler._request_dispatcher  # noqa: SLF001 - SGLang's table of messages
        scheduler._request_dispatcher = self.wrapped(dispatcher, before=self._come, after=self._dispatched)  # noqa: SLF001
        wrapper = scheduler.flush_wrapper
        wrapper._flush_cache = self.wrapped(wrapper._flush_cache, after=self._flush)  # noqa: SLF001 - what it calls
        for name, before, after in (
            ("get_next_batch_to_run", None, self._next),
            ("run_batch", self._run, self._ran),
            ("process_batch_result", self._land, self._landed),
            ("on_idle", None, None),
        ):
            setattr(scheduler, name, self.wrapped(getattr(scheduler, name), before=before, after=after))
        scheduler.run_event_loop = self._closing(self.wrapped(scheduler.run_event_loop))

    def leave_crash(self, exc: Exception) -> None:
        """Write the recording in the innermost call that the exception passes through."""
        if not self._has_died:
            self._has_died = True
            super().leave_crash(exc)

    def note(self, note: Callable[..., None] | None, *args: object, **kwargs: object) -> None:
        """Note a call without its keyword arguments, the tensors that stages pass on."""
        del kwargs
        super().note(note, *args)

    def _closing(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def loop(*args: Any, **kwargs: Any) -> Any:
            try:
                return own(*args, **kwargs)
            finally:
                if self._ids and not self._has_died:
                    self.recorder.leave("exit")
                self.recorder.close()

        return loop

    # -- inputs --

    def _come(self, message: Any) -> None:
        match message:
            case TokenizedGenerateReqInput():
                self._arrive(message)
            case BatchTokenizedGenerateReqInput():
                for one in message.batch:
                    self._arrive(one)
            case AbortReq():
                self._abort(message)
            case ContinueGenerationReqInput():
                self.recorder.event(Called(name="resume"))
            case _ if type(message).__name__ in _NOT_TAKEN:
                raise NotRecordedError(f"{type(message).__name__} is not recorded")

    def _dispatched(self, _: Any, message: Any) -> None:
        """Note a pause after its dispatch: a retracting pause first processes the result in flight."""
        if isinstance(message, PauseGenerationReqInput):
            self.recorder.event(Called(name="pause", arguments={"mode": message.mode}))

    def _arrive(self, message: Any) -> None:
        sampling = message.sampling_params
        asked = [name for name in _REFUSED if getattr(message, name, None)]
        asked += [name for name in _REFUSED_SAMPLING if getattr(sampling, name, None)]
        if asked:
            raise NotRecordedError(f"requests with {', '.join(asked)} are not recorded")
        self._requests += 1
        self._ids[message.rid] = self._requests
        ends = () if sampling.ignore_eos else self._scheduler.model_config.hf_eos_token_id or ()
        engine: dict[str, Scalar] = {"ignore_eos": True} if sampling.ignore_eos else {}
        if sampling.min_new_tokens:
            engine["min_new_tokens"] = sampling.min_new_tokens
        frame = Arrived(
            id=self._requests,
            # The adapter uses "#" in its own names.
            rid=message.rid.replace("#", "_"),
            prompt_ids=tuple(message.input_ids),
            max_new_tokens=sampling.max_new_tokens,
            stop_token_ids=(*(sampling.stop_token_ids or ()), *ends),
            priority=message.priority or 0,
            salt=message.extra_key or "",
            engine=engine,
        )
        self.recorder.event(frame)

    def _abort(self, message: AbortReq) -> None:
        ids = [one for rid, one in self._ids.items() if message.abort_all or rid.startswith(message.rid)]
        if ids:
            self.recorder.event(Aborted(ids=tuple(ids)))

    def _flush(self, is_flushed: bool) -> None:
        self.recorder.event(Called(name="flush", answer=is_flushed))

    def _land(self, batch: Any, result: Any) -> None:
        del batch
        number, _, sampling = self._flights.pop(id(result))
        if result.copy_done is not None:
            result.copy_done.synchronize()
        tokens = result.next_token_ids.tolist()
        rows = [row if gets else None for row, gets in enumerate(sampling)]
        self.recorder.packed_event(packed_result(number, rows, [[token] for token in tokens]), moves=True)

    def _landed(self, _: None, batch: Any, result: Any) -> None:
        del result
        for req in batch.reqs:
            if req.finished():
                self._ids.pop(req.rid, None)

    # -- outputs --

    def _next(self, plan: Any) -> None:
        if not plan.batch_to_run:
            self._plans += 1
            self.recorder.planned_nothing(self._plans, self.recorder.now, len(self._ids))

    def _run(self, batch: Any) -> None:
        self._plans += 1
        packed = packed_of(self._scheduler, batch, self._plans, self.recorder.now, self._ids)
        self._samples = samples(batch)
        self.recorder.packed_plan(packed, len(self._ids))
        if self._plans % _FORGET_EVERY == 0:
            self._forget(self._alive())

    def _ran(self, result: Any, batch: Any) -> None:
        del batch
        # Holding the result keeps its identity unique.
        self._flights[id(result)] = self._plans, result, self._samples

    def _forget(self, alive: Iterable[str]) -> None:
        known = set(alive)
        self._ids = {rid: one for rid, one in self._ids.items() if rid in known}

    def _alive(self) -> Iterable[str]:
        scheduler = self._scheduler
        batches = (scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch_for_debug)
        yield from [req.rid for req in scheduler.waiting_queue]
        yield from [req.rid for batch in batches if batch is not None for req in batch.reqs]
        if scheduler.chunked_req is not None:
            yield scheduler.chunked_req.rid

    def snapshot(self) -> Beginning:
        """Report that a ring has lost its beginning: SGLang's prefix tree cannot be expressed in events."""
        return Beginning(Start(plan=self._plans + 1, now=self.recorder.now, lost=("everything before this step",)))
