"""The base class of the parsers of tool calls; each family of models has a subclass.

A class has the family's name, markers, grammar form, call ids and reader. Text that only looks like a call is emitted
as content.
"""

from __future__ import annotations

import re
import uuid
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Final

from engine.frontend.text.incoming_text import Reading
from engine.frontend.text.reasoning import Part, PartReader
from engine.frontend.text.tools.argument_schemas import Properties, is_text
from engine.frontend.text.tools.call_grammar import CallForm
from engine.frontend.text.tools.call_objects import NO_ARGUMENTS, CallObject, read_arguments, read_other_arguments
from engine.frontend.text.tools.call_parts import FENCE, CallParts
from engine.frontend.text.tools.called_names import CalledNames
from engine.frontend.text.tools.closing_tags import is_closer
from engine.frontend.text.tools.json_values import QUOTES, SPACE, decoded
from engine.frontend.text.tools.python_values import read_python_value
from engine.frontend.text.tools.tagged_values import WrittenArguments, is_argument, json_of

# The tags around each call of Hermes, Qwen3-Coder and GLM.
OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
# The separators between calls, and a surplus brace, which models often write.
_BETWEEN = re.compile(r"[\s,;}]*")
# What may be left of a call after its arguments.
_REST = re.compile(r"[\s`}]*")
_LANGUAGE = re.compile(r"[\w+-]*")
_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"[^\s=,()\[\]{}<>\"']*")
_OPENING = frozenset("[({'\"")
_NEVER_AFTER_A_CLOSER = re.compile(r"[^\s,=()\[\]{}<>'\"]*")
_BETWEEN_ARGUMENTS = re.compile(r"[\s,]*")
_WORD = re.compile(r"[^\s,<>()\[\]{}\"']*")
_IN_NO_NAME = re.compile(r"[()\[\]{}=\"']")


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
    closers: ClassVar[tuple[str, ...]] = ()
    """The tags that close a call, which models damage."""
    ends_reasoning: ClassVar[tuple[str, ...]] = ()
    """Markers that end reasoning whose own end is missing."""

    _is_fenced = False
    """Whether a Markdown fence was read after a marker."""
    _has_begun = False
    """Whether the call in Python that was read last has begun."""

    def __init__(self, tools: Collection[str], properties: Mapping[str, Properties] | None = None) -> None:
        super().__init__()
        self._tools = frozenset(tools)
        self._properties = properties or {}
        self._parts = CallParts(self._found, self._tools)
        self._called = CalledNames(self._tools, self._properties)

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
        """Read calls that are objects, or names with arguments: one, several, or a list.

        Emit the marked text as content if there is none.
        ``bare``: no marker precedes them. False if there is none.
        """
        text = self._text
        yield from text.run(SPACE)
        listed = (yield from text.peek()) == "[" and (yield from text.sees(self.markers)) is None
        if listed:
            text.take(1)
            yield from text.run(SPACE)
        found = False
        while True:
            if (yield from text.peek()) == "{":
                stops, tools = self.markers + self.separators, self._tools if bare else None
                if not (yield from CallObject(text, self._parts, stops, tools, self._properties).read()):
                    break
                yield from self._read_between()
            elif (bare and not listed) or not (yield from self._read_called()):
                break
            found = True
            text.mark()
        if listed and found and (yield from text.peek()) == "]":
            text.take(1)
            text.unmark()
            yield from self._read_between()
        self._give_back()
        self._is_fenced = self._is_fenced and found
        return found

    def _read_start(self) -> Reading[None]:
        """Read calls without a marker with which the text begins, if they name tools and have only the keys of calls.

        Anywhere else they may be an example, and only at the start the model has not said that.
        """
        text = self._text
        yield from text.run(SPACE, self._parts.say)
        if (yield from text.marker((FENCE,))) is not None:
            # Before a call it is left out.
            self._parts.say(FENCE)
            yield from text.run(_LANGUAGE, self._parts.say)
            yield from text.run(SPACE, self._parts.say)
        text.mark()
        if (yield from text.peek()) in ("{", "["):
            found = yield from self._read_objects(bare=True)
        else:
            called = yield from self._called.seen(text)
            found = called is not None and called.has_object and (yield from self._read_called())
            self._give_back()
        if found:
            for closer in self.closers:
                yield from self._skip_closers(closer)

    def _sees_object(self) -> Reading[bool]:
        """Return whether calls as other families write them are at this position: objects, or names with arguments."""
        first = yield from self._text.peek()
        return (first != "" and first in "[{") or (yield from self._called.seen(self._text)) is not None

    def _read_called(self) -> Reading[bool]:
        """Read a call whose arguments follow the name of a tool at once; False, with nothing read, if there is none."""
        called = yield from self._called.seen(self._text)
        if called is None:
            return False
        self._text.take(len(called.written))
        yield from self._read_arguments_of(called.tool)
        return True

    def _read_arguments_of(self, name: str) -> Reading[None]:
        """Read the arguments of a call whose name precedes them."""
        arguments = WrittenArguments(self._parts)
        if (yield from self._read_given(name, arguments)):
            arguments.end()
        yield from self._read_between()

    def _read_given(self, name: str, arguments: WrittenArguments) -> Reading[bool]:
        """Read the arguments after a tool's name. True if they have names, so that more may follow and the end must.

        False if they were an object, with which the call has ended, or if they were cut.
        """
        text = self._text
        yield from text.run(SPACE)
        in_parentheses = (yield from text.peek()) == "("
        text.take(int(in_parentheses))
        yield from text.run(SPACE)
        if (yield from text.peek()) == "{":
            self._begin(name)
            yield from self._read_whole_arguments(name)
            if in_parentheses:
                yield from text.run(SPACE)
                text.take(int((yield from text.peek()) == ")"))
            return False
        return (yield from self._read_named(name, arguments, closer=")" if in_parentheses else ">"))

    def _read_whole_arguments(self, name: str, given: str = "") -> Reading[None]:
        """Read the object of a call that has begun, unless its whole arguments are ``given``; the call ends with it."""
        if given:
            self._parts.give(given)
        else:
            stops, declared = self.markers + self.separators, self._properties.get(name, {})
            yield from read_arguments(self._text, self._parts, stops, name, declared)

    def _read_others(self, ends: Sequence[str], *, may_end: bool = True) -> Reading[str]:
        """Read arguments that do not begin as an object; a call that ends before them has none.

        One of ``ends`` ends it, and so does the end of the text if it ``may_end`` there.
        """
        text = self._text
        is_at_end = not (yield from text.peek()) and text.has_stopped and may_end
        if is_at_end or (yield from text.sees(ends)) is not None:
            return NO_ARGUMENTS
        return (yield from read_other_arguments(text))

    def _read_end(self) -> Reading[None]:
        """Read what is left of a call after its arguments."""
        yield from self._skip_fence_end()
        yield from self._text.run(_REST)
        for closer in self.closers:
            yield from self._skip_closers(closer)
        yield from self._text.run(SPACE)

    def _read_named(self, name: str, arguments: WrittenArguments, *, closer: str) -> Reading[bool]:
        """Read arguments with names up to their ``closer``; False if they are truncated or not those of a call.

        Before a bracket they are Python, and before the end of a tag attributes, whose schemas say what they are.
        """
        text, self._has_begun = self._text, False
        yield from text.run(SPACE)
        while not ((yield from text.peek()) == closer or (self._has_begun and (yield from self._lacks_closer()))):
            key = yield from text.word(_KEY)
            yield from text.run(SPACE)
            if closer == ">" and key == "/" and (yield from text.peek()) == ">":
                break
            if not key or (yield from text.peek()) != "=":
                self._give_back()
                return False
            text.take(1)
            if not self._has_begun:
                self._begin(name)
            yield from text.run(SPACE)
            arguments.key(key)
            first = yield from text.peek()
            if closer == ">":
                whole = yield from self._read_attribute(arguments, self._properties.get(name, {}).get(key, {}))
            else:
                whole = yield from read_python_value(text, arguments.add, self._lacks_closer)
            if not whole:
                return False
            if first in _OPENING and not (yield from self._lacks_closer()):
                yield from text.run(_NEVER_AFTER_A_CLOSER)
            yield from text.run(_BETWEEN_ARGUMENTS)
        text.take(int((yield from text.peek()) == closer))
        if not self._has_begun:
            self._begin(name)
        return True

    def _read_attribute(self, arguments: WrittenArguments, schema: Mapping[str, Any]) -> Reading[bool]:
        """Read the value of an attribute, which may be written in quotes although it is no text."""
        text, written = self._text, list[str]()
        first = yield from text.peek()
        if first not in _OPENING:
            word = yield from text.word(_WORD)
            word = word.removesuffix("/" * ((yield from text.peek()) == ">"))
            arguments.add(json_of(word, schema) if word else "")
            return bool(word)
        emit = arguments.add if is_text(schema) else written.append
        if not (yield from read_python_value(text, emit, self._lacks_closer)):
            return False
        value = "".join(written)
        said = decoded(value) if first in QUOTES else None
        arguments.add(value if said is None else json_of(said, schema))
        return True

    def _begin(self, name: str) -> None:
        self._has_begun = True
        self._text.unmark()
        self._parts.begin(name)

    def _lacks_closer(self) -> Reading[bool]:
        """Return whether a call ends here without its bracket: at the end of its text, or before the next call."""
        text = self._text
        character = yield from text.peek()
        if not character:
            return text.has_stopped
        if character in "]}>" or (yield from text.sees((*self.markers, *self.separators))) is not None:
            return True
        if character == "<":
            tag = yield from text.tag()
            return any(is_closer(tag, closer, self.markers) for closer in self.closers)
        text.mark()
        name = yield from text.word(_NAME)
        follows = name in self._tools and (yield from text.peek()) == "("
        text.rewind()
        return follows

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

    def _may_be_name(self, name: str) -> bool:
        """Return whether a text may be a name: one that is no tool's has no brackets, quotes or equals signs."""
        return name in self._tools or (name != "" and _IN_NO_NAME.search(name) is None)

    def _give_back(self) -> None:
        """Emit the held text as content: it is not a call."""
        self._parts.say(self._text.unmark())


