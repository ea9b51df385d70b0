"""Large answers: bounded by what the whole answer will hold, and made in parts between which the event loop turns."""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from typing import Any

import msgspec
import pytest
from thinned import thinned

from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import FinishReason, PromptLogprob, TokenLogprob, TokenOutput
from engine.frontend.protocols.anthropic import MessageShape
from engine.frontend.protocols.openai import chat_blocks as spoken
from engine.frontend.protocols.openai.chat_blocks import SpokenChoice
from engine.frontend.protocols.openai.requests import chat_order, completion_order
from engine.frontend.protocols.openai.response_shapes import ResponseShape, response_order
from engine.frontend.protocols.openai.shapes import ChatShape, CompletionShape
from engine.frontend.schema.errors import ApiError
from engine.frontend.schema.native import CachedTokensDetails, GenerateAnswer, MetaInfo
from engine.frontend.sessions import sessions
from engine.frontend.sessions.requests import ServedModel, native_order
from engine.frontend.sessions.sessions import NativeShape, Session, Sessions
from engine.frontend.text.answer import Detokenizer
from engine.frontend.text.dialect import AnswerParser, Dialect, Parsing
from engine.frontend.text.tokenizer import ChatTemplate
from engine.frontend.text.tools.families import FAMILIES
from engine.process.settings import ServerSettings

TOP = tuple((token, -1.0 - token) for token in range(20))
TOKENS = 8_000


@pytest.fixture
def served(byte_tokenizer) -> ServedModel:
    class Template:
        chat_template = "brackets"

        def apply_chat_template(self, conversation: list[dict[str, str]], **_: Any) -> str:
            return "".join(message["content"] for message in conversation)

    settings = ServerSettings(max_total_tokens=2 * TOKENS)
    limits = Limits.of(settings, EMBEDDED_FACTS)
    return ServedModel(byte_tokenizer, ChatTemplate(Template()), limits, "embedded")


def _orders(n: int) -> dict[str, Any]:
    ids = [65] * TOKENS
    chat = {"messages": [{"role": "user", "content": "A" * TOKENS}], "prompt_logprobs": 20, "n": n, "rid": "r"}
    echo = {"prompt": ids, "echo": True, "logprobs": 20, "n": n, "rid": "r"}
    native = {"input_ids": ids, "return_logprob": True, "top_logprobs_num": 20, "logprob_start_len": 0, "rid": "r"}
    return {
        "chat": chat | {"logprobs": True, "top_logprobs": 20},
        "prompt_logprobs": {"prompt": ids, "prompt_logprobs": 20, "n": n, "rid": "r"},
        "echo": echo,
        "echo stream": echo | {"stream": True},
        "native": native,
    }


def _session(kind: str, n: int, served: ServedModel) -> Session:
    data = json.dumps(_orders(n)[kind]).encode()
    if kind == "native":
        order = native_order(data, served)
        shape: sessions.Shape = NativeShape()
    elif kind == "chat":
        order = chat_order(data, served)
        shape = ChatShape(order, served)
    else:
        order = completion_order(data, served)
        shape = CompletionShape(order, served)
    session = Session(Sessions(lambda _: None), order, shape, served.tokenizer)
    assert not session.send_some()
    for message in order.messages:
        entries = TOKENS - 1 if message.prompt_logprobs_from >= 0 else 0
        end = TokenOutput(
            rid=message.rid,
            prompt_logprobs=(PromptLogprob(-0.5, 1, TOP),) * entries,
            token_ids=(66,) * 500,
            logprobs=(TokenLogprob(-0.5, TOP),) * 500,
            finish_reason=FinishReason.LENGTH,
            completion_tokens=500,
        )
        session._sessions.take(end)
    return session


def _answer(session: Session, *, stream: bool) -> tuple[bytes, list[int]]:
    """The answer, and the calls of each turn of the loop, of Python and of C."""
    counts, told = [0], b""
    shaping = None
    sys.setprofile(lambda *_: counts.append(counts.pop() + 1))
    try:
        while not session.is_told:
            counts.append(0)
            if stream:
                told += session.part()
            elif shaping is None:
                shaping = session.body() if session.collect() else None
            else:
                try:
                    next(shaping)
                except StopIteration as done:
                    return done.value, counts
    finally:
        sys.setprofile(None)
    return told, counts


@pytest.mark.parametrize("kind", thinned(["chat", "prompt_logprobs", "echo", "echo stream", "native"], one_in=2))
def test_no_answer_keeps_the_loop(served: ServedModel, kind: str) -> None:
    """8,000 tokens with 20 each took 0.6 s in one turn. A turn is measured by its calls, alike on every machine."""
    _, calls = _answer(_session(kind, 2, served), stream="stream" in kind)
    assert max(calls) < sum(calls) / 3


