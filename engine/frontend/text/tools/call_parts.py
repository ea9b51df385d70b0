"""Collects the parts of an output: content and calls.

Owns what of the text around calls is content, and what ends a call: only arguments that are a JSON object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, Final

from engine.frontend.text.reasoning import CallArguments, CallBegun, CallEnded, Content, Part, appended
from engine.frontend.text.tools.called_names import NAMESPACE
from engine.frontend.text.tools.json_values import is_object

FENCE: Final = "```"
# A line that is a Markdown fence, or the beginning of one.
_FENCE_LINE = re.compile(r"`{1,3}|```[\w+-]{1,16}")
_FENCES = re.compile(r"^[ \t]*```", re.MULTILINE)


class CallParts:
    """Collects the parts of an output. A Markdown fence around calls is not content.

    ``tools`` are the names of the model's tools: a namespace before one of them is no part of it.
    """

    def __init__(self, parts: list[Part], tools: Collection[str]) -> None:
        self._parts = parts
        self._tools = tools
        self._arguments: list[str] = []
        # Text that is content only if more follows: whitespace, and before it a fence.
        self._held = ""
        self._said = False
        self._called = False
        # The content since the last call, whether it began in a fenced block, and whether a fence was left out.
        self._content: list[str] = []
        self._is_block = False
        self._is_fenced = False

    def say(self, text: str) -> None:
        """Add content. A trailing fence and trailing whitespace are held back until more follows."""
        text = self._held + text
        if self._is_fenced:
            text = self._unfenced(text)
            if self._is_fenced:
                self._held = text
                return
        if self._called and not self._said:
            text = text.lstrip()
        shown = text[: self._end_of(text)]
        self._held = text[len(shown) :]
        self._show(shown)

    def _unfenced(self, text: str) -> str:
        """Leave out the fence after calls that follow one."""
        after = text.lstrip()
        if after != FENCE and FENCE.startswith(after):
            return text
        self._is_fenced = False
        return after.removeprefix(FENCE) if after.startswith(FENCE) else text

    def _end_of(self, text: str) -> int:
        """Return where the content ends that is certain."""
        end = len(text.rstrip())
        line = text.rfind("\n", 0, end) + 1
        if (line or not self._content) and _FENCE_LINE.fullmatch(text[line:end].strip()):
            return len(text[:line].rstrip())
        return end

    def _show(self, shown: str) -> None:
        if shown:
            self._said = True
            self._content.append(shown)
            appended(self._parts, Content(shown))

    def begin(self, name: str, call_id: str | None = None) -> None:
        self._take_fence()
        self._called = True
        self._arguments.clear()
        plain = name.removeprefix(NAMESPACE)
        self._parts.append(CallBegun(plain if name not in self._tools and plain in self._tools else name, call_id))

    def _take_fence(self) -> None:
        """Leave out the fence before a call, unless it closes a block of the content."""
        fence = self._held.strip()
        self._is_block ^= len(_FENCES.findall("".join(self._content))) % 2 == 1
        self._content.clear()
        if not fence:
            return
        before, after = self._held.split(fence)
        if self._is_block or not fence.startswith(FENCE):
            self._is_block ^= fence.startswith(FENCE)
            self._show(before + fence)
            self._content.clear()
            self._held = after
        else:
            self._is_fenced = True
            self._held = before

    def argue(self, text: str) -> None:
        self._arguments.append(text)
        appended(self._parts, CallArguments(text))

    def give(self, arguments: str) -> None:
        """Add the whole arguments and the end of the call."""
        self.argue(arguments)
        self.end()

    def given(self, missing: str) -> dict[str, Any] | None:
        """Return the arguments with their ``missing`` closers; None if they are then no JSON object."""
        written = "".join(self._arguments) + missing
        return json.loads(written) if is_object(written) else None

    def end(self, missing: str = "") -> None:
        """Add the ``missing`` closers, and the end of the call if the arguments are then a JSON object."""
        if is_object("".join(self._arguments) + missing):
            self.argue(missing)
            self._parts.append(CallEnded())

    def close(self) -> None:
        """End the text; trailing whitespace is content if there was no call."""
        self._show(self._held.rstrip() if self._called else self._held)
