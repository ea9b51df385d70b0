"""What a client sees of one request: text, ids and counts, made from the scheduler's outputs as they come.

Owns the request's text: detokenizer, stop strings, what was shown. Pure: sends nothing and waits for nothing, so that
the simulated server shows what the real one does.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.frontend.detokenizer import Decoder, Detokenizer
from engine.frontend.input_logprobs import InputLogprobs, joined_inputs
from engine.frontend.protocol import GenerateAnswer, MetaInfo, OutputLogprob
from engine.frontend.stop_strings import StopScanner
from engine.messages import FinishReason, Generate, TokenLogprob, TokenOutput

__all__ = ["Answer", "is_shown", "joined"]


class Answer:
    """The answer to one request, piece by piece."""

    def __init__(self, decoder: Decoder, message: Generate) -> None:
        self._message = message
        self._detokenizer = Detokenizer(decoder)
        self._scanner = StopScanner(message.sampling.stop)
        self._shown_tokens = 0
        self._inputs = InputLogprobs(message) if message.prompt_logprobs_from >= 0 else None
        self._begins = True

    @property
    def stop_found(self) -> bool:
        """True once a stop string ended the text; the scheduler has to be told, unless it ended the request itself."""
        return self._scanner.matched is not None

    def piece(self, output: TokenOutput) -> GenerateAnswer:
        """What is new with an output: text and ids are deltas, counts are totals."""
        ids, text = self._show(output)
        begins, self._begins = self._begins, False
        inputs = {} if self._inputs is None else self._inputs.fields(output.prompt_logprobs, begins=begins)
        finish_reason = FinishReason.STOP if self.stop_found and output.finish_reason else output.finish_reason
        meta = MetaInfo(
            id=output.rid,
            finish_reason=finish_reason,
            prompt_tokens=output.prompt_tokens or len(self._message.prompt_ids),
            completion_tokens=self._shown_tokens,
            cached_tokens=output.cached_tokens,
            matched_stop=self._matched_stop(output) if output.finish_reason else msgspec.UNSET,
            output_logprobs=_logprobs(ids, output.logprobs) if self._message.return_logprob else msgspec.UNSET,
            **inputs,
        )
        return GenerateAnswer(text=text, output_ids=ids, meta_info=meta)

    def _show(self, output: TokenOutput) -> tuple[tuple[int, ...], str]:
        """What the client may see of an output: nothing after a stop string, no text of a stop token."""
        texts: list[str] = []
        taken = 0
        for token_id in output.token_ids:
            if self.stop_found:
                break
            taken += 1
            self._shown_tokens += 1
            if taken == len(output.token_ids) and output.stop_token_id is not None:
                break
            texts.append(self._scan(self._detokenizer.push(token_id)))
        if output.finish_reason is not None and not self.stop_found:
            texts += [self._scanner.push(self._detokenizer.flush()), self._scanner.flush()]
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


def is_shown(piece: GenerateAnswer) -> bool:
    """Whether a client is told of a piece: it ends the answer, or has a token or a part of the prompt's logprobs."""
    meta = piece.meta_info
    return bool(meta.finish_reason or piece.output_ids or meta.input_token_logprobs)


def joined(pieces: Sequence[GenerateAnswer]) -> GenerateAnswer:
    """All pieces of an answer, the last one with its finish reason, as one."""
    meta = pieces[-1].meta_info
    if meta.output_logprobs is not msgspec.UNSET:
        meta = msgspec.structs.replace(meta, output_logprobs=tuple(_joined_logprobs(pieces)))
    if inputs := joined_inputs(pieces):
        meta = msgspec.structs.replace(meta, **inputs)
    return GenerateAnswer(
        text="".join(piece.text for piece in pieces),
        output_ids=tuple(token_id for piece in pieces for token_id in piece.output_ids),
        meta_info=meta,
    )


def _logprobs(ids: tuple[int, ...], logprobs: tuple[TokenLogprob | None, ...]) -> tuple[OutputLogprob, ...]:
    # Not strict: after a stop string fewer ids are shown than were computed.
    entries = [(token_id, entry) for token_id, entry in zip(ids, logprobs, strict=False) if entry is not None]
    return tuple(OutputLogprob(token_id=token_id, logprob=entry.logprob, top=entry.top) for token_id, entry in entries)


def _joined_logprobs(pieces: Sequence[GenerateAnswer]) -> list[OutputLogprob]:
    entries = [piece.meta_info.output_logprobs for piece in pieces]
    return [entry for part in entries if isinstance(part, tuple) for entry in part]
