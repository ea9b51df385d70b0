"""Parsers of tool calls, one class for each family of models, and the family of a chat template.

A class has the family's name, markers, grammar form, call ids and reader. Text that only looked like a call is given
back as content.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Mapping
from typing import ClassVar, Final

from engine.frontend.text.incoming_text import Reading
from engine.frontend.text.reasoning import Part, PartReader
from engine.frontend.text.tools.call_grammar import ArgumentForm, CallForm
from engine.frontend.text.tools.call_parser import (
    SPACE,
    CallObject,
    CallParts,
    Properties,
    read_arguments,
    read_python_value,
)
from engine.frontend.text.tools.closing_tags import is_closer
from engine.frontend.text.tools.tagged_values import TaggedValues, WrittenArguments

# After a call: what separates calls in some families, and a brace too many, which models often write.
_BETWEEN = re.compile(r"[\s,;}]*")


class CallParser(PartReader):
    """Finds the calls in one answer's text.

    ``tools`` are the names of the tools that the model was given, ``properties`` the argument schemas of each.
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
    typed: ClassVar[bool] = False
    """Whether the reader needs the argument schemas."""

    def __init__(self, tools: Collection[str], properties: Mapping[str, Properties] | None = None) -> None:
        super().__init__()
        self._tools = frozenset(tools)
        self._properties = properties or {}
        self._parts = CallParts(self._found)

    @classmethod
    def form_of(cls, template: str) -> CallForm:  # noqa: ARG003 - some families have an older and a newer way
        """Return the form of calls for models with this chat template."""
        return cls.form

    @staticmethod
    def new_id() -> str:
        """Make an id for a call to which the model gave none."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def flush(self, *, stopped: bool = False) -> list[Part]:
        """End the text; return the remaining parts. ``stopped``: the model ended it, rather than a limit."""
        self._text.end(stopped=stopped)
        next(self._reader, None)
        self._parts.close()
        return self._advance()

    def _read_objects(self, *, bare: bool = False) -> Reading[None]:
        """Read calls that are objects: one, several, or a list. Give the marked text back if there is none.

        ``bare``: no marker announced them.
        """
        text = self._text
        yield from text.run(SPACE)
        listed = (yield from text.peek()) == "[" and (yield from text.sees(self.markers)) is None
        if listed:
            text.take(1)
            yield from text.run(SPACE)
        found = False
        while (yield from text.peek()) == "{":
            stops = self.markers + self.separators
            if not (yield from CallObject(text, self._parts, stops, self._tools if bare else None).read()):
                break
            found = True
            yield from self._read_between()
            text.mark()
        if listed and found and (yield from text.peek()) == "]":
            text.take(1)
            text.unmark()
            yield from self._read_between()
        self._give_back()

    def _read_between(self) -> Reading[None]:
        """Read the separator between calls. Its whitespace may be content if no marker closes a call."""
        between = yield from self._text.word(_BETWEEN)
        if not self.closes:
            self._parts.say("".join(character for character in between if character.isspace()))

    def _skip_closer(self, closer: str) -> Reading[bool]:
        """Read a closing tag at this position, intact or damaged, if there is one."""
        tag = yield from self._text.tag()
        if not is_closer(tag, closer, self.markers):
            return False
        self._text.take(len(tag))
        return True

    def _give_back(self) -> None:
        """Emit the held text as content: it is not a call."""
        self._parts.say(self._text.unmark())


# Of Hermes, Qwen3-Coder and GLM.
OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"


class HermesParser(CallParser):
    """Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once for each call.

    The objects end where their braces close, so that a string may name the markers.
    """

    name = "hermes"
    markers = (OPEN, CLOSE)
    closes = True
    form = CallForm(before=(OPEN, '\n{"name": '), between=(', "arguments": ',), after=("}\n", CLOSE), separator=("\n",))

    def _read(self) -> Reading[None]:
        text = self._text
        while (yield from text.until((OPEN,), self._parts.say)) is not None:
            text.mark(back=len(OPEN))
            yield from self._read_objects()
            yield from self._skip_closer(CLOSE)


PYTHON_TAG: Final = "<|python_tag|>"


class Llama3Parser(CallParser):
    """Llama 3: ``{"name": ..., "parameters": {...}}`` as it is or after ``<|python_tag|>``, several with ``;`` between.

    An object that nothing announces is a call if it names a tool and has no keys but a call's: models answer in JSON
    too.
    """

    name = "llama3"
    markers = (PYTHON_TAG,)
    separators = (";",)
    form = CallForm(before=('{"name": ',), between=(', "parameters": ',), after=("}",), separator=("; ",))

    def _read(self) -> Reading[None]:
        text = self._text
        while (found := (yield from text.until((PYTHON_TAG, "{"), self._parts.say))) is not None:
            text.mark(back=len(found))
            bare = found == "{"
            if bare:
                text.step_back(1)
            yield from self._read_objects(bare=bare)


TOOL_CALLS: Final = "[TOOL_CALLS]"
CALL_ID: Final = "[CALL_ID]"
ARGS: Final = "[ARGS]"
MISTRAL_NAMED_FORM: Final = CallForm(before=(TOOL_CALLS,), quoted=False, between=(ARGS,))
# Mistral's templates refuse ids of any other length.
MISTRAL_ID_CHARS = 9
_PLAIN_NAME = re.compile(r"[^\s\[\]{}]*")


class MistralParser(CallParser):
    """Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, or ``[TOOL_CALLS]name[ARGS]{...}`` for each call.

    Newer models give each call an id between name and arguments; some leave ``[ARGS]`` out.
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
        while (yield from text.until((TOOL_CALLS,), self._parts.say)) is not None:
            text.mark(back=len(TOOL_CALLS))
            yield from text.run(SPACE)
            first = yield from text.peek()
            if first and first in "[{":
                yield from self._read_objects()
            else:
                yield from self._read_named()

    def _read_named(self) -> Reading[None]:
        """Read one call whose name precedes its arguments."""
        text = self._text
        name = yield from self._read_name()
        call_id = None
        if (yield from text.marker((CALL_ID,))) is not None:
            call_id = (yield from self._read_name()) or None
        yield from text.marker((ARGS,))
        yield from text.run(SPACE)
        if not name or (yield from text.peek()) != "{":
            self._give_back()
            return
        text.unmark()
        self._parts.begin(name, call_id)
        yield from read_arguments(text, self._parts, self.markers)
        yield from self._read_between()

    def _read_name(self) -> Reading[str]:
        name = yield from self._text.word(_PLAIN_NAME)
        yield from self._text.run(SPACE)
        return name


