"""One test over many small cases: it runs them all and fails once, with each case that is wrong.

For tables of words, names and pages, where a case is a line. A case that needs fixtures of its own is parametrized.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

__all__ = ["every_case"]


_Test = Callable[..., None]


def every_case(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[_Test], _Test]:
    """Give a test its cases, in the form that ``pytest.mark.parametrize`` takes, as one test."""
    taken = (names,) if isinstance(names, str) else names
    listed = list(cases)
    assert listed, "there is no case"

    def of(test: _Test) -> _Test:
        def run(**fixtures: Any) -> None:
            wrong, skipped = [], []
            for case in listed:
                values = _values(case, len(taken))
                try:
                    test(**dict(zip(taken, values, strict=True)), **fixtures)
                except pytest.skip.Exception as exc:
                    skipped.append(str(exc))
                except (Exception, pytest.fail.Exception) as exc:  # noqa: BLE001 - whatever a case raises, the others run
                    wrong.append(f"{_shown(case, values)}: {type(exc).__name__}: {exc}")
            assert not wrong, f"{len(wrong)} of {len(listed)} cases are wrong:\n" + "\n".join(wrong)
            if len(skipped) == len(listed):
                pytest.skip(skipped[0])

        signature = inspect.signature(test)
        kept = [value for name, value in signature.parameters.items() if name not in taken]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return run

    return of


def _values(case: Any, count: int) -> tuple[Any, ...]:
    values = getattr(case, "values", None) if hasattr(case, "marks") else None
    if values is not None:
        return tuple(values)
    return (case,) if count == 1 else tuple(case)


def _shown(case: Any, values: tuple[Any, ...]) -> str:
    if hasattr(case, "marks") and case.id:
        return str(case.id)
    return ", ".join(getattr(value, "__name__", None) or getattr(value, "name", None) or str(value) for value in values)
