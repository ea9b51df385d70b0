"""A conversation with a model on a server of the OpenAI protocol: what was said, and the next answer as it comes.

Owns the history. An answer that failed leaves none; one that was broken off leaves what was shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec

from engine.errors import EngineError

__all__ = ["ChatError", "Conversation", "Turn"]

CONNECT_TIMEOUT_S = 10.0
# A long prompt on a slow machine is silent for a while.
ANSWER_TIMEOUT_S = 600.0


class ChatError(EngineError):
    """The server does not answer, or answers with an error; the text is the server's own where it has one."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the conversation."""

    role: str
    content: str


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class Conversation:
    """One conversation. ``completion_tokens`` is the count of the last answer, 0 until the server told it."""

    def __init__(
        self, client: httpx.Client, *, model: str, system: str = "", max_tokens: int | None, temperature: float
    ) -> None:
        self._client = client
        self._model = model
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._system = [Turn(role="system", content=system)] if system else []
        self._turns: list[Turn] = []
        self.completion_tokens = 0

    @classmethod
    def open(
        cls, url: str, api_key: str | None, *, model: str, system: str, max_tokens: int | None, temperature: float
    ) -> Conversation:
        """A conversation with a server; without ``model`` with the first that it lists. Raises ChatError."""
        client = httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1"),
            timeout=httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        )
        name = model or _first_model(client, url)
        return cls(client, model=name, system=system, max_tokens=max_tokens, temperature=temperature)

    @property
    def model(self) -> str:
        return self._model

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What was said so far, the system message left out."""
        return tuple(self._turns)

    def clear(self) -> None:
        """Forget what was said, not the system message."""
        self._turns.clear()

    def ask(self, text: str) -> Iterator[str]:
        """Say something and get the answer in pieces. Closing the iterator breaks the answer off.

        Raises ChatError; the question is not kept then.
        """
        question = Turn(role="user", content=text)
        self.completion_tokens = 0
        said: list[str] = []
        try:
            for piece in self._stream([*self._system, *self._turns, question]):
                said.append(piece)
                yield piece
        except ChatError:
            said.clear()
            raise
        finally:
            if said:
                self._turns += [question, Turn(role="assistant", content="".join(said))]

    def close(self) -> None:
        self._client.close()

    def _stream(self, turns: list[Turn]) -> Iterator[str]:
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=self._body(turns)) as response:
                if response.status_code != 200:
                    response.read()
                    raise ChatError(_message_of(response))
                yield from self._pieces(response.iter_lines())
        except httpx.HTTPError as exc:
            raise ChatError(f"the server must answer, but: {exc or type(exc).__name__}; is it still running?") from exc

    def _pieces(self, lines: Iterator[str]) -> Iterator[str]:
        for line in lines:
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:"):
                continue
            if data == "[DONE]":
                return
            event = _decode_event(data)
            if event.error is not None:
                raise ChatError(_message_in(event.error))
            if event.usage is not None:
                self.completion_tokens = event.usage.completion_tokens
            for choice in event.choices:
                if choice.delta.content:
                    yield choice.delta.content
        raise ChatError("the answer must end in order, but the server broke it off")

    def _body(self, turns: list[Turn]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [msgspec.structs.asdict(turn) for turn in turns],
            "temperature": self._temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body if self._max_tokens is None else body | {"max_tokens": self._max_tokens}


def _first_model(client: httpx.Client, url: str) -> str:
    try:
        response = client.get("/v1/models")
        if response.status_code != 200:
            raise ChatError(_message_of(response))
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as exc:
        raise ChatError(f"url must be of a server of the OpenAI protocol, got {url}: {exc}; is it running?") from exc


def _message_of(response: httpx.Response) -> str:
    try:
        return _message_in(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}: {response.text}"


def _message_in(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
