"""The error for a body that breaks rules: field, rule, value and remedy of the first few.

Owns the bound on the work and on the length: a body of a million wrong entries costs no more than one of a thousand.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence, Sized
from types import UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin

from pydantic import BaseModel, JsonValue, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from engine.frontend.schema.errors import ApiError, FieldError, shortened
from lockstep.broken_rules import broken_rule, did_you_mean, joined_rules

# Each error that pydantic describes costs a microsecond and half a kilobyte, and it describes all or none.
MAX_DESCRIBED_ERRORS = 1000
MAX_SHOWN_ERRORS = 8
MAX_COMPARED_ERRORS = 64
MAX_SHOWN_VALUE_CHARS = 80
# What the routes of several protocols call the same thing.
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
# What stands for fields of the body: an argument of a client's library, a part of Ollama's protocol.
WRAPPERS = ("extra_body", "options", "parameters")
# What a validator puts after a key that broke a rule itself.
KEY = "[key]"
# The validator has the words of Python.
IN_JSON = {"must be False": "must be false", "must be True": "must be true"}
# The ends of the validator's words for a value of another type than a branch takes.
OF_A_TYPE = ("_type", "literal_error")
OF_ONE_VALUE = ("literal_error", "none_required")
NOT_HONOURED = "not honoured"
# What a value is counted in that is too long.
LENGTHS = {"too_long": "entries", "string_too_long": "characters"}

_values = reprlib.Repr()
_values.maxstring = _values.maxother = _values.maxlong = MAX_SHOWN_VALUE_CHARS


def invalid_body(exc: ValidationError, model: type[BaseModel]) -> ApiError:
    """Make the error (400) for a body that is no ``model``."""
    count = exc.error_count()
    if count > MAX_DESCRIBED_ERRORS:
        return ApiError.invalid(
            f"the body must keep to the fields of this route, but it breaks their rules in {count} places, too many to "
            f"name; the fields are {', '.join(_fields_of(model))}"
        )
    errors = _of_branches_meant(exc.errors(include_url=False), model)
    told = _sentences(errors[:MAX_SHOWN_ERRORS], model)
    if len(errors) > MAX_SHOWN_ERRORS:
        told.append(f"and {len(errors) - MAX_SHOWN_ERRORS} more")
    path, _ = _locate(errors[0]["loc"], model)
    broken = (errors[0].get("ctx") or {}).get("error")
    path += [broken.field] if isinstance(broken, FieldError) else []
    return ApiError.invalid("; ".join(told), param=_joined(path) or None)


def _of_branches_meant(errors: Sequence[ErrorDetails], model: type[BaseModel]) -> Sequence[ErrorDetails]:
    """The errors without those of a union's branches that another type was given for.

    Such a branch reports the value as a whole, and the branch that was meant reports a place inside it.
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
    """Word one sentence for each value, although each branch of a union reports it."""
    rules: dict[tuple[str, str], list[str]] = {}
    others: list[str] = []
    for error in errors:
        rule = IN_JSON.get(rule := broken_rule(error["type"], error.get("ctx")), rule)
        path, owner = _locate(error["loc"], model)
        if error["type"] == "value_error":
            # A rule between the fields of one body names these, not the place of the body.
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
    """Why one value alone is taken, as the field's description says it before that value."""
    if field is None or kind not in OF_ONE_VALUE:
        return ""
    reason, separator, _ = (field.description or "").partition(": only")
    is_said = bool(separator) or ": " in reason
    return f": {reason}" if is_said and reason != NOT_HONOURED else ""


def _meant(name: str, owner: type[BaseModel]) -> str:
    """The remedy for a field that a body does not have: what it is called there, where it belongs, or all fields."""
    fields = _fields_of(owner)
    called = next((other for other in SYNONYMS.get(name, ()) if other in fields), None)
    kinds = [(home, kind) for home, field in fields.items() for kind in _branches(field.annotation) if _is_body(kind)]
    homes = [home for home, kind in kinds if name in _fields_of(kind)]
    if called is None and homes:
        return f"it is a field of {homes[0]}"
    if called is None and name in WRAPPERS:
        return "what is in it are fields of the body itself; send them there"
    return did_you_mean(name, fields) if called is None else f"did you mean {called!r}?"


def _measured(error: ErrorDetails) -> str:
    """Show the value that broke a rule, or the length of a value that is too long."""
    value, unit = error["input"], LENGTHS.get(error["type"])
    return _shown(value) if unit is None or not isinstance(value, Sized) else f"{len(value)} {unit}"


def _shown(value: object) -> str:
    """A value as JSON has its words and as Python writes the rest, shortened before it is written."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) and len(value) <= MAX_SHOWN_VALUE_CHARS else _values.repr(value)


def _joined(path: Sequence[int | str]) -> str:
    return ".".join(shortened(str(part), MAX_SHOWN_VALUE_CHARS) for part in path)


def _locate(loc: Sequence[int | str], model: type[BaseModel]) -> tuple[list[int | str], type[BaseModel]]:
    """The path of a place in a body as its client wrote it, and the innermost body that the place is in.

    A validator names the branches of a union in between. Which parts are such names is read from the types: a client's
    own key may look like one.
    """
    owner = model
    path: list[int | str] = []
    here: list[Any] = [model]
    branch_named = True
    for part in loc:
        if len(here) > 1 and not branch_named and isinstance(part, str):
            here = [kind for kind in here if _is_branch(kind, str(part))] or here
            # A union with a rule of its own in a union: the name of its branch follows.
            branch_named = "union[" not in str(part)
            continue
        if part == KEY and not any(_is_body(kind) or get_origin(kind) in (list, dict) for kind in here):
            break  # Not a place, but a word of the validator's: it was the key that broke a rule.
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
    """Whether this is a validator's name of a branch: 'int', 'list[int]', 'constrained-str', 'function-after[...]'.

    A branch that is found by what one of its fields says is named by that.
    """
    if _is_body(kind) and any(name in get_args(field.annotation) for field in kind.model_fields.values()):
        return True
    called: str = (get_origin(kind) or kind).__name__
    return name.startswith(called) or name.endswith(f"-{called}")


def _inside(kind: Any, part: int | str) -> list[Any]:
    """The types that may stand at a key or an index of a value of some type."""
    if _is_body(kind):
        field = _fields_of(kind).get(str(part))
        return [] if field is None else _branches(field.annotation)
    if get_origin(kind) in (list, dict):
        return _branches(get_args(kind)[-1])
    return []


def _branches(annotation: Any) -> list[Any]:
    """The branches of a type, without annotations. None is not a branch."""
    if annotation is JsonValue or annotation == "JsonValue":  # its own name inside it
        return _branches(cast(Any, JsonValue).__value__)
    if get_origin(annotation) is Annotated:
        return _branches(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _branches(part)]
    return [] if annotation is type(None) else [annotation]
