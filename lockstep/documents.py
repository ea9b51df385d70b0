"""JSON that others have written, decoded to a declared type; one error for whatever else it is."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from lockstep.errors import LockstepError

Kind = TypeVar("Kind")


class DocumentError(LockstepError, ValueError):
    """Bytes are no document of the type that was awaited."""


def document(data: bytes | str, kind: type[Kind]) -> Kind:
    """Decode JSON to ``kind``. Raises DocumentError.

    msgspec's own error is not enough: bytes that are no UTF-8 and nesting that is too deep raise others.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except Exception as exc:
        raise DocumentError(f"{type(exc).__name__}: {exc}") from exc
