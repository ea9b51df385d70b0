"""The calls of DeepSeek."""

from __future__ import annotations

import re
from typing import Final

from engine.frontend.text.incoming_text import Reading
from engine.frontend.text.tools.call_grammar import CallForm
from engine.frontend.text.tools.called_names import names_before
from engine.frontend.text.tools.families.base import SectionParser
from engine.frontend.text.tools.json_values import QUOTES, SPACE


def _marker(*words: str) -> str:
    """Return a marker of DeepSeek: a wide bar at both ends, a low block between words."""
    return "<\uff5c" + "\u2581".join(words) + "\uff5c>"


CALLS: Final = _marker("tool", "calls", "begin")
END_CALLS: Final = _marker("tool", "calls", "end")
CALL: Final = _marker("tool", "call", "begin")
END_CALL: Final = _marker("tool", "call", "end")
SEPARATOR: Final = _marker("tool", "sep")
FENCE: Final = "```json"
FENCE_END: Final = "```"
DEEPSEEK_FENCED_FORM: Final = CallForm(
    opening=(CALLS,),
    before=(CALL, "function", SEPARATOR),
    quoted=False,
    between=(f"\n{FENCE}\n",),
    after=(f"\n{FENCE_END}", END_CALL),
    separator=("\n",),
    closing=(END_CALLS,),
)
# How arguments begin, the latter where they are an object in a string.
_BEGINNINGS: Final = QUOTES | {"{"}
_FENCED_NAME = re.compile(r"[^\s<>{}`]*")
NULL: Final = "null"


class DeepSeekParser(SectionParser):
    """DeepSeek V3.1: the name, a separator, JSON. V3 and R1: a type, the separator, the name, JSON in a fenced block.

    Each call is between two markers, and all calls are between two more. The text before the separator is the name,
    unless the arguments do not follow it directly.
    """

    name = "deepseek"
    markers = (CALLS, END_CALLS, CALL, END_CALL, SEPARATOR)
    sections = (CALLS,)
    call = CALL
    end_sections = (END_CALLS,)
    separators = (FENCE_END,)
    closes = True
    closers = (END_CALL,)
    ends_reasoning = (CALLS,)
    form = CallForm(
        opening=(CALLS,), before=(CALL,), quoted=False, between=(SEPARATOR,), after=(END_CALL,), closing=(END_CALLS,)
    )

    @classmethod
    def form_of(cls, template: str) -> CallForm:
        return DEEPSEEK_FENCED_FORM if FENCE in template else cls.form

    def _sees_call(self) -> Reading[bool]:
        """Return whether a name is at this position, and the separator or arguments after it."""
        if (yield from names_before(self._text, _FENCED_NAME, SEPARATOR)):
            return True
        return (yield from self._called.seen(self._text)) is not None

    def _read_call(self) -> Reading[bool]:
        text = self._text
        yield from text.run(SPACE)
        if (yield from self._called.seen(text)) is not None:
            yield from self._read_called()
            yield from self._read_end()
            return True
        name = yield from self._read_name()
        separated = (yield from text.marker((SEPARATOR,))) is not None
        yield from text.run(SPACE)
        if not separated and name in self._tools:
            # The fence after a name separates it from its arguments.
            separated = yield from self._skip_fence()
        fenced = False
        if separated and (yield from text.peek()) not in _BEGINNINGS:
            kind, name = name, (yield from self._read_name())
            fenced = yield from self._skip_fence()
            if name in ("", NULL):
                name = kind
        first = yield from text.peek()
        given = ""
        if separated and name and first != "{":
            given = yield from self._read_others((FENCE_END, END_CALL) if fenced else (END_CALL,), may_end=False)
        if not (separated and name) or not (first == "{" or given):
            self._give_back()
            return False
        text.unmark()
        self._parts.begin(name)
        yield from self._read_whole_arguments(name, given)
        yield from self._read_end()
        return True

    def _read_name(self) -> Reading[str]:
        yield from self._text.run(SPACE)
        name = yield from self._text.word(_FENCED_NAME)
        yield from self._text.run(SPACE)
        return name
