"""A script's handle of a request of the engine: the scheduler's work on it and its client's view."""

from __future__ import annotations

from engine.core.messages import FinishReason, Generate, PromptLogprob, Refusal, TokenLogprob, TokenOutput
from engine.core.scheduler import Place, Request
from scripted.script.clients import ClientView, finish_reason_of
from scripted.script.handles import BaseRequest
from scripted.script.values import Listed

_RUNNING_PLACES = frozenset(Place) - {Place.WAITING, Place.RELEASING, Place.GONE}
# The places of requests whose prompt is not completely computed.
_PARTLY_PREFILLED = frozenset({Place.CHUNKED, Place.RECEIVING})


class RequestHandle(BaseRequest):
    """One request of a script. It reads the scheduler's live object, because scripts assert on its state."""

    def __init__(self, message: Generate, client: ClientView) -> None:
        super().__init__(message.rid, message.prompt_ids, message.sampling.max_new_tokens, client)
        self.message = message
        self.sampling = message.sampling
        # The choices of one reply, including itself.
        self.together: list[RequestHandle] = [self]
        self._request: Request | None = None
        # The path of its LoRA at its start, because another LoRA may be loaded under the same name later.
        self.lora_path: str | None = None
        self._output_ids: list[int] = []
        self._logprobs: list[TokenLogprob | None] = []
        self._prompt_logprobs: list[PromptLogprob] = []
        self._weights_versions: set[int] = set()
        self._end: TokenOutput | None = None
        self._just_ended = False
        # True once a message that ends it has arrived; the front end then sends no other for it.
        self.is_ending = False
        self._is_parked = False
        self._chunked_parks = 0

    # -- filled in by the gate --

    def bind(self, request: Request, lora_path: str | None) -> None:
        """Note the live object when it is first seen, and the path of its LoRA."""
        self._request = request
        self.lora_path = lora_path

    @property
    def is_bound(self) -> bool:
        """True once the scheduler's object was seen."""
        return self._request is not None

    def see(self, output: TokenOutput, weights_version: int) -> None:
        """Note an output of the scheduler, computed with these weights."""
        assert self._end is None, f"{self.rid} got another reply after its terminal one: {output}"
        if output.token_ids or output.prompt_logprobs:
            self._weights_versions.add(weights_version)
        self._output_ids += output.token_ids
        self._logprobs += output.logprobs
        self._prompt_logprobs += output.prompt_logprobs
        if output.finish_reason is not None:
            self._end = output
            self._just_ended = True

    def step_on(self) -> None:
        """Begin the step after its end: the live object is gone."""
        self._just_ended = False

    def see_chunked(self, *, is_parked: bool) -> None:
        """Note a step that left it partly prefilled, with or without launching a chunk."""
        self._chunked_parks += is_parked and not self._is_parked
        self._is_parked = is_parked

    def see_refusal(self, refusal: Refusal) -> None:
        """Note the scheduler's refusal: the engine changed between its arrival and its step."""
        self._end = TokenOutput(rid=self.rid, finish_reason=FinishReason.ERROR, error=refusal.message)

    def was_computed_with(self, weights_version: int) -> bool:
        """Return whether every token was computed with these weights."""
        return self._weights_versions <= {weights_version}

    # -- for scripts --

    @property
    def req(self) -> Request | None:
        """The scheduler's live object, up to the step that ends it; None before its first step and afterwards."""
        return None if self._end is not None and not self._just_ended else self._request

    @property
    def is_running(self) -> bool:
        return self._request is not None and self._request.place in _RUNNING_PLACES

    @property
    def is_prefilled(self) -> bool:
        request = self.req
        return request is not None and request.lease is not None and request.place not in _PARTLY_PREFILLED

    @property
    def finish_reason(self) -> str | None:
        """``length``, ``stop``, ``abort``, ``error`` or ``timeout``; None before the end."""
        return finish_reason_of(None if self._end is None else self._end.finish_reason)

    @property
    def error(self) -> str | None:
        """The error or the time limit that ended it, if any."""
        return None if self._end is None else self._end.error

    @property
    def is_chunking(self) -> bool:
        """True while it is the partly prefilled request."""
        return self._request is not None and self._request.place is Place.CHUNKED

    @property
    def chunks_done(self) -> int:
        """The number of chunks of its prompt, if that was split; survives a retraction."""
        return 0 if self._request is None else self._request.chunks_done

    @property
    def chunked_parks(self) -> int:
        """How often a step launched no part of it while it was partly prefilled; consecutive steps count once."""
        return self._chunked_parks

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were hit when it was first admitted, in both tiers of the cache."""
        return 0 if self._request is None else min(self._request.cached_tokens, self._request.prompt_tokens)

    @property
    def cached_tokens_device(self) -> int:
        """The part of ``cached_tokens`` that was hit in the prefix tree."""
        return self.cached_tokens - self.cached_tokens_host

    @property
    def cached_tokens_host(self) -> int:
        """The part of ``cached_tokens`` that was loaded from host memory."""
        return 0 if self._request is None else self._request.cached_tokens_host

    @property
    def remaining_prompt_tokens(self) -> int:
        """Tokens that must still be launched before it can decode."""
        if self._end is not None:
            return 0
        request = self._request
        if request is None or request.place is Place.WAITING:
            return len(self.prompt_ids if request is None else request.ids)
        return max(0, request.prefill_tokens - request.planned_tokens) if request.place in _PARTLY_PREFILLED else 0

    @property
    def kv_pages(self) -> int:
        """Pages that it uses, including cached ones; 0 if it owns no memory."""
        lease = None if self._request is None else self._request.lease
        return 0 if lease is None else len(lease.pages)

    @property
    def lock_refs(self) -> int:
        """Locks on the node of its cached prefix, including its own; 0 without one."""
        lease = None if self._request is None else self._request.lease
        return 0 if lease is None else lease.node.lock_ref

    @property
    def retractions(self) -> int:
        """How often it was sent back to the queue."""
        return 0 if self._request is None else self._request.retractions

    @property
    def output_ids(self) -> tuple[int, ...]:
        """The tokens that the scheduler emitted."""
        return Listed(self._output_ids)

    @property
    def logprobs(self) -> tuple[TokenLogprob | None, ...]:
        """One entry for each emitted token of a request that requested logprobs."""
        return Listed(self._logprobs)

    @property
    def prompt_logprobs(self) -> tuple[PromptLogprob, ...]:
        """One entry for each token of the prompt after ``logprob_start_len`` that the scheduler has reported."""
        return Listed(self._prompt_logprobs)
