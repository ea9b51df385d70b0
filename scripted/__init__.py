"""The scripted harness: freeze the engine's scheduler, run step-level scripts in it, and assert what happens.

``@scripted(config)`` makes a pytest test of a generator; ``ScriptedSim`` and ``ScriptedServer`` run one by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scripted.errors import (
    BadCall,
    BudgetSpent,
    RequestRefused,
    ScriptError,
    ScriptFailed,
    ScriptTimeout,
    ServerDied,
    ServerDirty,
    UnknownName,
)
from scripted.gate.run import ScriptSucceeded
from scripted.refusals import ScriptDefinitionError
from scripted.script.decorator import scripted
from scripted.script.options import ScriptOptions
from scripted.server.wire import HookReady, RunScript, ScriptFailedReply, Shutdown

if TYPE_CHECKING:
    from scripted.rig.handle import RequestHandle
    from scripted.script.t import ScriptContext
    from scripted.server.runner import ScriptedServer
    from scripted.sim.runner import ScriptedSim

__all__ = [
    "BadCall",
    "BudgetSpent",
    "HookReady",
    "RequestHandle",
    "RequestRefused",
    "RunScript",
    "ScriptContext",
    "ScriptDefinitionError",
    "ScriptError",
    "ScriptFailed",
    "ScriptFailedReply",
    "ScriptOptions",
    "ScriptSucceeded",
    "ScriptTimeout",
    "ScriptedServer",
    "ScriptedSim",
    "ServerDied",
    "ServerDirty",
    "Shutdown",
    "UnknownName",
    "scripted",
]

# Loaded at first use: a test file that only decorates scripts should not pay for what runs them.
_LAZY = {
    "RequestHandle": "scripted.rig.handle",
    "ScriptContext": "scripted.script.t",
    "ScriptedServer": "scripted.server.runner",
    "ScriptedSim": "scripted.sim.runner",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'scripted' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
