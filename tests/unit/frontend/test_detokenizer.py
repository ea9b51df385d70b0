"""Incremental detokenization: the pieces joined are the text, for any cut of UTF-8 and both families of decoders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from engine.frontend.text.answer import Decoder, Detokenizer, TokenTexts


class Bytes:
    """One token a byte; 256 and above are special and have no text."""

    def __init__(self) -> None:
        self.longest_window = 0

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.longest_window = max(self.longest_window, len(ids))
        return bytes(token_id for token_id in ids if token_id < 256).decode(errors="replace")


def _sentencepiece_like() -> tuple[Decoder, dict[str, int]]:
    """Leading spaces as a mark, and bytes as tokens of their own, as Llama 2 and Gemma have them."""
    words = ["\u2581Hello", "\u2581world", "!", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="a"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer, vocabulary


def _pieces(decoder: Decoder, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(decoder)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(st.text(max_size=20))
def test_any_text_cut_at_every_byte(text: str) -> None:
    """Stop text never leaks, wherever text is cut (C03)."""
    pieces = _pieces(Bytes(), list(text.encode()))
    assert "".join(pieces) == text


@given(st.lists(st.integers(0, 260), max_size=40))
def test_any_bytes_at_all_valid_or_not(ids: list[int]) -> None:
    """C03: a random model says anything; the text must still be what decoding everything at once gives."""
    decoder = Bytes()
    assert "".join(_pieces(decoder, ids)) == decoder.decode(ids)


def test_characters_come_out_as_soon_as_they_are_whole() -> None:
    assert _pieces(Bytes(), list("a\u20acb".encode())) == ["a", "", "", "\u20ac", "b", ""]


def test_a_cut_character_at_the_end_is_shown_as_replacement() -> None:
    assert _pieces(Bytes(), list("a\u20ac".encode()[:-1])) == ["a", "", "", "\ufffd"]


@given(
    st.lists(st.sampled_from(["\u2581Hello", "\u2581world", "!", "a", "\u20ac", "\U0001f600"]), min_size=1, max_size=12)
)
def test_leading_spaces_and_byte_fallback(words: list[str]) -> None:
    """C03: each piece is decoded with its context, so no space between words is lost."""
    decoder, vocabulary = _sentencepiece_like()
    tokens = [token for word in words for token in ([word] if word in vocabulary else _byte_tokens(word))]
    ids = [vocabulary[token] for token in tokens]
    assert "".join(_pieces(decoder, ids)) == decoder.decode(ids)


def test_a_special_token_between_words_takes_no_space_with_it() -> None:
    """C03: it has no text, so the word before it is the context of the word behind it."""
    decoder, vocabulary = _sentencepiece_like()
    assert isinstance(decoder, Tokenizer)
    decoder.add_special_tokens(["<turn>"])
    ids = [vocabulary["\u2581Hello"], decoder.token_to_id("<turn>"), vocabulary["\u2581world"]]
    assert "".join(_pieces(decoder, ids)) == "Hello world"


def test_bytes_that_are_no_character_do_not_hold_the_text_back_forever() -> None:
    decoder, vocabulary = _sentencepiece_like()
    tokens = [*_byte_tokens("\u20ac"), "<0xFF>", "a", "a", "a", "a"]
    pieces = _pieces(decoder, [vocabulary[token] for token in tokens])
    assert pieces[:3] == ["", "", "\u20ac"]
    assert "".join(pieces) == "\u20ac\ufffdaaaa"
    assert pieces[-1] == ""


def _byte_tokens(text: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in text.encode()]


@pytest.mark.parametrize("text", ["x" * 500, "\u20ac" * 200])
def test_window_stays_short(text: str) -> None:
    """A token costs the same at the end of a long output as at its beginning."""
    decoder = Bytes()
    _pieces(decoder, list(text.encode()))
    assert decoder.longest_window <= 6


def test_an_unfinished_character_is_not_read_before_it_is_whole() -> None:
    """Its bytes corrupt the finished character before it, and would show as replacements of both."""
    decoder, vocabulary = _sentencepiece_like()
    ids = [vocabulary[f"<0x{byte:02X}>"] for byte in "\u20ac\U0001f98a".encode()]
    assert _pieces(decoder, ids) == ["", "", "\u20ac", "", "", "", "\U0001f98a", ""]


class Corrupting:
    """Byte fallback as a table: an incomplete character also corrupts the complete one before it."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return {(1,): "ab\ufffd", (1, 2): "a\ufffd\ufffd", (1, 2, 3): "ab\u20ac"}.get(tuple(ids), "")


def test_a_character_that_is_corrupted_meanwhile_is_shown_once() -> None:
    assert _pieces(Corrupting(), [1, 2, 3]) == ["ab", "", "\u20ac", ""]


def test_a_part_of_a_character_is_spelled_by_its_byte() -> None:
    decoder, vocabulary = _sentencepiece_like()
    assert isinstance(decoder, Tokenizer)
    spelled = [TokenTexts(decoder).text_of(vocabulary[f"<0x{byte:02X}>"]) for byte in (0x41, 0xE2, 0xFF, 0x80)]
    assert spelled == ["A", r"bytes:\xe2", r"bytes:\xff", r"bytes:\x80"]
