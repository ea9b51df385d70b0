"""Error texts for a value that breaks a rule: one sentence for each kind of error that the validator has.

Owns the rules' wording, in the vocabulary of JSON and of numbers, and the nearest name to a misspelt one. The caller
names the field. The validator's own wording never gets through.
"""

from __future__ import annotations

import difflib
from collections import UserDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

# No field has a longer name, and the time of the search grows with the square of the length.
_MAX_COMPARED_CHARS = 64
# A misspelt name is more similar than this to the one it stands for: each word, or all together; 1 is equal.
_ALIKE = 0.5
_NEARLY_EQUAL = 0.95

_INTEGER = "must be an integer"
_NUMBER = "must be a number"
_TRUTH = "must be true or false"
_TEXT = "must be a string"
_LIST = "must be a list"
_OBJECT = "must be an object"

# By the validator's type of error, whose context fills the braces.
RULES = {
    "missing": "must be given",
    "none_required": "must be null or left out",
    "greater_than": "must be > {gt}",
    "greater_than_equal": "must be >= {ge}",
    "less_than": "must be < {lt}",
    "less_than_equal": "must be <= {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "finite_number": "must be a finite number",
    "int_type": _INTEGER,
    "int_parsing": _INTEGER,
    "int_from_float": _INTEGER,
    "int_parsing_size": "must be an integer of fewer digits",
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "bool_type": _TRUTH,
    "bool_parsing": _TRUTH,
    "string_type": _TEXT,
    "string_sub_type": _TEXT,
    "string_unicode": "must be Unicode text",
    "string_too_short": "must have >= {min_length} characters",
    "string_too_long": "must have <= {max_length} characters",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "list_type": _LIST,
    "tuple_type": _LIST,
    "set_type": _LIST,
    "frozen_set_type": _LIST,
    "iterable_type": _LIST,
    "too_short": "must have >= {min_length} entries",
    "too_long": "must have <= {max_length} entries",
    "dict_type": _OBJECT,
    "mapping_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
    "dataclass_type": _OBJECT,
    "invalid_key": "must have strings as keys",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "union_tag_invalid": "must have {discriminator} one of {expected_tags}",
    "union_tag_not_found": "must have {discriminator}",
    "json_type": "must be JSON text",
    "json_invalid": "must be JSON: {error}",
    "value_error": "{error}",
    "assertion_error": "{error}",
}


def broken_rule(kind: str, context: Mapping[str, Any] | None) -> str:
    """Return the broken rule as 'must be ...', from the validator's type of error and its context."""
    template = RULES.get(kind, f"must pass the check {kind.replace('_', ' ')!r}")
    return template.format_map(_Shown({} if context is None else context))


class _Shown(UserDict[str, Any]):
    """A context whose whole numbers have no decimal point."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return int(value) if isinstance(value, float) and value.is_integer() else value


def joined_rules(rules: Iterable[str]) -> str:
    """Join alternative rules, such as the branches of a union, into one."""
    different = tuple(dict.fromkeys(rules))
    if len(different) > 1 and all(rule.startswith("must be ") for rule in different):
        return "must be " + _alternatives([rule.removeprefix("must be ") for rule in different])
    return _alternatives(different)


def _alternatives(parts: Sequence[str]) -> str:
    return " or ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def nearest(name: str, known: Collection[str], *, cutoff: float = 0.6) -> str | None:
    """Return the most similar known name; None below the similarity ``cutoff``, which is 1 for equal names.

    Case makes no difference.
    """
    if len(name) > _MAX_COMPARED_CHARS:
        return None
    in_full = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), in_full, cutoff=cutoff)
    return next((in_full[one] for one in close if _means_the_same(name.lower(), one)), None)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the remedy for an unknown name: the nearest one, or all."""
    if not known:
        return "there are no fields; leave it out"
    near = nearest(name, known)
    return f"the fields are {', '.join(known)}" if near is None else f"did you mean {near!r}?"


def _means_the_same(name: str, near: str) -> bool:
    """True if one name is the other misspelt: ``tp_size`` is not ``pp_size``, although one letter differs."""
    words, others = name.split("_"), near.split("_")
    is_a_beginning = near.startswith(name) or name.startswith(near)
    whole = difflib.SequenceMatcher(None, "".join(words), "".join(others)).ratio()
    pairs = zip(words, others, strict=False) if len(words) == len(others) else ()
    alike = [difflib.SequenceMatcher(None, *pair).ratio() > _ALIKE for pair in pairs]
    return is_a_beginning or whole > _NEARLY_EQUAL or (bool(alike) and all(alike))
