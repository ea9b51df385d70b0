"""One request from its first to its last output: sent on construction, shown piece by piece.

When a stop string is found in the answer, the scheduler is told here; the answer ends when the scheduler's terminal
reply says that the request is really gone.
"""

from __future__ import annotations

from engine.frontend.answer import Answer
from engine.frontend.detokenizer import Decoder
from engine.frontend.engine_client import EngineClient, HandOver
from engine.frontend.errors import ApiError, ErrorType
from engine.frontend.metrics import RequestTimes
from engine.frontend.protocol import GenerateAnswer
from engine.messages import FAILURES, Abort, FinishReason, Generate, TokenOutput

__all__ = ["Generation", "TimedOut"]


class TimedOut(ApiError):
    """The time of a request was over before its first token. ``piece`` shows that beside choices that have some."""

    def __init__(self, why: str, piece: GenerateAnswer) -> None:
        super().__init__(504, ErrorType.TIME_LIMIT, why)
        self.piece = piece


class Generation:
    """The answer of one request. Construction sends it, and raises ApiError when it is refused at once.

    ``hand_over`` is given its outputs, and a failure in place of the last one. ``grammar_field`` is the field of the
    body that says what the output must be, if one does.
    """

    def __init__(
        self,
        client: EngineClient,
        decoder: Decoder,
        message: Generate,
        times: RequestTimes,
        hand_over: HandOver,
        *,
        grammar_field: str | None = None,
    ) -> None:
        self._client = client
        self._times = times
        self._rid = message.rid
        self._grammar_field = grammar_field
        self._answer = Answer(decoder, message)
        self._request = client.start(message)
        self._request.hand_over = hand_over

    def abort(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ask the scheduler to end this request; a no-op when it has ended."""
        self._client.abort(self._request, Abort(rid=self._rid, finish_reason=reason))

    def piece(self, output: TokenOutput) -> GenerateAnswer:
        """What is new with an output: text and ids are deltas, counts are totals; the last one has a finish reason.

        Raises ApiError when the request was ended by an error or a fault of its own, TimedOut when its time was over
        before its first token.
        """
        self._times.note(output)
        reason = output.finish_reason
        if reason in FAILURES:
            raise ApiError.of_failure(output, self._grammar_field)
        stopped_before = self._answer.stop_found
        piece = self._answer.piece(output)
        if self._answer.stop_found and not stopped_before:
            self.abort(FinishReason.STOP)
        if reason is FinishReason.TIMEOUT and not output.completion_tokens:
            raise TimedOut(output.error or "the time of this request is over", piece)
        return piece
