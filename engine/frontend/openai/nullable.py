"""Bodies of the OpenAI protocol, in which null stands for a field's default."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from engine.frontend.protocol import StrictBody

__all__ = ["NullableBody"]


class NullableBody(StrictBody):
    """A body in which null stands for a field's default, as the protocol has it."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None or name not in cls.model_fields}
