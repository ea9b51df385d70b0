"""Request names: the clients' and the internal ones.

vLLM's front end makes names unique before the scheduler gets them: two requests with one name differ, even if results
of the first are in flight when the second arrives.
"""

from __future__ import annotations

from typing import Final

_ARRIVED: Final = "@"


def id_at(rid: str, step: int) -> str:
    """Return the internal name of a request that arrives in this step."""
    return f"{rid}{_ARRIVED}{step}"


def rid_of(request_id: str) -> str:
    return request_id.rpartition(_ARRIVED)[0] or request_id
