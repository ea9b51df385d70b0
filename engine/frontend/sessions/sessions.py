"""The front end's state machine of requests, without an event loop, a socket or a clock.

Takes orders, disconnects and the scheduler's replies; produces messages to the scheduler and the bytes of HTTP replies.
Owns the rids in use, the ends of requests, choices, stop strings and the parts of a stream. The HTTP front end and the
harness's simulated clients are shells around it.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from engine.core.messages import FAILURES, Abort, ClientMessage, FinishReason, Generate, Refusal, TokenOutput, ended_by
from engine.core.routing.prefills import Prefills
from engine.frontend.schema.errors import LORA_PARAM, ApiError, ErrorBody, ErrorType
from engine.frontend.schema.native import MAX_TOP_LOGPROBS, META_LISTS, GenerateAnswer, MetaInfo
from engine.frontend.sessions.requests import Order
from engine.frontend.text.answer import Answer, Decoder, is_shown, joined

# Prompt tokens sent in one turn of the event loop, which take 2 ms. All choices of a long prompt may take 100 ms.
TOKENS_A_TURN: Final = 262_144
# Outputs turned into pieces in one turn of the event loop; a client that paused has many.
OUTPUTS_A_TURN: Final = 32
# Logprobs encoded in one turn of the event loop, which take 3 ms.
VALUES_A_TURN: Final = 1024
# The end of a stream in the native and the OpenAI protocol.
DONE: Final = b"data: [DONE]\n\n"

IndexedPiece = tuple[int, GenerateAnswer]
# A function that takes an output of a request, or the error that refused or failed it. Must not raise.
HandOver = Callable[[TokenOutput | ApiError], None]
# A function that observes each output when it becomes a piece.
Observer = Callable[[TokenOutput], None]
_Result = TypeVar("_Result")
_Entry = TypeVar("_Entry")
# A generator that encodes a reply and, in large replies, yields where the event loop may turn.
Shaping = Generator[None, None, _Result]


class Shape(ABC):
    """Base of the shapes, the reply formats of the protocols; one for each HTTP request. ``end`` closes a stream."""

    end = b""

    @abstractmethod
    def whole(self, answers: Sequence[GenerateAnswer]) -> Shaping[object]:
        """Make the body of a whole reply from the outputs of all choices."""

    def events(self, index: int, piece: GenerateAnswer) -> Iterable[msgspec.Struct]:  # noqa: ARG002
        """Make the events that show one piece of one choice in a stream, possibly none."""
        return ()

    def last_events(self) -> Iterable[msgspec.Struct]:
        """Make the events after the last piece of the last choice."""
        return ()

    def failure(self, error: ErrorBody) -> msgspec.Struct:
        """Make the last event of a broken stream."""
        return error


class NativeShape(Shape):
    """Shapes replies of ``/generate``: each piece unchanged, with its index if there are ``n`` choices."""

    end = DONE

    def __init__(self, n: int = 1) -> None:
        self._n = n

    def whole(self, answers: Sequence[GenerateAnswer]) -> Shaping[object]:
        shown = []
        for index, answer in enumerate(answers):
            if index:
                yield
            shown.append(self._indexed(index, (yield from self._spelled(answer))))
        return shown if self._n > 1 else shown[0]

    def _spelled(self, answer: GenerateAnswer) -> Shaping[GenerateAnswer]:
        meta, fields = answer.meta_info, dict[str, Any]()
        for name in META_LISTS:
            entries = getattr(meta, name)
            if entries is not msgspec.UNSET:
                fields[name] = listed((yield from spelled(entries, MAX_TOP_LOGPROBS, lambda entry: entry)))
        return msgspec.structs.replace(answer, meta_info=msgspec.structs.replace(meta, **fields))

    def events(self, index: int, piece: GenerateAnswer) -> Iterable[msgspec.Struct]:
        return (self._indexed(index, piece),)

    def _indexed(self, index: int, answer: GenerateAnswer) -> GenerateAnswer:
        return answer if self._n == 1 else msgspec.structs.replace(answer, index=index)


class Request:
    """A sent request, registered until its terminal reply even if its client has left."""

    def __init__(self, rid: str, hand_over: HandOver) -> None:
        self.rid = rid
        self.hand_over = hand_over
        self.has_ended = False
        # True once a message that ends it was sent, so that its rid is free for later messages.
        self.is_ending = False


class Sessions:
    """The open requests to one scheduler. ``send`` takes its messages in order.

    On a decode engine ``prefills`` chooses the prefill engine of each prompt.
    """

    def __init__(self, send: Callable[[ClientMessage], None], prefills: Prefills | None = None) -> None:
        self._send = send
        self._prefills = prefills
        self._open: dict[str, Request] = {}
        # Earlier requests with a reused rid that still wait for their terminal replies, oldest first.
        self._ending: dict[str, deque[Request]] = {}
        # Replies with several choices, by their own rids, until the last choice has ended.
        self._answers: dict[str, Session] = {}
        self._broken: ApiError | None = None
        self._closed: ApiError | None = None

    @property
    def broken(self) -> ApiError | None:
        """Return the reason why the engine is gone; None while it lives."""
        return self._broken

    @property
    def closed(self) -> ApiError | None:
        """Return the reason why no further request is accepted, or None. Open requests may finish."""
        return self._broken or self._closed

    @property
    def open_requests(self) -> int:
        return len(self._open) + sum(map(len, self._ending.values()))

    def send(self, message: ClientMessage) -> None:
        """Send a message, and free the rids of the requests that it ends.

        An abort of a reply with several choices ends them all.
        """
        answer = self._answers.get(message.rid) if isinstance(message, Abort) else None
        if answer is not None and isinstance(message, Abort):
            message = answer.call_off(message)
        for rid in ended_by(message, self._open.keys()):
            self._open[rid].is_ending = True
        self._send(message)

    def check_free(self, rids: Iterable[str]) -> None:
        """Raise ApiError (409) for the rid of a live request, or of a live reply with several choices."""
        for rid in rids:
            request, answer = self._open.get(rid), self._answers.get(rid)
            if (request is not None and not request.is_ending) or (answer is not None and answer.is_live):
                raise ApiError.rid_is_live(rid)

    def begin(self, answer: Session) -> None:
        """Register a reply with several choices. Raises ApiError: 409 if one of its rids is live."""
        self.check_free([answer.rid, *answer.rids])
        self._answers[answer.rid] = answer

    def end(self, answer: Session) -> None:
        """Unregister a reply whose last choice has ended."""
        if self._answers.get(answer.rid) is answer:
            del self._answers[answer.rid]

    def start(self, message: Generate, hand_over: HandOver) -> Request:
        """Send a request. Raises ApiError: 409 for a live rid, 503 if closed or if the engine is gone."""
        if self.closed is not None:
            raise self.closed
        self.check_free([message.rid])
        before = self._open.get(message.rid)
        if before is not None:
            self._ending.setdefault(message.rid, deque()).append(before)
        request = self._open[message.rid] = Request(message.rid, hand_over)
        self.send(message if self._prefills is None else self._prefills.place(message))
        return request

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        """Abort a request once; it stays registered until the scheduler's terminal reply."""
        if not (request.has_ended or request.is_ending) and self._broken is None:
            self.send(Abort(rid=request.rid, finish_reason=reason))

    def take(self, reply: TokenOutput | Refusal) -> None:
        """Hand a reply to its request; drop replies to unknown requests."""
        rid = reply.rid
        older, newest = self._ending.get(rid), self._open.get(rid)
        # The requests of a rid are answered in order, but for refusals.
        place = reply.behind if isinstance(reply, Refusal) else 0
        request = older[place] if older and place < len(older) else newest
        if self._prefills is not None:
            self._prefills.heard(reply, is_newest=request is newest)
        if request is None:
            return
        output = ApiError.of_refusal(reply) if isinstance(reply, Refusal) else reply
        request.has_ended = isinstance(output, ApiError) or output.finish_reason is not None
        if request.has_ended and request is newest:
            del self._open[rid]
        elif request.has_ended and older:
            older.remove(request)
            if not older:
                del self._ending[rid]
        request.hand_over(output)

    def break_off(self, reason: ApiError) -> None:
        """End every open request with an error, and refuse further ones. Only the first reason counts."""
        if self._broken is not None:
            return
        self._broken = reason
        requests = [*self._open.values(), *(one for lives in self._ending.values() for one in lives)]
        self._open.clear()
        self._ending.clear()
        for request in requests:
            request.has_ended = True
            request.hand_over(reason)

    def close(self, reason: ApiError) -> None:
        self._closed = reason


