"""The reader of prompts: tokenizes them with the engine's own code, so that their pages can be compared with its cache.

Without the model it reads texts instead. Refuses nothing: an invalid body has no prompt, and the engine reports the
error to the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

import msgspec

from engine.core.errors import ConfigError
from engine.core.limits import Limits
from engine.core.messages import salt_key
from engine.core.routing.placement import NO_PROMPT, Prompt, chunk_hashes
from engine.frontend.http.forked_work import is_long
from engine.frontend.http.routes.generation import GENERATING, ROUTES, orders_of
from engine.frontend.schema.errors import ApiError
from engine.frontend.sessions.requests import Order, ServedModel, served_model
from engine.process.settings import ServerSettings


class ReadsPrompts(Protocol):
    """Reads prompts for a router."""

    async def learn(self, settings: ServerSettings, limits: Limits) -> None: ...

    async def prompt_of(self, path: str, body: bytes) -> Prompt: ...


class PromptReader:
    """Reads prompts with the model of the first engine that answered; all engines must serve it."""

    def __init__(self) -> None:
        self._orders: Mapping[str, Callable[[bytes], Order]] = {}
        self._served: ServedModel | None = None
        self._loading = asyncio.Lock()

    async def learn(self, settings: ServerSettings, limits: Limits) -> None:
        """Learn the model of an engine. Raises ConfigError for a second model, or if it has no tokenizer."""
        async with self._loading:
            if self._served is None:
                self._served = await asyncio.to_thread(served_model, settings, limits, {})
                self._orders = orders_of(self._served)
        known = self._served
        for what, value, other in (
            ("model", settings.model_name, known.model_name),
            ("vocabulary", limits.vocab_size, known.limits.vocab_size),
            ("page size", limits.page_size, known.limits.page_size),
        ):
            if value != other:
                raise ConfigError(f"engines of one router must have the same {what}, got {value} beside {other}")

    async def prompt_of(self, path: str, body: bytes) -> Prompt:
        """Read the prompt of a body; a long body in a thread."""
        if path not in GENERATING or not self._orders:
            return NO_PROMPT
        if is_long(body, is_chat=ROUTES[path].is_chat):
            return await asyncio.to_thread(self._read, path, body)
        return self._read(path, body)

    def _read(self, path: str, body: bytes) -> Prompt:
        try:
            order = self._orders[path](body)
        except ApiError:
            return NO_PROMPT
        assert self._served is not None, "no model is known yet"
        first = order.messages[0]
        prompt = Prompt.of_ids(
            first.prompt_ids, self._served.limits.page_size, lora=first.lora or "", salt=salt_key(first.cache_salt)
        )
        return replace(prompt, tokens=sum(len(message.prompt_ids) for message in order.messages[:: order.n]))


# Bytes per token of most tokenizers and texts; it only weighs prompts against each other.
BYTES_A_TOKEN: Final = 4
_ENCODER: Final = msgspec.json.Encoder()


def prompt_in(path: str, body: bytes, chunk_bytes: int) -> Prompt:
    """Read a prompt as text: its chunks count bytes, and its tokens are estimated. Empty if a body has none."""
    if path not in GENERATING:
        return NO_PROMPT
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return NO_PROMPT
    if not isinstance(fields, dict):
        return NO_PROMPT
    text = _prompt(fields)
    # Different LoRAs, models and cache salts share no KV.
    namespace = _text([fields.get(name) for name in ("model", "lora_path", "cache_salt")])
    return Prompt(
        chain=chunk_hashes(text, chunk_bytes, namespace),
        tokens=len(text) // BYTES_A_TOKEN,
        tokens_a_chunk=max(1, chunk_bytes // BYTES_A_TOKEN),
    )


def _prompt(fields: dict[str, Any]) -> bytes:
    said = fields.get("messages", fields.get("input"))
    if said is not None:
        # Templates put the tools first. Each message is a separate text, so that a new one changes none before it.
        parts = [fields.get("tools"), fields.get("system"), fields.get("instructions")]
        return b"".join(map(_text, [*parts, *(said if isinstance(said, list) else (said,))]))
    for name in ("text", "prompt", "input_ids"):
        if fields.get(name):
            return _text(fields[name])
    return b""


def _text(value: object) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else _ENCODER.encode(value)
