"""The text of a bug report in the form that a scheduler's project asks for.

A person reads it before sending it: facts that no run can supply are marked as unknown.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Final, TypeAlias

import msgspec


class IssuePart(StrEnum):
    """A part of a report, which a project's form puts under one of its headings."""

    ENVIRONMENT = "environment"
    FLAGS = "flags"
    HAPPENS = "what happens"
    EXPECTED = "what should happen"
    CAUSE = "cause"
    SCRIPT = "script"
    AFFECTED = "who is affected"
    UPSTREAM = "what is known upstream"


# The headings of a project's form, each with its parts by name.
IssueForm: TypeAlias = Sequence[tuple[str, Sequence[str]]]
PLAIN_FORM: Final[IssueForm] = tuple((part.capitalize(), (part,)) for part in IssuePart)


class Issue(msgspec.Struct, frozen=True):
    """A report: its title, and the text of each part in Markdown."""

    title: str
    parts: Mapping[IssuePart, str]

    def text(self, form: IssueForm) -> str:
        """Lay the report out in a project's form, leaving out headings without text."""
        lines = [f"# {self.title}"]
        for heading, parts in form:
            present = [
                (IssuePart(name), self.parts[IssuePart(name)]) for name in parts if self.parts.get(IssuePart(name))
            ]
            lines += [f"## {heading}"] if present else []
            for part, text in present:
                lines += [f"**{part.capitalize()}**", text] if len(parts) > 1 else [text]
        return "\n\n".join(lines) + "\n"


def environment_of(packages: Sequence[str]) -> str:
    """Return the versions that a report names: Python, torch and the scheduler's packages."""
    found = [f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"]
    for name in dict.fromkeys((*packages, "torch")):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def fenced(text: str, language: str = "text") -> str:
    """Return a fenced code block; the indentation of its first line is kept."""
    body = text.strip("\n")
    return f"```{language}\n{body}\n```"
