"""The order of one HTTP request that generates: the engine's requests, and the shape of the answer.

Owns the form in which an order passes between processes. Small whatever the body was: prompts fit into the context.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from engine.frontend.dialect import Parsing
from engine.messages import Generate, Grammar

__all__ = ["Order", "packed", "unpacked"]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of an answer, all choices of the first prompt before those of the next.

    ``n`` is the number of choices for each prompt; ``logprobs`` and ``include_usage`` say what the answer shows,
    ``echo`` the prompts' texts that its choices begin with. ``top_logprobs`` and ``prompt_logprobs`` are how many of
    the most likely tokens a completion's logprobs and those of its prompt show.
    ``echo`` the prompts' texts that its choices begin with. ``grammar_field`` is the field that says what the output
    must be, if one does: all requests have the same grammar, in their sampling.
    ``parsing`` is what the answers are looked through for. ``grammar_parts`` are parts of the grammar that the client
    wrote, with their places in the body, for an error that names one. ``lora`` is the
    LoRA that was asked for as the model, ``lora_field`` the field that asks for one.
    """

    rid: str
    messages: tuple[Generate, ...]
    stream: bool
    n: int = 1
    logprobs: bool = False
    include_usage: bool = False
    echo: tuple[str, ...] = ()
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    grammar_field: str | None = None
    parsing: Parsing | None = None
    grammar_parts: tuple[tuple[str, Grammar], ...] = ()
    lora: str | None = None
    lora_field: str = "model"


class _Packed(msgspec.Struct, frozen=True):
    """An order without its prompts, and each prompt once."""

    order: Order
    prompts: tuple[msgspec.Raw, ...]


_packed_decoder = msgspec.msgpack.Decoder(_Packed)
_prompt_decoder = msgspec.msgpack.Decoder(tuple[int, ...])
_encode = msgspec.msgpack.Encoder().encode


def packed(data: bytes, take: Callable[[bytes], Order]) -> bytes:
    """The order that ``take`` makes of a body, as bytes."""
    order = take(data)
    prompts = tuple(msgspec.Raw(_encode(message.prompt_ids)) for message in order.messages[:: order.n])
    bare = tuple(msgspec.structs.replace(message, prompt_ids=()) for message in order.messages)
    return _encode(_Packed(msgspec.structs.replace(order, messages=bare), prompts))


async def unpacked(answer: bytes | memoryview) -> Order:
    """The order, taken apart in steps between which the event loop turns."""
    found = _packed_decoder.decode(answer)
    messages: list[Generate] = []
    for index, prompt in enumerate(found.prompts):
        ids = _prompt_decoder.decode(prompt)
        choices = found.order.messages[index * found.order.n : (index + 1) * found.order.n]
        messages += [msgspec.structs.replace(message, prompt_ids=ids) for message in choices]
        await asyncio.sleep(0)
    return msgspec.structs.replace(found.order, messages=tuple(messages))
