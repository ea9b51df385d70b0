"""A chat without a server: what is kept of a conversation, and what the terminal makes of lines and of Ctrl-C."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from rich.console import Console

from engine.chat import ChatError, Conversation, Terminal, Turn

Handler = Callable[[httpx.Request], httpx.Response]


def _stream(*pieces: str, end: str = "data: [DONE]\n\n") -> httpx.Response:
    events = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    events.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": len(pieces)}})
    return httpx.Response(200, text="".join(f"data: {json.dumps(event)}\n\n" for event in events) + end)


@pytest.fixture
def asked() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def talk(asked: list[dict[str, Any]]) -> Iterator[Callable[[Handler], Conversation]]:
    """A conversation with a server that is a function; ``asked`` are the bodies that it got."""
    clients: list[httpx.Client] = []

    def make(handler: Handler) -> Conversation:
        def note(request: httpx.Request) -> httpx.Response:
            asked.append(json.loads(request.content))
            return handler(request)

        clients.append(httpx.Client(transport=httpx.MockTransport(note), base_url="http://server"))
        return Conversation(clients[-1], model="m", system="Be brief.", max_tokens=5, temperature=0.5)

    yield make
    for client in clients:
        client.close()


def test_history_goes_along_and_can_be_forgotten(talk, asked: list[dict[str, Any]]) -> None:
    """C01"""
    conversation = talk(lambda _: _stream("An", "swer"))
    assert list(conversation.ask("one")) == ["An", "swer"]
    assert conversation.completion_tokens == 2
    list(conversation.ask("two"))
    roles = [(message["role"], message["content"]) for message in asked[1]["messages"]]
    assert roles == [("system", "Be brief."), ("user", "one"), ("assistant", "Answer"), ("user", "two")]
    assert (asked[0]["model"], asked[0]["max_tokens"], asked[0]["temperature"]) == ("m", 5, 0.5)
    conversation.clear()
    list(conversation.ask("three"))
    assert len(asked[2]["messages"]) == 2


def test_answer_that_is_broken_off_is_kept_as_shown(talk) -> None:
    conversation = talk(lambda _: _stream("An", "swer"))
    pieces = conversation.ask("one")
    assert next(pieces) == "An"
    pieces.close()
    assert conversation.turns == (Turn(role="user", content="one"), Turn(role="assistant", content="An"))


def _refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (lambda _: httpx.Response(400, json={"error": {"message": "no template"}}), "no template"),
        (lambda _: httpx.Response(502, text="gateway"), "HTTP 502: gateway"),
        (lambda _: _stream("An", end=""), "broke it off"),
        (lambda _: httpx.Response(200, text='data: {"error": {"message": "stage 1 died"}}\n\n'), "stage 1 died"),
        (_refuse, "refused; is it still running?"),
    ],
)
def test_failed_answer_says_why_and_is_not_kept(talk, handler: Handler, message: str) -> None:
    """A06: silence is never taken for an end."""
    conversation = talk(handler)
    with pytest.raises(ChatError, match=message.replace("?", r"\?")):
        list(conversation.ask("one"))
    assert conversation.turns == ()


def _screen(talk, monkeypatch: pytest.MonkeyPatch, handler: Handler, *lines: str) -> tuple[str, Conversation]:
    """What a user sees who types some lines and then Ctrl-D."""
    typed = iter(lines)

    def read(*_: object) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    conversation = talk(handler)
    console = Console(file=io.StringIO(), width=100)
    Terminal(conversation, console).run()
    return console.file.getvalue(), conversation


def test_terminal_shows_answers_as_they_are(talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets of a model are no markup of the terminal's."""
    screen, conversation = _screen(talk, monkeypatch, lambda _: _stream("[bold]", "x[/y]"), "hi", "", "/nonsense")
    assert "[bold]x[/y]\n" in screen
    assert "2 tokens" in screen
    assert screen.count("/clear forgets") == 2
    assert len(conversation.turns) == 2


def test_commands(talk, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    _, conversation = _screen(talk, monkeypatch, lambda _: _stream("x"), "hi", "/clear", "/exit", "never asked")
    assert (conversation.turns, len(asked)) == ((), 1)


def test_error_does_not_end_the_chat(talk, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    screen, _ = _screen(talk, monkeypatch, lambda _: httpx.Response(429, text="full"), "one", "two")
    assert screen.count("error: HTTP 429: full") == 2
    assert len(asked) == 2


def test_interrupt_during_an_answer_ends_the_answer_only(talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """C05: the stream is closed, so the server aborts the request."""
    closed: list[bool] = []

    class Endless(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield b'data: {"choices": [{"delta": {"content": "An"}}]}\n\n'
            raise KeyboardInterrupt

        def close(self) -> None:
            closed.append(True)

    screen, conversation = _screen(
        talk, monkeypatch, lambda _: httpx.Response(200, stream=Endless()), "one", "/nonsense"
    )
    assert "[broken off]" in screen
    assert screen.count("/clear forgets") == 2
    assert closed
    assert conversation.turns[-1] == Turn(role="assistant", content="An")
