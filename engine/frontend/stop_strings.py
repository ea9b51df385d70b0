"""Stop strings in a stream of text: finds them wherever the text was cut and never shows a part of one.

Owns what is held back; knows nothing of tokens. Stands between the detokenizer and the client.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopScanner"]


class StopScanner:
    """Passes text through until a stop string ends in it. What comes out does not depend on how the text is cut."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take text in, give the text that is safe to show out. After a match nothing comes out any more."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        seen = self._held + text
        found = self._first_match(seen)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return seen[:start]
        safe = len(seen) - self._partial_length(seen)
        self._held = seen[safe:]
        return seen[:safe]

    def flush(self) -> str:
        """What was held back, once it is known that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, seen: str) -> tuple[int, str] | None:
        """The match that ends first: the one that a reader character by character would meet."""
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := seen.find(stop)) >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _partial_length(self, seen: str) -> int:
        """The length of the longest tail of the text that may be the beginning of a stop string."""
        for length in range(min(len(seen), self._longest - 1), 0, -1):
            tail = seen[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
