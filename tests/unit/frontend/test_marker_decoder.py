"""Markers that are special tokens: shown to the parser that looks for them, and to nothing else."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from engine.frontend.answer import Detokenizer
from engine.frontend.token_texts import MarkerDecoders

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


def stream(decoders: MarkerDecoders, markers: tuple[str, ...], ids: list[int]) -> str:
    detokenizer = Detokenizer(decoders.showing(markers))
    return "".join([detokenizer.push(token_id) for token_id in ids]) + detokenizer.flush()


def test_a_special_token_is_shown_only_to_the_parser_that_looks_for_it(tokenizer: Tokenizer) -> None:
    """vLLM pull request 25281: special tokens were left out before the parser saw the text, so it found no call."""
    text = "a \u20ac[TOOL_CALLS]<|eot|><tool_call>b"
    ids = tokenizer.encode(text).ids
    decoders = MarkerDecoders(tokenizer)
    assert stream(decoders, (), ids) == "a \u20ac<tool_call>b"
    assert stream(decoders, ("[TOOL_CALLS]", "[ARGS]"), ids) == "a \u20ac[TOOL_CALLS]<tool_call>b"
    assert stream(decoders, ("<tool_call>",), ids) == "a \u20ac<tool_call>b"


def test_the_tokenizer_itself_decodes_where_no_marker_is_special(tokenizer: Tokenizer) -> None:
    decoders = MarkerDecoders(tokenizer)
    assert decoders.showing(()) is decoders.showing(("<tool_call>", "</tool_call>")) is tokenizer
    assert decoders.showing(("[TOOL_CALLS]",)) is decoders.showing(("[TOOL_CALLS]",)) is not tokenizer


def test_everything_is_shown_where_that_is_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x<|eot|>").ids
    decoder = MarkerDecoders(tokenizer).showing(("[TOOL_CALLS]",))
    assert decoder.decode(ids, skip_special_tokens=False) == "x<|eot|>"
