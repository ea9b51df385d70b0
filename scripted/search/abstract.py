"""The abstract state of a run between two steps: what a search counts as somewhere that it has not been.

From the account of who is alive and was told what, and from what the adapter says of its own parts. It never judges.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from scripted.core.run import Run

# More requests, and more in flight, make no other state.
_MANY: Final = 3


def abstract_state(run: Run) -> Hashable:
    """In which places requests are, what is in flight, and what stands in the way. Names and numbers are left out."""
    account = run.oracle.account
    lives = frozenset([(life.state, bool(life.said), life.aborted, life.launched) for life in account.live.values()])
    obstacle = run.obstacle
    return (
        lives,
        min(len(account.live), _MANY),
        account.is_settled,
        min(len(run.results), _MANY),
        run.is_holding,
        None if obstacle is None else obstacle.kind,
        run.adapter.where(run, None),
        run.adapter.relations(run),
    )
