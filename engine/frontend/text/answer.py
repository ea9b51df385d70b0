"""Turns the scheduler's outputs for one request into the text, ids and counts that its client sees.

Owns the tokens whose text is not final, the text held back for stop strings, the text already shown, and the prompt's
logprobs. Pure: sends nothing and waits for nothing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from engine.core.messages import FinishReason, Generate, PromptLogprob, TokenLogprob, TokenOutput
from engine.frontend.schema.native import (
    META_LISTS,
    CachedTokensDetails,
    GenerateAnswer,
    InputTopLogprob,
    MetaInfo,
    OutputLogprob,
)

REPLACEMENT = "\ufffd"
# An incomplete UTF-8 character has at most three of its four bytes, and at most one replacement character for each.
MAX_UNFINISHED = 3


class Answer:
    """The answer to one request. With ``shows_stop`` the text includes the stop string that ended it."""

    def __init__(self, decoder: Decoder, message: Generate, *, shows_stop: bool = False) -> None:
        self._message = message
        self._detokenizer = Detokenizer(decoder)
        self._scanner = StopScanner(message.sampling.stop, shows_stop=shows_stop)
        self._shown_tokens = 0
        self._inputs = InputLogprobs(message) if message.prompt_logprobs_from >= 0 else None
        self._begins = True

    @property
    def stop_found(self) -> bool:
        """True once a stop string has ended the text, which the scheduler must be told unless it ended the request
        itself.
        """
        return self._scanner.matched is not None

    def piece(self, output: TokenOutput) -> GenerateAnswer:
        """Convert an output to a piece of the answer: text and ids are deltas, counts are totals."""
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
            cached_tokens_details=CachedTokensDetails(
                device=output.cached_tokens - output.cached_tokens_host, host=output.cached_tokens_host
            ),
            matched_stop=self._matched_stop(output) if output.finish_reason else msgspec.UNSET,
            output_logprobs=_logprobs(ids, output.logprobs) if self._message.return_logprob else msgspec.UNSET,
            **inputs,
        )
        vector = output.logprobs[0].vector if output.logprobs and output.logprobs[0] is not None else b""
        return GenerateAnswer(text=text, output_ids=ids, meta_info=meta, vector=vector or msgspec.UNSET)

    def _show(self, output: TokenOutput) -> tuple[tuple[int, ...], str]:
        """Return the ids and text to show: nothing after a stop string, no text for a stop token."""
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
        """Scan for stop strings once at least ``min_new_tokens`` tokens have been generated."""
        if self._shown_tokens < self._message.sampling.min_new_tokens:
            return text
        return self._scanner.push(text)

    def _matched_stop(self, output: TokenOutput) -> str | int | msgspec.UnsetType:
        if self._scanner.matched is not None:
            return self._scanner.matched
        return output.stop_token_id if output.stop_token_id is not None else msgspec.UNSET


def is_shown(piece: GenerateAnswer) -> bool:
    """Return whether a piece is sent to the client: it ends the answer, or has tokens or prompt logprobs."""
    meta = piece.meta_info
    return bool(meta.finish_reason or piece.output_ids or meta.input_token_logprobs)


def joined(pieces: Sequence[GenerateAnswer]) -> GenerateAnswer:
    """Join all pieces of an answer; the last one has the finish reason."""
    meta = pieces[-1].meta_info
    lists = {
        name: tuple([entry for piece in pieces for entry in getattr(piece.meta_info, name) or ()])
        for name in META_LISTS
        if getattr(meta, name) is not msgspec.UNSET
    }
    return GenerateAnswer(
        text="".join(piece.text for piece in pieces),
        output_ids=tuple(token_id for piece in pieces for token_id in piece.output_ids),
        meta_info=msgspec.structs.replace(meta, **lists),
        vector=pieces[-1].vector,
    )


def _logprobs(ids: tuple[int, ...], logprobs: tuple[TokenLogprob | None, ...]) -> tuple[OutputLogprob, ...]:
    # Not strict: after a stop string fewer ids are shown than were computed.
    entries = [(token_id, entry) for token_id, entry in zip(ids, logprobs, strict=False) if entry is not None]
    return tuple(OutputLogprob(token_id=token_id, logprob=entry.logprob, top=entry.top) for token_id, entry in entries)


class Decoder(Protocol):
    """The part of a tokenizer that detokenization needs."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""


