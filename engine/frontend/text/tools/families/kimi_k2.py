"""The calls of Kimi K2."""

from __future__ import annotations

import re
from typing import Final

from engine.frontend.text.incoming_text import Reading
from engine.frontend.text.tools.call_grammar import DIGITS, CallForm
from engine.frontend.text.tools.called_names import NAMESPACE, names_before
from engine.frontend.text.tools.families.base import SectionParser
from engine.frontend.text.tools.json_values import SPACE, JsonValue, is_object, keys_of

SECTION: Final = "<|tool_calls_section_begin|>"
END_SECTION: Final = "<|tool_calls_section_end|>"
# Models also write them in the singular.
_SECTIONS: Final = (SECTION, "<|tool_call_section_begin|>")
_END_SECTIONS: Final = (END_SECTION, "<|tool_call_section_end|>")
CALL: Final = "<|tool_call_begin|>"
ARGUMENTS: Final = "<|tool_call_argument_begin|>"
END_CALL: Final = "<|tool_call_end|>"
_ID = re.compile(r"[^\s<>{}\"]*")
# A name and the call's number, whose signs clients and models replace or leave out.
_NAMED = re.compile(r"(?P<space>functions[._]?)?(?P<name>.*?)(?:(?P<sign>[:._-]?)(?P<number>[0-9]+))?")


class KimiK2Parser(SectionParser):
    """Kimi K2: an id of the form ``functions.NAME:NUMBER``, a marker and JSON, between two markers for each call.

    All calls are between two more, which end the reasoning before them. The template shows the model earlier calls by
    their ids alone, so each call keeps its id, and one that was written in another way gets the usual form.
    """

    name = "kimi_k2"
    markers = (*_SECTIONS, *_END_SECTIONS, CALL, ARGUMENTS, END_CALL)
    sections = _SECTIONS
    call = CALL
    end_sections = _END_SECTIONS
    closes = True
    closers = (END_CALL,)
    ends_reasoning = _SECTIONS
    form = CallForm(
        opening=(SECTION,),
        before=(CALL, NAMESPACE),
        quoted=False,
        between=(":", DIGITS, ARGUMENTS),
        after=(END_CALL,),
        closing=(END_SECTION,),
    )

    _count = 0
    """The number of calls so far."""
    _number = ""
    """The number in the id of the call that is read; empty if the id has none."""

    def _sees_call(self) -> Reading[bool]:
        """Return whether an id is at this position, and the marker after it."""
        return (yield from names_before(self._text, _ID, ARGUMENTS))

    def _read_call(self) -> Reading[bool]:
        text = self._text
        yield from text.run(SPACE)
        if (yield from self._called.seen(text)) is not None:
            self._number = ""
            yield from self._read_called()
            yield from self._read_end()
            return True
        written = yield from text.word(_ID)
        yield from text.run(SPACE)
        separated = (yield from text.marker((ARGUMENTS,))) is not None
        yield from self._skip_openers(ARGUMENTS)
        name, self._number = self._named_by(written)
        is_object_next = (yield from text.peek()) == "{"
        given = ""
        if not is_object_next and separated:
            given = yield from self._read_others(self.markers)
        elif is_object_next and not name:
            given = yield from self._read_whole()
        name = name or self._tool_with(given)
        if not name or not (given or is_object_next):
            self._give_back()
            return False
        self._begin(name)
        yield from self._read_whole_arguments(name, given)
        yield from self._read_end()
        return True

    def _begin(self, name: str) -> None:
        self._has_begun = True
        self._text.unmark()
        self._parts.begin(name, f"{NAMESPACE}{name}:{self._number or self._count}")
        self._count += 1

    def _named_by(self, written: str) -> tuple[str, str]:
        """Return the tool that an id names and the call's number; no name for a number alone."""
        found = _NAMED.fullmatch(written)
        assert found is not None, f"the pattern matches any id, got {written!r}"
        space, name, number = found["space"] or "", found["name"], found["number"] or ""
        unnumbered = written.removeprefix(space)
        for tool in (name, unnumbered, written):
            if tool in self._tools:
                return tool, number if tool == name else ""
        if space == NAMESPACE or found["sign"] == ":":
            return name, number
        return "", number

    def _tool_with(self, given: str) -> str:
        """Return the only tool that declares the arguments of a call without a name; empty if that is not certain."""
        keys = keys_of(given)
        tools = [tool for tool in self._tools if keys and keys <= self._properties.get(tool, {}).keys()]
        return tools[0] if len(tools) == 1 else ""

    def _read_whole(self) -> Reading[str]:
        """Read arguments whose tool only they tell; empty if they are truncated."""
        kept: list[str] = []
        missing = yield from JsonValue(self._text, kept.append, self.markers).read()
        if missing and not self._text.has_stopped and not (yield from self._text.peek()):
            return ""
        given = "".join(kept) + missing
        return given if is_object(given) else ""