START: Final = "<|python_start|>"
END: Final = "<|python_end|>"
_PYTHON_NAME = re.compile(r"[\w.-]*")
_OPENING = frozenset("[({'\"")
_NEVER_AFTER_A_CLOSER = re.compile(r"[^\s,=()\[\]{}<'\"]*")
_PYTHON_KEY = re.compile(r"[^\s=,()\[\]{}\"']*")
_COMMAS = re.compile(r"[\s,]*")


class Llama4Parser(CallParser):
    """Llama 4: ``[name(key=value), ...]``, calls as Python writes them, as they are or between two markers.

    A list that nothing announces is one of calls if it begins with the name of a tool. After the marker JSON, which the
    models of this family write too, is read as Llama 3 writes it.
    """

    name = "llama4"
    markers = (START, END)
    # Between the markers, though these models may leave them out: a bracket alone is no sign of calls.
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
                if character != "[":
                    self._give_back()
                    continue
                text.take(1)
            yield from self._read_list(bare=bare)

    def _read_list(self, *, bare: bool) -> Reading[None]:
        """Read calls up to the end of their list. Give the marked text back if there is none."""
        text, found = self._text, False
        while True:
            yield from text.run(SPACE)
            name = yield from text.word(_PYTHON_NAME)
            if not name or (bare and name not in self._tools) or (yield from text.peek()) != "(":
                break
            text.take(1)
            if not (yield from self._read_call(name)):
                return
            found = True
            yield from text.run(_COMMAS)
            text.mark()
            if (yield from text.peek()) == "]":
                text.take(1)
                text.unmark()
                break
        self._give_back()
        if found:
            yield from text.run(SPACE)
            yield from self._skip_closer(END)

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

    def _begin(self, name: str) -> None:
        self._text.unmark()
        self._parts.begin(name)

    def _lacks_closer(self) -> Reading[bool]:
        """Return whether a call ends here without its bracket: with the list or the text, or before the next call."""
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


