"""The families of models by the format of their calls, one class each, and which of them a chat template belongs to.

A class has the family's name, its markers, how it writes calls that are asked for, what ids they may have, and how what
the models write is read. What looked like a call and is none is given back.
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
    TaggedValues,
    WrittenArguments,
    read_python_value,
    read_value,
)

# After a call: what separates calls in some families, and a brace too many, which models often write.
_BETWEEN = re.compile(r"[\s,;}]*")


class CallParser(PartReader):
    """Finds the calls in one answer's text.

    ``tools`` are the names of the tools that the model was given, ``properties`` the schemas of each one's arguments.
    """

    name: ClassVar[str]
    form: ClassVar[CallForm]
    """How the family writes calls."""
    markers: ClassVar[tuple[str, ...]]
    """What the family writes around its calls; a tokenizer may have it as special tokens."""
    closes: ClassVar[bool] = False
    """True when a marker closes each call."""
    typed: ClassVar[bool] = False
    """True when it depends on the schemas of the arguments what a model has written."""

    def __init__(self, tools: Collection[str], properties: Mapping[str, Properties] | None = None) -> None:
        super().__init__()
        self._tools = frozenset(tools)
        self._properties = properties or {}
        self._parts = CallParts(self._found)

    @classmethod
    def form_of(cls, template: str) -> CallForm:  # noqa: ARG003 - some families have an older and a newer way
        """How the models that have this template write calls."""
        return cls.form

    @staticmethod
    def new_id() -> str:
        """An id for a call, where the model gave none."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def flush(self) -> list[Part]:
        """The rest, once it is known that no more text comes."""
        self._text.end()
        next(self._reader, None)
        self._parts.close()
        return self._advance()

    def _read_objects(self, *, bare: bool = False) -> Reading[None]:
        """Read calls that are objects: one, several, or a list of them. What was marked is given back if none is.

        ``bare``: nothing announced them.
        """
        text = self._text
        yield from text.run(SPACE)
        listed = (yield from text.peek()) == "[" and (yield from text.sees(self.markers)) is None
        if listed:
            text.take(1)
            yield from text.run(SPACE)
        found = False
        while (yield from text.peek()) == "{":
            if not (yield from CallObject(text, self._parts, self.markers, self._tools if bare else None).read()):
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
        """Read what separates calls. Of that, whitespace may be content where no marker closes a call."""
        between = yield from self._text.word(_BETWEEN)
        if not self.closes:
            self._parts.say("".join(character for character in between if character.isspace()))

    def _give_back(self) -> None:
        """What was held is no call: it is content."""
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
            yield from text.marker((CLOSE,))


PYTHON_TAG: Final = "<|python_tag|>"


class Llama3Parser(CallParser):
    """Llama 3: ``{"name": ..., "parameters": {...}}`` as it is or after ``<|python_tag|>``, several with ``;`` between.

    An object that nothing announces is a call if it names a tool and has no keys but a call's: models answer in JSON
    too.
    """

    name = "llama3"
    markers = (PYTHON_TAG,)
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
        """Read one call whose name stands before its arguments."""
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
        if (yield from read_value(text, self._parts.argue, self.markers)):
            self._parts.end()
        yield from self._read_between()

    def _read_name(self) -> Reading[str]:
        name = yield from self._text.word(_PLAIN_NAME)
        yield from self._text.run(SPACE)
        return name


START: Final = "<|python_start|>"
END: Final = "<|python_end|>"
_PYTHON_NAME = re.compile(r"[\w.-]*")
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
        """Read calls up to the end of their list. What was marked is given back if there is none."""
        text = self._text
        while True:
            yield from text.run(SPACE)
            name = yield from text.word(_PYTHON_NAME)
            if not name or (bare and name not in self._tools) or (yield from text.peek()) != "(":
                break
            text.take(1)
            if not (yield from self._read_call(name)):
                return
            yield from text.run(_COMMAS)
            text.mark()
            if (yield from text.peek()) == "]":
                text.take(1)
                text.unmark()
                yield from text.run(SPACE)
                yield from text.marker((END,))
                return
        self._give_back()

    def _read_call(self, name: str) -> Reading[bool]:
        """Read the arguments of a call; False when it was cut, or is none: arguments have names."""
        text, arguments, begun = self._text, WrittenArguments(self._parts), False
        while True:
            yield from text.run(SPACE)
            closed = (yield from text.peek()) == ")"
            key = "" if closed else (yield from text.word(_PYTHON_KEY))
            yield from text.run(SPACE)
            if not closed and (not key or (yield from text.peek()) != "="):
                self._give_back()
                return False
            text.take(1)
            if not begun:
                begun = True
                text.unmark()
                self._parts.begin(name)
            if closed:
                arguments.end()
                return True
            yield from text.run(SPACE)
            arguments.key(key)
            if not (yield from read_python_value(text, arguments.add)):
                return False
            yield from text.run(SPACE)
            if (yield from text.peek()) == ",":
                text.take(1)


