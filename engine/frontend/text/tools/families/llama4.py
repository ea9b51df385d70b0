"""The calls of Llama 4, in Python syntax."""

from __future__ import annotations

import re
from typing import Final

from engine.frontend.text.incoming_text import Reading
from engine.frontend.text.tools.call_grammar import ArgumentForm, CallForm
from engine.frontend.text.tools.families.base import CallParser
from engine.frontend.text.tools.json_values import SPACE
from engine.frontend.text.tools.tagged_values import WrittenArguments

START: Final = "<|python_start|>"
END: Final = "<|python_end|>"
_PYTHON_NAME = re.compile(r"[\w.-]*")
_SEPARATORS = re.compile(r"[\s,;]*")
_BEFORE_COMMA = re.compile(r"[^,<]*")
# The text after a damaged call that is held back until it is known whether another call follows.
MOST_SKIPPED: Final = 4096


class Llama4Parser(CallParser):
    """Llama 4: ``[name(key=value), ...]``, calls in Python syntax, bare or between two markers.

    A bare list consists of calls if it begins with the name of a tool. JSON after the marker, which these models also
    write, is read as for Llama 3.
    """

    name = "llama4"
    markers = (START, END)
    closers = (END,)
    # With the markers, although these models may omit them: a bracket alone does not indicate calls.
    form = CallForm(
        opening=(START, "["),
        before=(),
        quoted=False,
        between=("(",),
        after=(")",),
        separator=(", ",),
        closing=("]", END),
        arguments=ArgumentForm(between=("=",), separator=(", ",), raw=False),
    )

    _searched = 0

    def _read(self) -> Reading[None]:
        text = self._text
        while (found := (yield from text.until((START, "["), self._parts.say))) is not None:
            text.mark(back=len(found))
            bare = found == "["
            if not bare:
                yield from text.run(SPACE)
                character = yield from text.peek()
                if character == "{":
                    yield from self._read_objects()
                    yield from text.marker((END,))
                    continue
                # Models sometimes omit the brackets around the calls.
                bare = character != "["
                text.take(int(not bare))
            yield from self._read_list(bare=bare)

    def _read_list(self, *, bare: bool) -> Reading[None]:
        """Read calls up to the end of their list. Emit the marked text as content if there is none."""
        text, found = self._text, False
        while True:
            yield from text.run(SPACE)
            name = yield from text.word(_PYTHON_NAME)
            if not name or (bare and name not in self._tools):
                break
            yield from text.run(SPACE)
            if (yield from text.peek()) != "(":
                break
            text.take(1)
            arguments = WrittenArguments(self._parts)
            if (yield from self._read_named(name, arguments, closer=")")):
                arguments.end()
            elif not (yield from self._skip_to_call()):
                return
            found = True
            yield from text.run(_SEPARATORS)
            text.mark()
            if (yield from text.peek()) == "]":
                text.take(1)
                text.unmark()
                break
        self._give_back()
        if found:
            yield from text.run(SPACE)
            yield from self._skip_closers(END)

    def _skip_to_call(self) -> Reading[bool]:
        """Skip the rest of a damaged call, up to the next one; False if none follows, and then the rest is content."""
        text = self._text
        text.mark()
        most = text.place + MOST_SKIPPED
        # No call follows a comma up to where an earlier search ended, so all of them together read the text once.
        text.take(max(0, self._searched - text.place))
        while text.place < most:
            yield from text.run(_BEFORE_COMMA)
            character = yield from text.peek()
            if not character or (yield from text.sees(self.markers)) is not None:
                break
            text.take(1)
            if character != ",":
                continue
            yield from text.run(SPACE)
            name = yield from text.word(_PYTHON_NAME)
            if name in self._tools and (yield from text.peek()) == "(":
                text.step_back(len(name))
                lost = text.unmark()
                if not self._has_begun:
                    self._parts.say(lost)
                text.mark()
                return True
        self._searched = text.place
        text.rewind()
        return False
