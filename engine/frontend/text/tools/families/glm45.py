"""The calls of GLM-4.5 and later."""

from __future__ import annotations

import re
from typing import Final

from engine.frontend.text.incoming_text import Reading
from engine.frontend.text.tools.argument_schemas import Properties
from engine.frontend.text.tools.call_grammar import ArgumentForm, CallForm
from engine.frontend.text.tools.closing_tags import is_closer
from engine.frontend.text.tools.families.base import CLOSE, OPEN, CallParser
from engine.frontend.text.tools.json_values import SPACE
from engine.frontend.text.tools.nested_calls import BEFORE_TAG, CallOpening, Meaning, NestedCalls, TagPair
from engine.frontend.text.tools.tagged_values import TaggedValues, WrittenArguments, may_follow

KEY: Final = "<arg_key>"
END_KEY: Final = "</arg_key>"
VALUE: Final = "<arg_value>"
END_VALUE: Final = "</arg_value>"
# Neither pattern crosses a tag, because a stray tag would be read as a part of a key.
_BARE_NAME = re.compile(r"[^<>\s{}]*")
_KEY = re.compile(r"[^<]*")
_OPENING = re.compile(rf"(?:{OPEN}\s*)+(?:(?P<object>{{)|(?P<name>[^<>\s(){{}}]*))")
# A key without its opening tag is looked for in so many characters.
_LONGEST_KEY: Final = 96
_PAIRS: Final = (TagPair((OPEN,), CLOSE), TagPair((VALUE,), END_VALUE))


