"""How a mutant of a plain contract is made; it lists none."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from scripted.core.mutant import Mutant

__all__ = ["contract"]

_CORE: Final = "tests/registered/core"


def contract(
    name: str, bug: str, signature: str, test: str, owner: type | ModuleType, attribute: str, replacement: Any
) -> Mutant:
    """A mutant of a contract. ``test`` without a folder is in the core suite."""
    where = test if "/" in test else f"{_CORE}/{test}"
    return Mutant(
        name=name,
        origin="a contract of the core suite",
        bug=bug,
        signature=signature,
        test=where,
        owner=owner,
        attribute=attribute,
        replacement=replacement,
    )
