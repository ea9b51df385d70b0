"""The scripted harness: freeze the engine's scheduler, run step-level scripts in it, and assert what happens.

``@scripted(config)`` makes a pytest test of a generator; ``ScriptedSim`` and ``ScriptedServer`` run one by hand. What
the commands do is in ``scripted.api``: search, replay, shrink, write a test, run a script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripted_lockstep.script.context import ScriptContext
    from scripted_lockstep.script.handle import RequestHandle
    from scripted_lockstep.tiers.server.runner import ScriptedServer
    from scripted_lockstep.tiers.sim.runner import ScriptedSim

    from scripted.core.errors import BadCall, BudgetSpent, RequestRefused, UnknownName
    from scripted.core.refusals import ScriptDefinitionError
    from scripted.report.failure import ScriptError, ScriptFailed, ScriptTimeout, ServerDied, ServerDirty
    from scripted.script.decorator import scripted
    from scripted.script.options import ScriptOptions

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

# Loaded at first use: a file that only decorates scripts does not pay for what runs them, and a scheduler that this
# project did not write is searched without its engine. The messages on the wire are here for who speaks it himself.
_LAZY = {
    "scripted_lockstep.script.context": ("ScriptContext",),
    "scripted_lockstep.script.execution": ("ScriptSucceeded",),
    "scripted_lockstep.script.handle": ("RequestHandle",),
    "scripted_lockstep.tiers.server.runner": ("ScriptedServer",),
    "scripted_lockstep.tiers.server.wire": ("Shutdown",),
    "scripted_lockstep.tiers.sim.runner": ("ScriptedSim",),
    "scripted.core.refusals": ("ScriptDefinitionError",),
    "scripted.core.errors": ("BadCall", "BudgetSpent", "RequestRefused", "UnknownName"),
    "scripted.report.failure": ("ScriptError", "ScriptFailed", "ScriptTimeout", "ServerDied", "ServerDirty"),
    "scripted.script.decorator": ("scripted",),
    "scripted.script.options": ("ScriptOptions",),
    "scripted.script.wire": ("HookReady", "RunScript", "ScriptFailedReply"),
}


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _LAZY.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(module), name)
            return value
    raise AttributeError(f"module 'scripted' has no attribute {name!r}")
