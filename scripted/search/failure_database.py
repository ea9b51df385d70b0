"""Keeps the failures of searches in a file of the user's project, to be run first the next time and shared.

One failure a line, as JSON: a schedule that replays it, and why it failed. Of each kind of failure the newest is kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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


class SavedFailure(msgspec.Struct, frozen=True):
    """``schedule`` is the line that replays it; ``text`` is what the failure said."""

    adapter: str
    schedule: str
    signature: str
    text: str


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
        """All of them, oldest first, without lines that are none. Raises ScriptDefinitionError for another file."""
        saved, damaged = self._lines()
        if damaged and not saved:
            number, why, _ = damaged[0]
            raise ScriptDefinitionError(
                f"line {number} of {self._file} is no saved failure ({why}), nor is any other; name another file"
            )
        return saved

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

    def add(self, schedule: Schedule, failure: Failure) -> None:
        """Keep a failure, in place of an older one of its kind. Raises OSError."""
        new = SavedFailure(schedule.of, str(schedule), failure.signature, failure.text)
        others = [one for one in self.read() if (one.adapter, one.signature) != (new.adapter, new.signature)]
        self._write([*others, new])

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
                self._write([one for one in self.read() if one != saved])
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