FUNCTION: Final = "<function="
END_FUNCTION: Final = "</function>"
PARAMETER: Final = "<parameter="
END_PARAMETER: Final = "</parameter>"
_TAG_NAME = re.compile(r"[^<>\n]*")
_BEFORE_TAG = re.compile(r"[^<]*")


class Qwen3CoderParser(CallParser):
    """Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``, in lines.

    Models leave the outer tag out at times: a function that is one of the tools is a call without it.
    """

    name = "qwen3_coder"
    markers = (OPEN, CLOSE)
    closes = True
    typed = True
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
        while (found := (yield from text.until((OPEN, FUNCTION), self._parts.say))) is not None:
            text.mark(back=len(found))
            if found == OPEN:
                yield from text.run(SPACE)
            if found == OPEN and (yield from text.marker((FUNCTION,))) is None:
                self._give_back()
                continue
            yield from self._read_function(bare=found == FUNCTION)

    def _read_function(self, *, bare: bool) -> Reading[None]:
        text = self._text
        name = yield from self._read_name()
        # Without its bracket the tag is a call's all the same where it names a tool.
        closed = (yield from text.peek()) == ">"
        if not name or ((bare or not closed) and name not in self._tools):
            self._give_back()
            return
        text.take(int(closed))
        text.unmark()
        self._parts.begin(name)
        arguments, properties = WrittenArguments(self._parts), self._properties.get(name, {})

        def forgotten(tag: str, at_line_start: bool) -> Reading[bool]:
            if tag.startswith(PARAMETER):
                key = tag.removeprefix(PARAMETER).removesuffix(">").strip()
                return _may_follow(key, arguments, properties, at_line_start)
            return (yield from self._ends_call(tag))

        values = TaggedValues(
            text,
            close=END_PARAMETER,
            followers=(PARAMETER, OPEN, FUNCTION),
            closers=(END_FUNCTION, CLOSE),
            forgotten=forgotten,
            lines=True,
        )
        while (yield from self._next_parameter()):
            key = yield from self._read_name()
            closed = (yield from text.peek()) == ">"
            text.take(int(closed))
            if not key or key in arguments.keys or not (closed or key in properties or not properties):
                whole = yield from values.skip()
            else:
                whole = yield from values.read(properties.get(key, {}), arguments, key)
            if not whole:
                return
        yield from text.run(SPACE)
        closed = yield from self._skip_closer(END_FUNCTION)
        yield from text.run(SPACE)
        closed = (yield from self._skip_closer(CLOSE)) or closed
        if closed or text.has_stopped or (yield from text.peek()):
            arguments.end()

    def _next_parameter(self) -> Reading[bool]:
        """Read through the opening of the next parameter; False at the end of the call."""
        text = self._text
        while True:
            yield from text.run(_BEFORE_TAG)
            tag = yield from text.tag()
            if tag.startswith(PARAMETER):
                text.take(len(PARAMETER))
                return True
            if not tag or tag.startswith((OPEN, FUNCTION)) or self._is_end(tag):
                return False
            # Not part of a call.
            text.take(len(tag))

    def _is_end(self, tag: str) -> bool:
        return any(is_closer(tag, closer, (*self.markers, FUNCTION)) for closer in (END_FUNCTION, CLOSE))

    def _ends_call(self, tag: str) -> Reading[bool]:
        """Return whether a tag ends a call whose last value has no closing tag."""
        text = self._text
        text.take(len(tag))
        yield from text.run(SPACE)
        after = yield from text.tag()
        follows = after.startswith((OPEN, FUNCTION)) or not (yield from text.peek())
        if tag == OPEN:
            return after.startswith(FUNCTION)
        if tag.startswith(FUNCTION):
            return tag.removeprefix(FUNCTION).removesuffix(">").strip() in self._tools
        if is_closer(tag, CLOSE, (*self.markers, FUNCTION)):
            return follows
        return self._is_end(tag) and (follows or self._is_end(after))

    def _read_name(self) -> Reading[str]:
        return (yield from self._text.word(_TAG_NAME)).strip()


