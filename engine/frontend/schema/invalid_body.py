"""Makes the error for an invalid body: field, rule, value and remedy of the first few faults.

Limits work and length: a million wrong entries cost no more than a thousand.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from types import UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin

from pydantic import BaseModel, JsonValue, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from engine.frontend.schema.errors import ApiError, FieldError, JsonLiterals, shortened
from lockstep.broken_rules import broken_rule, did_you_mean, joined_rules

# pydantic describes all errors or none; each costs a microsecond and half a kilobyte.
MAX_DESCRIBED_ERRORS = 1000
MAX_SHOWN_ERRORS = 8
MAX_COMPARED_ERRORS = 64
MAX_SHOWN_VALUE_CHARS = 80
# Names of one field in several protocols.
SYNONYMS = {
    "enable_thinking": ("chat_template_kwargs",),
    "input": ("messages", "prompt", "text"),
    "max_length": ("max_tokens", "max_new_tokens", "max_output_tokens"),
    "max_new_tokens": ("max_tokens",),
    "max_tokens": ("max_new_tokens", "max_output_tokens"),
    "n_predict": ("max_tokens", "max_new_tokens", "max_output_tokens"),
    "prompt": ("messages", "text", "input"),
    "text": ("prompt", "messages"),
}
# Containers of fields: arguments of a client library, and a part of Ollama's protocol.
WRAPPERS = ("extra_body", "options", "parameters")
# The validator appends it to a key that breaks a rule.
KEY = "[key]"
# Replaces the validator's Python literals.
IN_JSON = {"must be False": "must be false", "must be True": "must be true"}
# Suffixes of the validator's error types for a value whose type does not match a branch.
OF_A_TYPE = ("_type", "literal_error")
OF_ONE_VALUE = ("literal_error", "none_required")
NOT_HONOURED = "not honoured"
# Units of the length of a value.
LENGTHS = {"too_long": "entries", "string_too_long": "characters"}

_values = JsonLiterals()
_values.maxstring = _values.maxother = _values.maxlong = MAX_SHOWN_VALUE_CHARS


def invalid_body(exc: ValidationError, model: type[BaseModel]) -> ApiError:
    """Make the error (400) for a body that is not a ``model``."""
    count = exc.error_count()
    if count > MAX_DESCRIBED_ERRORS:
        return ApiError.invalid(
            f"the body must follow the rules of this route's fields, but breaks them in {count} places, too many to "
            f"list; the fields are {', '.join(_fields_of(model))}"
        )
    errors = _of_branches_meant(exc.errors(include_url=False), model)
    sentences = _sentences(errors[:MAX_SHOWN_ERRORS], model)
    if len(errors) > MAX_SHOWN_ERRORS:
        sentences.append(f"and {len(errors) - MAX_SHOWN_ERRORS} more")
    path, _ = _locate(errors[0]["loc"], model)
    broken = (errors[0].get("ctx") or {}).get("error")
    path += [broken.field] if isinstance(broken, FieldError) else []
    return ApiError.invalid("; ".join(sentences), param=_joined(path) or None)


def _of_branches_meant(errors: Sequence[ErrorDetails], model: type[BaseModel]) -> Sequence[ErrorDetails]:
    """Drop the errors of union branches for another type than the value's.

    Such a branch reports the whole value; the intended branch reports a place inside it.
    """
    first, rest = errors[:MAX_COMPARED_ERRORS], errors[MAX_COMPARED_ERRORS:]
    paths = [tuple(_locate(error["loc"], model)[0]) for error in first]
    looked_into = {path[:length] for path in paths for length in range(len(path))}
    meant = [
        error
        for error, path in zip(first, paths, strict=True)
        if path not in looked_into or not error["type"].endswith(OF_A_TYPE)
    ]
    return [*meant, *rest]


def _sentences(errors: Sequence[ErrorDetails], model: type[BaseModel]) -> list[str]:
    """Return one sentence for each value, although each branch of a union reports it."""
    rules: dict[tuple[str, str], list[str]] = {}
    others: list[str] = []
    for error in errors:
        rule = IN_JSON.get(rule := broken_rule(error["type"], error.get("ctx")), rule)
        path, owner = _locate(error["loc"], model)
        if error["type"] == "value_error":
            # A rule between fields names the fields instead of the body's place.
            inside = path and isinstance(error["input"], dict)
            others.append(f"{_joined(path)}: {rule}" if inside else rule)
        elif error["type"] == "extra_forbidden":
            remedy = _meant(str(path[-1]), owner)
            others.append(f"{_joined(path)} is not a field here, got {_shown(error['input'])}; {remedy}")
        else:
            value = "" if error["type"] in ("missing", "json_invalid") else f", got {_measured(error)}"
            value += _why_only(error["type"], _fields_of(owner).get(str(path[-1])) if path else None)
            rules.setdefault((_joined(path) or "the body", value), []).append(rule)
    return [f"{path} {joined_rules(broken)}{value}" for (path, value), broken in rules.items()] + others


def _why_only(kind: str, field: FieldInfo | None) -> str:
    """Return the reason why only one value is accepted, from the field's description."""
    if field is None or kind not in OF_ONE_VALUE:
        return ""
    reason, separator, _ = (field.description or "").partition(": only")
    is_said = bool(separator) or ": " in reason
    return f": {reason}" if is_said and reason != NOT_HONOURED else ""


