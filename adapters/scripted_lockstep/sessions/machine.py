"""The front end's sessions as a machine of the search, over the plainest scheduler that keeps the search's promises.

The simulated device computes the first request of each answer; the others get its solo output, rotated. The front end's
code is the engine's own; the scheduler admits in order, computes whole prompts and caches nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from engine.core.messages import Abort as AbortMessage
from engine.core.messages import ClientMessage, FinishReason, Generate, PromptLogprob, TokenOutput
from engine.frontend.schema.errors import ApiError
from engine.frontend.sessions.sessions import Sessions
from scripted.core.tokens import FIRST_TOKEN, TOKENS
from scripted.core.violation import Violation
from scripted.sdk import Abort, Add, Batch, BatchFailed, BatchResult, Limits, Refused, Share, Stepped, Tokens
from scripted.sdk.messages import Event, Reply
from scripted_lockstep.sessions.answers import (
    OpenAnswer,
    SessionSettings,
    byte_tokens,
    logprob_of,
    model_tokens,
    prompt_logprobs_of,
)

LIMITS: Final = Limits(block_size=4, blocks=24, batch_tokens=64, batch_requests=8, context_tokens=64)


@dataclass(eq=False)
class _DeviceRequest:
    """The one request of a reply that the simulated device computes.

    ``is_reported``: the search was told that it has ended.
    """

    add: Add
    ids: list[int]
    blocks: tuple[int, ...] = ()
    computed: int = 0
    is_in_flight: bool = False
    is_reported: bool = False


@dataclass(eq=False)
class _Sent:
    """A request that the front end has sent. ``tokens`` is its whole output, or None if the device computes it."""

    answer: OpenAnswer
    message: Generate
    place: int
    tokens: list[int] | None = None
    delivered: int = 0
    model: list[int] = field(default_factory=list)


class SessionsMachine:
    """The replies that are not complete. Up to ``depth`` batches may be in flight."""

    def __init__(self, settings: SessionSettings) -> None:
        self.depth = settings.depth
        self._settings = settings
        # The front end's messages, each with its answer.
        self._messages: deque[tuple[OpenAnswer | None, ClientMessage]] = deque()
        self._sender: OpenAnswer | None = None
        self._sessions = Sessions(lambda message: self._messages.append((self._sender, message)))
        self._answers: list[OpenAnswer] = []
        self._sent: dict[str, _Sent] = {}
        # Requests that wait for blocks or run, in order of arrival; a rid may be reused while its last batch is in
        # flight.
        self._device_requests: list[_DeviceRequest] = []
        self._free = list(range(LIMITS.blocks))
        self._in_flight: dict[int, list[_DeviceRequest]] = {}
        self._launched = self._step = 0
        self._replies: list[Reply] = []

    def step(self, events: Sequence[Event], now: float) -> Stepped:
        """Apply the events, emit the rotated outputs, let clients read, and launch a batch."""
        del now
        self._step += 1
        self._replies = []
        for event in events:
            self._take(event)
        self._emit_rotated()
        for answer in self._answers:
            if answer.is_sending:
                self._send(answer)
        self._take_messages()
        if not events or not self._step % self._settings.lag:
            for answer in self._answers:
                answer.read()
            self._take_messages()
        for answer in self._answers:
            if rids := answer.unneeded_requests():
                raise Violation(f"the answer {answer.add.rid} needs no more of {', '.join(rids)}, which go on")
        self._answers = [answer for answer in self._answers if not answer.is_done]
        if not self._answers and self._sessions.open_requests:
            raise Violation(f"every answer is over, but {self._sessions.open_requests} requests are registered")
        batch = self._launch() if len(self._in_flight) < self.depth else None
        again = batch is not None or self._has_more_to_do
        return Stepped(microbatch=batch, replies=tuple(self._replies), again=again)

    @property
    def _has_more_to_do(self) -> bool:
        """Return whether a step without events still sends, reads, or emits tokens."""
        open_ones = [one for one in self._answers if not (one.is_over or one.has_left)]
        return any(one.is_sending or one.session.has_more for one in open_ones) or any(
            one.tokens is not None for one in self._sent.values()
        )

    @property
    def is_idle(self) -> bool:
        return not self._answers and not self._in_flight

    def counts(self) -> Mapping[str, int]:
        """Return the requests that the search knows, the batches in flight, and the free blocks."""
        return {
            "waiting": sum(not one.blocks for one in self._device_requests),
            "running": sum(bool(one.blocks) for one in self._device_requests),
            "in_flight": len(self._in_flight),
            "blocks_free": len(self._free),
        }

    # -- events --

    def _take(self, event: Event) -> None:
        match event:
            case Add():
                self._begin(event)
            case Abort():
                self._abort(event.rid)
            case BatchResult():
                for request, ids in zip(self._in_flight.pop(event.batch_id), event.token_ids, strict=True):
                    self._land(request, ids)
            case BatchFailed():
                for request in self._in_flight.pop(event.batch_id):
                    self._land(request, (), event.error)
            case _:
                raise TypeError(f"sessions have nothing for {event}")

    def _begin(self, add: Add) -> None:
        most = len(add.prompt_ids) + add.max_new_tokens
        if most > LIMITS.context_tokens or len(add.prompt_ids) > LIMITS.batch_tokens:
            self._replies.append(Refused(rid=add.rid, reason="it does not fit"))
            return
        answer = OpenAnswer(add, self._settings, self._sessions)
        try:
            self._send(answer)
        except ApiError as exc:
            self._replies.append(Refused(rid=add.rid, reason=exc.body.error.message))
            return
        self._answers.append(answer)
        self._device_requests.append(_DeviceRequest(add, list(add.prompt_ids)))
        self._take_messages()

    def _abort(self, rid: str) -> None:
        """End the latest answer of this rid, for a client that leaves or for an operator."""
        answer = next((one for one in reversed(self._answers) if one.add.rid == rid), None)
        if self._settings.leaves and answer is not None:
            if not (answer.is_over or answer.has_left):
                answer.leave()
        else:
            self._sessions.send(AbortMessage(rid=rid, call_id="call"))
        self._take_messages()

    def _send(self, answer: OpenAnswer) -> None:
        self._sender = answer
        try:
            answer.send()
        finally:
            self._sender = None

    # -- the scheduler's side --

    def _take_messages(self) -> None:
        """Take the front end's messages in order."""
        while self._messages:
            answer, message = self._messages.popleft()
            if isinstance(message, Generate):
                assert answer is not None, f"{message.rid} is sent for no answer"
                self._start(answer, message)
            elif isinstance(message, AbortMessage):
                self._abort_one(message)

    def _start(self, answer: OpenAnswer, message: Generate) -> None:
        index = answer.session.rids.index(message.rid)
        answer.emitted[message.rid] = []
        sent = self._sent[message.rid] = _Sent(answer, answer.order.messages[index], index)
        if index:
            sent.tokens = model_tokens(answer.add, index)

    def _abort_one(self, abort: AbortMessage) -> None:
        sent = self._sent.get(abort.rid)
        if sent is None and abort.call_id is None:
            raise Violation(f"the front end aborts {abort.rid} ({abort.finish_reason}), which has ended")
        if sent is not None:
            self._end(sent, abort.finish_reason)

    def _emit_rotated(self) -> None:
        """Emit one or two tokens of each rotated output, some in every step and some in every other step."""
        for sent in list(self._sent.values()):
            if sent.tokens is None or self._step % (1 + sent.place % 2):
                continue
            count = min(1 + sent.place % 2, len(sent.tokens) - sent.delivered)
            self._emit(
                sent,
                sent.tokens[sent.delivered : sent.delivered + count],
                is_last=sent.delivered + count == len(sent.tokens),
            )

    def _emit(self, sent: _Sent, tokens: Sequence[int], *, is_last: bool) -> None:
        """Pass new tokens of a request to the front end."""
        add = sent.answer.add
        sent.model += tokens
        sent.delivered = len(sent.model)
        scores = self._scores(sent)
        emitted = sent.answer.emitted[sent.message.rid]
        new = byte_tokens(sent.model, add.stop_token_ids, self._settings)[len(emitted) :]
        places = range(len(emitted), len(emitted) + len(new))
        emitted += new
        output = TokenOutput(
            rid=sent.message.rid,
            token_ids=tuple(new),
            logprobs=tuple([logprob_of(token, place) for token, place in zip(new, places, strict=True)]),
            finish_reason=FinishReason.LENGTH if is_last else None,
            **_cached(sent),
            completion_tokens=len(emitted),
            prompt_logprobs=scores,
        )
        self._pass_on(sent, output)

    def _scores(self, sent: _Sent) -> tuple[PromptLogprob, ...]:
        """Send the first half of a prompt's logprobs before the first token; return the other half, once."""
        scored, message = sent.answer.scored, sent.message
        if message.rid in scored or not (scores := prompt_logprobs_of(message)):
            return ()
        scored.add(message.rid)
        half = len(scores) // 2
        self._pass_on(sent, TokenOutput(rid=message.rid, prompt_logprobs=scores[:half]))
        return scores[half:]

    def _end(self, sent: _Sent, reason: FinishReason, error: str | None = None) -> None:
        self._report_end(sent, reason)
        output = TokenOutput(
            rid=sent.message.rid,
            finish_reason=reason,
            error=error,
            **_cached(sent),
        )
        self._pass_on(sent, output)

    def _pass_on(self, sent: _Sent, output: TokenOutput) -> None:
        if output.finish_reason is not None:
            sent.answer.ends[sent.message.rid] = output.finish_reason
            del self._sent[sent.message.rid]
        self._sessions.take(output)

    def _report_end(self, sent: _Sent, reason: FinishReason) -> None:
        """Tell the search, once, that the request of a reply has ended."""
        request = next((one for one in self._device_requests if one.add is sent.answer.add), None)
        if sent.place or request is None:
            return
        if not request.is_reported:
            self._replies.append(Tokens(rid=request.add.rid, finish_reason=reason.value))
            request.is_reported = True
        self._free_blocks_of(request)

    # -- batches --

    def _launch(self) -> Batch | None:
        shares: list[Share] = []
        requests: list[_DeviceRequest] = []
        tokens = 0
        for request in self._ready():
            count = len(request.ids) - request.computed
            if tokens + count > LIMITS.batch_tokens or len(shares) == LIMITS.batch_requests:
                break
            shares.append(
                Share(rid=request.add.rid, start=request.computed, count=count, block_ids=self._table_of(request))
            )
            request.computed, request.is_in_flight = len(request.ids), True
            requests.append(request)
            tokens += count
        if not shares:
            return None
        self._launched += 1
        self._in_flight[self._launched] = requests
        return Batch(id=self._launched, shares=tuple(shares))

    def _ready(self) -> Iterator[_DeviceRequest]:
        """Yield the requests that can be computed, in order of arrival; none passes one that waits for blocks."""
        for request in list(self._device_requests):
            if not request.blocks and not self._admit(request):
                return
            if not request.is_in_flight and not request.is_reported:
                yield request

    def _admit(self, request: _DeviceRequest) -> bool:
        need = -(-(len(request.add.prompt_ids) + request.add.max_new_tokens) // LIMITS.block_size)
        if need > len(self._free):
            return False
        request.blocks, self._free = tuple(self._free[:need]), self._free[need:]
        return True

    def _table_of(self, request: _DeviceRequest) -> tuple[int, ...]:
        return request.blocks[: -(-len(request.ids) // LIMITS.block_size)]

    def _land(self, request: _DeviceRequest, ids: Sequence[int], error: str | None = None) -> None:
        request.is_in_flight = False
        sent = self._sent_of(request)
        if request.is_reported or sent is None:
            self._free_blocks_of(request)
            return
        if error is not None:
            self._end(sent, FinishReason.ERROR, error)
            return
        request.ids += ids
        count = len(request.ids) - len(request.add.prompt_ids)
        is_last = count == request.add.max_new_tokens
        is_stop = bool(ids) and ids[-1] in request.add.stop_token_ids
        reason = "stop" if is_stop else "length" if is_last else None
        self._replies.append(Tokens(rid=request.add.rid, token_ids=tuple(ids), finish_reason=reason))
        if reason is not None:
            request.is_reported = True
            self._free_blocks_of(request)
        if is_stop and not is_last:
            # It continues until the front end has found the stop string, which the device need not compute.
            left = request.add.max_new_tokens - count
            filler = min(set(range(FIRST_TOKEN, FIRST_TOKEN + TOKENS)).difference(request.add.stop_token_ids))
            sent.tokens, sent.delivered = [*request.ids[-count:], *[filler] * left], count
        self._emit(sent, ids, is_last=is_last)

    def _sent_of(self, request: _DeviceRequest) -> _Sent | None:
        return next((one for one in self._sent.values() if one.answer.add is request.add and not one.place), None)

    def _free_blocks_of(self, request: _DeviceRequest) -> None:
        """Free the blocks of a request that has ended, once no batch with it is in flight."""
        if request.is_in_flight or request not in self._device_requests:
            return
        self._device_requests.remove(request)
        self._free = sorted([*self._free, *request.blocks])


def _cached(sent: _Sent) -> dict[str, Any]:
    """Return the fields of an output that report the cached tokens of its prompt."""
    tiers = sent.answer.cached_tokens_of(sent.message)
    return {"cached_tokens": sum(tiers.values()), "cached_tokens_host": tiers["host"]}
