"""The scripted harness: freeze a scheduler, run step-level scripts in it, assert what happens, and search for races.

``@scripted(config)`` turns a generator into a pytest test; ``ScriptedSim`` and ``ScriptedServer`` run one by hand. Five
functions do what the commands do: ``explore``, ``replay``, ``shrink``, ``write_test`` and ``run_script``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scripted.api import explore, replay, run_script, shrink, write_test
    from scripted.core.errors import BadCall, BudgetSpent, RequestRefused, UnknownName
    from scripted.core.refusals import ScriptDefinitionError
    from scripted.report.failure import ScriptError, ScriptFailed, ScriptTimeout, ServerDied, ServerDirty
    from scripted.script.decorator import scripted
    from scripted.script.harness import Harness, ScriptedServer, ScriptedSim
    from scripted.script.options import ScriptOptions
    from scripted.script.wire import HookReady, RunScript, ScriptFailedReply, Shutdown

__all__ = [
    "BadCall",
    "BudgetSpent",
    "Harness",
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
    "explore",
    "replay",
    "run_script",
    "scripted",
    "shrink",
    "write_test",
]

# Loaded at first use: pytest loads the plugin, and with it this file, even in projects without scripts.
_LAZY = {
    "scripted.api": ("explore", "replay", "run_script", "shrink", "write_test"),
    "scripted.core.errors": ("BadCall", "BudgetSpent", "RequestRefused", "UnknownName"),
    "scripted.core.refusals": ("ScriptDefinitionError",),
    "scripted.report.failure": ("ScriptError", "ScriptFailed", "ScriptTimeout", "ServerDied", "ServerDirty"),
    "scripted.script.decorator": ("scripted",),
    "scripted.script.harness": ("Harness", "ScriptedServer", "ScriptedSim"),
    "scripted.script.options": ("ScriptOptions",),
    "scripted.script.wire": ("HookReady", "RunScript", "ScriptFailedReply", "Shutdown"),
}
# Types of adapters: for annotations, and for programs that talk to a gate themselves.
_OF_ADAPTERS = ("RequestHandle", "ScriptContext", "ScriptSucceeded")


def __getattr__(name: str) -> Any:
    import importlib

    for module, names in _LAZY.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(module), name)
            return value
    if name in _OF_ADAPTERS:
        from scripted.core.adapters import contract_name

        value = globals()[name] = contract_name(name)
        return value
    raise AttributeError(f"module 'scripted' has no attribute {name!r}")
