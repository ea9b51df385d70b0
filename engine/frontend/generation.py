"""One request from its first to its last output: tokens come in, pieces of the answer go out.

Owns the request's text: detokenizer, stop strings, what was shown. A stop string is found here, and here the scheduler
is told; the answer ends when the scheduler's terminal reply says that the request is really gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from engine.frontend.detokenizer import Decoder, Detokenizer
from engine.frontend.engine_client import EngineClient
from engine.frontend.problems import ApiError, ProblemType
from engine.frontend.protocol import GenerateAnswer, MetaInfo, OutputLogprob
from engine.frontend.stop_strings import StopScanner
from engine.messages import Abort, FinishReason, Generate, TokenLogprob, TokenOutput

__all__ = ["Generation"]


class Generation:
    """The answer of one request. Sent on construction, which raises ApiError when it is refused at once."""

    def __init__(self, client: EngineClient, decoder: Decoder, message: Generate) -> None:
        self._client = client
        self._message = message
        self._detokenizer = Detokenizer(decoder)
        self._scanner = StopScanner(message.sampling.stop)
        self._shown_tokens = 0
        self._request = client.start(message)

    def abort(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ask the scheduler to end this request; a no-op when it has ended."""
        self._client.abort(self._request, Abort(rid=self._message.rid, finish_reason=reason))

    async def pieces(self) -> AsyncIterator[GenerateAnswer]:
        """The answer in pieces: texts and ids are what is new, counts are totals; the last has a finish reason.

        Raises ApiError when the request was refused or ended by an error.
        """
        finished = False
        while not finished:
            output = await self._request.next_output()
            if output.finish_reason is FinishReason.ERROR:
                raise ApiError(500, ProblemType.ENGINE, output.error or "the engine could not compute this request")
            finished = output.finish_reason is not None
            piece = self._piece(output)
            if finished or piece.output_ids:
                yield piece

    async def whole(self) -> GenerateAnswer:
        """The answer in one. Raises ApiError as ``pieces`` does."""
        pieces = [piece async for piece in self.pieces()]
        meta = pieces[-1].meta_info
        if self._message.return_logprob:
            meta = msgspec.structs.replace(meta, output_logprobs=tuple(_joined_logprobs(pieces)))
        return GenerateAnswer(
            text="".join(piece.text for piece in pieces),
            output_ids=tuple(token_id for piece in pieces for token_id in piece.output_ids),
            meta_info=meta,
        )

    def _piece(self, output: TokenOutput) -> GenerateAnswer:
        ids, text = self._show(output)
        stopped = self._scanner.matched is not None
        finish_reason = FinishReason.STOP if stopped and output.finish_reason else output.finish_reason
        meta = MetaInfo(
            id=output.rid,
            finish_reason=finish_reason,
            prompt_tokens=output.prompt_tokens or len(self._message.prompt_ids),
            completion_tokens=self._shown_tokens,
            cached_tokens=output.cached_tokens,
            matched_stop=self._matched_stop(output) if output.finish_reason else msgspec.UNSET,
            output_logprobs=_logprobs(ids, output.logprobs) if self._message.return_logprob else msgspec.UNSET,
        )
        return GenerateAnswer(text=text, output_ids=ids, meta_info=meta)

    def _show(self, output: TokenOutput) -> tuple[tuple[int, ...], str]:
        """What the client may see of an output: nothing after a stop string, no text of a stop token."""
        texts: list[str] = []
        taken = 0
        for token_id in output.token_ids:
            if self._scanner.matched is not None:
                break
            taken += 1
            self._shown_tokens += 1
            if taken == len(output.token_ids) and output.stop_token_id is not None:
                break
            texts.append(self._scan(self._detokenizer.push(token_id)))
        if output.finish_reason is not None and self._scanner.matched is None:
            texts += [self._scanner.push(self._detokenizer.flush()), self._scanner.flush()]
        elif self._scanner.matched is not None and output.finish_reason is None:
            self.abort(FinishReason.STOP)
        return output.token_ids[:taken], "".join(texts)

    def _scan(self, text: str) -> str:
        """Look for stop strings, but not before ``min_new_tokens`` tokens are out."""
        if self._shown_tokens < self._message.sampling.min_new_tokens:
            return text
        return self._scanner.push(text)

    def _matched_stop(self, output: TokenOutput) -> str | int | msgspec.UnsetType:
        if self._scanner.matched is not None:
            return self._scanner.matched
        return output.stop_token_id if output.stop_token_id is not None else msgspec.UNSET


def _logprobs(ids: tuple[int, ...], logprobs: tuple[TokenLogprob | None, ...]) -> tuple[OutputLogprob, ...]:
    # Not strict: after a stop string fewer ids are shown than were computed.
    entries = [(token_id, entry) for token_id, entry in zip(ids, logprobs, strict=False) if entry is not None]
    return tuple(OutputLogprob(token_id=token_id, logprob=entry.logprob, top=entry.top) for token_id, entry in entries)


def _joined_logprobs(pieces: list[GenerateAnswer]) -> list[OutputLogprob]:
    entries = [piece.meta_info.output_logprobs for piece in pieces]
    return [entry for part in entries if isinstance(part, tuple) for entry in part]
