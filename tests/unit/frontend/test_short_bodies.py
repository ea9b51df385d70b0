"""Short bodies are short work: what is costly about one is done once, or in a process of its own."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

import pytest

from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import FinishReason, TokenOutput
from engine.frontend.http.forked_work import LONG_BODY_BYTES, is_long
from engine.frontend.protocols.openai import bodies, requests
from engine.frontend.schema import native as protocol
from engine.frontend.sessions.requests import ServedModel
from engine.frontend.text.tokenizer import ChatTemplate
from engine.process.settings import ServerSettings

USER = {"role": "user", "content": "x"}
CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
COSTLY = {
    "messages": {"messages": [USER] * 700},
    "tools": {"messages": [USER], "tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(400)]},
    "calls": {"messages": [USER, {"role": "assistant", "tool_calls": [CALL] * 450}]},
    "nested arguments": {
        "messages": [
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a":' * 4000}}]}
        ]
    },
    "entries of arguments": {
        "messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": {"a": [1] * 16_000}}]}]
    },
    "numbers that are written out": {"tools": [{"name": "f", "input_schema": {"enum": [1e22] * 5000}}]},
}


def _bytes(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


@pytest.mark.parametrize("kind", COSTLY)
def test_a_body_of_many_objects_is_long_whatever_its_bytes(kind: str) -> None:
    """Each of them took 15 to 50 ms of the event loop, up to five times what was promised of short bodies."""
    data = _bytes(COSTLY[kind])
    assert len(data) <= LONG_BODY_BYTES
    assert is_long(data, is_chat=True)


def test_a_body_that_is_too_long_is_not_looked_through() -> None:
    """Counting in 16 MB took 13 ms of the event loop."""

    class Uncounted(bytes):
        def count(self, *_: object) -> int:
            raise AssertionError("its length is enough")

    assert is_long(Uncounted(b"{" * (LONG_BODY_BYTES + 1)))


@pytest.mark.parametrize("body", [{"text": "x" * 32_000}, {"messages": [USER] * 100}, {"input_ids": [1] * 8000}])
def test_texts_and_ids_are_not(body: dict[str, Any]) -> None:
    assert not is_long(_bytes(body), is_chat="messages" in body)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions", "/v1/responses"])
def test_such_a_body_is_worked_on_elsewhere(play, path: str) -> None:
    async def scene(stage) -> None:
        entries = {"input": "x", "chat_template_kwargs": {"x": [1] * 6000}}
        body = entries if path == "/v1/responses" else {"messages": [USER] * 700}
        answer = asyncio.create_task(stage.http.post(path, content=_bytes(body)))
        if path != "/tokenize":
            message = await stage.scheduler.receive()
            await stage.scheduler.reply(TokenOutput(rid=message.rid, finish_reason=FinishReason.LENGTH))
        assert (await answer).status_code == 200
        assert len(stage.long_bodies) == 1

    play(scene)


def test_what_choices_share_is_made_once(byte_tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 choices wrote a schema of 31 KB 128 times, and looked through the ids of their prompt as often."""
    limits = Limits.of(ServerSettings(), EMBEDDED_FACTS)
    served = ServedModel(byte_tokenizer, ChatTemplate(None), limits, "embedded")  # type: ignore[arg-type]
    counts = {"schema_grammar": 0, "check_vocabulary": 0}

    def count(name: str, function: Any, *args: Any) -> Any:
        counts[name] += 1
        return function(*args)

    for module, name in ((bodies, "schema_grammar"), (protocol, "schema_grammar"), (requests, "check_vocabulary")):
        monkeypatch.setattr(module, name, functools.partial(count, name, getattr(module, name)))
    body = {"prompt": [1, 2], "n": 128, "seed": 5, "guided_json": {"enum": ["a"]}}
    order = requests.completion_order(_bytes(body), served)
    assert counts == {"schema_grammar": 1, "check_vocabulary": 3}
    assert [message.sampling.seed for message in order.messages[:3]] == [5, 6, 7]
    assert len({id(message.sampling.grammar) for message in order.messages}) == 1
