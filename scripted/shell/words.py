"""The shell's words for the verbs of ``t``, with their parameters, and the reader of their arguments.

A word is the action's shell word or the verb's own name. Signature and docstring come from the verb, so that the verbs
of every adapter can be typed. Reading gives a call; only the verb itself refuses a value.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from scripted.core.action import Action, verbs_of
from scripted.core.phrases import nearest
from scripted.core.refusals import BadCommand
from scripted.core.verb import Code, Verb
from scripted.script.context import BaseContext, actions_behind

_SPELT: Final = {"true": True, "false": False, "none": None, "null": None}
_MOST_NAMES: Final = 6
_NAMED: Final = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)


class ShellWord(NamedTuple):
    """A word for the verb ``path`` of ``t``. ``is_start``: it begins a request; ``is_call``: it returns a call."""

    text: str
    path: str
    signature: inspect.Signature
    doc: str
    is_start: bool
    is_call: bool

    @property
    def takes(self) -> str:
        """Its parameters as help shows them; ``[PAGES]`` is optional."""
        parameters = self.signature.parameters.values()
        plain = [
            name.upper() if default is inspect.Parameter.empty else f"[{name.upper()}]"
            for name, default, kind in ((one.name, one.default, one.kind) for one in parameters)
            if kind not in _NAMED
        ]
        named = ["[NAME=VALUE ...]"] if any(one.kind in _NAMED for one in parameters) else []
        return " ".join([*plain, *named])

    @property
    def meaning(self) -> str:
        return " ".join(self.doc.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".").replace("``", "")

    @property
    def help(self) -> str:
        plain = [one.replace(annotation=one.empty) for one in self.signature.parameters.values()]
        return f"{self.text} {self.takes}".rstrip() + f"\nt.{self.path}{inspect.Signature(plain)}\n{self.doc}"

    def read(self, words: list[str], rids: Collection[str]) -> Verb:
        """Read a call: positional words in order, a rid as its request's handle, ``NAME=VALUE`` by name.

        Raises BadCommand.
        """
        arguments: list[object] = []
        keywords: dict[str, object] = {}
        for word in words:
            name, separator, value = word.partition("=")
            if separator and name.isidentifier():
                keywords[name] = _value(value)
            else:
                arguments.append(Code(word) if word in rids else _value(word))
        try:
            self.signature.bind(*arguments, **keywords)
        except TypeError as exc:
            names = list(self.signature.parameters)
            takes = ", ".join(names) or "nothing after it"
            if len(names) > _MOST_NAMES:
                takes = f"what help {self.text} names"
            meant = "".join(nearest(name, names) for name in keywords if name not in names)
            got = " ".join(words) or "nothing"
            raise BadCommand(f"{self.text} takes {takes}, got {got}: {exc}{meant}") from exc
        return Verb(self.path, *arguments, **keywords)


def words_of(t: BaseContext) -> Mapping[str, ShellWord]:
    """Return the words of a session with this ``t`` in the order of its actions."""
    words = {}
    for action in actions_behind(t):
        short = {path: text for text, path in action.shell_words.items()}
        for path in dict.fromkeys([*verbs_of(action), *action.shell_words.values()]):
            word = _word(t, action, short.get(path, path), path)
            words[word.text] = word
    return words


def _word(t: BaseContext, action: type[Action], text: str, path: str) -> ShellWord:
    owner, _, name = path.rpartition(".")
    function = getattr(type(operator.attrgetter(owner)(t) if owner else t), name)
    signature = inspect.signature(function)
    return ShellWord(
        text,
        path,
        signature.replace(parameters=list(signature.parameters.values())[1:]),
        inspect.getdoc(function) or "",
        action.is_start,
        str(signature.return_annotation).endswith("Call"),
    )


def _value(text: str) -> object:
    """Read a Python literal, or return the text itself."""
    if text.lower() in _SPELT:
        return _SPELT[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
