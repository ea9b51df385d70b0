"""Markers that are special tokens: shown to the parser that looks for them, and to nothing else."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from engine.frontend.text.answer import Detokenizer, MarkerDecoder

SPECIAL = ("[TOOL_CALLS]", "<|eot|>")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(
        BPE(vocab={letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}, merges=[])
    )
    made.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = ByteLevelDecoder()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    made.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return made


def decoder_of(tokenizer: Tokenizer, *markers: str) -> MarkerDecoder:
    return MarkerDecoder(tokenizer, {text: tokenizer.token_to_id(text) for text in SPECIAL}, markers)


def stream(tokenizer: Tokenizer, markers: tuple[str, ...], ids: list[int]) -> str:
    detokenizer = Detokenizer(decoder_of(tokenizer, *markers))
    return "".join([detokenizer.push(token_id) for token_id in ids]) + detokenizer.flush()


def test_a_special_token_is_shown_only_to_the_parser_that_looks_for_it(tokenizer: Tokenizer) -> None:
    """vLLM pull request 25281: special tokens were left out before the parser saw the text, so it found no call."""
    text = "a \u20ac[TOOL_CALLS]<|eot|><tool_call>b"
    ids = tokenizer.encode(text).ids
    assert stream(tokenizer, (), ids) == "a \u20ac<tool_call>b"
    assert stream(tokenizer, ("[TOOL_CALLS]", "[ARGS]"), ids) == "a \u20ac[TOOL_CALLS]<tool_call>b"
    assert stream(tokenizer, ("<tool_call>",), ids) == "a \u20ac<tool_call>b"


def test_everything_is_shown_where_that_is_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x<|eot|>").ids
    decoder = decoder_of(tokenizer, "[TOOL_CALLS]")
    assert decoder.decode(ids, skip_special_tokens=False) == "x<|eot|>"
