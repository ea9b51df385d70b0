"""The scripted harness: freeze the engine's scheduler, run step-level scripts in it, and assert what happens.

``@scripted(config)`` makes a pytest test of a generator; ``ScriptedSim`` and ``ScriptedServer`` run one by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from scripted.rig.handle import RequestHandle
    from scripted.script.decorator import scripted
    from scripted.script.options import ScriptOptions
    from scripted.script.t import ScriptContext
    from scripted.server.runner import ScriptedServer
    from scripted.server.wire import EndServer, HookReady, RunScript, ScriptFailedReply
    from scripted.sim.runner import ScriptedSim

__all__ = [
    "BadCall",
    "BudgetSpent",
    "EndServer",
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
    "UnknownName",
    "scripted",
]

# Loaded at first use: a file that only decorates scripts does not pay for what runs them, and a scheduler that this
# project did not write is searched without its engine.
_ERRORS = "scripted.errors"
_WIRE = "scripted.server.wire"
_LAZY = {
    "BadCall": _ERRORS,
    "BudgetSpent": _ERRORS,
    "HookReady": _WIRE,
    "RequestHandle": "scripted.rig.handle",
    "RequestRefused": _ERRORS,
    "RunScript": _WIRE,
    "ScriptContext": "scripted.script.t",
    "ScriptDefinitionError": "scripted.refusals",
    "ScriptError": _ERRORS,
    "ScriptFailed": _ERRORS,
    "ScriptFailedReply": _WIRE,
    "ScriptOptions": "scripted.script.options",
    "ScriptSucceeded": "scripted.gate.run",
    "ScriptTimeout": _ERRORS,
    "ScriptedServer": "scripted.server.runner",
    "ScriptedSim": "scripted.sim.runner",
    "ServerDied": _ERRORS,
    "ServerDirty": _ERRORS,
    "EndServer": _WIRE,
    "UnknownName": _ERRORS,
    "scripted": "scripted.script.decorator",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'scripted' has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value