class SectionParser(CallParser):
    """Finds calls between two markers each, which other markers surround together: a section.

    Either marker of a section may be missing.
    """

    sections: ClassVar[tuple[str, ...]]
    """Markers before all calls."""
    call: ClassVar[str]
    """The marker before each call."""
    end_sections: ClassVar[tuple[str, ...]]
    """Markers after all calls."""

    def _read(self) -> Reading[None]:
        text = self._text
        while (found := (yield from text.until((*self.sections, self.call), self._parts.say))) is not None:
            text.mark(back=len(found))
            if found != self.call:
                yield from self._skip_openers(found)
                if not (yield from self._opens_call()):
                    self._give_back()
                    continue
            while (yield from self._read_call()):
                before = text.place
                if not (yield from self._opens_call()):
                    break
                text.mark(back=text.place - before)
            for closer in self.end_sections:
                yield from self._skip_closers(closer)

    def _opens_call(self) -> Reading[bool]:
        """Read the marker before a call, if there is one; a call may also show without it."""
        return (yield from self._text.marker((self.call,))) is not None or (yield from self._sees_call())

    @abstractmethod
    def _sees_call(self) -> Reading[bool]:
        """Return whether a call without its marker is at this position."""

    @abstractmethod
    def _read_call(self) -> Reading[bool]:
        """Read one call; False with the text given back if there is none."""