def _may_follow(key: str, arguments: WrittenArguments, properties: Properties, at_line_start: bool) -> bool:
    """Return whether an opening tag inside a value begins the next argument: one of the tool that was not given yet.

    If the tool's arguments are unknown, the tag must be at the start of a line.
    """
    if not key or key in arguments.keys:
        return False
    return key in properties if properties else at_line_start


KEY: Final = "<arg_key>"
END_KEY: Final = "</arg_key>"
VALUE: Final = "<arg_value>"
END_VALUE: Final = "</arg_value>"
# Neither crosses a tag: a stray one would be read as a part of a key.
_BARE_NAME = re.compile(r"[^<>\s{}]*")
_KEY = re.compile(r"[^<]*")


class Glm45Parser(CallParser):
    """GLM-4.5 and later: ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``.

    The tags stand in lines or in one line. A call without arguments is a name alone.
    """

    name = "glm45"
    markers = (OPEN, CLOSE, KEY, END_KEY, VALUE, END_VALUE)
    closes = True
    typed = True
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
        while (yield from text.until((OPEN,), self._parts.say)) is not None:
            text.mark(back=len(OPEN))
            yield from text.run(SPACE)
            name = yield from text.word(_BARE_NAME)
            yield from text.run(SPACE)
            if not name or not (yield from self._is_call(name)):
                self._give_back()
                continue
            text.unmark()
            self._parts.begin(name)
            yield from self._read_arguments(name)

    def _is_call(self, name: str) -> Reading[bool]:
        """Return whether a name is followed by its call; a call of a tool may end here without its closing tag."""
        tag = yield from self._text.tag()
        if tag in (KEY, CLOSE) or (name in self._tools and (tag == OPEN or is_closer(tag, CLOSE, self.markers))):
            return True
        return name in self._tools and self._text.has_stopped and not (yield from self._text.peek())

    def _read_arguments(self, name: str) -> Reading[None]:
        """Read up to the end of the call; a truncated call gets no end."""
        text, arguments, properties = self._text, WrittenArguments(self._parts), self._properties.get(name, {})

        def forgotten(tag: str, at_line_start: bool) -> Reading[bool]:
            del at_line_start
            text.take(len(tag))
            if tag == KEY:
                key = (yield from text.word(_KEY)).strip()
                opens = (yield from text.sees((END_KEY, VALUE))) is not None
                return opens and _may_follow(key, arguments, properties, at_line_start=True)
            yield from text.run(SPACE)
            after = yield from text.tag()
            if tag == OPEN:
                return (yield from text.word(_BARE_NAME)) in self._tools
            follows = after.startswith(OPEN) or not (yield from text.peek())
            return follows and is_closer(tag, CLOSE, self.markers)

        values = TaggedValues(
            text, close=END_VALUE, followers=(KEY, OPEN), closers=(CLOSE,), forgotten=forgotten, lines=False
        )
        while (yield from self._next_argument()):
            key = yield from self._read_key()
            if not (yield from text.peek()):
                return
            if not key or key in arguments.keys:
                whole = yield from values.skip()
            else:
                whole = yield from values.read(properties.get(key, {}), arguments, key)
            if not whole:
                return
        if (yield from self._skip_closer(CLOSE)) or text.has_stopped or (yield from text.peek()):
            arguments.end()

    def _next_argument(self) -> Reading[bool]:
        """Read through the opening of the next argument; False at the end of the call."""
        text = self._text
        while True:
            yield from text.run(_BEFORE_TAG)
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
        yield from text.marker((VALUE,))
        return key.strip()

    def _skip_damaged(self) -> Reading[bool]:
        """Read any other tag between a key and the tag of its value."""
        text = self._text
        text.mark()
        tag = yield from text.tag()
        text.take(len(tag))
        yield from text.run(SPACE)
        is_before_value = bool(tag) and tag not in self.markers and (yield from text.sees((VALUE,))) is not None
        if is_before_value:
            text.unmark()
        else:
            text.rewind()
        return is_before_value


