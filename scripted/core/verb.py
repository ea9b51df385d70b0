"""A call of a verb of ``t``, which can be printed as a line of a script or performed."""

from __future__ import annotations

import json
import keyword
import operator
import re
from typing import Any


class Code:
    """An argument printed as the expression ``text``; ``value`` is the value of the expression."""

    def __init__(self, text: str, value: object = None) -> None:
        self.text = text
        self.value = value


class Verb:
    """A call by the verb's name on ``t`` and its arguments. ``str()`` gives the line of script."""

    def __init__(self, name: str, *arguments: object, **keywords: object) -> None:
        self.name = name
        self.arguments = arguments
        self.keywords = keywords

    def perform(self, t: object) -> Any:
        keywords = {name: _value_of(value) for name, value in self.keywords.items()}
        return operator.attrgetter(self.name)(t)(*map(_value_of, self.arguments), **keywords)

    def __str__(self) -> str:
        keywords = (f"{name}={_text_of(value)}" for name, value in self.keywords.items())
        return f"t.{self.name}({', '.join([*map(_text_of, self.arguments), *keywords])})"


def variable_of(name: str) -> str:
    """Make a variable name of a script from any name."""
    words = re.sub(r"\W+", "_", name).strip("_").lower() or "it"
    words = f"r_{words}" if words[0].isdigit() else words
    return f"{words}_" if keyword.iskeyword(words) or words == "t" else words


def _value_of(argument: object) -> object:
    return argument.value if isinstance(argument, Code) else argument


def _text_of(argument: object) -> str:
    if isinstance(argument, Code):
        return argument.text
    return json.dumps(argument) if isinstance(argument, str) else repr(argument)
