"""The calls of Qwen3-Coder."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

from engine.frontend.text.incoming_text import Emit, Reading, dropped
from engine.frontend.text.tools.argument_schemas import Properties
from engine.frontend.text.tools.call_grammar import ArgumentForm, CallForm
from engine.frontend.text.tools.closing_tags import is_closer
from engine.frontend.text.tools.families.base import CLOSE, OPEN, CallParser
from engine.frontend.text.tools.json_values import SPACE
from engine.frontend.text.tools.nested_calls import BEFORE_TAG, CallOpening, Meaning, NestedCalls, TagPair
from engine.frontend.text.tools.tagged_values import TaggedValues, WrittenArguments, may_follow

FUNCTION: Final = "<function="
END_FUNCTION: Final = "</function>"
PARAMETER: Final = "<parameter="
END_PARAMETER: Final = "</parameter>"
# The openings of a function and of a parameter, and as elements with an attribute, or abbreviated.
_FUNCTIONS: Final = (FUNCTION, "<function name=")
_PARAMETERS: Final = (PARAMETER, "<parameter name=", "<param=", "<param name=")
_PAIRS: Final = (TagPair((OPEN,), CLOSE), TagPair(_FUNCTIONS, END_FUNCTION), TagPair(_PARAMETERS, END_PARAMETER))
_OPENING = re.compile(
    rf"(?:{OPEN}\s*)*(?:(?P<object>(?<=>)\s*{{)|<function(?:\s+name)?=\s*[\"']?(?P<name>[^<>\n\"'(){{}}=]*?)(?=\s+\w+=|\s*[(<>\n\"'{{]|$))?"
)
# The opening of any element up to a name, which is a parameter's where only one is possible.
_ELEMENT = re.compile(r"<(?:(\w+)(?:\s+name)?\s*[=:\s]\s*)?")
_AFTER_ARGUMENTS = re.compile(r"[\s,;}>\]]*")
_TAG_NAME = re.compile(r"[^<>\n]*")


def _opener_of(tag: str, openers: Sequence[str] = _PARAMETERS) -> str:
    """Return the beginning of a tag that opens a parameter, up to its name; empty for any other tag."""
    return next((opener for opener in openers if tag.startswith(opener)), "")


def _misspelt_opener_of(tag: str, names: Collection[str]) -> str:
    """Return the same for a tag of any other element with one of some names."""
    found = _ELEMENT.match(tag)
    opener = found.group() if found else ""
    return opener if opener and _name_in(tag.removeprefix(opener).removesuffix(">")) in names else ""


def _element_of(opener: str) -> str:
    """Return the name of the element that a tag opens, if it is not the usual one."""
    element = _ELEMENT.match(opener)
    return (element[1] or "") if element and opener != PARAMETER else ""


def _named_by(tag: str) -> Reading[tuple[str | None, str | None]]:
    """Return the tool or the parameter that a tag names."""
    yield from ()
    opener, function = _opener_of(tag), _opener_of(tag, _FUNCTIONS)
    name = _name_in(tag.removeprefix(opener or function).removesuffix(">"))
    return (name if function else None), (name if opener else None)


def _name_in(written: str) -> str:
    """Return the name in a tag without spaces and quotes around it."""
    name = written.strip()
    quoted = len(name) > 1 and name[0] == name[-1] and name[0] in "\"'"
    return name[1:-1] if quoted else name


class Qwen3CoderParser(CallParser):
    """Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``, on separate
    lines.

    Models sometimes omit the outer tag: a function that is a known tool is a call without it.
    """

    name = "qwen3_coder"
    markers = (OPEN, CLOSE)
    closes = True
    separators = (FUNCTION, END_FUNCTION)
    closers = (END_FUNCTION, CLOSE)
    form = CallForm(
        before=(OPEN, "\n" + FUNCTION),
        quoted=False,
        between=(">\n",),
        after=(END_FUNCTION + "\n", CLOSE),
        separator=("\n",),
        arguments=ArgumentForm(before=(PARAMETER,), between=(">\n",), after=(f"\n{END_PARAMETER}\n",), raw=True),
    )

    def _read(self) -> Reading[None]:
        text = self._text
        opening = CallOpening(_OPENING, self._tools)
        nested = NestedCalls(text, _PAIRS, Meaning(opening, _named_by, self._accepts))
        while (found := (yield from text.until((OPEN, *_FUNCTIONS), self._parts.say))) is not None:
            text.mark(back=len(found))
            if found == OPEN:
                yield from self._skip_openers(OPEN)
                if (yield from self._sees_object()):
                    # As other models of the family write calls.
                    if (yield from self._read_objects()):
                        yield from self._skip_closers(CLOSE)
                    continue
            opener = found
            if found == OPEN and (yield from text.marker(_FUNCTIONS)) is None:
                opener = _misspelt_opener_of((yield from text.tag()), self._tools)
                text.take(len(opener))
                if not opener:
                    self._give_back()
                    continue
            yield from self._read_function(nested, opening, opener)

    def _read_function(self, nested: NestedCalls, opening: CallOpening, opener: str) -> Reading[None]:
        """Read a function after the beginning of its tag, or after the usual one behind the tag of a call."""
        text = self._text
        called = yield from self._called.seen(text)
        if called is not None:
            text.take(len(called.written))
        name = called.tool if called is not None else (yield from self._read_name())
        element = "" if opener in (OPEN, *_FUNCTIONS) else _element_of(opener) or name
        # Even without its bracket the tag belongs to a call if it names a tool.
        closed = (yield from text.peek()) == ">"
        if not self._may_be_name(name) or ((opener != OPEN or not closed) and name not in self._tools):
            self._give_back()
            return
        text.take(int(closed))
        nested.enter(name, has_lines="\n" in (yield from text.word(SPACE)))
        arguments, properties = WrittenArguments(self._parts), self._properties.get(name, {})
        text.take(len((yield from self._called.named_again(text, name))))
        lost, opener = list[str](), ""
        if called is not None or (yield from text.peek()) == "{" or (yield from self._called.sees_named(text, name)):
            has_names = yield from self._read_given(name, arguments)
            yield from text.run(_AFTER_ARGUMENTS)
            if not has_names:
                yield from self._skip_closers(END_FUNCTION)
                yield from text.run(SPACE)
                yield from self._skip_closers(CLOSE)
                return
        else:
            opener = yield from self._next_parameter(properties, lost.append)
            # Text is no argument, so a tool that has some is not called with it alone.
            has_none = name in self._properties and not properties
            if not (opener or has_none) and "".join(lost).strip() and ((yield from text.peek()) or text.has_stopped):
                self._give_back()
                return
            self._begin(name)
        values = self._values_of(arguments, properties, nested, opening, element)
        while opener := opener or (yield from self._next_parameter(properties)):
            key = yield from self._read_name()
            closed = (yield from text.peek()) == ">"
            text.take(int(closed))
            if not key or key in arguments.keys or not (closed or key in properties or not properties):
                whole = yield from values.skip()
            else:
                whole = yield from values.read(properties.get(key, {}), arguments, key, _element_of(opener))
            if not whole:
                return
            opener = ""
        yield from text.run(SPACE)
        closed = yield from self._skip_closers(END_FUNCTION)
        yield from text.run(SPACE)
        closed = (yield from self._skip_closers(CLOSE)) or closed
        if closed or text.has_stopped or (yield from text.peek()):
            arguments.end()

    def _values_of(
        self,
        arguments: WrittenArguments,
        properties: Properties,
        nested: NestedCalls,
        opening: CallOpening,
        element: str,
    ) -> TaggedValues:
        """Return the reader of the values of a call. ``element`` is the name of its tag, unless it is the usual one."""

        def forgotten(tag: str, at_line_start: bool) -> Reading[bool]:
            if opener := _opener_of(tag):
                key = _name_in(tag.removeprefix(opener).removesuffix(">"))
                return may_follow(key, arguments, properties, at_line_start)
            return (yield from self._ends_call(tag, opening))

        return TaggedValues(
            self._text,
            close=END_PARAMETER,
            followers=(*_PARAMETERS, OPEN, *_FUNCTIONS),
            closers=(END_FUNCTION, CLOSE, *([f"</{element}>"] if element else [])),
            forgotten=forgotten,
            nested=nested,
            opens=lambda tag: bool(_misspelt_opener_of(tag, properties)),
            lines=True,
        )

    def _next_parameter(self, properties: Properties, emit: Emit = dropped) -> Reading[str]:
        """Read the opening of the next parameter up to its name, and return it; empty at the end of the call.

        What is before it goes to ``emit``: it is no part of a call.
        """
        text = self._text
        while True:
            yield from text.run(BEFORE_TAG, emit)
            tag = yield from text.tag()
            if opener := _opener_of(tag):
                text.take(len(opener))
                return opener
            if not tag or tag.startswith((OPEN, *_FUNCTIONS)) or self._is_end(tag):
                return ""
            if opener := _misspelt_opener_of(tag, properties):
                text.take(len(opener))
                return opener
            emit(text.take(len(tag)))

    def _is_end(self, tag: str) -> bool:
        return any(is_closer(tag, closer, (*self.markers, *_FUNCTIONS)) for closer in (END_FUNCTION, CLOSE))

    def _ends_call(self, tag: str, opening: CallOpening) -> Reading[bool]:
        """Return whether a tag ends a call whose last value has no closing tag."""
        text = self._text
        if tag.startswith((OPEN, *_FUNCTIONS)):
            return (yield from opening.follows(text))
        if not self._is_end(tag):
            return False
        text.take(len(tag))
        yield from text.run(SPACE)
        after = yield from text.tag()
        if not is_closer(tag, CLOSE, (*self.markers, *_FUNCTIONS)) and self._is_end(after):
            return True
        return not (yield from text.peek()) or (yield from opening.follows(text))

    def _read_name(self) -> Reading[str]:
        return _name_in((yield from self._text.word(_TAG_NAME)))
