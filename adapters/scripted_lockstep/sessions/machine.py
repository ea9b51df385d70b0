"""The front end's sessions as a machine of the search, over the plainest scheduler that keeps the search's promises.

The simulated device computes the first request of each answer; the others get its solo output, rotated. The front end's
code is the engine's own; the scheduler admits in order, computes whole prompts and caches nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from engine.core.messages import Abort as AbortMessage
from engine.core.messages import ClientMessage, FinishReason, Generate, PromptLogprob, Refusal, RefusalKind, TokenOutput
from engine.frontend.schema.errors import ApiError
from engine.frontend.sessions.sessions import Sessions
from scripted.core.tokens import FIRST_TOKEN, TOKENS
from scripted.core.violation import Violation
from scripted.sdk import Abort, Add, Batch, BatchFailed, BatchResult, Limits, Refused, Share, Stepped, Tokens
from scripted.sdk.messages import Event, Reply
from scripted_lockstep.sessions.answers import OpenAnswer
from scripted_lockstep.sessions.orders import model_tokens
from scripted_lockstep.sessions.settings import MOST_SENT, SessionSettings
from scripted_lockstep.sessions.texts import byte_tokens, logprob_of, prompt_logprobs_of

LIMITS: Final = Limits(block_size=4, blocks=24, batch_tokens=64, batch_requests=8, context_tokens=64)


@dataclass(eq=False)
class _DeviceRequest:
    """The one request of a reply that the simulated device computes."""

    answer: OpenAnswer
    ids: list[int]
    blocks: tuple[int, ...] = ()
    computed: int = 0
    is_in_flight: bool = False

    @property
    def add(self) -> Add:
        return self.answer.add


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
        # The front end's messages, each with its answer and the step in which it arrives.
        self._messages: deque[tuple[int, OpenAnswer | None, ClientMessage]] = deque()
        self._sender: OpenAnswer | None = None
        self._sessions = Sessions(self._post)
        self._answers: list[OpenAnswer] = []
        self._sent: dict[str, _Sent] = {}
        # Requests that wait for blocks or run, in order of arrival; a rid may be reused while its last batch is in
        # flight.
        self._device_requests: list[_DeviceRequest] = []
        self._free = list(range(LIMITS.blocks))
        self._in_flight: dict[int, list[_DeviceRequest]] = {}
        self._launched = self._step = 0
        # The answers that are called off in the next step, unknown to the search.
        self._sent_in_haste: list[OpenAnswer] = []
        self._replies: list[Reply] = []

    def step(self, events: Sequence[Event], now: float) -> Stepped:
        """Apply the events, emit the rotated outputs, let clients read, and launch a batch."""
        del now
        self._step += 1
        self._replies = []
        self._send_hasty_ones_again()
        self._take_messages()
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
        if not self._answers and (kept := _kept_by(self._sessions)):
            raise Violation(f"every answer is over, but the sessions keep {kept}")
        batch = self._launch() if len(self._in_flight) < self.depth else None
        again = batch is not None or self._has_more_to_do
        return Stepped(microbatch=batch, replies=tuple(self._replies), again=again)

    @property
    def _has_more_to_do(self) -> bool:
        """Return whether a step without events still sends, reads, or emits tokens."""
        going = any(one.is_sending or one.has_input for one in self._answers)
        waits = bool(self._messages or self._sent_in_haste)
        return going or waits or any(one.tokens is not None for one in self._sent.values())

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
        answer = OpenAnswer(add, self._settings, self._sessions, is_known=not self._settings.hasty)
        try:
            self._send(answer)
        except ApiError as exc:
            self._replies.append(Refused(rid=add.rid, reason=exc.body.error.message))
            return
        self._answers.append(answer)
        if self._settings.hasty:
            self._sent_in_haste.append(answer)
        if self._settings.has_blocks:
            self._begin_beside(add)
        self._take_messages()

    def _begin_beside(self, add: Add) -> None:
        """Begin a reply that the search does not know: its one request has stop strings that its output contains."""
        beside = msgspec.structs.replace(add, rid=f"{add.rid}-beside")
        answer = OpenAnswer(beside, self._settings, self._sessions, is_known=False, number=1)
        try:
            self._send(answer)
        except ApiError:
            # The one beside an earlier request of this rid goes on.
            return
        self._answers.append(answer)

    def _abort(self, rid: str) -> None:
        """End the latest answer of this rid: its client leaves, it runs out of time, or an operator aborts it."""
        answer = next((one for one in reversed(self._answers) if one.add.rid == rid), None)
        if answer in self._sent_in_haste:
            self._sent_in_haste.remove(answer)
            answer.is_known = True
        if answer is not None and self._settings.times_out and answer.emitted:
            self._run_out_of_time(answer)
        else:
            self._call_off(rid, answer)
            if answer is not None and answer.is_known and not answer.is_over:
                self._retry(answer)
        self._take_messages()

    def _call_off(self, rid: str, answer: OpenAnswer | None) -> None:
        if not self._settings.leaves or answer is None:
            if answer is not None:
                answer.is_called_off = True
            self._sessions.send(AbortMessage(rid=rid, call_id="call"))
        elif not (answer.is_over or answer.has_left):
            answer.leave()

    def _retry(self, ended: OpenAnswer) -> None:
        """Send a request that was called off again, under its rid; all but the last are called off again."""
        for number in range(self._settings.retries):
            answer = OpenAnswer(msgspec.structs.replace(ended.add), self._settings, self._sessions, is_known=False)
            try:
                self._send(answer)
            except ApiError:
                # The one before has ended by itself, and its last reply is on its way.
                return
            self._answers.append(answer)
            if number + 1 < self._settings.retries:
                self._call_off(ended.add.rid, answer)

    def _send_hasty_ones_again(self) -> None:
        """Call off the requests of the last step and send them again, for the search the same ones."""
        hasty, self._sent_in_haste = self._sent_in_haste, []
        for ended in hasty:
            if ended.is_sending:
                # The rids of its other choices are not free.
                ended.is_known = True
                continue
            self._call_off(ended.add.rid, ended)
            answer = OpenAnswer(msgspec.structs.replace(ended.add), self._settings, self._sessions)
            self._send(answer)
            self._answers.append(answer)

    def _run_out_of_time(self, answer: OpenAnswer) -> None:
        """End the first request of an answer, those without a token, now or later, and some others."""
        answer.is_late = True
        for sent in [one for one in self._sent.values() if one.answer is answer]:
            if not (sent.place and sent.delivered) or (sent.place + sent.delivered) % 2:
                self._end(sent, FinishReason.TIMEOUT, "it ran out of time")

    def _send(self, answer: OpenAnswer) -> None:
        self._sender = answer
        try:
            answer.send()
        finally:
            self._sender = None

    # -- the scheduler's side --

    def _post(self, message: ClientMessage) -> None:
        """Send a message of the front end. Raises Violation for its own abort of a request that has ended."""
        self._messages.append((self._step + self._settings.delay, self._sender, message))
        if isinstance(message, Generate) and self._sender is not None:
            self._sender.posted += 1
        if not isinstance(message, AbortMessage):
            return
        queued = [one.rid for _, _, one in self._messages if isinstance(one, Generate)]
        if message.call_id is None and message.rid not in (*self._sent, *queued):
            raise Violation(f"the front end aborts {message.rid} ({message.finish_reason}), which has ended")
        newest = next((one for one in reversed(self._answers) if message.rid in one.session.rids), None)
        answer = self._sender or newest
        if answer is not None:
            if message.call_id is None:
                answer.check_reason(message)
            answer.called_off.add(message.rid)
            if message.rid == answer.order.messages[0].rid:
                # The rid is free for the search before the scheduler has heard of it.
                self._report(answer, message.finish_reason)

    def _take_messages(self) -> None:
        """Take the front end's messages in order, as far as they have arrived; early refusals overtake them."""
        if self._settings.refuses == "early":
            self._refuse_early()
        while self._messages and self._messages[0][0] <= self._step:
            _, answer, message = self._messages.popleft()
            if isinstance(message, Generate):
                assert answer is not None, f"{message.rid} is sent for no answer"
                self._start(answer, message)
            elif isinstance(message, AbortMessage):
                self._abort_one(message)

    def _start(self, answer: OpenAnswer, message: Generate) -> None:
        if self._finds_no_room(answer):
            self._refuse(answer, message, behind=0)
            return
        index = answer.session.rids.index(message.rid)
        answer.emitted[message.rid] = []
        sent = self._sent[message.rid] = _Sent(answer, answer.order.messages[index], index)
        if index or not answer.is_known:
            sent.tokens = model_tokens(answer.add, answer.number + index)
        elif not answer.is_reported:
            self._device_requests.append(_DeviceRequest(answer, list(answer.add.prompt_ids)))
        if answer.is_late:
            self._end(sent, FinishReason.TIMEOUT, "it ran out of time")

    def _refuse_early(self) -> None:
        """Refuse the requests of new answers that find no room: all choices of an answer, or none."""
        messages, self._messages = self._messages, deque[tuple[int, OpenAnswer | None, ClientMessage]]()
        for step, answer, message in messages:
            if answer is None or not isinstance(message, Generate) or not self._finds_no_room(answer):
                self._messages.append((step, answer, message))
                continue
            ahead = [one.rid for _, _, one in self._messages if isinstance(one, Generate)]
            self._refuse(answer, message, behind=[*self._sent, *ahead].count(message.rid))

    def _refuse(self, answer: OpenAnswer, message: Generate, *, behind: int) -> None:
        answer.emitted[message.rid] = []
        answer.note_end(message.rid, FinishReason.ERROR)
        if answer.is_known and not answer.is_reported:
            self._replies.append(Refused(rid=answer.add.rid, reason="the scheduler is full"))
            answer.is_reported = True
        why = "the scheduler is full"
        self._sessions.take(Refusal(rid=message.rid, kind=RefusalKind.BUSY, message=why, behind=behind))

    def _finds_no_room(self, answer: OpenAnswer) -> bool:
        if answer.is_refused is None:
            is_full = {"never": False, "early": len(self._sent) >= MOST_SENT, "in_turn": self._step % 2 == 1}
            answer.is_refused = is_full[self._settings.refuses]
        return answer.is_refused

    def _abort_one(self, abort: AbortMessage) -> None:
        sent = self._sent.get(abort.rid)
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
        """Pass new tokens of a request to the front end, up to a stop token if the scheduler knows them."""
        add = sent.answer.add
        stops = [place for place, token in enumerate(tokens, 1) if token in add.stop_token_ids]
        is_stop = self._settings.stop_tokens and bool(stops)
        if is_stop:
            tokens = tokens[: stops[0]]
            sent.answer.stopped.add(sent.message.rid)
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
            finish_reason=FinishReason.STOP if is_stop else FinishReason.LENGTH if is_last else None,
            stop_token_id=new[-1] if is_stop else None,
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
        if not sent.place:
            self._report(sent.answer, reason)
        output = TokenOutput(rid=sent.message.rid, finish_reason=reason, error=error, **_cached(sent))
        self._pass_on(sent, output)

    def _pass_on(self, sent: _Sent, output: TokenOutput) -> None:
        if output.finish_reason is not None:
            sent.answer.note_end(sent.message.rid, output.finish_reason)
            del self._sent[sent.message.rid]
        self._sessions.take(output)

    def _report(self, answer: OpenAnswer, reason: FinishReason) -> None:
        """Tell the search, once, that the request of a reply has ended. To the search a time limit is an abort."""
        if answer.is_reported or not answer.is_known:
            return
        reported = FinishReason.ABORT if reason is FinishReason.TIMEOUT else reason
        self._replies.append(Tokens(rid=answer.add.rid, finish_reason=reported.value))
        self._end_on_device(answer)

    def _end_on_device(self, answer: OpenAnswer) -> None:
        answer.is_reported = True
        request = next((one for one in self._device_requests if one.answer is answer), None)
        if request is not None:
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
            if not request.is_in_flight and not request.answer.is_reported:
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
        if request.answer.is_reported or sent is None:
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
            self._end_on_device(request.answer)
        if is_stop and not (is_last or self._settings.stop_tokens):
            # It continues until the front end has found the stop string, which the device need not compute.
            left = request.add.max_new_tokens - count
            filler = min(set(range(FIRST_TOKEN, FIRST_TOKEN + TOKENS)).difference(request.add.stop_token_ids))
            sent.tokens, sent.delivered = [*request.ids[-count:], *[filler] * left], count
        self._emit(sent, ids, is_last=is_last)

    def _sent_of(self, request: _DeviceRequest) -> _Sent | None:
        return next((one for one in self._sent.values() if one.answer is request.answer and not one.place), None)

    def _free_blocks_of(self, request: _DeviceRequest) -> None:
        """Free the blocks of a request that has ended, once no batch with it is in flight."""
        if request.is_in_flight or request not in self._device_requests:
            return
        self._device_requests.remove(request)
        self._free = sorted([*self._free, *request.blocks])


def _kept_by(sessions: Sessions) -> dict[str, object]:
    """Return every collection of the sessions that is not empty."""
    return {name: kept for name, kept in vars(sessions).items() if isinstance(kept, Collection) and kept}


def _cached(sent: _Sent) -> dict[str, Any]:
    """Return the fields of an output that report the cached tokens of its prompt."""
    tiers = sent.answer.cached_tokens_of(sent.message)
    return {"cached_tokens": sum(tiers.values()), "cached_tokens_host": tiers["host"]}
