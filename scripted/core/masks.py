"""The grammar of every simulated device: which tokens may come next, by what the request has said so far.

Pure functions without an import: standalone tests begin with this text.
"""

from __future__ import annotations

from collections.abc import Iterable

STATES = 3


def is_allowed(token: int, state: int) -> bool:
    """Each token is allowed in one state, so a mask of another state forbids what comes next."""
    return token % STATES == state


def state_after(tokens: Iterable[int], state: int = 0) -> int:
    """Of the grammar after these tokens, which depends on each of them."""
    for token in tokens:
        state = (state + token // STATES) % STATES
    return state
