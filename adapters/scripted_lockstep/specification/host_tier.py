"""The second tier of the executable specification: pages on the host, and the copies to it and from it.

Names in bold are the rules of docs/rules.md. This module knows neither the order of requests nor time nor page numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.core.limits import Limits
from scripted_lockstep.specification.request import Page, SpecifiedKey

# The key of the KV, and all tokens up to the end of the page.
_Prefix = tuple[Any, ...]


class _Kept:
    """A page on the host: 'due' until its copy is launched, 'written' until the result arrives, then 'ready'."""

    def __init__(self) -> None:
        self.state, self.readers = "due", 0


class SpecifiedHostTier:
    """Tracks the host tier. ``kept`` has its pages, least recently used first."""

    def __init__(self, limits: Limits) -> None:
        self._pages, self._size = limits.host_pages, limits.page_size
        self.kept: dict[_Prefix, _Kept] = {}
        self._due_in: list[_Prefix] = []
        self._flights: dict[int, tuple[list[_Prefix], list[_Prefix]]] = {}

    def sizes(self) -> dict[str, int]:
        """**Counters** of host pages."""
        ready = sum([page.state == "ready" for page in self.kept.values()])
        return {
            "host_pages_total": self._pages,
            "host_pages_free": self._pages - len(self.kept),
            "host_pages_cached": ready,
        }

    def hit(self, ids: Sequence[int], hit: int, kv_key: SpecifiedKey) -> list[_Prefix]:
        """**Host hit**: the pages that continue the hit in the prefix cache, up to the first that is not ready."""
        found: list[_Prefix] = []
        for end in range((hit + 1) * self._size, len(ids), self._size):
            page = self.kept.get((kv_key, *ids[:end]))
            if page is None or page.state != "ready":
                break
            found.append((kv_key, *ids[:end]))
        return found

    def protect(self, found: Sequence[_Prefix]) -> None:
        """**Host page**: keep the pages that will be loaded."""
        for prefix in found:
            self.kept[prefix].readers += 1

    def load(self, found: Sequence[_Prefix]) -> None:
        """**Host hit**: loaded by the next microbatch; of pages used together the last counts as used first."""
        for prefix in reversed(found):
            self.kept[prefix] = self.kept.pop(prefix)
        self._due_in += found

    def keep(self, page: Page) -> None:
        """**Host page**: write back an evicted page, unless the host has it already or has no place for it."""
        prefix: _Prefix = ()
        kv_key, above = page.tokens[0], page
        while above.above is not None:
            prefix, above = above.tokens[1:] + prefix, above.above
        prefix = (kv_key, *prefix)
        if prefix in self.kept:
            self.kept[prefix] = self.kept.pop(prefix)
            return
        if len(self.kept) == self._pages:
            idle = [one for one, kept in self.kept.items() if not kept.readers and kept.state != "written"]
            for one in idle[:1]:
                del self.kept[one]
        if len(self.kept) < self._pages:
            self.kept[prefix] = _Kept()

    def launch(self, number: int) -> tuple[int, int]:
        """**Copies**: launch all due copies with this microbatch. Returns how many go to the host and from it."""
        out, into = [prefix for prefix, page in self.kept.items() if page.state == "due"], self._due_in
        for prefix in out:
            self.kept[prefix].state = "written"
        self._flights[number], self._due_in = (out, into), []
        return len(out), len(into)

    def land(self, number: int | None, *, failed: bool) -> None:
        """**Copies**: a result makes the written pages ready; failed and lost copies are dropped."""
        for one in [*self._flights] if number is None else [number]:
            out, into = self._flights.pop(one, ([], []))
            for prefix in into:
                self.kept[prefix].readers -= 1
            for prefix in out:
                self.kept[prefix].state = "ready"
                if failed:
                    del self.kept[prefix]

    def flush(self) -> None:
        """Forget everything."""
        self.kept, self._due_in = {}, []