@pytest.mark.parametrize("kind", ["chat", "prompt_logprobs", "echo", "native"])
def test_an_answer_made_in_parts_is_the_same(served: ServedModel, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_large_answers.TOKENS", 300)
    with monkeypatch.context() as patch:
        patch.setattr(sessions, "VALUES_A_TURN", 100)
        in_parts, _ = _answer(_session(kind, 2, served), stream=False)
    monkeypatch.setattr(time, "time", lambda: json.loads(in_parts).get("created", 0))
    assert _answer(_session(kind, 2, served), stream=False)[0] == in_parts


def test_offsets_are_found_in_parts(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer of a real model took 56 ms for those of 2,000 tokens, in one turn."""
    pushed: list[int] = []
    push = Detokenizer.push
    monkeypatch.setattr(Detokenizer, "push", lambda one, token: pushed.append(token) or push(one, token))
    session = _session("echo", 1, served)
    while not session.collect():
        continue
    shaping, longest, before = session.body(), 0, len(pushed)
    while next(shaping, "over") is None:
        longest, before = max(longest, len(pushed) - before), len(pushed)
    assert longest <= sessions.VALUES_A_TURN // 16
    assert len(pushed) >= TOKENS


def test_an_answer_is_let_go_of_in_parts(served: ServedModel) -> None:
    """Pieces are freed as they are sent; freed at a later collection, they took 51 ms of another turn."""
    session = _session("native", 1, served)
    while not session.collect():
        continue
    shaping, (kept,) = session.body(), session._kept
    counts = []
    while next(shaping, "over") is None:
        counts.append(len(kept))
    assert len(set(counts)) > TOKENS * 21 // (4 * sessions.VALUES_A_TURN)
    assert kept == []


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
HERMES = Dialect(family=FAMILIES["hermes"])


@pytest.mark.parametrize("shape_of", [ChatShape, ResponseShape, MessageShape])
def test_calls_are_looked_for_in_parts(served: ServedModel, shape_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,000 calls took 0.5 s in one turn. What is found is the same."""
    looked_at: list[int] = []
    push = AnswerParser.push
    monkeypatch.setattr(AnswerParser, "push", lambda parser, text: looked_at.append(len(text)) or push(parser, text))
    order = response_order(b'{"input": "x", "rid": "r"}', served)
    meta = MetaInfo(
        id="r",
        finish_reason=FinishReason.STOP,
        prompt_tokens=1,
        completion_tokens=9,
        cached_tokens=0,
        cached_tokens_details=CachedTokensDetails(device=0, host=0),
    )
    answer = GenerateAnswer(text=CALL * 200 + "over", output_ids=(1,) * 9, meta_info=meta)

    def whole() -> tuple[int, bytes]:
        ids = map("c{}".format, itertools.count())
        parser = functools.partial(HERMES.parser, Parsing(tools=("f",)))
        choice = SpokenChoice(parser(), lambda: next(ids), lambda _: None, named=False, end_of_reasoning=None)
        shaping, turns = shape_of(order, served, lambda: choice).whole([answer]), 1
        while True:
            try:
                next(shaping)
                turns += 1
            except StopIteration as done:
                return turns, msgspec.json.encode(done.value)

    monkeypatch.setattr(time, "time", lambda: 0)
    turns, found = whole()
    assert max(looked_at) <= spoken.CHARS_A_TURN
    assert turns > len(answer.text) / spoken.CHARS_A_TURN
    assert found.count(b'"name":"f"') == 200
    monkeypatch.setattr(spoken, "CHARS_A_TURN", 10**6)
    assert whole()[1] == found


@pytest.mark.parametrize(
    ("kind", "n", "is_refused"),
    [
        ("prompt_logprobs", 6, False),
        ("prompt_logprobs", 7, True),
        ("echo", 7, True),
        ("echo stream", 7, True),
        # A chat shows its prompt once.
        ("chat", 64, False),
    ],
)
def test_what_the_whole_answer_holds_is_bounded(served: ServedModel, kind: str, n: int, is_refused: bool) -> None:
    """The prompt was counted once, and 64 choices that repeat it took 4 GB."""
    data = json.dumps(_orders(n)[kind]).encode()
    take = chat_order if kind == "chat" else completion_order
    if not is_refused:
        take(data, served)
        return
    with pytest.raises(ApiError, match=f"1048576 logprobs of the prompts.*got {7 * TOKENS * 21}; .* or choices"):
        take(data, served)
