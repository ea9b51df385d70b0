"""Stop strings: never shown, found wherever the text is cut, earliest end first."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from byte_tokenizer import ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st

from engine.core.messages import FinishReason, Generate, SamplingParams, TokenOutput
from engine.frontend.text.answer import Answer, StopScanner, joined

TEXT = ByteTokenizer()
texts = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


def _scan(stops: list[str], parts: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    shown = "".join(scanner.push(part) for part in parts)
    return shown + ("" if scanner.matched else scanner.flush()), scanner.matched


def _plain(stops: list[str], text: str) -> tuple[str, str | None]:
    """The same, character by character: the first position where a stop string has just ended."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(stop_lists, texts, st.lists(st.integers(0, 30), max_size=6))
def test_result_does_not_depend_on_how_text_is_cut(stops: list[str], text: str, cuts: list[int]) -> None:
    """Stop text never leaks, wherever text is cut (C03)."""
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    parts = [text[start:end] for start, end in pairwise(bounds)]
    assert _scan(stops, parts) == _plain(stops, text)


def test_partial_match_is_held_back_and_given_out_when_it_fails() -> None:
    """Stop text never leaks, wherever text is cut (C03)."""
    scanner = StopScanner(["STOP"])
    assert [scanner.push(part) for part in ("one ST", "O", "x ", "ST")] == ["one ", "", "STOx ", ""]
    assert scanner.flush() == "ST"


def test_nothing_comes_out_after_a_match() -> None:
    scanner = StopScanner(["b"])
    assert scanner.push("abc") == "a"
    assert scanner.matched == "b"
    assert scanner.push("more") == ""


@pytest.mark.parametrize("stops", [[], ["x"]])
def test_text_without_a_stop_passes_at_once(stops: list[str]) -> None:
    assert StopScanner(stops).push("abc") == "abc"


@pytest.mark.parametrize(("least", "shown"), [(2, "a"), (3, "ab"), (4, "abxb")])
def test_a_stop_string_may_end_with_the_last_token_that_must_come(byte_tokenizer, least: int, shown: str) -> None:
    """C03: with ``min_new_tokens`` tokens out it counts, and none before that."""
    text = {2: "ax", 3: "abx", 4: "abxbx"}[least]
    sampling = SamplingParams(stop=("x",), min_new_tokens=least)
    answer = Answer(byte_tokenizer, Generate(rid="r", prompt_ids=(1,), sampling=sampling))
    pieces = [
        answer.piece(TokenOutput(rid="r", token_ids=(byte,), finish_reason=FinishReason.LENGTH if last else None))
        for byte, last in zip(text.encode(), [*[False] * (len(text) - 1), True], strict=True)
    ]
    assert "".join(piece.text for piece in pieces) == shown
    assert answer.stop_found


STOP_TOKEN = 0
outputs = st.lists(st.sampled_from([*b"abc"]), max_size=12)
sizes = st.lists(st.integers(1, 4), min_size=12, max_size=12)


@given(stop_lists, outputs, sizes, st.booleans())
def test_an_answer_is_the_same_however_many_tokens_come_at_once(
    stops: list[str], tokens: list[int], together: list[int], ends_at_a_token: bool
) -> None:
    """C03: its text, its ids, and where it stopped, also if a stop string and a stop token come together.

    A stop token has an id and no text; a stop string before it counts, and what came after that is not shown.
    """
    every = [*tokens, STOP_TOKEN] if ends_at_a_token else tokens
    text, stop = _plain(stops, bytes(tokens).decode())
    answer = Answer(TEXT, Generate(rid="r", prompt_ids=(1,), sampling=SamplingParams(stop=tuple(stops))))
    pieces, start = [], 0
    for size in together:
        new, start = every[start : start + size], start + size
        is_last = start >= len(every)
        reason = (FinishReason.STOP if ends_at_a_token else FinishReason.LENGTH) if is_last else None
        at_token = STOP_TOKEN if is_last and ends_at_a_token else None
        pieces.append(
            answer.piece(TokenOutput(rid="r", token_ids=tuple(new), finish_reason=reason, stop_token_id=at_token))
        )
        if is_last:
            break
    told = joined(pieces)
    stops_at: object = stop if stop is not None else STOP_TOKEN if ends_at_a_token else msgspec.UNSET
    assert (told.text, told.meta_info.matched_stop) == (text, stops_at)
    assert list(told.output_ids) == (every if stop is None else tokens[: len(text) + len(stop)])
    ends_with_stop = stop is not None or ends_at_a_token
    assert told.meta_info.finish_reason is (FinishReason.STOP if ends_with_stop else FinishReason.LENGTH)