class Session:
    """The reply to one HTTP request: its choices are sent together, shown as they arrive, and aborted together.

    ``on_output`` is called when an output or a failure arrives; the shell then takes a ``part`` of a stream, or
    collects the whole. ``observe`` makes the observer of a choice's outputs. ``tokens_a_turn``, ``outputs_a_turn`` and
    ``values_a_turn`` bound the tokens sent, and the outputs and prompt logprobs read, before the event loop turns.
    """

    def __init__(
        self,
        sessions: Sessions,
        order: Order,
        shape: Shape,
        decoder: Decoder,
        *,
        observe: Callable[[], Observer] = lambda: _ignore,
        request_id: str | None = None,
        tokens_a_turn: int | None = None,
        outputs_a_turn: int | None = None,
        values_a_turn: int | None = None,
    ) -> None:
        self._sessions = sessions
        self._order = order
        self._tokens_a_turn = tokens_a_turn or TOKENS_A_TURN
        self._outputs_a_turn = outputs_a_turn or OUTPUTS_A_TURN
        self._values_a_turn = values_a_turn or VALUES_A_TURN
        self._shape = shape
        self._decoder = decoder
        self._observe = observe
        self._request_id = request_id
        self._choices: list[_Choice] = []
        self._outputs: deque[tuple[int, TokenOutput | ApiError]] = deque()
        self._ended = 0
        # The sent choices without a terminal reply.
        self._unended = 0
        self._has_shown = False
        self._overdue: list[tuple[int, _TimedOut]] = []
        self._failure: ApiError | None = None
        self._kept: list[list[GenerateAnswer]] = []
        # True once a stream's status was sent, with its first pieces; a stream ends with the last part.
        self.has_begun = self.is_told = False
        self.is_aborted = self.has_left = self._is_called_off = False
        self.on_output: Callable[[], None] = _nothing

    # -- requests --

    def send_some(self) -> bool:
        """Send requests in order, up to a limit of prompt tokens. Returns whether there are more to send.

        Sends nothing after ``abort``. Raises ApiError if one is refused, and aborts the others.
        """
        if not self._choices and len(self._order.messages) > 1:
            self._sessions.begin(self)
        tokens = 0
        while self.is_cut_short and not self.is_aborted:
            if tokens >= self._tokens_a_turn:
                return True
            index = len(self._choices)
            message = self._order.messages[index]
            if len(self._order.messages) > 1:
                message = msgspec.structs.replace(message, choices=len(self._order.messages), first_choice=self.rids[0])
            answer, observe = Answer(self._decoder, message, shows_stop=self._order.shows_stop), self._observe()
            try:
                request = self._sessions.start(message, functools.partial(self._take, index))
            except ApiError:
                self.abort()
                raise
            self._choices.append(_Choice(request, answer, observe))
            self._unended += 1
            if self._is_called_off:
                self._sessions.abort(request)
            tokens += len(message.prompt_ids)
        return False

    @property
    def is_cut_short(self) -> bool:
        """True if some requests of the order were not sent."""
        return len(self._choices) < len(self._order.messages)

    def leave(self) -> None:
        """Abort all requests, because the client has left. Their outputs are observed, and nothing is made of them."""
        self.has_left = True
        self.abort()

    def abort(self) -> None:
        """Abort all requests that have not ended."""
        if self.is_aborted:
            return
        self.is_aborted = True
        for choice in self._choices:
            self._sessions.abort(choice.request)
        self._forget_if_ended()

    def call_off(self, abort: Abort) -> Abort:
        """Abort all choices but the last live one for an operator; return the message that aborts that one."""
        self._is_called_off = True
        live = [c.request for c in self._choices if not (c.request.has_ended or c.request.is_ending)]
        for request in live[:-1]:
            self._sessions.abort(request)
        return msgspec.structs.replace(abort, rid=live[-1].rid) if live else abort

    @property
    def rid(self) -> str:
        return self._order.rid

    @property
    def rids(self) -> list[str]:
        return [message.rid for message in self._order.messages]

    @property
    def is_live(self) -> bool:
        """True while some request has neither ended nor been aborted."""
        if self.is_aborted or self._is_called_off:
            return False
        return self.is_cut_short or any(not c.request.has_ended and not c.request.is_ending for c in self._choices)

    def _forget_if_ended(self) -> None:
        if not self._unended and (self.is_aborted or not self.is_cut_short):
            self._sessions.end(self)

    # -- the reply --

    @property
    def has_more(self) -> bool:
        """True if ``part`` or ``collect`` would return or raise something at once."""
        return bool(self._outputs) or self._failure is not None

    @property
    def is_over(self) -> bool:
        """True once the last choice has ended and its last piece was taken."""
        return self._ended == len(self._choices) and not self.has_more

    def part(self) -> bytes:
        """Return the events of a stream for the outputs so far, up to a limit, and its end; possibly none.

        An error after the first piece is the last event; only a complete stream is closed. Raises ApiError for an error
        before the first piece.
        """
        try:
            pieces = self.pieces()
            self.has_begun = self.has_begun or bool(pieces)
            self.is_told = self.is_over
            return b"" if self.has_left else self._events_of(pieces)
        except ApiError as exc:
            if not self.has_begun:
                raise
            self.is_told = True
            return b"" if self.has_left else written([self._shape.failure(exc.body_for(self._request_id))])

    def _events_of(self, pieces: Sequence[IndexedPiece]) -> bytes:
        events = written(event for index, piece in pieces for event in self._shape.events(index, piece))
        return events + written(self._shape.last_events()) + self._shape.end if self.is_told else events

    def collect(self) -> bool:
        """Collect the outputs of a whole reply. Returns whether it is complete. Raises ApiError."""
        self._kept += [[] for _ in range(len(self._choices) - len(self._kept))]
        for index, piece in self.pieces():
            if not self.has_left:
                self._kept[index].append(piece)
        return self.is_over

    def body(self) -> Shaping[bytes]:
        """Make the body of a collected reply; empty if its client leaves before it is made."""
        making, body, values = self._made(), b"", 0
        while not self.has_left:
            try:
                next(making)
            except StopIteration as done:
                body = done.value
                break
            yield
        making.close()
        # Freed in parts, because freeing a million values at once takes 60 ms.
        for pieces in self._kept:
            while pieces:
                values += _values_of(pieces.pop().meta_info)
                if values > VALUES_A_TURN:
                    yield
                    values = 0
        return body

    def _made(self) -> Shaping[bytes]:
        answers = list[GenerateAnswer]()
        for index, pieces in enumerate(self._kept):
            if index:
                yield
            answers.append(joined(pieces))
        return msgspec.json.encode((yield from self._shape.whole(answers)))

    def pieces(self) -> list[IndexedPiece]:
        """Return the pieces so far, up to a limit, with the index of their choice, in the order of arrival.

        Raises ApiError, after the earlier pieces, if a choice was refused or failed, and aborts the others. A choice
        that timed out before its first token fails the reply only if no other choice has a token.
        """
        pieces: list[IndexedPiece] = []
        try:
            if self._failure is not None:
                raise self._failure
            values = 0
            for _ in range(min(len(self._outputs), self._outputs_a_turn)):
                index, output = self._outputs.popleft()
                pieces += self._shown(index, output)
                values += 0 if isinstance(output, ApiError) else _prompt_values(output)
                if values >= self._values_a_turn:
                    break
        except ApiError as exc:
            self._failure = exc
            self.abort()
            if not pieces:
                raise
        return pieces

    def _take(self, index: int, output: TokenOutput | ApiError) -> None:
        parts = [output] if isinstance(output, ApiError) else _split(output, self._values_a_turn)
        self._outputs += [(index, part) for part in parts]
        self._unended -= self._choices[index].request.has_ended
        self._forget_if_ended()
        self.on_output()

    def _shown(self, index: int, output: TokenOutput | ApiError) -> list[IndexedPiece]:
        """Return the pieces that an output adds to the reply. Raises ApiError."""
        if isinstance(output, ApiError):
            raise self._named(output)
        self._ended += output.finish_reason is not None
        choice = self._choices[index]
        stopped_before = choice.answer.stop_found
        try:
            piece = choice.piece(output, self._order.grammar_field)
            pieces = [(index, piece)] if is_shown(piece) else []
        except _TimedOut as exc:
            self._overdue.append((index, exc))
            pieces = []
        except ApiError as exc:
            raise self._named(exc) from exc
        # The requests of a client that left were aborted.
        if choice.answer.stop_found and not stopped_before and not self.is_aborted:
            self._sessions.abort(choice.request, FinishReason.STOP)
        self._has_shown = self._has_shown or bool(pieces)
        if self._overdue and self._has_shown:
            pieces += [(overdue, end.piece) for overdue, end in self._overdue]
            self._overdue.clear()
        elif self._overdue and self._ended == len(self._choices):
            raise self._overdue[0][1]
        return pieces

    def _named(self, error: ApiError) -> ApiError:
        """Add the field that selected the LoRA to an error about the LoRA."""
        return error.naming(self._order.lora_field) if error.body.error.param == LORA_PARAM else error


