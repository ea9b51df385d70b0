"""The grammar of every simulated device: the tokens that may follow an output.

Pure functions without a runtime import: standalone tests include this source.
"""

from __future__ import annotations

from collections.abc import Iterable

STATES = 3


def is_allowed(token: int, state: int) -> bool:
    """Return whether the state allows a token: each is allowed in one state only, so a mask of another rejects it."""
    return token % STATES == state


def state_after(tokens: Iterable[int], state: int = 0) -> int:
    """Return the state of the grammar after these tokens; it depends on each of them."""
    for token in tokens:
        state = (state + token // STATES) % STATES
    return state
