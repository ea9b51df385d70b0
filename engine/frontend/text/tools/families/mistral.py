"""The calls of Mistral."""

from __future__ import annotations

import re
import uuid
from typing import Final

from engine.frontend.text.incoming_text import Reading
from engine.frontend.text.tools.call_grammar import CallForm
from engine.frontend.text.tools.families.base import CallParser
from engine.frontend.text.tools.json_values import SPACE

TOOL_CALLS: Final = "[TOOL_CALLS]"
CALL_ID: Final = "[CALL_ID]"
ARGS: Final = "[ARGS]"
MISTRAL_NAMED_FORM: Final = CallForm(before=(TOOL_CALLS,), quoted=False, between=(ARGS,))
# Mistral's templates refuse ids of any other length.
MISTRAL_ID_CHARS = 9
_LONGEST_NAME: Final = 128
_PLAIN_NAME = re.compile(r"[^\s\[\]{}]*")


class MistralParser(CallParser):
    """Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, or ``[TOOL_CALLS]name[ARGS]{...}`` for each call.

    Newer models write an id between name and arguments; some omit ``[ARGS]``.
    """

    name = "mistral"
    markers = (TOOL_CALLS, CALL_ID, ARGS)
    form = CallForm(
        opening=(TOOL_CALLS, "["),
        before=('{"name": ',),
        between=(', "arguments": ',),
        after=("}",),
        separator=(", ",),
        closing=("]",),
    )

    @classmethod
    def form_of(cls, template: str) -> CallForm:
        return MISTRAL_NAMED_FORM if ARGS in template else cls.form

    @staticmethod
    def new_id() -> str:
        return uuid.uuid4().hex[:MISTRAL_ID_CHARS]

    def _read(self) -> Reading[None]:
        text = self._text
        if (yield from text.judged(self._is_named, _LONGEST_NAME)):
            text.mark()
            yield from self._read_all_marked()
        else:
            yield from self._read_start()
        while (yield from text.until((TOOL_CALLS,), self._parts.say)) is not None:
            text.mark(back=len(TOOL_CALLS))
            yield from self._skip_openers(TOOL_CALLS)
            if (yield from self._sees_object()):
                if (yield from self._read_objects()):
                    yield from self._skip_fence_end()
            else:
                yield from self._read_all_marked()

    def _read_all_marked(self) -> Reading[None]:
        """Read a call with a marker after its name, and further ones, which may lack the marker before it."""
        yield from self._read_marked()
        while (yield from self._text.judged(self._is_named, _LONGEST_NAME)):
            self._text.mark()
            yield from self._read_marked()

    def _is_named(self, ahead: str, more: bool) -> bool | None:
        """Return whether a tool's name is here, and a marker after it."""
        found = _PLAIN_NAME.match(ahead)
        name, rest = (found.group().strip('"'), ahead[found.end() :].lstrip()) if found else ("", ahead)
        if more and not rest:
            return None if any(tool.startswith(name) for tool in self._tools) else False
        if more and name in self._tools and any(marker.startswith(rest) for marker in (CALL_ID, ARGS)):
            return None
        return name in self._tools and rest.startswith((CALL_ID, ARGS))

    def _read_marked(self) -> Reading[None]:
        """Read one call whose name precedes its arguments."""
        text = self._text
        name = yield from self._read_name()
        call_id = None
        if (yield from text.marker((CALL_ID,))) is not None:
            call_id = (yield from self._read_name()) or None
        announced = (yield from text.marker((ARGS,))) is not None
        yield from self._skip_openers(ARGS)
        begins = (yield from text.peek()) == "{"
        given = (yield from self._read_others((TOOL_CALLS,))) if announced and name and not begins else ""
        if not name or not (begins or given):
            self._give_back()
            return
        text.unmark()
        self._parts.begin(name, call_id)
        yield from self._read_whole_arguments(name, given)
        yield from self._skip_fence_end()
        yield from self._read_between()

    def _read_name(self) -> Reading[str]:
        name = yield from self._text.word(_PLAIN_NAME)
        yield from self._text.run(SPACE)
        return name.strip('"')