class _TimedOut(ApiError):
    """A request timed out before its first token. ``piece`` shows it beside choices with tokens."""

    def __init__(self, why: str, piece: GenerateAnswer) -> None:
        super().__init__(ErrorType.TIME_LIMIT, why)
        self.piece = piece


class _Choice(NamedTuple):
    request: Request
    answer: Answer
    observe: Observer

    def piece(self, output: TokenOutput, grammar_field: str | None) -> GenerateAnswer:
        """Return an output's piece: text and ids are deltas, counts are totals; the last one has a finish reason.

        Raises ApiError for a failure or the request's own fault, and _TimedOut for a time limit before the first token.
        """
        self.observe(output)
        if output.finish_reason in FAILURES:
            raise ApiError.of_failure(output, grammar_field)
        piece = self.answer.piece(output)
        if output.finish_reason is FinishReason.TIMEOUT and not output.completion_tokens:
            raise _TimedOut(output.error or "the request timed out", piece)
        return piece


def spelled(entries: Sequence[_Entry], values_each: int, spell: Callable[[_Entry], object]) -> Shaping[bytes]:
    """Encode the contents of a JSON list of entries that ``spell`` makes, each with ``values_each`` values."""
    count = max(1, VALUES_A_TURN // max(1, values_each))
    parts = []
    for start in range(0, len(entries), count):
        if start:
            yield
        parts.append(msgspec.json.encode([spell(entry) for entry in entries[start : start + count]])[1:-1])
    return b",".join(parts)


def listed(*insides: bytes) -> Any:
    """Join the contents of JSON lists to one raw list."""
    return msgspec.Raw(b"[" + b",".join([inside for inside in insides if inside]) + b"]")


def finished(shaping: Shaping[_Result]) -> _Result:
    """Run a shaping to its end at once and return its result."""
    while True:
        try:
            next(shaping)
        except StopIteration as done:
            result: _Result = done.value
            return result


def _values_of(meta: MetaInfo) -> int:
    """Return the maximum number of logprobs in a piece."""
    entries = len(meta.input_token_logprobs or ()) + len(meta.output_logprobs or ())
    return entries * (1 + MAX_TOP_LOGPROBS)


def _prompt_values(output: TokenOutput) -> int:
    """Return the number of prompt logprobs in an output."""
    logprobs = output.prompt_logprobs
    return len(logprobs) * (1 + len(logprobs[0].top)) if logprobs else 0


def _split(output: TokenOutput, values_a_turn: int) -> list[TokenOutput]:
    """Split an output so that no part has more prompt logprobs than one turn encodes."""
    logprobs = output.prompt_logprobs
    if _prompt_values(output) <= values_a_turn:
        return [output]
    count = max(1, values_a_turn // (1 + len(logprobs[0].top)))
    *first, last = (logprobs[start : start + count] for start in range(0, len(logprobs), count))
    bare = msgspec.structs.replace(
        output, token_ids=(), logprobs=(), finish_reason=None, stop_token_id=None, error=None
    )
    parts = [msgspec.structs.replace(bare, prompt_logprobs=part) for part in first]
    return [*parts, msgspec.structs.replace(output, prompt_logprobs=last)]


def written(events: Iterable[msgspec.Struct]) -> bytes:
    """Encode server-sent events; an event of a tagged type has the tag as its name."""
    return b"".join([_named(event) + b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events])


def _named(event: msgspec.Struct) -> bytes:
    tag = event.__struct_config__.tag
    return b"" if tag is None else b"event: %b\n" % str(tag).encode()


def _ignore(output: TokenOutput) -> None:
    """Ignore an output."""


def _nothing() -> None:
    """Do nothing: outputs wait until they are taken."""
