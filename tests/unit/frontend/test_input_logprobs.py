"""The logprobs of a prompt on their way to a client: parts that follow each other, whole and in a stream."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from engine.core.messages import FinishReason, Generate, PromptLogprob, SamplingParams, TokenOutput
from engine.frontend.protocols.openai.shapes import EchoOffsets, echoed, ranked
from engine.frontend.schema.errors import ApiError
from engine.frontend.sessions.requests import MAX_PROMPT_LOGPROBS, check_prompt_logprobs
from engine.frontend.sessions.sessions import Shaping, finished, listed
from engine.frontend.text.answer import Answer, Decoder, TokenTexts, is_shown, joined


class Bytes(Decoder):
    """A tokenizer of bytes, with a special token 256."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        special = b"" if skip_special_tokens else b"<s>"
        return b"".join(special if one == 256 else bytes([one]) for one in ids).decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str | None:
        return chr(token_id)


def message(ids: tuple[int, ...], start: int = 0, top: int = 0) -> Generate:
    return Generate(
        rid="r", prompt_ids=ids, sampling=SamplingParams(), prompt_logprobs_from=start, prompt_top_logprobs_num=top
    )


def values(*logprobs: float) -> tuple[PromptLogprob, ...]:
    return tuple(PromptLogprob(one, 2, ((65, -0.5), (66, -1.5))) for one in logprobs)


def columns(shaping: Shaping[tuple[bytes, bytes, bytes, bytes]]) -> list[list[Any]]:
    return [json.loads(msgspec.json.encode(listed(inside))) for inside in finished(shaping)]


def test_parts_follow_each_other_and_the_first_entry_is_null() -> None:
    answer = Answer(Bytes(), message((70, 71, 72, 73, 74), 1, 2))
    pieces = [
        answer.piece(TokenOutput(rid="r", prompt_logprobs=values(-1.0, -2.0))),
        answer.piece(TokenOutput(rid="r", prompt_logprobs=values(-3.0))),
        answer.piece(TokenOutput(rid="r", token_ids=(75,))),
        answer.piece(TokenOutput(rid="r", finish_reason=FinishReason.LENGTH)),
    ]
    assert pieces[1].meta_info.input_token_logprobs == ((-3.0, 74, None),)
    assert [is_shown(piece) for piece in pieces] == [True, True, True, True]
    meta = joined(pieces).meta_info
    assert meta.input_token_logprobs == ((None, 71, None), (-1.0, 72, None), (-2.0, 73, None), (-3.0, 74, None))
    assert meta.input_token_ranks == (None, 2, 2, 2)
    assert meta.input_top_logprobs == (None, *[((-0.5, 65, None), (-1.5, 66, None))] * 3)


def test_a_prompt_of_one_token_has_its_null_all_the_same() -> None:
    answer = Answer(Bytes(), message((70,)))
    pieces = [answer.piece(TokenOutput(rid="r", finish_reason=FinishReason.LENGTH))]
    assert joined(pieces).meta_info.input_token_logprobs == ((None, 70, None),)
    assert joined(pieces).meta_info.input_top_logprobs is msgspec.UNSET


def test_who_asks_for_none_gets_none() -> None:
    piece = Answer(Bytes(), message((70, 71), -1)).piece(TokenOutput(rid="r"))
    assert piece.meta_info.input_token_logprobs is msgspec.UNSET
    assert not is_shown(piece)


def test_an_echo_spells_the_prompt_and_counts_its_characters() -> None:
    """A special token that the tokenizer added has no text in the echo; a character in parts has one offset."""
    ids = (256, *"a\u20acb".encode())
    answer = Answer(Bytes(), message(ids, 0, 2))
    piece = answer.piece(TokenOutput(rid="r", prompt_logprobs=values(*[-1.0] * 5)))
    texts = TokenTexts(Bytes())
    tokens, logprobs, tops, offsets = columns(echoed(piece, 1, texts, EchoOffsets(Bytes(), texts, "a\u20acb")))
    assert tokens[:2] == ["<s>", "a"]
    assert offsets == [0, 0, 1, 1, 1, 2]
    assert logprobs == [None, *[-1.0] * 5]
    assert tops == [None, *[{"A": -0.5}] * 5]
    # One that its client spelled out counts.
    assert columns(echoed(piece, 0, texts, EchoOffsets(Bytes(), texts, "<s>a\u20acb")))[3] == [0, 3, 4, 4, 4, 5]


def test_of_likely_tokens_with_one_text_the_most_likely_is_shown() -> None:
    """The logprobs of a completion name tokens by their texts."""

    class Twice(Bytes):
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return super().decode([one % 256 for one in ids], skip_special_tokens)

    likely = (PromptLogprob(-1.0, 2, ((321, -0.5), (65, -1.5), (66, -2.5))),)
    piece = Answer(Twice(), message((70, 71), 0, 3)).piece(TokenOutput(rid="r", prompt_logprobs=likely))
    texts = TokenTexts(Twice())
    tops = columns(echoed(piece, 3, texts, EchoOffsets(Twice(), texts, "FG")))[2]
    assert tops == [None, {"A": -0.5, "B": -2.5}]


def test_a_ranked_prompt_has_each_token_and_the_best_by_id() -> None:
    piece = Answer(Bytes(), message((70, 71, 65), 0, 2)).piece(TokenOutput(rid="r", prompt_logprobs=values(-3.0, -0.5)))
    first, said, best = json.loads(msgspec.json.encode(finished(ranked(piece, 1, TokenTexts(Bytes())))))
    assert first is None
    assert said == {
        "71": {"logprob": -3.0, "rank": 2, "decoded_token": "G"},
        "65": {"logprob": -0.5, "rank": 1, "decoded_token": "A"},
    }
    assert list(best) == ["65"]


def test_more_than_an_answer_can_keep_is_refused_with_the_numbers() -> None:
    check_prompt_logprobs([message((1,) * 4096, 0, 3)], "p")
    with pytest.raises(ApiError) as caught:
        check_prompt_logprobs([message((1,) * 8192, 0, 20)] * 7, "prompt_logprobs")
    text = caught.value.body.error.message
    assert str(MAX_PROMPT_LOGPROBS) in text
    assert str(7 * 8192 * 21) in text
    check_prompt_logprobs([message((1,) * 8192, -1, 0)] * 500, "p")
    check_prompt_logprobs([message((1,) * 8192, 8191, 20)] * 500, "p")
