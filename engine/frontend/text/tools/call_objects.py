"""Reads calls that are JSON objects, for the parsers of all families.

Owns the point at which an object becomes a call: its name is known, and its arguments begin.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from engine.frontend.text.incoming_text import Emit, IncomingText, Reading
from engine.frontend.text.tools.argument_schemas import Properties
from engine.frontend.text.tools.call_parts import CallParts
from engine.frontend.text.tools.called_names import NAMESPACE
from engine.frontend.text.tools.closing_tags import is_closer
from engine.frontend.text.tools.json_values import (
    LITERAL,
    QUOTES,
    SPACE,
    JsonValue,
    decoded,
    escaped,
    is_object,
    read_string,
    read_value,
    skip_comment,
)


def read_other_arguments(text: IncomingText) -> Reading[str]:
    """Read arguments that do not begin as an object: an object in a string, or null. Empty for anything else."""
    if (yield from text.peek()) in QUOTES:
        written: list[str] = []
        whole = yield from read_string(text, written.append)
        said = decoded("".join(written)) if whole else None
        return said if said is not None and is_object(said) else ""
    return NO_ARGUMENTS if (yield from text.word(LITERAL)) == "null" else ""


NO_ARGUMENTS: Final = "{}"
NAME: Final = "name"
_NAME_AND_SIGN: Final = "name="
# The function's name, or the whole call in the form of requests.
FUNCTION: Final = "function"
ARGUMENTS: Final = ("arguments", "parameters", "args", "input")
# What models also write for them behind a marker. Only a tool's name is one there.
_OTHER_NAMES: Final = ("tool", "tool_name", "function_name", "action")
_OTHER_ARGUMENTS: Final = ("tool_input", "tool_args", "action_input", "params", "kwargs")
# The keys of a call without a marker. An object with any other key is content in JSON.
KEYS_OF_A_BARE_CALL: Final = frozenset((NAME, FUNCTION, *ARGUMENTS, "type", "id"))
# What is around calls, a list or one.
_WRAPPERS: Final = ("tool_calls", "function_calls", "tool_call", "function_call")
# A part of a call that has at least its name.
_PARTS: Final[tuple[str, ...]] = (FUNCTION,)
# Those that say nothing of the arguments.
_NOTES: Final = frozenset((NAME, FUNCTION, "type", "id"))
# The kind of a call; a parameter of the same name has another value.
_KIND: Final = f'"{FUNCTION}"'
_COMMAS = re.compile(r"[\s,]*")
# More than the name of a tool and the keys of a call.
_LONGEST_OPENING: Final = 256


def read_arguments(
    text: IncomingText, parts: CallParts, stops: Sequence[str], tool: str, declared: Properties
) -> Reading[None]:
    """Read the object of a call of ``tool`` that has begun, and end the call.

    Closing brackets that the model forgot are added, unless the text was cut.
    """
    missing = yield from _read_object_of(text, parts.argue, stops, tool, declared)
    if not missing or text.has_stopped or (yield from text.peek()):
        parts.end(missing)


def _read_object_of(
    text: IncomingText, emit: Emit, stops: Sequence[str], tool: str, declared: Properties, *, enclosing: int = 0
) -> Reading[str]:
    """Read the arguments of a call, and return the closers that they lack.

    If the object is the whole call once more, the arguments are in it.
    """
    opening = ""
    if declared.keys().isdisjoint((NAME, *ARGUMENTS)):
        opening = (yield from text.judged(functools.partial(_call_again, tool), _LONGEST_OPENING)) or ""
    text.take(len(opening))
    missing = yield from JsonValue(text, emit, stops, enclosing=enclosing + bool(opening)).read()
    if opening and not missing:
        yield from text.run(SPACE)
        text.take(int((yield from text.peek()) == "}"))
    return missing


def _call_again(tool: str, ahead: str, more: bool) -> str | None:
    """Return what stands before the arguments if a text is a call of this tool; None if that depends on ``more``."""
    written = "".join(ahead.split())
    openings = [f'{{"{NAME}":"{space}{tool}","{key}":{{' for space in ("", NAMESPACE) for key in ARGUMENTS]
    if not any(written.startswith(one) for one in openings):
        return None if more and any(one.startswith(written) for one in openings) else ""
    return ahead[: ahead.index("{", 1)]


class CallObject:
    """Reads an object that may be a call. With ``tools`` it must name one of them and have only the keys of a call.

    ``properties`` are the schemas of each tool's arguments, which models also write beside the name.
    """

    def __init__(
        self,
        text: IncomingText,
        parts: CallParts,
        stops: Sequence[str],
        tools: Collection[str] | None,
        properties: Mapping[str, Properties],
    ) -> None:
        self._text = text
        self._parts = parts
        # The number of objects around the arguments, and the keys of calls or of parts of one in this object.
        self._enclosing = 1
        self._wrappers: tuple[str, ...] = (*_WRAPPERS, *_PARTS, *(("tool",) if tools is None else ()))
        # Whether the object is a part of a call: its name, with or without its arguments.
        self._is_part = False
        self._stops = stops
        self._tools = tools
        self._properties = properties
        self._name: str | None = None
        self._arguments: str | None = None
        # The values of other keys, as JSON.
        self._beside: dict[str, str] = {}
        self._begun = False
        # The last bracket of the arguments, after which more of them may stand beside the name.
        self._last = ""
        self._is_whole = False
        self._is_closed = False

    def read(self) -> Reading[bool]:
        """Return True for a call, even a truncated one; False, with nothing emitted, if it is not a call."""
        found = yield from self._read_entries()
        if self._is_whole:
            self._end()
        return found

    def _read_entries(self) -> Reading[bool]:
        """Read the keys and values of the object, as ``read`` does, up to the end of the call's arguments."""
        text = self._text
        text.take(1)
        yield from text.run(SPACE)
        # Small models copy the doubled braces of a template.
        text.take(int((yield from text.peek()) == "{"))
        while True:
            yield from text.run(_COMMAS)
            if (yield from skip_comment(text, self._stops)):
                continue
            character = yield from text.peek()
            if character == "}":
                text.take(1)
                return self._close()
            if character not in QUOTES:
                return self._close() if (yield from self._is_cut()) else self._begun
            if not (yield from self._read_entry()):
                return self._begun

    def _is_cut(self) -> Reading[bool]:
        """Return whether the call ends at this position, without its closing bracket."""
        text = self._text
        if not (yield from text.peek()):
            return text.has_stopped
        tag = yield from text.tag()
        return (yield from text.sees(self._stops)) is not None or any(is_closer(tag, stop) for stop in self._stops)

    def _close(self) -> bool:
        """Complete the object; a call without arguments gets those beside its name, or an empty object."""
        self._is_closed = True
        if self._name is not None and not self._begun and not (self._is_part and self._beside.keys() <= _NOTES):
            beside = self._given_beside(self._name)
            if self._beside.keys() - beside.keys() <= _NOTES:
                entries = ", ".join(f'"{escaped(key)}": {value}' for key, value in beside.items())
                self._give(f"{{{entries}}}")
        return self._begun

    def _given_beside(self, name: str) -> dict[str, str]:
        """Return the arguments beside the name, as JSON. A key of calls is one only if the tool declares it."""
        declared = self._properties.get(name, {})
        return {
            key: value
            for key, value in self._beside.items()
            if (key in declared and (key, value) != ("type", _KIND))
            or (self._tools is None and key not in KEYS_OF_A_BARE_CALL)
        }

    def _may_be_beside(self, key: str) -> bool:
        """Return whether a key may be an argument of the call, whose name may still be unknown."""
        return self._tools is None or key in KEYS_OF_A_BARE_CALL or self._is_declared(key)

    def _is_declared(self, key: str) -> bool:
        """Return whether the tool declares an argument; any tool while the name is unknown."""
        names = self._properties if self._name is None else (self._name,)
        return any(key in self._properties.get(name, {}) for name in names)

    def _read_entry(self) -> Reading[bool]:
        """Read a key and its value; False if the object cannot be read further or is not a call."""
        text = self._text
        key = yield from self._read_text()
        yield from text.run(SPACE)
        if key == _NAME_AND_SIGN and self._name is None and not self._begun:
            return (yield from self._read_rest_of_name())
        if key is None or (yield from text.peek()) != ":":
            return False
        text.take(1)
        yield from text.run(SPACE)
        first = yield from text.peek()
        is_open = self._name is None and self._arguments is None and not self._begun
        if is_open and key in self._wrappers and first in ("{", "[") and not self._is_declared(key):
            return (yield from self._read_wrapped(key))
        if not self._may_be_beside(key):
            return False
        if key in (NAME, FUNCTION) and self._name is None and not self._begun:
            return (yield from self._read_name())
        if self._is_arguments(key, (yield from text.peek())) and self._arguments is None and not self._begun:
            return (yield from self._read_arguments(key))
        if self._is_only_name(key) and (yield from text.peek()) == "{":
            self._name = key
            return (yield from self._read_object())
        value = yield from read_value(text, self._stops, enclosing=self._enclosing)
        if key in _OTHER_NAMES and self._tools is None and self._name is None and value is not None:
            said = decoded(value) if value.startswith('"') else None
            if said is not None and said in self._properties:
                return self._take_name(said)
        self._beside[key] = value or ""
        return value is not None

    def _read_wrapped(self, key: str) -> Reading[bool]:
        """Read the calls in an object, or only the name of one whose arguments are beside it."""
        text = self._text
        listed = (yield from text.peek()) == "["
        text.take(int(listed))
        while True:
            yield from text.run(_COMMAS)
            if (yield from text.peek()) != "{":
                break
            inner = self._inner(is_part=key not in _WRAPPERS)
            found = yield from inner.read()
            self._begun |= found
            if not found:
                self._name = inner.only_name
                return self._begun or self._name is not None
            if not listed:
                return True
        text.take(int((yield from text.peek()) == "]"))
        return self._begun

    def _inner(self, *, is_part: bool) -> CallObject:
        inner = CallObject(self._text, self._parts, self._stops, self._tools, self._properties)
        inner._enclosing = self._enclosing + 1
        inner._is_part = is_part
        inner._wrappers = () if is_part else _PARTS
        return inner

    @property
    def only_name(self) -> str | None:
        """The name in a whole part of a call that has nothing else; None for any other object."""
        return self._name if self._is_part and self._is_closed and not self._begun else None

    def _is_arguments(self, key: str, first: str) -> bool:
        """Return whether a key is that of the arguments, which begin so."""
        is_other = key in _OTHER_ARGUMENTS and self._tools is None and first == "{"
        return key in ARGUMENTS or (is_other and not self._is_declared(key))

    def _is_only_name(self, key: str) -> bool:
        """Return whether a key is the name of a tool, in an object of nothing but its arguments."""
        is_first = self._name is None and self._arguments is None and not self._beside
        return is_first and self._tools is None and key in self._properties

    def _read_text(self) -> Reading[str | None]:
        """Read and decode a string; None if there is none."""
        if (yield from self._text.peek()) not in QUOTES:
            return None
        written: list[str] = []
        whole = yield from read_string(self._text, written.append)
        return decoded("".join(written)) if whole else None

    def _read_rest_of_name(self) -> Reading[bool]:
        """Read a name whose opening quote has closed its key: ``"name="add"``."""
        name = yield from self._text.word(LITERAL)
        if not name or (yield from self._text.peek()) != '"':
            return False
        self._text.take(1)
        return self._take_name(name)

    def _read_name(self) -> Reading[bool]:
        name = yield from self._read_text()
        return self._take_name(name) if name else False

    def _take_name(self, name: str) -> bool:
        if self._tools is not None and name not in self._tools:
            return False
        self._name = name
        if self._arguments is not None:
            self._give(self._arguments)
        return True

    def _read_arguments(self, key: str) -> Reading[bool]:
        """Read the arguments: an object, an object in a string, or null for none; or one argument of this name."""
        character = yield from self._text.peek()
        if character == "{":
            return (yield from self._read_object())
        value = yield from read_value(self._text, self._stops, enclosing=self._enclosing)
        if value is None:
            return False
        said = decoded(value) if value.startswith('"') else "" if value == "null" else None
        if (said is None or (said and not is_object(said))) and self._is_declared(key):
            self._beside[key] = value
            return True
        if said is None:
            return False
        self._give(said or NO_ARGUMENTS)
        return True

    def _read_object(self) -> Reading[bool]:
        """Emit an object as it arrives, or keep it until the name is known."""
        if self._name is None:
            kept: list[str] = []
            if (yield from JsonValue(self._text, kept.append, self._stops, enclosing=self._enclosing).read()):
                return False
            self._arguments = "".join(kept)
            return True
        self._begin(self._name)
        text, declared = self._text, self._properties.get(self._name, {})
        missing = yield from _read_object_of(
            text, self._argue, self._stops, self._name, declared, enclosing=self._enclosing
        )
        self._is_whole = not missing
        if missing:
            self._argue("")
            if text.has_stopped or (yield from text.peek()):
                self._parts.end(missing)
        return not missing

    def _give(self, arguments: str) -> None:
        """Emit all arguments but the last bracket, or keep them until the name is known."""
        if self._name is None:
            self._arguments = arguments
            return
        self._begin(self._name)
        self._argue(arguments.rstrip().removesuffix("}"))
        self._argue("}")
        self._is_whole = True

    def _argue(self, text: str) -> None:
        """Emit a piece of the arguments, but hold a bracket back until another piece follows."""
        self._parts.argue(self._last)
        self._last = text if text == "}" else ""
        if not self._last:
            self._parts.argue(text)

    def _end(self) -> None:
        """End the call; a key beside its arguments that the tool declares is one of them if they lack it."""
        declared = self._properties.get(self._name or "", {})
        more = {key: value for key, value in self._beside.items() if key in declared and key not in KEYS_OF_A_BARE_CALL}
        given = self._parts.given(self._last) if more else None
        if given is not None:
            entries = [f'"{escaped(key)}": {value}' for key, value in more.items() if key not in given]
            self._parts.argue((", " if given and entries else "") + ", ".join(entries))
        self._parts.argue(self._last)
        self._parts.end()

    def _begin(self, name: str) -> None:
        self._begun = True
        self._text.unmark()
        self._parts.begin(name)
