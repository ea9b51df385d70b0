"""Recognizes the name of a tool that its arguments follow at once: ``name{...}``, ``name(key=...)``, ``name key=...``.

Only the names of the tools and of their arguments tell such a call from other text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from engine.frontend.text.incoming_text import IncomingText, Reading
from engine.frontend.text.tools.argument_schemas import Properties

# More than a name, a bracket and the name of an argument.
_LONGEST_BEGINNING = 256
_NAME = re.compile(r"""\s*(?P<quote>["']?)(?P<name>[\w.-]*)(?P<end>["']?)""")
_NAME_AGAIN = re.compile(r"\s*\[?\s*[\w.-]*\s*")
_SIGN = re.compile(r"\s*[=:)]?\s*")
_KEY = re.compile(r"[\w.-]*")
# Models of all families write them around the name.
NAMESPACE: Final = "functions."
_AFTER_NAME: Final = ".call"


class CalledName(NamedTuple):
    """``tool`` is the name, and ``written`` what stands for it in the text. ``has_object``: an object follows it."""

    tool: str
    written: str
    has_object: bool


class CalledNames:
    """Recognizes the names of ``tools``; ``properties`` are the argument schemas of each."""

    def __init__(self, tools: Collection[str], properties: Mapping[str, Properties]) -> None:
        self._tools = tools
        self._properties = properties

    def seen(self, text: IncomingText) -> Reading[CalledName | None]:
        """Return the name at this position if arguments follow it."""
        found = yield from text.judged(self._name_in, _LONGEST_BEGINNING)
        return found if isinstance(found, CalledName) else None

    def sees_named(self, text: IncomingText, tool: str) -> Reading[bool]:
        """Return whether arguments with names, or in parentheses, are at this position, whose tool is known."""

        def judged(ahead: str, more: bool) -> bool | None:
            return self._follows(tool, " " + ahead, more)

        return bool((yield from text.judged(judged, _LONGEST_BEGINNING)))

    def named_again(self, text: IncomingText, tool: str) -> Reading[str]:
        """Return what stands here of a call whose tool is known if its arguments follow; empty if there is nothing.

        That is its name once more, or the method that calls it, with or without the bracket of a list.
        """
        names = f"({re.escape(NAMESPACE)})?{re.escape(tool)}({re.escape(_AFTER_NAME)})?|{re.escape(_AFTER_NAME)}"
        again = re.compile(rf"\s*\[?\s*({names})(?![\w.-])\s*")

        def judged(ahead: str, more: bool) -> str | None:
            found = again.match(ahead)
            if more and (found is None or found.end() == len(ahead)) and _NAME_AGAIN.fullmatch(ahead):
                return None
            is_called = found is not None and self._follows(tool, ahead[found.end() :], more)
            return None if is_called is None else found.group() if found and is_called else ""

        return (yield from text.judged(judged, _LONGEST_BEGINNING)) or ""

    def _name_in(self, ahead: str, more: bool) -> CalledName | bool | None:
        """Return the name that a text begins with; False if it is none, None if that depends on ``more``."""
        found = _NAME.match(ahead)
        rest = ahead[found.end() :] if found else ""
        if not rest and more:
            return None if self._is_begun(found["name"] if found else "") else False
        if found is None or found["quote"] != found["end"]:
            return False
        plain = found["name"].removeprefix(NAMESPACE)
        names = (found["name"], plain, plain.removesuffix(_AFTER_NAME))
        tool = next((name for name in names if name in self._tools), None)
        if tool is None:
            return False
        # Models write the sign of another format between the two.
        sign = _SIGN.match(rest)
        after = rest[sign.end() :] if sign else rest
        if not after and more:
            return None
        if after[:1] == "{":
            return CalledName(tool, found.group() + rest[: len(rest) - len(after)], has_object=True)
        follows = self._follows(tool, rest, more)
        return CalledName(tool, found.group(), has_object=False) if follows else follows

    def _is_begun(self, written: str) -> bool:
        """Return whether a text is the beginning of a tool's name, with what may be around it."""
        plain = written.removeprefix(NAMESPACE)
        names = (f"{tool}{_AFTER_NAME}" for tool in self._tools)
        return NAMESPACE.startswith(written) or any(name.startswith((plain, written)) for name in names)

    def _follows(self, tool: str, rest: str, more: bool) -> bool | None:
        """Return whether arguments with names, or an object in parentheses, follow the name of a tool."""
        after = rest.lstrip()
        if after[:1] == "(":
            inner = after[1:].lstrip()
            return True if inner[:1] in (*"){",) else self._is_key(inner, more, None)
        if not after:
            return None if more else False
        # Prose may follow a name, but not an attribute that the tool declares.
        return rest[0].isspace() and self._is_key(after, more, self._properties.get(tool, {}))

    @staticmethod
    def _is_key(written: str, more: bool, declared: Properties | None) -> bool | None:
        """Return whether a text begins with the name of an argument and the sign after it; None allows any name."""
        found = _KEY.match(written)
        key = found.group() if found else ""
        after = written[len(key) :].lstrip()
        if not after:
            return None if more else False
        return bool(key) and after[0] == "=" and (declared is None or key in declared)


def names_before(text: IncomingText, name: re.Pattern[str], marker: str) -> Reading[bool]:
    """Return whether a name is at this position, and a marker after it."""

    def judged(ahead: str, more: bool) -> bool | None:
        found = name.match(ahead)
        rest = ahead[found.end() :].lstrip() if found else ""
        if marker.startswith(rest) and rest != marker:
            return None if more else False
        return bool(found and found.group()) and rest.startswith(marker)

    return bool((yield from text.judged(judged, _LONGEST_BEGINNING)))
