"""Streams of tokens drawn with a seed, as completions show them, against a plain reading of each whole output."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from typing import Any, NamedTuple

import pytest
from byte_tokenizer import ByteTokenizer

from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import FinishReason, Generate, SamplingParams, TokenLogprob, TokenOutput
from engine.frontend.protocols.openai.shapes import CompletionShape
from engine.frontend.sessions.requests import Order, ServedModel
from engine.frontend.sessions.sessions import finished
from engine.frontend.text.answer import Answer, joined
from engine.frontend.text.dialect import PLAIN
from engine.frontend.text.tokenizer import load_tokenizer

STREAMS = 2000
SPELLED = ["a", "b", "c", "ab", "\u00e9", "\u20ac", "\U0001f600"]
STOPS = ["ab", "ba", "c\u00e9", "\u20aca", "aab", "\U0001f600"]
LETTERS = range(97, 123)
# A token that ends an output has an id and no text.
END = 300


class Drawn(NamedTuple):
    """One choice: its tokens, their logprobs, and whether the last one is a stop token."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    ends: bool


class Told(NamedTuple):
    text: str
    tokens: list[int]
    reason: FinishReason


def drawn(draw: random.Random, top: int, *, is_text: bool) -> Drawn:
    spelled = "".join(draw.choice(SPELLED) for _ in range(draw.randint(1, 9))).encode()
    if draw.random() < 0.3:
        spelled = spelled[: draw.randint(1, len(spelled))]  # Perhaps within a character.
    tokens = list(spelled) if is_text else [draw.choice([*spelled, 0xFF, 0x80, 0xE2]) for _ in spelled]
    ends = draw.random() < 0.4
    tokens += [END] if ends else []
    logprobs = [
        TokenLogprob(-draw.random(), tuple((one, -place - 0.5) for place, one in enumerate(draw.sample(LETTERS, top))))
        for _ in tokens
    ]
    return Drawn(tokens, logprobs, ends)


def read(one: Drawn, stops: list[str], least: int, *, shows_stop: bool) -> Told:
    """What a client is told, from the whole output: a stop string ends it with the token that completes it.

    Only text counts that comes with token number ``least`` or a later one.
    """
    spoken = one.tokens[: len(one.tokens) - one.ends]
    whole = bytes(spoken).decode(errors="replace")
    for taken in range(max(least, 1), len(spoken) + 1):
        begin = len(settled(spoken[: max(least, 1) - 1]))
        text = settled(spoken[:taken])
        found = [(at + len(stop), at) for stop in stops if (at := text.find(stop, begin)) >= 0]
        if found:
            end, start = min(found)
            return Told(text[: end if shows_stop else start], spoken[:taken], FinishReason.STOP)
    return Told(whole, one.tokens, FinishReason.STOP if one.ends else FinishReason.LENGTH)


def settled(tokens: list[int]) -> str:
    """The text that no further token changes."""
    text = bytes(tokens).decode(errors="replace")
    held = min(3, len(text) - len(text.rstrip("\ufffd")))
    return text[: len(text) - held]


def values_of(columns: list[Any], name: str) -> list[Any]:
    return [value for column in columns for value in json.loads(bytes(getattr(column, name)))]


@pytest.fixture(scope="module")
def served() -> ServedModel:
    config = EngineConfig()
    _, template = load_tokenizer(config)
    return ServedModel(ByteTokenizer(), template, Limits.of(config, EMBEDDED_FACTS), "embedded", PLAIN)


