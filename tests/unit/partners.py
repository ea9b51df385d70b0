"""Answers of played partners: a valid load, and valid answers with seeded random damage."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from engine.core.routing.load import Load

IDLE_LOAD: Final = Load(
    num_running_reqs=0,
    num_waiting_reqs=0,
    num_pending_tokens=0,
    free_pages=0,
    cached_pages=0,
    weights_version=0,
    role="both",
    sleep_level=0,
)
MOST_DAMAGES: Final = 3
ODD: Final[tuple[Any, ...]] = (
    None,
    True,
    -1,
    0,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
    0.5,
    1e308,
    "",
    "x" * 5000,
    "\u0663" * 100,
    "\x1b[2J\n",
    "zz",
    [],
    [None],
    [[]] * 50,
    {},
    {"": None},
    {"error": {"message": 3}},
)
RAW: Final = (
    b"",
    b"[" * 200_000,
    b'{"a":' * 40_000,
    b"\x91" * 200_000,
    b"\xff" * 64,
    b"[{}]",
    b"null",
    b"NaN",
    b"1e999",
    b"9" * 5000,
    b'"\\ud800"',
    b"\xc1",
    b"<html>",
)


def damaged(right: Any, encode: Callable[[Any], bytes], count: int, seed: int = 1) -> Iterator[bytes]:
    """``count`` answers that were ``right``, a value of plain data, before a few of its parts or bytes changed."""
    chance = random.Random(seed)
    for number in range(count):
        if number % 50 == 0:
            yield chance.choice(RAW)
        elif number % 2:
            value = msgspec.msgpack.decode(msgspec.msgpack.encode(right))
            for _ in range(chance.randint(1, MOST_DAMAGES)):
                value = _with_other_part(value, chance)
            yield encode(value)
        else:
            yield _with_other_bytes(encode(right), chance)


def _with_other_part(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        if chance.random() < 0.1:
            return {name: part for name, part in value.items() if name != key}
        return value | {key: _with_other_part(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        place = chance.randrange(len(value))
        return [*value[:place], _with_other_part(value[place], chance), *value[place + chance.randint(0, 1) :]]
    return chance.choice(ODD)


def _with_other_bytes(data: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.randint(1, MOST_DAMAGES)):
        start = chance.randrange(len(data) + 1)
        end = min(len(data), start + chance.choice((0, 1, 2, 30)))
        data = data[:start] + chance.randbytes(chance.choice((0, 1, 2, 8))) + data[end:]
    return data
