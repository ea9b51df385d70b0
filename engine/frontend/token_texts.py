"""The texts of single tokens, for logprobs, and of special tokens that an answer's parser looks for.

A token may be a part of a character and then has no text: it is named by its bytes. The text of an output is the
answer's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.frontend.answer import REPLACEMENT, Decoder

CACHED_TOKENS = 65_536
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary(Decoder, Protocol):
    """The part of a tokenizer that knows single tokens."""

    def id_to_token(self, id: int) -> str | None:  # noqa: A002 - the tokenizer's own name
        """A token's piece as the vocabulary spells it."""


class TokenTexts:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.bytes_of = functools.lru_cache(CACHED_TOKENS)(self._bytes_of)

    def text_of(self, token_id: int) -> str:
        r"""A token's text; a part of a character is spelled like ``bytes:\xe2\x82``."""
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
    """Shows markers, though they may be special tokens, and leaves the other special tokens out as the library does."""

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
    """The byte that each character of a byte-level vocabulary stands for: itself if visible, else from 256 up."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(256 + rank): byte for rank, byte in enumerate(hidden)}