@pytest.mark.parametrize("seed", range(8))
def test_a_stream_shows_what_the_whole_output_says(served: ServedModel, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(STREAMS // 8):
        is_text, top, n, shows_stop = draw.random() < 0.7, draw.randint(0, 3), draw.randint(1, 3), draw.random() < 0.5
        stops, least = draw.sample(STOPS, draw.randint(0, 2)), draw.choice([0, 0, 2, 5])
        prompts = [tuple(range(97, 97 + draw.randint(1, 4))) for _ in range(draw.randint(1, 2))]
        echo = tuple(bytes(prompt).decode() for prompt in prompts) if draw.random() < 0.3 else ()
        sampling = SamplingParams(stop=tuple(stops), min_new_tokens=least)
        messages = tuple(
            Generate(rid=f"r-{at}", prompt_ids=prompts[at // n], sampling=sampling, return_logprob=True)
            for at in range(n * len(prompts))
        )
        order = Order(
            rid="r", messages=messages, stream=True, n=n, logprobs=True, top_logprobs=top, include_usage=True,
            continuous_usage=draw.random() < 0.5, token_ids=True, shows_stop=shows_stop, echo=echo,
        )  # fmt: skip
        choices = [drawn(draw, top, is_text=is_text) for _ in messages]
        answers = [Answer(served.tokenizer, message, shows_stop=shows_stop) for message in messages]
        cached = [draw.randint(0, len(message.prompt_ids)) for message in messages]
        shape, at, begun = CompletionShape(order, served), [0] * len(choices), set[int]()
        pieces: dict[int, list[Any]] = defaultdict(list)
        seen: dict[int, list[Any]] = defaultdict(list)
        live = set(range(len(choices)))
        while live:
            index = draw.choice(sorted(live))
            one, start = choices[index], at[index]
            end = at[index] = min(len(one.tokens), start + draw.randint(1, 4))
            is_last = end == len(one.tokens)
            reason = (FinishReason.STOP if one.ends else FinishReason.LENGTH) if is_last else None
            output = TokenOutput(
                rid=str(index), token_ids=tuple(one.tokens[start:end]), logprobs=tuple(one.logprobs[start:end]),
                finish_reason=reason, stop_token_id=END if is_last and one.ends else None, cached_tokens=cached[index],
            )  # fmt: skip
            piece = answers[index].piece(output)
            if answers[index].stop_found and reason is None:
                ended = TokenOutput(rid=str(index), finish_reason=FinishReason.ABORT, cached_tokens=cached[index])
                piece = joined([piece, answers[index].piece(ended)])
            begun.add(index // n)
            pieces[index].append(piece)
            for event in shape.events(index, piece):
                (choice,) = event.choices
                seen[choice.index].append(choice)
                if order.continuous_usage:
                    assert event.usage.prompt_tokens == sum(len(prompts[one]) for one in begun)
            if piece.meta_info.finish_reason is not None:
                live.discard(index)
        *_, last = shape.last_events()
        assert last.usage.prompt_tokens == sum(map(len, prompts))
        assert last.usage.prompt_tokens_details.cached_tokens == sum(cached[::n])
        whole = finished(CompletionShape(order, served).whole([joined(pieces[one]) for one in range(len(choices))]))
        assert whole.usage == last.usage
        told_tokens = 0
        for index, one in enumerate(choices):
            told = read(one, stops, least, shows_stop=shows_stop)
            shown = seen[index]
            begin = echo[index // n] if echo else ""
            context = (seed, index, bytes(one.tokens[: len(one.tokens) - one.ends]), stops, least, shows_stop)
            assert "".join(choice.text for choice in shown) == begin + told.text, context
            assert [token for choice in shown for token in choice.token_ids] == told.tokens, context
            assert [choice.finish_reason for choice in shown if choice.finish_reason] == [told.reason], context
            told_tokens += len(told.tokens)
            columns = [choice.logprobs for choice in shown]
            kept = one.logprobs[: len(told.tokens)]
            assert values_of(columns, "token_logprobs") == [entry.logprob for entry in kept], context
            tops = [list(best.items()) for best in values_of(columns, "top_logprobs")]
            assert tops == [[(chr(token), value) for token, value in entry.top] for entry in kept], context
            if is_text:
                spoken = one.tokens[: len(one.tokens) - one.ends]
                places = [len(begin) + len(settled(spoken[:number])) for number in range(len(kept))]
                assert values_of(columns, "text_offset") == places, context
            assert whole.choices[index].text == begin + told.text, context
        assert last.usage.completion_tokens == told_tokens
