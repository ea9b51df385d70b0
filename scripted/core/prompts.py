"""Generates the prompts of scripts and schedules from seeds, equal in every process."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

# The longest prompt in tokens, or other argument in elements, that a script may ask for: longer than any context. The
# harness builds it before the route can refuse it.
MOST_ITEMS: Final = 1 << 20

# The call in the text of a script, and its import.
PROMPT_CALL: Final = "prompt_of("
PROMPT_IMPORT: Final = "from scripted.core.prompts import prompt_of"

# Prompts are printable ASCII, so that their text is one character a token with the embedded tokenizer.
_FIRST_PROMPT_ID: Final = 32
_PROMPT_IDS: Final = 95
_MIX: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1
# A list of pieces, each SEED:TOKENS or SEED:FIRST:TOKENS. The digits bound the stream that a piece is cut from.
PIECES: Final = r"^(\d{1,9}(:\d{1,6}){1,2}(,\d{1,9}(:\d{1,6}){1,2})*)?$"


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """The seeds of a prompt: all tokens come from ``seed``, or the first ``shared`` from it and the rest from ``tail``.

    The pieces of ``parts`` precede these. With ``after`` the prompt continues the request of that name: ``begun``
    tokens, including the first ``cut`` of its output, precede all others.
    """

    seed: int
    shared: int = 0
    tail: int = 0
    parts: str = ""
    after: str = ""
    cut: int | None = None
    begun: int = 0


def prompt_of(length: int, seed: int) -> list[int]:
    """Make ``length`` printable token ids that depend on seed and position; equal seeds give equal prefixes."""
    # A power of two: one cached stream serves all shorter prompts of its seed.
    return list(_stream_of(1 << max(length - 1, 0).bit_length(), seed)[:length])


@functools.lru_cache(maxsize=64)
def _stream_of(length: int, seed: int) -> tuple[int, ...]:
    value, ids = (seed + 1) * _MIX & _MASK, []
    for _ in range(length):
        value = (value * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) & _MASK
        ids.append(_FIRST_PROMPT_ID + (value >> 33) % _PROMPT_IDS)
    return tuple(ids)


@functools.lru_cache(maxsize=4096)
def prompt_ids(length: int, seed: int, shared: int = 0, tail: int = 0, parts: str = "") -> tuple[int, ...]:
    """Make ``length`` token ids; equal seeds give equal prefixes, as ``start_req(prompt_len=, prompt_seed=)`` does.

    The pieces of ``parts`` come first. Of the others, the first ``shared`` come from ``seed`` and the rest from
    ``tail``; with ``shared=0`` all come from ``seed``.
    """
    if parts:
        return tuple([token for piece in pieces_of(length, seed, shared, tail, parts) for token in piece.tokens])
    if not shared:
        return tuple(prompt_of(length, seed))
    return (*prompt_of(min(shared, length), seed), *prompt_of(max(0, length - shared), tail))


class Piece(NamedTuple):
    """The ``length`` tokens of a seed from its token ``first`` on."""

    seed: int
    first: int
    length: int

    def __str__(self) -> str:
        return f"{self.seed}:{self.first}:{self.length}" if self.first else f"{self.seed}:{self.length}"

    @property
    def end(self) -> int:
        return self.first + self.length

    @property
    def tokens(self) -> list[int]:
        return prompt_of(self.end, self.seed)[self.first :]

    @property
    def code(self) -> str:
        """The script expression that makes its tokens."""
        return f"{PROMPT_CALL}{self.end}, {self.seed})" + (f"[{self.first}:]" if self.first else "")


def pieces_of(length: int, seed: int, shared: int = 0, tail: int = 0, parts: str = "") -> list[Piece]:
    """Return the pieces of the prompt that ``prompt_ids`` makes from the same arguments."""
    rest = [Piece(seed, 0, shared), Piece(tail, 0, length)] if shared else [Piece(seed, 0, length)]
    pieces = []
    for piece in (*read_pieces(parts), *rest):
        count = min(piece.length, length)
        length -= count
        pieces += [piece._replace(length=count)] if count else []
    return pieces


def read_pieces(text: str) -> Iterator[Piece]:
    """Parse a list of pieces that matches ``PIECES``."""
    for part in text.split(",") if text else ():
        seed, *first, count = map(int, part.split(":"))
        yield Piece(seed, first[0] if first else 0, count)


def recipe_from(pieces: Sequence[Piece]) -> Recipe:
    """Return the simplest recipe for these pieces; the last piece extends to the end of the prompt."""
    last = pieces[-1] if pieces and not pieces[-1].first else None
    parts = pieces if last is None else pieces[:-1]
    seed = 0 if last is None else last.seed
    if len(parts) == 1 and not parts[0].first:
        return Recipe(seed=parts[0].seed, shared=parts[0].length, tail=seed)
    return Recipe(seed=seed, parts=",".join(map(str, parts)))


def code_of(pieces: Iterable[Piece]) -> str:
    """Return the script expression that makes these pieces."""
    return f"[{', '.join([f'*{piece.code}' for piece in pieces])}]"
