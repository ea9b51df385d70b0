"""Converts a script's values to JSON, and refuses any other value at the script's line, in both tiers alike.

The server decides which values it accepts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from scripted.core.errors import BadCall


def as_json(call: str, name: str, value: object) -> object:
    """Convert a value to JSON. Raises BadCall, with the argument's name, for a value that JSON cannot express."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _finite(call, name, value)
    if isinstance(value, str):
        return _encodable(call, name, value)
    if isinstance(value, (list, tuple)):
        # Prompts have thousands of tokens.
        if all(type(item) is int for item in value):
            return list(value)
        return [as_json(call, f"{name}[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {_key(call, name, key): as_json(call, f"{name}[{key!r}]", item) for key, item in value.items()}
    raise BadCall(
        f"{call} takes {name} as a JSON value, got {value!r}, a {type(value).__name__}; "
        "write a number, a text, a list or a dict, such as int(...), sorted(...) or .tolist()"
    )


def _finite(call: str, name: str, value: float) -> float:
    if not math.isfinite(value):
        raise BadCall(f"{call} takes {name} as a finite number, got {float(value)!r}, which JSON cannot express")
    return float(value)


def _encodable(call: str, name: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise BadCall(f"{call} takes {name} as a text that UTF-8 can encode, got {value!a}: {exc.reason}") from exc
    return str.__str__(value)


def _key(call: str, name: str, key: object) -> str:
    if isinstance(key, str):
        return _encodable(call, f"a key of {name}", key)
    if isinstance(key, int) and not isinstance(key, bool):
        return str(int(key))
    raise BadCall(f"{call} takes {name} with texts or whole numbers as keys, got {key!r}")
