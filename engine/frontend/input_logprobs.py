"""The logprobs of a prompt as its client is given them: part after part, one entry for each token that was asked for.

Owns the place in the prompt where the next part goes on. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from engine.frontend.protocol import GenerateAnswer, InputTopLogprob
from engine.messages import Generate, PromptLogprob

__all__ = ["InputLogprobs", "joined_inputs"]

_Entry = TypeVar("_Entry")


class InputLogprobs:
    """What is told of one prompt so far."""

    def __init__(self, message: Generate) -> None:
        self._ids = message.prompt_ids
        self._wants_top = message.prompt_top_logprobs_num > 0
        self._next = message.prompt_logprobs_from

    def fields(self, part: Sequence[PromptLogprob], *, begins: bool) -> dict[str, Any]:
        """The fields of ``MetaInfo`` for the next part, which may be empty; the one that begins has a null in front."""
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


def joined_inputs(pieces: Sequence[GenerateAnswer]) -> dict[str, Any]:
    """The same fields of all pieces of an answer together; none where none were asked for."""
    metas = [piece.meta_info for piece in pieces]
    fields: dict[str, Any] = {}
    if metas[-1].input_token_logprobs is not msgspec.UNSET:
        fields["input_token_logprobs"] = _chained([meta.input_token_logprobs for meta in metas])
        fields["input_token_ranks"] = _chained([meta.input_token_ranks for meta in metas])
    if metas[-1].input_top_logprobs is not msgspec.UNSET:
        fields["input_top_logprobs"] = _chained([meta.input_top_logprobs for meta in metas])
    return fields


def _chained(parts: Sequence[tuple[_Entry, ...] | msgspec.UnsetType]) -> tuple[_Entry, ...]:
    return tuple([entry for part in parts if isinstance(part, tuple) for entry in part])


def _top(one: PromptLogprob) -> tuple[InputTopLogprob, ...]:
    return tuple([(logprob, token, None) for token, logprob in one.top])
