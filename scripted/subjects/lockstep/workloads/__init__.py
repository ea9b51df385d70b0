"""The library of base workloads: small, each with one situation that real engines got wrong.

More workloads find more than more depth: a search that sweeps one event over all of these beats two events over one.
Each is one line of a schedule's own text; write another one in the same way, in the file of its subject.
"""

from __future__ import annotations

from typing import Final

from scripted.subjects.lockstep.workloads.adapters import ADAPTERS
from scripted.subjects.lockstep.workloads.ahead import AHEAD
from scripted.subjects.lockstep.workloads.basic import BASIC, FLAGSHIP
from scripted.subjects.lockstep.workloads.bounds import BOUNDS
from scripted.subjects.lockstep.workloads.calls import CALLS
from scripted.subjects.lockstep.workloads.drafts import DRAFTS
from scripted.subjects.lockstep.workloads.grammars import GRAMMARS
from scripted.subjects.lockstep.workloads.host_tier import HOST_TIER
from scripted.subjects.lockstep.workloads.launching import LAUNCHING
from scripted.subjects.lockstep.workloads.memory import MEMORY
from scripted.subjects.lockstep.workloads.outputs import OUTPUTS, STOP_TOKENS
from scripted.subjects.lockstep.workloads.queueing import QUEUEING
from scripted.subjects.lockstep.workloads.windows import WINDOWS

__all__ = ["FLAGSHIP", "STOP_TOKENS", "TEXTS"]

# In the order of a search.
TEXTS: Final[dict[str, str]] = {
    **BASIC,
    **QUEUEING,
    **MEMORY,
    **CALLS,
    **LAUNCHING,
    **OUTPUTS,
    **WINDOWS,
    **DRAFTS,
    **GRAMMARS,
    **ADAPTERS,
    **HOST_TIER,
    **AHEAD,
    **BOUNDS,
}