def _marker(*words: str) -> str:
    """A marker of DeepSeek: a wide bar at both ends, a low block between words."""
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
_FENCED_NAME = re.compile(r"[^\s<>{}`]*")
_REST = re.compile(r"[\s`}]*")


class DeepSeekParser(CallParser):
    """DeepSeek V3.1: the name, a separator, JSON. V3 and R1: a type, the separator, the name, JSON in a fenced block.

    Each call stands between two markers, all calls between two more. What stands before the separator is the name,
    unless the arguments do not come right after it.
    """

    name = "deepseek"
    markers = (CALLS, END_CALLS, CALL, END_CALL, SEPARATOR)
    separators = (FENCE_END,)
    closes = True
    form = CallForm(
        opening=(CALLS,), before=(CALL,), quoted=False, between=(SEPARATOR,), after=(END_CALL,), closing=(END_CALLS,)
    )

    @classmethod
    def form_of(cls, template: str) -> CallForm:
        return DEEPSEEK_FENCED_FORM if FENCE in template else cls.form

    def _read(self) -> Reading[None]:
        text = self._text
        while (found := (yield from text.until((CALLS, CALL), self._parts.say))) is not None:
            text.mark(back=len(found))
            if found == CALLS:
                yield from text.run(SPACE)
                if (yield from text.marker((CALL,))) is None:
                    self._give_back()
                    continue
            while (yield from self._read_call()):
                text.mark(back=len(CALL))
            yield from self._skip_closer(END_CALLS)

    def _read_call(self) -> Reading[bool]:
        """Read one call; True if the opening of another was read after it."""
        text = self._text
        name = yield from self._read_name()
        separated = (yield from text.marker((SEPARATOR,))) is not None
        yield from text.run(SPACE)
        if separated and (yield from text.peek()) != "{":
            name = yield from self._read_name()
            yield from text.marker((FENCE,))
            yield from text.run(SPACE)
        if not (separated and name) or (yield from text.peek()) != "{":
            self._give_back()
            return False
        text.unmark()
        self._parts.begin(name)
        yield from read_arguments(text, self._parts, self.markers + self.separators)
        yield from text.run(_REST)
        yield from self._skip_closer(END_CALL)
        yield from text.run(SPACE)
        return (yield from text.marker((CALL,))) is not None

    def _read_name(self) -> Reading[str]:
        yield from self._text.run(SPACE)
        name = yield from self._text.word(_FENCED_NAME)
        yield from self._text.run(SPACE)
        return name


_ALL = (HermesParser, Llama3Parser, MistralParser, Llama4Parser, Qwen3CoderParser, Glm45Parser, DeepSeekParser)
FAMILIES: Final[dict[str, type[CallParser]]] = {family.name: family for family in _ALL}


def family_of_template(template: str) -> type[CallParser] | None:
    """Return the family of a chat template; None for an unknown one or one without tools."""
    if TOOL_CALLS in template:
        return MistralParser
    if CALL in template:
        return DeepSeekParser
    if OPEN in template:
        # Formats that share a marker and put something else than JSON after it.
        if FUNCTION in template:
            return Qwen3CoderParser
        return Glm45Parser if KEY in template else HermesParser
    if "<|header_start|>" in template and ("tools" in template or START in template):
        return Llama4Parser
    if PYTHON_TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return Llama3Parser
    return None
