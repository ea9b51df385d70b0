"""The base class of the parsers of tool calls; each family of models has a subclass.

A class has the family's name, markers, grammar form, call ids and reader. Text that only looks like a call is emitted
as content.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Mapping
from typing import ClassVar, Final

from engine.frontend.text.incoming_text import Reading
from engine.frontend.text.reasoning import Part, PartReader
from engine.frontend.text.tools.argument_schemas import Properties
from engine.frontend.text.tools.call_grammar import CallForm
from engine.frontend.text.tools.call_objects import CallObject, read_arguments
from engine.frontend.text.tools.call_parts import FENCE, CallParts
from engine.frontend.text.tools.closing_tags import is_closer
from engine.frontend.text.tools.json_values import SPACE
from engine.frontend.text.tools.tagged_values import is_argument

# The tags around each call of Hermes, Qwen3-Coder and GLM.
OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
# The separators between calls, and a surplus brace, which models often write.
_BETWEEN = re.compile(r"[\s,;}]*")
_LANGUAGE = re.compile(r"[\w+-]*")


class CallParser(PartReader):
    """Finds the calls in one output's text.

    ``tools`` are the names of the model's tools, ``properties`` the argument schemas of each.
    """

    name: ClassVar[str]
    form: ClassVar[CallForm]
    """The form of the family's calls, for grammars."""
    markers: ClassVar[tuple[str, ...]]
    """Markers around the family's calls; a tokenizer may have them as special tokens."""
    separators: ClassVar[tuple[str, ...]] = ()
    """Text after a call's object that never occurs in JSON outside strings."""
    closes: ClassVar[bool] = False
    """Whether a marker closes each call."""

    _is_fenced = False
    """Whether a Markdown fence was read after a marker."""

    def __init__(self, tools: Collection[str], properties: Mapping[str, Properties] | None = None) -> None:
        super().__init__()
        self._tools = frozenset(tools)
        self._properties = properties or {}
        self._parts = CallParts(self._found, self._tools)

    @classmethod
    def form_of(cls, template: str) -> CallForm:  # noqa: ARG003 - some families have an older and a newer way
        """Return the form of calls for models with this chat template."""
        return cls.form

    @staticmethod
    def new_id() -> str:
        """Make an id for a call without one."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def flush(self, *, stopped: bool = False) -> list[Part]:
        """End the text; return the remaining parts. ``stopped``: the model ended it, rather than a limit."""
        self._text.end(stopped=stopped)
        next(self._reader, None)
        self._parts.close()
        return self._advance()

    def _read_objects(self, *, bare: bool = False) -> Reading[bool]:
        """Read calls that are objects: one, several, or a list. Emit the marked text as content if there is none.

        ``bare``: no marker precedes them. False if there is none.
        """
        text = self._text
        yield from text.run(SPACE)
        listed = (yield from text.peek()) == "[" and (yield from text.sees(self.markers)) is None
        if listed:
            text.take(1)
            yield from text.run(SPACE)
        found = False
        while (yield from text.peek()) == "{":
            stops, tools = self.markers + self.separators, self._tools if bare else None
            if not (yield from CallObject(text, self._parts, stops, tools, self._properties).read()):
                break
            found = True
            yield from self._read_between()
            text.mark()
        if listed and found and (yield from text.peek()) == "]":
            text.take(1)
            text.unmark()
            yield from self._read_between()
        self._give_back()
        self._is_fenced = self._is_fenced and found
        return found

    def _read_object_of(self, name: str) -> Reading[None]:
        """Read the object at this position as the arguments of a call whose name precedes it."""
        self._text.unmark()
        self._parts.begin(name)
        yield from read_arguments(self._text, self._parts, self.markers + self.separators)
        yield from self._read_between()

    def _read_between(self) -> Reading[None]:
        """Read the separator between calls. Its whitespace may be content if no marker closes a call."""
        between = yield from self._text.word(_BETWEEN)
        if not self.closes:
            self._parts.say("".join(character for character in between if character.isspace()))

    def _skip_openers(self, opener: str) -> Reading[None]:
        """Read whitespace after an opening tag, the same tag again, which models sometimes double, and a fence."""
        yield from self._text.run(SPACE)
        while (yield from self._text.marker((opener,))) is not None:
            yield from self._text.run(SPACE)
        yield from self._skip_fence()

    def _skip_fence(self) -> Reading[bool]:
        """Read the opening of a Markdown block around the calls, if there is one."""
        self._is_fenced = (yield from self._text.marker((FENCE,))) is not None
        if self._is_fenced:
            yield from self._text.run(_LANGUAGE)
            yield from self._text.run(SPACE)
        return self._is_fenced

    def _skip_fence_end(self) -> Reading[None]:
        """Read the end of a Markdown block whose opening was read."""
        if self._is_fenced:
            yield from self._text.run(SPACE)
            self._is_fenced = (yield from self._text.marker((FENCE,))) is None
            yield from self._text.run(SPACE)

    def _skip_closers(self, closer: str) -> Reading[bool]:
        """Read a closing tag at this position, intact or damaged, if there is one, and the same tag again."""
        text = self._text
        yield from self._skip_fence_end()
        found = yield from self._skip_closer(closer)
        while found:
            text.mark()
            yield from text.run(SPACE)
            if (yield from text.marker((closer,))) is None:
                text.rewind()
                break
            text.unmark()
        return found

    def _skip_closer(self, closer: str) -> Reading[bool]:
        """Read a closing tag at this position, intact or damaged, if there is one."""
        tag = yield from self._text.tag()
        if not is_closer(tag, closer, self.markers):
            return False
        self._text.take(len(tag))
        return True

    def _accepts(self, tool: str, key: str, written: str | None) -> bool:
        """Return whether a tool may be called with this argument; True if its arguments are unknown."""
        properties = self._properties.get(tool)
        return not properties or is_argument(written, properties.get(key))

    def _give_back(self) -> None:
        """Emit the held text as content: it is not a call."""
        self._parts.say(self._text.unmark())
