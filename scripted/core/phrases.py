"""Formats text for reports: escapes control characters, shortens rids, adds nouns to counts, finds nearest names."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from lockstep.errors import without_middle

# A rid longer than this keeps its head and its tail: generated rids differ in one of the two.
_RID_CHARACTERS: Final = 14
_RID_HEAD: Final = 5
_RID_TAIL: Final = 7


def printable(text: str) -> str:
    """Escape control characters, newlines and non-ASCII characters, so that the text fits on one line."""
    return text if text.isascii() and text.isprintable() else ascii(text)[1:-1]


def short_rid(rid: str) -> str:
    """Shorten a rid to a label of its head and tail."""
    rid = printable(rid)
    return rid if len(rid) <= _RID_CHARACTERS else f"{rid[:_RID_HEAD]}..{rid[-_RID_TAIL:]}"


def text_of(exc: BaseException) -> str:
    """Return the text of an exception, without the middle of a very long one.

    One whose ``__str__`` raises must not break a report.
    """
    try:
        return without_middle(str(exc))
    except Exception as why:  # noqa: BLE001 - a class of the user's
        return f"(its text raises {type(why).__name__})"


def common_start(sequences: Iterable[Sequence[object]]) -> int:
    """Return the length of the common prefix of all sequences."""
    return len(list(itertools.takewhile(lambda items: len(set(items)) == 1, zip(*sequences, strict=False))))


def path_of(file: str) -> str:
    """Make a path relative to the working folder if it is below it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 token``, ``2 tokens``, ``2 microbatches``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith(('ch', 's')) else 's'}"


# Names that users of SGLang's scripted runtime try, where the most similar name here means something else.
_ELSEWHERE: Final = {
    "idle": " (state.queues_clear: nothing waits or runs; state.is_fully_idle: and nothing is in flight)",
    "is_idle": " (state.queues_clear: nothing waits or runs; state.is_fully_idle: and nothing is in flight)",
    "abort_req": " (did you mean 'abort'?)",
    "abort_request": " (did you mean 'abort'?)",
    "is_running": " (ask a handle: r.is_running; or state.running)",
    "is_no_request": " (state.queues_clear: nothing waits or runs; state.is_fully_idle: and nothing is in flight)",
}


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest known word, or nothing.

    Among near words, one with a common prefix or the same letters wins.
    """
    if word in _ELSEWHERE:
        return _ELSEWHERE[word]
    close = difflib.get_close_matches(word, sorted(known))
    found = sorted(
        close, key=lambda one: not (word.startswith(one) or one.startswith(word) or sorted(word) == sorted(one))
    )
    return f" (did you mean {found[0]!r}?)" if found else ""
