"""A schedule as a test, with what was seen of it before it was kept."""

from __future__ import annotations

import msgspec


class WrittenTest(msgspec.Struct, frozen=True):
    """``text`` is the file, None when no form of it tells the bug from its absence. ``said`` is for the console."""

    text: str | None
    said: tuple[str, ...]


class TestHead(msgspec.Struct, frozen=True):
    """What stands above a test of an adapter: lines around ``from scripted import scripted``, and the decorator."""

    decorator: str
    imports: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