FUNCTION: Final = "<function="
END_FUNCTION: Final = "</function>"
PARAMETER: Final = "<parameter="
END_PARAMETER: Final = "</parameter>"
_TAG_NAME = re.compile(r"[^<>\n]*")


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
        if not name or (bare and name not in self._tools) or (yield from text.peek()) != ">":
            self._give_back()
            return
        text.take(1)
        text.unmark()
        self._parts.begin(name)
        arguments, properties = WrittenArguments(self._parts), self._properties.get(name, {})
        values = TaggedValues(text, close=END_PARAMETER, followers=(PARAMETER, END_FUNCTION, CLOSE), lines=True)
        while True:
            yield from text.run(SPACE)
            if (yield from text.marker((PARAMETER,))) is None:
                break
            key = yield from self._read_name()
            if (yield from text.peek()) != ">":
                return
            text.take(1)
            arguments.key(key)
            if not (yield from values.read(properties.get(key, {}), arguments)):
                return
        closed = (yield from text.marker((END_FUNCTION,))) is not None
        yield from text.run(SPACE)
        if (yield from text.marker((CLOSE,))) is not None or closed:
            arguments.end()

    def _read_name(self) -> Reading[str]:
        return (yield from self._text.word(_TAG_NAME)).strip()


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
            if not name or (yield from text.sees((KEY, CLOSE))) is None:
                self._give_back()
                continue
            text.unmark()
            self._parts.begin(name)
            yield from self._read_arguments(name)

    def _read_arguments(self, name: str) -> Reading[None]:
        """Read up to the end of the call; what is cut has no end."""
        text, arguments, properties = self._text, WrittenArguments(self._parts), self._properties.get(name, {})
        values = TaggedValues(text, close=END_VALUE, followers=(KEY, CLOSE), lines=False)
        while (yield from text.marker((KEY,))) is not None:
            key = yield from self._read_key()
            if (yield from text.marker((VALUE,))) is None:
                return
            arguments.key(key)
            if not (yield from values.read(properties.get(key, {}), arguments)):
                return
            yield from text.run(SPACE)
        if (yield from text.marker((CLOSE,))) is not None:
            arguments.end()

    def _read_key(self) -> Reading[str]:
        """Read a key and the tags around it, which models double at times."""
        text = self._text
        while (yield from text.marker((KEY,))) is not None:
            pass
        key = yield from text.word(_KEY)
        while (yield from text.marker((END_KEY,))) is not None:
            yield from text.run(SPACE)
        return key.strip()


def _marker(*words: str) -> str:
    """A marker of DeepSeek: a wide bar at both ends, a low block between words."""
    return "<\uff5c" + "\u2581".join(words) + "\uff5c>"


CALLS: Final = _marker("tool", "calls", "begin")
END_CALLS: Final = _marker("tool", "calls", "end")
CALL: Final = _marker("tool", "call", "begin")
END_CALL: Final = _marker("tool", "call", "end")
SEPARATOR: Final = _marker("tool", "sep")
FENCE: Final = "```json"
DEEPSEEK_FENCED_FORM: Final = CallForm(
    opening=(CALLS,),
    before=(CALL, "function", SEPARATOR),
    quoted=False,
    between=(f"\n{FENCE}\n",),
    after=("\n```", END_CALL),
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
            yield from text.marker((END_CALLS,))

    def _read_call(self) -> Reading[bool]:
        """Read one call; True when the beginning of another one was read after it."""
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
        if (yield from read_value(text, self._parts.argue, self.markers)):
            self._parts.end()
        yield from text.run(_REST)
        yield from text.marker((END_CALL,))
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
    """The family of the models that have this template; None for another one, or a template without tools."""
    if TOOL_CALLS in template:
        return MistralParser
    if CALL in template:
        return DeepSeekParser
    if OPEN in template:
        # Formats that share a marker and put something else than JSON after it.
        return Qwen3CoderParser if FUNCTION in template else Glm45Parser if KEY in template else HermesParser
    if "<|header_start|>" in template and ("tools" in template or START in template):
        return Llama4Parser
    if PYTHON_TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return Llama3Parser
    return None
