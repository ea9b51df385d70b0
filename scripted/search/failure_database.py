"""Keeps the findings of a project in a file: run first by the next search, named by their numbers, shared as a file.

One finding a line, as JSON: the smallest schedule that shows it, and why it fails. Its number is never given again
while it is kept.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from lockstep.documents import DocumentError, document
from scripted.core.adapters import adapter_named
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.search.execution import Failure
from scripted.search.shrinking import way_to_fail

DEFAULT_FAILURES: Final = Path(".scripted/failures.jsonl")
# A replay takes milliseconds, so all of them take a second or two.
FAILURES_LIMIT: Final = 200
_TEXT_LIMIT_CHARS: Final = 2_000


class SavedFailure(msgspec.Struct, frozen=True, omit_defaults=True):
    """``schedule`` is the line that replays it; ``text`` is what the failure said.

    ``decision`` is the scheduler's wrong decision, ``seen`` how many runs of the search that found it failed so.
    """

    adapter: str
    schedule: str
    signature: str
    text: str
    number: int = 0
    seen: int = 1
    decision: str = ""


class Replayed(msgspec.Struct, frozen=True):
    """A saved failure that was run again. Without a ``failure`` it was dropped, and ``why`` says for what reason."""

    saved: SavedFailure
    failure: Failure | None
    why: str = ""


class FailureDatabase:
    """The failures in ``file``, which need not be there yet; at most FAILURES_LIMIT, the newest."""

    def __init__(self, file: Path = DEFAULT_FAILURES) -> None:
        self._file = file

    def read(self) -> list[SavedFailure]:
        """All of them, oldest first, without lines that are none. Raises ScriptDefinitionError for another file.

        A line without a number, of an older version, gets the next one.
        """
        saved, damaged = self._lines()
        if damaged and not saved:
            number, why, _ = damaged[0]
            raise ScriptDefinitionError(
                f"line {number} of {self._file} is no saved failure ({why}), nor is any other; name another file"
            )
        free = itertools.count(1 + max((one.number for one in saved), default=0))
        return [one if one.number else msgspec.structs.replace(one, number=next(free)) for one in saved]

    def numbered(self, number: int) -> SavedFailure:
        """The finding of this number. Raises ScriptDefinitionError where there is none."""
        saved = self.read()
        for one in saved:
            if one.number == number:
                return one
        there = ", ".join(str(one.number) for one in saved) or "none"
        raise ScriptDefinitionError(f"{self._file} keeps no finding {number}; there are: {there}")

    def set_damaged_aside(self) -> list[str]:
        """Move lines that are no saved failures to a file beside this one. Returns a sentence for each of them.

        Raises ScriptDefinitionError for a file without any saved failure, which is left as it is.
        """
        saved, (_, damaged) = self.read(), self._lines()
        if not damaged:
            return []
        aside = self._file.with_name(f"{self._file.name}.damaged")
        with aside.open("ab") as file:
            file.write(b"".join(line + b"\n" for _, _, line in damaged))
        self._replace(saved)
        return [
            f"line {number} of {self._file} is no saved failure ({why}); it is in {aside} now"
            for number, why, _ in damaged
        ]

    def add(self, schedule: Schedule, failure: Failure, decision: str = "") -> SavedFailure:
        """Keep a finding with the next number; one of the same schedule keeps its own. Raises OSError."""
        saved = self.read()
        old = next((one for one in saved if (one.adapter, one.schedule) == (schedule.of, str(schedule))), None)
        number = old.number if old else 1 + max((one.number for one in saved), default=0)
        text = failure.text[:_TEXT_LIMIT_CHARS]
        new = SavedFailure(schedule.of, str(schedule), failure.signature, text, number, decision=decision)
        self._write([*(one for one in saved if one is not old), new])
        return new

    def replace(self, new: SavedFailure) -> None:
        """Keep this in place of the finding of its number. Raises OSError."""
        self._write([new if one.number == new.number else one for one in self.read()])

    def add_seen(self, more: Mapping[int, int]) -> None:
        """Count further failures of the findings with these numbers. Raises OSError."""
        saved = self.read()
        if any(more.get(one.number) for one in saved):
            self._write([msgspec.structs.replace(one, seen=one.seen + more.get(one.number, 0)) for one in saved])

    def forget(self, number: int) -> SavedFailure:
        """Drop the finding of this number. Raises ScriptDefinitionError where there is none, and OSError."""
        gone = self.numbered(number)
        self._write([one for one in self.read() if one.number != number])
        return gone

    def replay(self, adapter: str) -> Iterator[Replayed]:
        """Run those of an adapter again, newest first. What no longer fails, or cannot be read any more, is dropped.

        Raises ScriptDefinitionError where the adapter cannot be loaded, which says nothing of its failures.
        """
        mine = [one for one in reversed(self.read()) if one.adapter == adapter]
        if mine:
            adapter_named(adapter)
        for saved in mine:
            failure, why = _replayed(saved)
            if failure is None:
                self._write([one for one in self.read() if one.number != saved.number])
            yield Replayed(saved, failure, why)

    def _lines(self) -> tuple[list[SavedFailure], list[tuple[int, str, bytes]]]:
        """The saved failures, and each line that is none: its number, why, and its bytes."""
        saved: list[SavedFailure] = []
        damaged: list[tuple[int, str, bytes]] = []
        data = self._file.read_bytes() if self._file.exists() else b""
        # Line feeds alone end a line: JSON may hold whatever else ends one of a text.
        for number, line in enumerate(data.split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                saved.append(document(line, SavedFailure))
            except DocumentError as exc:
                damaged.append((number, str(exc), line))
        return saved, damaged

    def _write(self, saved: list[SavedFailure]) -> None:
        self.set_damaged_aside()
        self._replace(saved)

    def _replace(self, saved: list[SavedFailure]) -> None:
        """In one piece: a process that is killed leaves the old ones."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        new.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in saved[-FAILURES_LIMIT:]))
        new.replace(self._file)


def _replayed(saved: SavedFailure) -> tuple[Failure | None, str]:
    try:
        schedule = Schedule.parse(saved.schedule, of=saved.adapter)
    except (ScriptDefinitionError, ValueError) as exc:
        return None, f"it cannot be read any more: {exc}"
    _, failure = way_to_fail(schedule, saved.signature)
    return failure, "" if failure is not None else "it no longer fails"
