"""Orders of protocols that are other words for a chat.

Their fields become those of a chat, and its errors get their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from pydantic import ValidationError

from engine.frontend.errors import ApiError
from engine.frontend.invalid_body import invalid_body
from engine.frontend.openai.bodies import ChatBody
from engine.frontend.requests import Order

_QUOTED = r"""(?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""


class Translation:
    """``names`` are the protocol's names, by those of a chat's fields, as they are written in errors."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)
        fields = "|".join(re.escape(name) for name in self._names)
        self._pattern = re.compile(rf"{_QUOTED}|(?<!\w)(?:{fields})(?!\w)")

    def chat(self, fields: Mapping[str, Any]) -> ChatBody:
        """The chat of these fields; those that are None are left out. Raises ApiError in the protocol's words."""
        try:
            return ChatBody.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as exc:
            raise invalid_body(exc, ChatBody).reworded(self.reword) from exc

    def order(self, make: Callable[[], Order]) -> Order:
        """The order of a chat, with the protocol's names. Raises ApiError in the protocol's words."""
        try:
            order = make()
        except ApiError as exc:
            raise exc.reworded(self.reword) from exc
        return msgspec.structs.replace(
            order,
            grammar_field=None if order.grammar_field is None else self.reword(order.grammar_field),
            grammar_parts=tuple((self.reword(place), grammar) for place, grammar in order.grammar_parts),
        )

    def reword(self, text: str) -> str:
        """The same text with the protocol's names of fields; what it quotes is the client's."""
        return self._pattern.sub(lambda found: self._names.get(found[0], found[0]), text)
