"""The calls of Llama 3."""

from __future__ import annotations

import re
from typing import Final

from engine.frontend.text.incoming_text import Reading
from engine.frontend.text.tools.call_grammar import CallForm
from engine.frontend.text.tools.families.base import CallParser
from engine.frontend.text.tools.json_values import SPACE

PYTHON_TAG: Final = "<|python_tag|>"
_FUNCTION: Final = "<function="
_FUNCTIONS: Final = (_FUNCTION, "<function(")
_END_FUNCTION: Final = "</function>"
_AFTER_ARGUMENTS = re.compile(r"[\s)>\]]*")
_NAME = re.compile(r"[^<>{}\s]*")


class Llama3Parser(CallParser):
    """Llama 3: ``{"name": ..., "parameters": {...}}`` bare or after ``<|python_tag|>``, several separated by ``;``.

    Models also write ``<function=NAME>{...}</function>``, which Llama 3.1 has for tools in its system prompt.

    A bare object is a call if it names a tool and has only the keys of a call, because models also answer in JSON.
    """

    name = "llama3"
    markers = (PYTHON_TAG,)
    separators = (";", _FUNCTION, _END_FUNCTION)
    closers = (_END_FUNCTION,)
    form = CallForm(before=('{"name": ',), between=(', "parameters": ',), after=("}",), separator=("; ",))

    def _read(self) -> Reading[None]:
        text = self._text
        yield from self._read_start()
        while (found := (yield from text.until((PYTHON_TAG, *_FUNCTIONS, "{", "["), self._parts.say))) is not None:
            text.mark(back=len(found))
            if found in _FUNCTIONS:
                yield from self._read_function()
                continue
            bare = found != PYTHON_TAG
            if bare:
                text.step_back(1)
            else:
                yield from self._skip_openers(PYTHON_TAG)
            if (yield from self._read_objects(bare=bare)):
                yield from self._skip_fence_end()

    def _read_function(self) -> Reading[None]:
        """Read a call between tags; anything but the object of a known tool is content."""
        text = self._text
        if (yield from self._read_called()):
            yield from text.run(_AFTER_ARGUMENTS)
            yield from self._skip_closers(_END_FUNCTION)
            return
        name = yield from text.word(_NAME)
        if name not in self._tools or (yield from text.marker((">",))) is None:
            self._give_back()
            return
        yield from text.run(SPACE)
        again = yield from self._called.named_again(text, name)
        text.take(len(again))
        if (yield from text.peek()) != "{" and not (yield from self._called.sees_named(text, name)):
            self._give_back()
            return
        yield from self._read_arguments_of(name)
        if again:
            yield from text.run(_AFTER_ARGUMENTS)
        yield from self._skip_closers(_END_FUNCTION)