class Glm45Parser(CallParser):
    """GLM-4.5 and later: ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``.

    The tags are on separate lines or on one. A call without arguments is only a name.
    """

    name = "glm45"
    markers = (OPEN, CLOSE, KEY, END_KEY, VALUE, END_VALUE)
    closes = True
    closers = (CLOSE,)
    form = CallForm(
        before=(OPEN,),
        quoted=False,
        between=("\n",),
        after=(CLOSE,),
        separator=("\n",),
        arguments=ArgumentForm(before=(KEY,), between=(END_KEY, "\n", VALUE), after=(END_VALUE, "\n"), raw=True),
    )

    def _read(self) -> Reading[None]:
        text = self._text
        opening = CallOpening(_OPENING, self._tools)
        nested = NestedCalls(text, _PAIRS, Meaning(opening, self._named_by, self._accepts), (KEY,))
        while (yield from text.until((OPEN,), self._parts.say)) is not None:
            text.mark(back=len(OPEN))
            yield from self._skip_openers(OPEN)
            if (yield from self._sees_object()):
                # As other models write calls between these tags.
                if (yield from self._read_objects()):
                    yield from self._skip_closers(CLOSE)
                continue
            name = yield from self._read_name()
            space = yield from text.word(SPACE)
            if not self._may_be_name(name) or not (yield from self._is_call(name)):
                self._give_back()
                continue
            text.unmark()
            self._parts.begin(name)
            nested.enter(name, has_lines="\n" in space)
            yield from self._read_arguments(name, nested, opening)

    def _named_by(self, tag: str) -> Reading[tuple[str | None, str | None]]:
        """Read on after a tag in a value; return the tool or the key that it is before."""
        text = self._text
        if tag == KEY:
            return None, (yield from text.word(_KEY)).strip()
        if tag != OPEN:
            return None, None
        yield from text.run(SPACE)
        return (yield from text.word(_BARE_NAME)), None

    def _read_name(self) -> Reading[str]:
        """Read a name; of one that runs into a key only the tool's, if that is certain."""
        text = self._text
        name = yield from text.word(_BARE_NAME)
        if name in self._tools or (yield from text.sees((END_KEY,))) is None:
            return name
        tools = [
            tool
            for tool, properties in self._properties.items()
            if name.startswith(tool) and name.removeprefix(tool) in properties
        ]
        if len(tools) == 1:
            text.step_back(len(name) - len(tools[0]))
            return tools[0]
        return name

    def _is_call(self, name: str) -> Reading[bool]:
        """Return whether a call follows a name; a call of a known tool may end here without its closing tag."""
        if name in self._tools and (
            yield from self._sees_lost_key(WrittenArguments(self._parts), self._properties.get(name, {}))
        ):
            return True
        tag = yield from self._text.tag()
        if tag in (KEY, CLOSE) or (name in self._tools and (tag == OPEN or is_closer(tag, CLOSE, self.markers))):
            return True
        return name in self._tools and self._text.has_stopped and not (yield from self._text.peek())

    def _read_arguments(self, name: str, nested: NestedCalls, opening: CallOpening) -> Reading[None]:
        """Read up to the end of the call; a truncated call gets no end."""
        text, arguments, properties = self._text, WrittenArguments(self._parts), self._properties.get(name, {})

        def forgotten(tag: str, at_line_start: bool) -> Reading[bool]:
            del at_line_start
            if tag == OPEN:
                return (yield from opening.follows(text))
            text.take(len(tag))
            if tag == KEY:
                key = (yield from text.word(_KEY)).strip()
                opens = (yield from text.sees((END_KEY, VALUE))) is not None
                return opens and may_follow(key, arguments, properties, at_line_start=True)
            if not is_closer(tag, CLOSE, self.markers):
                return False
            yield from text.run(SPACE)
            return not (yield from text.peek()) or (yield from opening.follows(text))

        values = TaggedValues(
            text,
            close=END_VALUE,
            followers=(KEY, OPEN),
            closers=(CLOSE,),
            forgotten=forgotten,
            nested=nested,
            resumes=lambda: self._sees_lost_key(arguments, properties),
            lines=False,
        )
        while (yield from self._next_argument(arguments, properties)):
            key = yield from self._read_key()
            if not (yield from text.peek()):
                return
            if (yield from self._lacks_value()):
                continue
            if not key or key in arguments.keys:
                whole = yield from values.skip()
            else:
                whole = yield from values.read(properties.get(key, {}), arguments, key)
            if not whole:
                return
        if (yield from self._skip_closers(CLOSE)) or text.has_stopped or (yield from text.peek()):
            arguments.end()

    def _sees_lost_key(self, arguments: WrittenArguments, properties: Properties) -> Reading[bool]:
        """Return whether a key of the tool is at this position whose opening tag is missing, or is that of a call."""

        def judged(ahead: str, more: bool) -> bool | None:
            rest = ahead.removeprefix(OPEN)
            at = rest.find("<")
            if at < 0 or OPEN.startswith(ahead) or END_KEY.startswith(rest[at:]):
                is_whole = at >= 0 and rest[at:] == END_KEY
                if not is_whole:
                    return None if more else False
            return rest[at:].startswith(END_KEY) and may_follow(
                rest[:at].strip(), arguments, properties, at_line_start=False
            )

        return bool((yield from self._text.judged(judged, _LONGEST_KEY)))

    def _next_argument(self, arguments: WrittenArguments, properties: Properties) -> Reading[bool]:
        """Read through the opening of the next argument; False at the end of the call."""
        text = self._text
        while True:
            yield from text.run(SPACE)
            if (yield from self._sees_lost_key(arguments, properties)):
                yield from text.marker((OPEN,))
                return True
            yield from text.run(BEFORE_TAG)
            tag = yield from text.tag()
            if tag == KEY:
                text.take(len(tag))
                return True
            if not tag or tag == OPEN or is_closer(tag, CLOSE, self.markers):
                return False
            # Not part of a call.
            text.take(len(tag))

    def _read_key(self) -> Reading[str]:
        """Read a key and the tags around it, which models sometimes double, damage or forget."""
        text = self._text
        while (yield from text.marker((KEY,))) is not None:
            pass
        key = yield from text.word(_KEY)
        while (yield from self._skip_closer(END_KEY)) or (yield from self._skip_damaged()):
            yield from text.run(SPACE)
        return key.strip()

    def _lacks_value(self) -> Reading[bool]:
        """Read the opening tag of a value. True if the next argument or the end of the call comes instead."""
        if (yield from self._text.marker((VALUE,))) is not None:
            return False
        tag = yield from self._text.tag()
        return tag in (OPEN, KEY) or is_closer(tag, CLOSE, self.markers)

    def _skip_damaged(self) -> Reading[bool]:
        """Read any other tag between a key and the tag of its value."""
        text = self._text
        text.mark()
        tag = yield from text.tag()
        text.take(len(tag))
        yield from text.run(SPACE)
        is_before_value = (
            bool(tag) and tag not in (OPEN, CLOSE, KEY, VALUE) and (yield from text.sees((VALUE,))) is not None
        )
        if is_before_value:
            text.unmark()
        else:
            text.rewind()
        return is_before_value