class Detokenizer:
    """Incremental detokenization of one output.

    Decodes a window of two segments, each of which begins where all earlier text was final. The settled segment has
    been shown and only provides context, because some tokenizers drop a leading space; the open one is pending.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._settled: list[int] = []
        self._context = ""
        self._open: list[int] = []
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became final, possibly empty."""
        self._open.append(token_id)
        text = self._window_text()
        if text is None:
            return ""
        final = len(text) - _unfinished(text)
        delta = text[self._shown : final]
        self._shown = max(self._shown, final)
        if final == len(text):
            self._settle()
        return delta

    def flush(self) -> str:
        """Return the pending text after the last token, with replacement characters for incomplete ones."""
        text = self._decode([*self._settled, *self._open])
        delta = text[self._shown :]
        self._settle()
        return delta

    def _window_text(self) -> str | None:
        """Decode both segments; None while the open one cannot be decoded yet.

        With byte fallback, adjacent byte tokens are decoded as one run, so an incomplete character also corrupts the
        complete one before it. An open segment that stays incomplete is decoded without its context.
        """
        text = self._decode([*self._settled, *self._open])
        if text.startswith(self._context):
            return text
        if len(self._open) <= MAX_UNFINISHED:
            return None
        self._shown -= len(self._context)
        self._settled, self._context = [], ""
        return self._decode(self._open)

    def _settle(self) -> None:
        """Settle the open segment; keep the older context as well if the segment has no text (special tokens)."""
        settled = self._open
        context = self._decode(settled)
        if not context:
            settled = [*self._settled, *self._open]
            context = self._decode(settled)
        self._settled, self._open, self._context = settled, [], context
        self._shown = len(self._context)

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=True)


def _unfinished(text: str) -> int:
    """Count the trailing characters that further bytes may change."""
    return min(MAX_UNFINISHED, len(text) - len(text.rstrip(REPLACEMENT)))


class StopScanner:
    """Passes text through up to the first stop string, independently of how the text is split."""

    def __init__(self, stops: Sequence[str], *, shows_stop: bool = False) -> None:
        self._shows_stop = shows_stop
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add text; return the text that is safe to show, which is empty after a match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        seen = self._held + text
        found = self._first_match(seen)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return seen[: start + len(self.matched) * self._shows_stop]
        safe = len(seen) - partial_length(seen, self._stops)
        self._held = seen[safe:]
        return seen[:safe]

    def flush(self) -> str:
        """Return the text held back, after the last push."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, seen: str) -> tuple[int, str] | None:
        """Return the match that ends first, as a character-by-character scan would."""
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := seen.find(stop)) >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop


class InputLogprobs:
    """Logprobs of one prompt, sent in parts."""

    def __init__(self, message: Generate) -> None:
        self._ids = message.prompt_ids
        self._wants_top = message.prompt_top_logprobs_num > 0
        self._next = message.prompt_logprobs_from

    def fields(self, part: Sequence[PromptLogprob], *, begins: bool) -> dict[str, Any]:
        """Return the fields of ``MetaInfo`` for the next part, possibly empty; the first part starts with a null."""
        values: list[PromptLogprob | None] = [*([None] if begins else ()), *part]
        ids = self._ids[self._next : self._next + len(values)]
        self._next += len(values)
        fields: dict[str, Any] = {
            "input_token_logprobs": tuple(
                [(None if one is None else one.logprob, token, None) for one, token in zip(values, ids, strict=True)]
            ),
            "input_token_ranks": tuple([None if one is None else one.rank for one in values]),
        }
        if self._wants_top:
            fields["input_top_logprobs"] = tuple([None if one is None else _top(one) for one in values])
        return fields


def _top(one: PromptLogprob) -> tuple[InputTopLogprob, ...]:
    return tuple([(logprob, token, None) for token, logprob in one.top])


def partial_length(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest suffix of a text that is a proper prefix of a marker."""
    longest = max(map(len, markers), default=0) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0


CACHED_TOKENS = 65_536
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary(Decoder, Protocol):
    """The part of a tokenizer that looks up single tokens."""

    def id_to_token(self, id: int) -> str | None:  # noqa: A002 - the tokenizer's own name
        """Return the token as spelled in the vocabulary."""


class TokenTexts:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.bytes_of = functools.lru_cache(CACHED_TOKENS)(self._bytes_of)

    def text_of(self, token_id: int) -> str:
        r"""Return a token's text; part of a character is written as ``bytes:\xe2\x82``."""
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes_of(self, token_id: int) -> bytes:
        text = self._vocabulary.decode([token_id], skip_special_tokens=False)
        if REPLACEMENT not in text:
            return text.encode()
        piece = self._vocabulary.id_to_token(token_id) or ""
        fallback = _FALLBACK_BYTE.fullmatch(piece)
        if fallback is not None:
            return bytes([int(fallback.group(1), 16)])
        alphabet = _byte_alphabet()
        if piece and all(character in alphabet for character in piece):
            return bytes(alphabet[character] for character in piece)
        return text.encode()


class MarkerDecoder:
    """A decoder that keeps special tokens that are markers and, like the library, omits the others."""

    def __init__(self, tokenizer: Decoder, special_ids: Mapping[str, int], markers: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._hidden = frozenset(token_id for text, token_id in special_ids.items() if text not in markers)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = [token_id for token_id in ids if token_id not in self._hidden] if skip_special_tokens else ids
        return self._tokenizer.decode(shown, skip_special_tokens=False)


class WholeDecoder:
    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        del skip_special_tokens
        return self._tokenizer.decode(ids, skip_special_tokens=False)


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """Map each character of a byte-level vocabulary to its byte: visible bytes to themselves, others from 256 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(256 + rank): byte for rank, byte in enumerate(hidden)}
