"""The calls of Llama 4, in Python syntax."""

from __future__ import annotations

import re
from typing import Final

from engine.frontend.text.incoming_text import Reading
from engine.frontend.text.tools.call_grammar import ArgumentForm, CallForm
from engine.frontend.text.tools.closing_tags import is_closer
from engine.frontend.text.tools.families.base import CallParser
from engine.frontend.text.tools.json_values import SPACE
from engine.frontend.text.tools.python_values import read_python_value
from engine.frontend.text.tools.tagged_values import WrittenArguments

START: Final = "<|python_start|>"
END: Final = "<|python_end|>"
_PYTHON_NAME = re.compile(r"[\w.-]*")
_OPENING = frozenset("[({'\"")
_NEVER_AFTER_A_CLOSER = re.compile(r"[^\s,=()\[\]{}<'\"]*")
_PYTHON_KEY = re.compile(r"[^\s=,()\[\]{}\"']*")
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

    _has_begun = False
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
            self._has_begun = False
            if not (yield from self._read_call(name)) and not (yield from self._skip_to_call()):
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

    def _read_call(self, name: str) -> Reading[bool]:
        """Read the arguments of a call; False if it is truncated or not a call, because arguments have names."""
        text, arguments = self._text, WrittenArguments(self._parts)
        yield from text.run(SPACE)
        begun = False
        while True:
            if (yield from text.peek()) == ")" or (begun and (yield from self._lacks_closer())):
                break
            key = yield from text.word(_PYTHON_KEY)
            yield from text.run(SPACE)
            if not key or (yield from text.peek()) != "=":
                self._give_back()
                return False
            text.take(1)
            if not begun:
                begun = True
                self._begin(name)
            yield from text.run(SPACE)
            arguments.key(key)
            first = yield from text.peek()
            if not (yield from read_python_value(text, arguments.add)):
                return False
            if first in _OPENING and not (yield from self._lacks_closer()):
                yield from text.run(_NEVER_AFTER_A_CLOSER)
            yield from text.run(SPACE)
            if (yield from text.peek()) == ",":
                text.take(1)
                yield from text.run(SPACE)
        if (yield from text.peek()) == ")":
            text.take(1)
        if not begun:
            self._begin(name)
        arguments.end()
        return True

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

    def _begin(self, name: str) -> None:
        self._has_begun = True
        self._text.unmark()
        self._parts.begin(name)

    def _lacks_closer(self) -> Reading[bool]:
        """Return whether a call ends here without its bracket: at the end of the list or the text, or before the
        next call.
        """
        text = self._text
        character = yield from text.peek()
        if not character:
            return text.has_stopped
        if character in "]}<":
            return character != "<" or is_closer((yield from text.tag()), END, (START,))
        text.mark()
        name = yield from text.word(_PYTHON_NAME)
        follows = name in self._tools and (yield from text.peek()) == "("
        text.rewind()
        return follows
