"""The messages of gpt-oss, which are reasoning, content or calls."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from engine.frontend.text.incoming_text import Emit, Reading
from engine.frontend.text.reasoning import CHANNEL, END_MESSAGE, MESSAGE, START_MESSAGE, Reasoning, appended
from engine.frontend.text.tools.argument_schemas import Properties
from engine.frontend.text.tools.call_grammar import CallForm
from engine.frontend.text.tools.called_names import NAMESPACE
from engine.frontend.text.tools.families.base import CallParser
from engine.frontend.text.tools.json_values import SPACE

CONSTRAIN: Final = "<|constrain|>"
RETURN: Final = "<|return|>"
END_CALL: Final = "<|call|>"
_ENDS: Final = (END_MESSAGE, RETURN, END_CALL)
_IN_HEADERS: Final = (START_MESSAGE, CHANNEL, CONSTRAIN, MESSAGE)
_HEADER = re.compile(r"[\w .=:/-]*")
_TO: Final = "to="
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")
_CHANNEL = re.compile(r"\b(analysis|commentary|final)")
_ANALYSIS: Final = "analysis"
# Who may be told something without being called.
_PEOPLE: Final = ("assistant", "user", "all")

# More than the space before a recipient.
_LONGEST_BEGINNING: Final = 16


def _names_recipient(ahead: str, more: bool) -> bool | None:
    """Return whether a text begins with the recipient of a message."""
    begun = ahead.lstrip()
    if begun != _TO and _TO.startswith(begun):
        return None if more else False
    return begun.startswith(_TO)


class _Header(NamedTuple):
    """The words before a message. ``tool`` is empty if the message calls none."""

    tool: str
    is_thought: bool


class GptOssParser(CallParser):
    """gpt-oss: messages of the form ``<|channel|>CHANNEL<|message|>TEXT<|end|>``, and ``<|start|>assistant`` between.

    The channel ``analysis`` is reasoning, and the others are content. A message ``to=functions.NAME`` calls a function
    with JSON; the recipient may come before or after the channel. The model stops with the end of a call.
    """

    name = "gpt_oss"
    markers = (START_MESSAGE, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS)
    closes = True
    form = CallForm(
        before=(CHANNEL, f"commentary to={NAMESPACE}"),
        quoted=False,
        between=(" ", CONSTRAIN, "json", MESSAGE),
        separator=(END_MESSAGE, START_MESSAGE, "assistant"),
    )

    def __init__(self, tools: Collection[str], properties: Mapping[str, Properties] | None = None) -> None:
        super().__init__(tools, properties)
        # Whether a message begins, and what there was before it.
        self._begins = False
        self._has_spoken = False
        self._has_thought = False
        # Whitespace that is reasoning only if more follows.
        self._held = ""

    def _read(self) -> Reading[None]:
        text = self._text
        emit: Emit = self._speak
        if (yield from text.judged(_names_recipient, _LONGEST_BEGINNING)):
            # The prompt has begun the header.
            text.mark()
            emit = yield from self._read_message()
        while (found := (yield from text.until(self.markers, emit))) is not None:
            if found in (START_MESSAGE, CHANNEL):
                text.mark(back=len(found))
                emit = yield from self._read_message()
            else:
                emit = self._speak

    def _read_message(self) -> Reading[Emit]:
        """Read the header of a message, and all of it if it is a call; return what takes its text."""
        text, words = self._text, ""
        while True:
            words += yield from text.word(_HEADER)
            marker = yield from text.marker(_IN_HEADERS)
            if marker in (None, MESSAGE):
                break
            words = "" if marker == START_MESSAGE else f"{words} "
        header = self._header_of(words)
        if header.tool and (yield from self._read_call(header.tool, is_announced=marker == MESSAGE)):
            return self._speak
        self._begins = True
        if marker == MESSAGE and (header.is_thought or not header.tool):
            text.unmark()
            return self._think if header.is_thought else self._speak
        has_text = header.tool or (yield from text.peek())
        lost = text.unmark()
        # A header that was cut says nothing.
        self._speak(lost if has_text else "")
        return self._speak

    def _header_of(self, words: str) -> _Header:
        recipient, channel = _RECIPIENT.search(words), _CHANNEL.search(words)
        is_thought = channel is not None and channel[1] == _ANALYSIS
        written = recipient[1] if recipient else ""
        name = written.removeprefix(NAMESPACE)
        if not self._tools or not name or written in (*_PEOPLE, NAMESPACE.rstrip(".")):
            return _Header("", is_thought)
        tool = next((one for one in (written, name, name.rpartition(".")[2]) if one in self._tools), "")
        # Reasoning with tools that the client has not given is reasoning.
        is_foreign = not tool and name == written and is_thought
        return _Header("" if is_foreign else tool or name, is_thought)

    def _read_call(self, name: str, *, is_announced: bool) -> Reading[bool]:
        """Read the arguments of a call; False if they are none."""
        text, given = self._text, ""
        yield from text.run(SPACE)
        yield from self._skip_fence()
        if (yield from text.peek()) != "{":
            given = yield from self._read_others(self.markers, may_end=is_announced)
            if not given:
                return False
        self._begin(name)
        yield from self._read_whole_arguments(name, given)
        yield from self._read_end()
        return True

    def _think(self, text: str) -> None:
        """Emit reasoning, each message of it on lines of its own."""
        text = self._held + text
        if self._begins:
            text = text.lstrip()
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if shown:
            appended(self._found, Reasoning("\n" * (self._begins and self._has_thought) + shown))
            self._has_thought, self._begins = True, False

    def _speak(self, text: str) -> None:
        """Emit content, each message of it on lines of its own."""
        self._held = ""
        if text:
            self._parts.say("\n" * (self._begins and self._has_spoken) + text)
            self._has_spoken, self._begins = True, False
