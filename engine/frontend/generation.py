"""One request from its first to its last output: sent on construction, answered piece by piece.

When a stop string is found in the answer, the scheduler is told here; the answer ends when the scheduler's terminal
reply says that the request is really gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from engine.frontend.answer import Answer, is_shown, joined
from engine.frontend.detokenizer import Decoder
from engine.frontend.engine_client import EngineClient
from engine.frontend.errors import ApiError, ErrorType, public
from engine.frontend.metrics import RequestTimes
from engine.frontend.protocol import GenerateAnswer
from engine.messages import Abort, FinishReason, Generate

__all__ = ["Generation", "TimedOut"]


class TimedOut(ApiError):
    """The time of a request was over before its first token. ``piece`` shows that beside choices that have some."""

    def __init__(self, why: str, piece: GenerateAnswer) -> None:
        super().__init__(504, ErrorType.TIME_LIMIT, why)
        self.piece = piece


class Generation:
    """The answer of one request. Construction sends it, and raises ApiError when it is refused at once."""

    def __init__(self, client: EngineClient, decoder: Decoder, message: Generate, times: RequestTimes) -> None:
        self._client = client
        self._times = times
        self._rid = message.rid
        self._answer = Answer(decoder, message)
        self._request = client.start(message)

    def abort(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ask the scheduler to end this request; a no-op when it has ended."""
        self._client.abort(self._request, Abort(rid=self._rid, finish_reason=reason))

    async def pieces(self) -> AsyncIterator[GenerateAnswer]:
        """The answer in pieces: texts and ids are deltas, counts are totals; the last piece has a finish reason.

        Raises ApiError when the request was refused or ended by an error, TimedOut when its time was over before its
        first token.
        """
        finished = False
        while not finished:
            output = await self._request.next_output()
            self._times.note(output)
            if output.finish_reason is FinishReason.ERROR:
                why = public(output.error or "the engine could not compute this request")
                raise ApiError(500, ErrorType.ENGINE, why)
            finished = output.finish_reason is not None
            stopped_before = self._answer.stop_found
            piece = self._answer.piece(output)
            if self._answer.stop_found and not stopped_before:
                self.abort(FinishReason.STOP)
            if output.finish_reason is FinishReason.TIMEOUT and not output.completion_tokens:
                raise TimedOut(output.error or "the time of this request is over", piece)
            if is_shown(piece):
                yield piece

    async def whole(self) -> GenerateAnswer:
        """The answer in one. Raises ApiError as ``pieces`` does."""
        return joined([piece async for piece in self.pieces()])
