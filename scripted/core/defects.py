"""Known defects of a scheduler: the tables that adapters ship, and the file of a project that tolerates some.

Owns the TOML format of both. A defect is recognized by running its schedules; nothing else about it is compared.
"""

from __future__ import annotations

import contextlib
import importlib.util
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from lockstep.whole_file import write_whole
from scripted.core.edits import Edit, EditDoesNotFit
from scripted.core.installed import installed_adapters
from scripted.core.refusals import ScriptDefinitionError

DEFAULT_KNOWN: Final = Path("scripted-known.toml")
_TABLE: Final = "defects.toml"
_SIZE_LIMIT_BYTES: Final = 4 << 20


class Upstream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An issue or a pull request of the scheduler's project. ``state`` is empty if it is not recorded."""

    number: str
    kind: str = "issue"
    state: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.number}" + (f" ({self.state})" if self.state else "")


class Reach(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a server meets a defect: ``who`` can cause it, and under which settings.

    ``settings`` are the least unusual ones, ``command`` starts a server with them, and ``failing`` of the random
    ``workloads`` fail.
    """

    who: str = ""
    settings: str = ""
    command: str = ""
    failing: int | None = None
    workloads: int | None = None


class Defect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A known defect. ``schedules`` show it, smallest first; ``cause`` is the function that decides wrongly.

    ``found``: by search or by reading. ``because``: why a project tolerates it. ``file``: the report for its
    maintainers. ``text``: the paragraphs of its section, in which ``{schedule}`` stands for the command that shows it.
    ``fix``: the edits of the scheduler that remove it, in this order; empty if none is known.
    """

    id: str
    title: str = ""
    schedules: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    found: str = "search"
    cause: str = ""
    upstream: tuple[Upstream, ...] = ()
    reach: Reach = Reach()
    because: str = ""
    file: str = ""
    text: str = ""
    fix: tuple[Edit, ...] = ()

    @contextlib.contextmanager
    def fixed(self) -> Iterator[None]:
        """Fix the defect in this process while the context is open. Raises EditDoesNotFit with nothing changed."""
        with contextlib.ExitStack() as stack:
            for edit in self.fix:
                stack.enter_context(edit.switched_on(f"the fix of {self.id}"))
            yield


class DefectTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of defects. ``before`` and ``after`` are the paragraphs around their sections on the page."""

    title: str = ""
    adapter: str = ""
    before: str = ""
    after: str = ""
    defect: tuple[Defect, ...] = ()


def read_defects(file: Path) -> DefectTable:
    """Read a file of defects. Raises ScriptDefinitionError with the field that is wrong, and OSError."""
    data = file.read_bytes()
    if len(data) > _SIZE_LIMIT_BYTES:
        raise ScriptDefinitionError(
            f"{file} has {len(data)} bytes; a table of known defects has at most {_SIZE_LIMIT_BYTES}"
        )
    try:
        table = msgspec.convert(tomllib.loads(data.decode()), DefectTable, strict=True)
    except (ValueError, RecursionError) as exc:
        raise ScriptDefinitionError(
            f"{file} is not a table of known defects: {exc}; each [[defect]] has an id and schedules"
        ) from exc
    ids = [one.id for one in table.defect]
    if twice := next((one for one in ids if ids.count(one) > 1), None):
        raise ScriptDefinitionError(f"{file} has the defect {twice!r} twice; an id names one defect")
    return table


def defects_of(adapter: str, project: Path = DEFAULT_KNOWN) -> tuple[Defect, ...]:
    """Return the known defects with a schedule of this adapter: the project's first, then the adapter's own.

    Raises ScriptDefinitionError for a damaged file.
    """
    files = [project] if project.is_file() else []
    if adapter in installed_adapters():
        # The package is not imported: its engine need not be installed.
        spec = importlib.util.find_spec(installed_adapters()[adapter].module.partition(".")[0])
        folders = spec.submodule_search_locations if spec is not None else None
        files += [file for folder in folders or () if (file := Path(folder) / _TABLE).is_file()]
    found = [one for file in files for one in read_defects(file).defect]
    return tuple(one for one in found if any(is_of(text, adapter) for text in one.schedules))


@contextlib.contextmanager
def all_fixed(defects: Iterable[Defect]) -> Iterator[None]:
    """Fix all of these defects while the context is open. Raises EditDoesNotFit with nothing changed."""
    with contextlib.ExitStack() as stack:
        for defect in defects:
            stack.enter_context(defect.fixed())
        yield


def fixable(defects: Iterable[Defect]) -> tuple[Defect, ...]:
    """Return the defects with a fix that fits the installed scheduler, also beside the fixes before it."""
    found: list[Defect] = []
    with contextlib.ExitStack() as stack:
        for defect in defects:
            with contextlib.suppress(EditDoesNotFit):
                stack.enter_context(defect.fixed())
                found += [defect] if defect.fix else []
    return tuple(found)


def is_of(schedule: str, adapter: str) -> bool:
    """Return whether the text of a schedule names this adapter."""
    return schedule.partition(";")[0].split()[:1] == [f"adapter={adapter}"]


def add_known(file: Path, defect: Defect) -> None:
    """Append a defect to a project's file. Raises ScriptDefinitionError if the file has its id, and OSError."""
    if file.is_file() and any(one.id == defect.id for one in read_defects(file).defect):
        raise ScriptDefinitionError(f"{file} has the defect {defect.id!r}; delete its [[defect]] first")
    lines = ["[[defect]]", f"id = {_quoted(defect.id)}", f"title = {_quoted(defect.title)}"]
    lines += [f"schedules = [{', '.join(map(_quoted, defect.schedules))}]"]
    reports = ", ".join(f"{{ number = {_quoted(one.number)}, kind = {_quoted(one.kind)} }}" for one in defect.upstream)
    lines += [f"upstream = [{reports}]"] if reports else []
    lines += [f"because = {_quoted(defect.because)}"]
    before = file.read_text(encoding="utf-8") + "\n" if file.is_file() else ""
    write_whole(file, (before + "\n".join(lines) + "\n").encode())


def _quoted(text: str) -> str:
    """Quote a TOML string with JSON's escapes, plus the one character that JSON leaves unescaped."""
    return msgspec.json.encode(text).decode().replace("\x7f", "\\u007f")
