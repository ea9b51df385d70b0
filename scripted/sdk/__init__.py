"""Adapters for schedulers of the usual shape: everything but the machine comes ready-made.

Write a machine (``step``, ``counts``, ``is_idle``, ``depth``) and a ``SchedulerAdapter`` for it; see
docs/your_scheduler.md.
"""

from scripted.core.action import Action, SearchBase, verb
from scripted.core.forks import Copier
from scripted.core.mutant import Mutant
from scripted.core.protocol import ADAPTER_API
from scripted.core.violation import Violation
from scripted.sdk.adapter import SchedulerAdapter
from scripted.sdk.capabilities import Capabilities, Limits, PauseMode
from scripted.sdk.messages import (
    Abort,
    Add,
    Answer,
    Batch,
    BatchFailed,
    BatchResult,
    FlushCache,
    Load,
    Pause,
    Refused,
    Resume,
    Ring,
    Rows,
    Share,
    Signal,
    Sleep,
    StateTable,
    Stepped,
    Tokens,
    Wake,
    Window,
)
from scripted.sdk.signals import SignalAction

__all__ = [
    "ADAPTER_API",
    "Abort",
    "Action",
    "Add",
    "Answer",
    "Batch",
    "BatchFailed",
    "BatchResult",
    "Capabilities",
    "Copier",
    "FlushCache",
    "Limits",
    "Load",
    "Mutant",
    "Pause",
    "PauseMode",
    "Refused",
    "Resume",
    "Ring",
    "Rows",
    "SchedulerAdapter",
    "SearchBase",
    "Share",
    "Signal",
    "SignalAction",
    "Sleep",
    "StateTable",
    "Stepped",
    "Tokens",
    "Violation",
    "Wake",
    "Window",
    "verb",
]
