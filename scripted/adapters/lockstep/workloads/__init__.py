"""The library of base workloads: small, each with one situation that real engines got wrong.

More workloads find more than more depth: a search that sweeps one event over all of these beats two events over one.
Each is one line of a schedule's own text; write another one in the same way, in the file of its subject.
"""

from __future__ import annotations

from typing import Final

from scripted.adapters.lockstep.workloads.ahead import AHEAD
from scripted.adapters.lockstep.workloads.basic import BASIC, FLAGSHIP
from scripted.adapters.lockstep.workloads.bounds import BOUNDS
from scripted.adapters.lockstep.workloads.calls import CALLS
from scripted.adapters.lockstep.workloads.drafts import DRAFTS
from scripted.adapters.lockstep.workloads.grammars import GRAMMARS
from scripted.adapters.lockstep.workloads.host_tier import HOST_TIER
from scripted.adapters.lockstep.workloads.launching import LAUNCHING
from scripted.adapters.lockstep.workloads.loras import LORAS
from scripted.adapters.lockstep.workloads.memory import MEMORY
from scripted.adapters.lockstep.workloads.outputs import OUTPUTS, STOP_TOKENS
from scripted.adapters.lockstep.workloads.queueing import QUEUEING
from scripted.adapters.lockstep.workloads.windows import WINDOWS

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
    **LORAS,
    **HOST_TIER,
    **AHEAD,
    **BOUNDS,
}
