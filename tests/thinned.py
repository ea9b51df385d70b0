"""Cases that differ little: `make test` runs every n-th of them, and the night (`make nightly`) the others as well."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["thinned"]


def thinned(cases: Iterable[Any], *, one_in: int) -> list[Any]:
    """Mark all but every ``one_in``-th case nightly; for ``pytest.mark.parametrize``."""
    return [case if number % one_in == 0 else _nightly(case) for number, case in enumerate(cases)]


def _nightly(case: Any) -> Any:
    if hasattr(case, "marks"):
        return pytest.param(*case.values, marks=(*case.marks, pytest.mark.nightly), id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.nightly)
