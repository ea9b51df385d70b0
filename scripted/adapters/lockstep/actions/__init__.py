"""Actions: what may happen to an engine from outside. One class each, which is all that the harness knows of it.

A new one is a class here and a verb of ``t``; tests/unit/actions says what it still lacks. A search tries them in the
order in which these modules define them.
"""

# isort: off
from scripted.core.action import Action, SearchBase
from scripted.core.common_actions import AdvanceClock, HoldResults, ReleaseResults
from scripted.adapters.lockstep.actions.action import (
    AdministrativeCall,
    EngineAction,
    Intervention,
    all_actions,
    name_in_answers,
    words_of,
)
from scripted.adapters.lockstep.actions.calls import (
    PAUSE_MODES,
    AbortEverything,
    BeginProfile,
    EndProfile,
    Flush,
    PauseServing,
    ResumeServing,
    SleepServing,
    WakeServing,
)
from scripted.adapters.lockstep.actions.results_and_stages import (
    FailStage,
    KillStage,
    ResumeStage,
    StallStage,
)
from scripted.adapters.lockstep.actions.grammars import FailGrammar, HoldGrammars, ReleaseGrammars
from scripted.adapters.lockstep.actions.transfers import FailTransfer, HoldTransfers, ReleaseTransfers
from scripted.adapters.lockstep.actions.weights_and_memory import Evict, Press, Relieve, Update
from scripted.adapters.lockstep.actions.loras import LoraLoad, LoraUnload
from scripted.adapters.lockstep.actions.client_requests import AbortRequest, DisconnectClient, StartRequest
from scripted.core.placed import Placed, parse_placed
from scripted.core.verb import Verb, variable_of

# isort: on

__all__ = [
    "PAUSE_MODES",
    "AbortEverything",
    "AbortRequest",
    "Action",
    "AdministrativeCall",
    "AdvanceClock",
    "BeginProfile",
    "DisconnectClient",
    "EndProfile",
    "EngineAction",
    "Evict",
    "FailGrammar",
    "FailStage",
    "FailTransfer",
    "Flush",
    "HoldGrammars",
    "HoldResults",
    "HoldTransfers",
    "Intervention",
    "KillStage",
    "LoraLoad",
    "LoraUnload",
    "PauseServing",
    "Placed",
    "Press",
    "ReleaseGrammars",
    "ReleaseResults",
    "ReleaseTransfers",
    "Relieve",
    "ResumeServing",
    "ResumeStage",
    "SearchBase",
    "SleepServing",
    "StallStage",
    "StartRequest",
    "Update",
    "Verb",
    "WakeServing",
    "all_actions",
    "name_in_answers",
    "parse_placed",
    "variable_of",
    "words_of",
]
