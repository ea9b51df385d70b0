"""The logprobs of prompts in the shapes of the OpenAI protocol: echoed before those of the output, and ranked.

Spelling only; which tokens have a value is said by the answers of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from engine.frontend.detokenizer import Decoder, Detokenizer
from engine.frontend.openai.answers import CompletionLogprobs, PromptTokenLogprob
from engine.frontend.protocol import GenerateAnswer, InputTopLogprob
from engine.frontend.token_texts import TokenTexts

__all__ = ["EchoOffsets", "echoed", "ranked"]

RankedPrompt = list[dict[str, PromptTokenLogprob] | None]


class _Entry(NamedTuple):
    """One token of a prompt. The first one of a prompt has neither logprob nor rank."""

    token_id: int
    logprob: float | None
    rank: int | None
    top: tuple[InputTopLogprob, ...]


class EchoOffsets:
    """Where each token of one prompt begins in its text, whose end is that of the last."""

    def __init__(self, decoder: Decoder, texts: TokenTexts, echo: str) -> None:
        self._detokenizer = Detokenizer(decoder)
        self._texts = texts
        self._echo = echo
        self._chars = 0

    def before(self, token_id: int) -> int:
        """The offset of the next token, in characters."""
        offset = self._chars
        text = self._detokenizer.push(token_id)
        if not text:
            # A special token has text only where its client spelled it out.
            spelled = self._texts.text_of(token_id)
            text = spelled if self._echo.startswith(spelled, offset) else ""
        self._chars = min(offset + len(text), len(self._echo))
        return offset


def echoed(answer: GenerateAnswer, most: int, texts: TokenTexts, offsets: EchoOffsets) -> CompletionLogprobs:
    """The logprobs of an echoed prompt, or of a part of it, with ``most`` of the most likely tokens."""
    entries = list(_entries(answer))
    text_of = texts.text_of
    return CompletionLogprobs(
        tokens=[text_of(entry.token_id) for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=[
            None if entry.logprob is None else {text_of(token): logprob for logprob, token, _ in entry.top[:most]}
            for entry in entries
        ],
        text_offset=[offsets.before(entry.token_id) for entry in entries],
    )


def ranked(answer: GenerateAnswer, most: int, texts: TokenTexts) -> RankedPrompt:
    """For each token of a prompt its logprob and those of the ``most`` most likely ones, by token id."""
    return [None if entry.logprob is None else _ranked_entry(entry, most, texts) for entry in _entries(answer)]


def _ranked_entry(entry: _Entry, most: int, texts: TokenTexts) -> dict[str, PromptTokenLogprob]:
    said = (entry.token_id, entry.logprob, entry.rank)
    best = [(token, logprob, rank) for rank, (logprob, token, _) in enumerate(entry.top[:most], 1)]
    ranked_tokens: dict[str, PromptTokenLogprob] = {}
    for token, logprob, rank in (said, *best):
        if logprob is not None and rank is not None:
            text = texts.text_of(token)
            ranked_tokens[str(token)] = PromptTokenLogprob(logprob=logprob, rank=rank, decoded_token=text)
    return ranked_tokens


def _entries(answer: GenerateAnswer) -> Iterator[_Entry]:
    meta = answer.meta_info
    values = meta.input_token_logprobs or ()
    ranks = meta.input_token_ranks or ()
    tops = meta.input_top_logprobs or ((),) * len(values)
    for (logprob, token, _), rank, top in zip(values, ranks, tops, strict=True):
        yield _Entry(token, logprob, rank, top or ())
