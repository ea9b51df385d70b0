"""What an answer consists of beside plain text: reasoning, content, and calls of tools in pieces.

Owns the parts' types. Parts come in the order of the text; the pieces of one call stand between its beginning and its
end, and no other part stands between them.
"""

from __future__ import annotations

import msgspec

__all__ = ["CallArguments", "CallBegun", "CallEnded", "Content", "Part", "Reasoning", "appended"]


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the model's reasoning."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """Text of the answer itself."""

    text: str


class CallBegun(msgspec.Struct, frozen=True):
    """The model calls a tool. ``id`` is the one that it gave the call, if its family does that."""

    name: str
    id: str | None = None


class CallArguments(msgspec.Struct, frozen=True):
    """The next piece of the call's arguments, as the model wrote them: JSON text."""

    text: str


class CallEnded(msgspec.Struct, frozen=True):
    """The call's arguments are complete. A call that was cut has no end."""


Part = Reasoning | Content | CallBegun | CallArguments | CallEnded


def appended(parts: list[Part], part: Part) -> None:
    """Add a part to a list; text that goes on with the last part's text becomes one part with it."""
    last = parts[-1] if parts else None
    match part, last:
        case (
            (Content(text), Content(before))
            | (Reasoning(text), Reasoning(before))
            | (
                CallArguments(text),
                CallArguments(before),
            )
        ):
            parts[-1] = type(part)(before + text)
        case (Content(""), _) | (Reasoning(""), _) | (CallArguments(""), _):
            return
        case _:
            parts.append(part)