def _meant(name: str, owner: type[BaseModel]) -> str:
    """Return the remedy for an unknown field: its name in this body, its place, or the list of fields."""
    fields = _fields_of(owner)
    called = next((other for other in SYNONYMS.get(name, ()) if other in fields), None)
    kinds = [(home, kind) for home, field in fields.items() for kind in _branches(field.annotation) if _is_body(kind)]
    homes = [home for home, kind in kinds if name in _fields_of(kind)]
    if called is None and homes:
        return f"it is a field of {homes[0]}"
    if called is None and name in WRAPPERS:
        return "its entries are fields of the body itself; send them there"
    return did_you_mean(name, fields) if called is None else f"did you mean {called!r}?"


def _measured(error: ErrorDetails) -> str:
    """Show the value that broke a rule, or the length of a value that is too long."""
    value, unit = error["input"], LENGTHS.get(error["type"])
    return _shown(value) if unit is None or not isinstance(value, Sized) else f"{len(value)} {unit}"


def _shown(value: object) -> str:
    """Write a value as Python does, but with JSON's literals, and shortened."""
    return repr(value) if isinstance(value, str) and len(value) <= MAX_SHOWN_VALUE_CHARS else _values.repr(value)


def _joined(path: Sequence[int | str]) -> str:
    return ".".join(shortened(str(part), MAX_SHOWN_VALUE_CHARS) for part in path)


def _locate(loc: Sequence[int | str], model: type[BaseModel]) -> tuple[list[int | str], type[BaseModel]]:
    """Return the path of a place as the client wrote it, and the innermost body around it.

    A validator's path contains names of union branches. The types distinguish them from the client's keys, which may
    look alike.
    """
    owner = model
    path: list[int | str] = []
    here: list[Any] = [model]
    branch_named = True
    for part in loc:
        if len(here) > 1 and not branch_named and isinstance(part, str):
            here = [kind for kind in here if _is_branch(kind, str(part))] or here
            # A union with a rule inside a union: the name of its branch follows.
            branch_named = "union[" not in str(part)
            continue
        if part == KEY and not any(_is_body(kind) or get_origin(kind) in (list, dict) for kind in here):
            break  # The validator's suffix for a key that breaks a rule, not a place.
        path.append(part)
        owner = next((kind for kind in here if _is_body(kind)), owner)
        here = [inner for kind in here for inner in _inside(kind, part)]
        branch_named = False
    return path, owner


def _fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """List the fields of a body as clients spell them."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _is_body(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _is_branch(kind: Any, name: str) -> bool:
    """Return whether a validator gives a branch this name: 'int', 'list[int]', 'constrained-str',
    'function-after[...]'.

    A discriminated branch has the name of its discriminator's value.
    """
    if _is_body(kind) and any(name in get_args(field.annotation) for field in kind.model_fields.values()):
        return True
    called: str = (get_origin(kind) or kind).__name__
    return name.startswith(called) or name.endswith(f"-{called}")


def _inside(kind: Any, part: int | str) -> list[Any]:
    """Return the types of the values at a key or an index of a value of some type."""
    if _is_body(kind):
        field = _fields_of(kind).get(str(part))
        return [] if field is None else _branches(field.annotation)
    if get_origin(kind) in (list, dict):
        return _branches(get_args(kind)[-1])
    return []


def _branches(annotation: Any) -> list[Any]:
    """Return the branches of a type without annotations and without None."""
    if annotation is JsonValue or annotation == "JsonValue":  # it refers to itself by name
        return _branches(cast(Any, JsonValue).__value__)
    if get_origin(annotation) is Annotated:
        return _branches(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _branches(part)]
    return [] if annotation is type(None) else [annotation]
