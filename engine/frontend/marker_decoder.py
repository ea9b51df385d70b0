"""Text of tokens with those special tokens in it that a parser looks for.

Owns which special tokens have text: those that an answer's parser needs, and no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.frontend.detokenizer import Decoder

__all__ = ["AddedToken", "AddedTokens", "MarkerDecoders"]


class AddedToken(Protocol):
    """A token that was added to a vocabulary."""

    content: str
    special: bool


class AddedTokens(Decoder, Protocol):
    """The part of a tokenizer that is needed here."""

    def get_added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """The tokens that were added to the vocabulary, by id."""
        ...


class _MarkerDecoder:
    """Leaves the other special tokens out before the library decodes the rest as one text."""

    def __init__(self, tokenizer: Decoder, hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = [token_id for token_id in ids if token_id not in self._hidden] if skip_special_tokens else ids
        return self._tokenizer.decode(shown, skip_special_tokens=False)


class MarkerDecoders:
    """Decoders of one tokenizer, one for each set of markers."""

    def __init__(self, tokenizer: AddedTokens) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._made: dict[tuple[str, ...], Decoder] = {}

    def showing(self, markers: tuple[str, ...]) -> Decoder:
        """A decoder that shows these markers; the tokenizer itself when none of them is a special token."""
        if markers not in self._made:
            hidden = frozenset(token_id for token_id, text in self._special.items() if text not in markers)
            shows_all = len(hidden) == len(self._special)
            self._made[markers] = self._tokenizer if shows_all else _MarkerDecoder(self._tokenizer, hidden)
        return self._made[markers]
