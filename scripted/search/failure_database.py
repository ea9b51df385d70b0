"""Keeps a project's findings in a file. The next search runs them first; commands name them by number.

Each line is one finding as JSON: the smallest schedule that shows it, and why it fails. Its number is unique while the
finding is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from lockstep.documents import DocumentError, document
from lockstep.whole_file import write_whole
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
    """``schedule`` is the line that replays the finding; ``text`` is the failure's message.

    ``decision`` is the scheduler's wrong decision. ``seen`` counts the runs of its search that failed this way.
    """

    adapter: str
    schedule: str
    signature: str
    text: str
    number: int = 0
    seen: int = 1
    decision: str = ""


class Replayed(msgspec.Struct, frozen=True):
    """A replayed finding. Without a ``failure`` it was dropped, for the reason in ``why``."""

    saved: SavedFailure
    failure: Failure | None
    why: str = ""


class FailureDatabase:
    """The newest findings in ``file``, at most FAILURES_LIMIT; the file may not exist yet."""

    def __init__(self, file: Path = DEFAULT_FAILURES) -> None:
        self._file = file

    def read(self) -> list[SavedFailure]:
        """Return all findings, oldest first, without damaged lines. Raises ScriptDefinitionError for another file.

        A line without a number, of an older version, gets the next one.
        """
        saved, damaged = self._lines()
        if damaged and not saved:
            number, why, _ = damaged[0]
            raise ScriptDefinitionError(
                f"line {number} of {self._file} is not a saved failure ({why}), and no line is; name another file"
            )
        free = itertools.count(1 + max((one.number for one in saved), default=0))
        return [one if one.number else msgspec.structs.replace(one, number=next(free)) for one in saved]

    def numbered(self, number: int) -> SavedFailure:
        """Return the finding with this number. Raises ScriptDefinitionError if there is none."""
        saved = self.read()
        for one in saved:
            if one.number == number:
                return one
        there = ", ".join(str(one.number) for one in saved) or "none"
        raise ScriptDefinitionError(f"{self._file} keeps no finding {number}; there are: {there}")

    def set_damaged_aside(self) -> list[str]:
        """Move damaged lines to a file beside this one, and return a sentence for each.

        Raises ScriptDefinitionError for a file without any finding, which stays as it is.
        """
        saved, (_, damaged) = self.read(), self._lines()
        if not damaged:
            return []
        aside = self._file.with_name(f"{self._file.name}.damaged")
        with aside.open("ab") as file:
            file.write(b"".join(line + b"\n" for _, _, line in damaged))
        self._replace(saved)
        return [
            f"line {number} of {self._file} is not a saved failure ({why}); it is in {aside} now"
            for number, why, _ in damaged
        ]

    def add(self, schedule: Schedule, failure: Failure, decision: str = "") -> SavedFailure:
        """Add a finding under the next number; a finding of the same schedule keeps its number. Raises OSError."""
        saved = self.read()
        old = next((one for one in saved if (one.adapter, one.schedule) == (schedule.of, str(schedule))), None)
        number = old.number if old else 1 + max((one.number for one in saved), default=0)
        text = failure.text[:_TEXT_LIMIT_CHARS]
        new = SavedFailure(schedule.of, str(schedule), failure.signature, text, number, decision=decision)
        self._write([*(one for one in saved if one is not old), new])
        return new

    def replace(self, new: SavedFailure) -> None:
        """Replace the finding with the same number. Raises OSError."""
        self._write([new if one.number == new.number else one for one in self.read()])

    def add_seen(self, more: Mapping[int, int]) -> None:
        """Count further failures of the findings with these numbers. Raises OSError."""
        saved = self.read()
        if any(more.get(one.number) for one in saved):
            self._write([msgspec.structs.replace(one, seen=one.seen + more.get(one.number, 0)) for one in saved])

    def forget(self, number: int) -> SavedFailure:
        """Drop the finding with this number. Raises ScriptDefinitionError if there is none, and OSError."""
        gone = self.numbered(number)
        self._write([one for one in self.read() if one.number != number])
        return gone

    def replay(self, adapter: str) -> Iterator[Replayed]:
        """Replay an adapter's findings, newest first. Drops findings that no longer fail or can no longer be read.

        Raises ScriptDefinitionError if the adapter cannot be loaded; its findings are then kept.
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
        """Return the findings, and each damaged line with its number, the reason and its bytes."""
        saved: list[SavedFailure] = []
        damaged: list[tuple[int, str, bytes]] = []
        data = self._file.read_bytes() if self._file.exists() else b""
        # Only line feeds separate findings: JSON strings may contain other line separators.
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
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._file, b"".join(msgspec.json.encode(one) + b"\n" for one in saved[-FAILURES_LIMIT:]))


def _replayed(saved: SavedFailure) -> tuple[Failure | None, str]:
    try:
        schedule = Schedule.parse(saved.schedule, of=saved.adapter)
    except (ScriptDefinitionError, ValueError) as exc:
        return None, f"it cannot be read any more: {exc}"
    _, failure = way_to_fail(schedule, saved.signature)
    return failure, "" if failure is not None else "it no longer fails"
