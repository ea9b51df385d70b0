"""Actions on the engine from outside: one class each, with everything that the harness knows about it.

A new action is a class here and a verb of ``t``; tests/unit/actions reports its missing parts. A search tries actions
in the order of these modules and of the classes in them.
"""

# isort: off
from scripted_lockstep.actions.action import EngineCall, all_actions
from scripted_lockstep.actions.calls import (
    AbortEverything,
    BeginProfile,
    EndProfile,
    Flush,
    PauseServing,
    ResumeServing,
    SleepServing,
    WakeServing,
)
from scripted_lockstep.actions.results_and_stages import FailStage, KillStage, ResumeStage, StallStage
from scripted_lockstep.actions.grammars import FailGrammar, HoldGrammars, ReleaseGrammars
from scripted_lockstep.actions.transfers import FailTransfer, HoldTransfers, ReleaseTransfers
from scripted_lockstep.actions.weights_and_memory import Evict, Press, Relieve, Update
from scripted_lockstep.actions.loras import HoldLoras, LoraLoad, LoraUnload, ReleaseLoras
from scripted_lockstep.actions.client_requests import AbortRequest, DisconnectClient, StartRequest

# isort: on

__all__ = [
    "AbortEverything",
    "AbortRequest",
    "BeginProfile",
    "DisconnectClient",
    "EndProfile",
    "EngineCall",
    "Evict",
    "FailGrammar",
    "FailStage",
    "FailTransfer",
    "Flush",
    "HoldGrammars",
    "HoldLoras",
    "HoldTransfers",
    "KillStage",
    "LoraLoad",
    "LoraUnload",
    "PauseServing",
    "Press",
    "ReleaseGrammars",
    "ReleaseLoras",
    "ReleaseTransfers",
    "Relieve",
    "ResumeServing",
    "ResumeStage",
    "SleepServing",
    "StallStage",
    "StartRequest",
    "Update",
    "WakeServing",
    "all_actions",
]
