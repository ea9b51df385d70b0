"""Mutants: edits that put a real engine's bug back into its code for a run, and files of mutants.

The harness applies a mutant in the process that runs the scheduler and undoes it afterwards; the engine's own code
contains no switch and no bug.
"""

from __future__ import annotations

import contextlib
import inspect
import tomllib
from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from scripted.core.edits import Edit, EditDoesNotFit, found_at, inside
from scripted.core.protocol import Adapter
from scripted.core.refusals import ScriptDefinitionError


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One bug in ``target``, written as ``module:Class.attribute``; the failures that it causes contain ``signature``.

    The text ``cut``, which must occur exactly once in the body of the target's function, becomes ``becomes``; if it
    does not occur verbatim, its lines are matched at any indentation. A bug that needs new logic has a ``replacement``
    for the whole attribute instead. ``kind`` and ``note`` compare it with the bug of its ``origin``: an imitation fails
    in the same way through other code. ``schedule`` shows the bug if its test is not a script. ``adapter`` names the
    adapter whose targets a search for it uses; empty for the searched adapter.
    """

    name: str
    origin: str
    bug: str
    signature: str
    test: str
    target: str
    cut: str = ""
    becomes: str = ""
    replacement: object = None
    kind: Literal["put back", "put back in part", "imitated"] = "put back"
    note: str = ""
    schedule: str = ""
    adapter: str = ""

    def __post_init__(self) -> None:
        if bool(self.cut) == (self.replacement is not None):
            raise ScriptDefinitionError(f"the mutant {self.name} must have either a cut or a replacement")
        if (self.kind == "put back") != (not self.note):
            raise ScriptDefinitionError(
                f"the mutant {self.name} must have a note if and only if it is not the bug itself, "
                f"got kind={self.kind!r} and note={self.note!r}"
            )

    @property
    def nearness(self) -> str:
        """How it differs from the bug of its origin; empty if it is that bug."""
        return "" if self.kind == "put back" else f"{self.kind}: {self.note}"

    @property
    def edit(self) -> Edit:
        """The edit of a mutant with a cut."""
        return Edit(self.target, self.cut, self.becomes)

    @contextlib.contextmanager
    def switched_on(self) -> Iterator[None]:
        """Put the bug in while the context is open. Raises EditDoesNotFit without changing anything."""
        if self.cut:
            with self.edit.switched_on(self._words):
                yield
            return
        owner, attribute, original = found_at(self.target, self._words)
        is_own = attribute in vars(owner)
        setattr(owner, attribute, self.replacement)
        try:
            yield
        finally:
            if is_own:
                setattr(owner, attribute, original)
            else:
                delattr(owner, attribute)

    @property
    def function(self) -> FunctionType:
        """The function that the cut edits. Raises EditDoesNotFit."""
        return self.edit.function(self._words)

    def is_met(self, codes: Container[int]) -> bool:
        """Return whether the mutated code is among these code objects, which a run called, by id.

        True for a target that is not code, such as a limit: any run may depend on it.
        """
        try:
            original = found_at(self.target, self._words)[2]
        except EditDoesNotFit:
            return False
        function = inside(original)
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) or self.cut else None
        code = code or getattr(getattr(original, "__func__", None), "__code__", None)
        return code is None or id(code) in codes

    @property
    def _words(self) -> str:
        return f"the mutant {self.name}"


@runtime_checkable
class HasMutants(Protocol):
    """An adapter that has mutants of its scheduler."""

    @property
    def mutant_names(self) -> tuple[str, ...]: ...

    def switched_on(self, mutant: str | None) -> AbstractContextManager[None]:
        """Switch a mutant on while the context is open; None for none. Raises ValueError for an unknown one."""
        ...

    def bugs_met(self, codes: Container[int]) -> Sequence[str]:
        """Return the mutants of code that a run called, given by the ids of its code objects."""
        ...


def switched_on(adapter: Adapter, mutant: str | None) -> AbstractContextManager[None]:
    """Switch a mutant of the adapter on while the context is open; None for none. Raises ValueError."""
    if isinstance(adapter, HasMutants):
        return adapter.switched_on(mutant)
    if mutant is None:
        return contextlib.nullcontext()
    raise ScriptDefinitionError(f"the adapter {adapter.name} has no mutants, got {mutant!r}; leave the mutant out")


def mutant_names_of(adapter: Adapter) -> tuple[str, ...]:
    """Return the names of an adapter's mutants; empty for an adapter without mutants."""
    return adapter.mutant_names if isinstance(adapter, HasMutants) else ()


def refusal_of_mutant(adapter: Adapter, mutant: str) -> str | None:
    """Return an error with the nearest name if the adapter has no such mutant; None if it has."""
    if mutant in mutant_names_of(adapter):
        return None
    try:
        with switched_on(adapter, mutant):
            return None
    except (ValueError, ScriptDefinitionError) as exc:
        return str(exc)


def read_mutants(file: Path) -> tuple[Mutant, ...]:
    """Read mutants from a TOML file: a table ``[[mutant]]`` for each, with the fields of ``Mutant``.

    A table ``[every]`` before them has the fields that they share.
    """
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as exc:  # also bytes that are no UTF-8, and brackets without end
        raise ScriptDefinitionError(f"{file} is no TOML: {exc}") from exc
    if unknown := set(tables) - {"every", "mutant"}:
        raise ScriptDefinitionError(f"{file} has tables [every] and [[mutant]] alone, got {sorted(unknown)}")
    try:
        found = msgspec.convert(tables, _MutantFile)
    except msgspec.ValidationError as exc:
        raise ScriptDefinitionError(f"{file} has tables [every] and [[mutant]] alone: {exc}") from exc
    mutants = []
    for table in found.mutant:
        name, fields = table.get("name", "without a name"), found.every | table
        for field, value in fields.items():
            if field != "replacement" and not isinstance(value, str):
                raise ScriptDefinitionError(f"{file}: the mutant {name} must have a text as {field}, got {value!r}")
        try:
            mutants.append(Mutant(**fields))
        except TypeError as exc:
            raise ScriptDefinitionError(f"{file}: the mutant {name} must have the fields of Mutant: {exc}") from exc
        except ScriptDefinitionError as exc:
            raise ScriptDefinitionError(f"{file}: {exc}") from exc
    return tuple(mutants)


class _MutantFile(msgspec.Struct, frozen=True):
    every: dict[str, Any] = {}
    mutant: tuple[dict[str, Any], ...] = ()
