"""A subject for a scheduler of the usual shape: everything but the machine, ready made.

Write a machine (``step``, ``counts``, ``is_idle``, ``depth``) and a ``PortableSubject`` of it; docs/your_scheduler.md
leads through it. Nothing here imports the engine.
"""

from scripted.portable.capabilities import Capabilities, Limits, PauseMode
from scripted.portable.messages import (
    Abort,
    Add,
    Answer,
    Batch,
    BatchFailed,
    BatchResult,
    FlushCache,
    Pause,
    Refused,
    Resume,
    Share,
    Stepped,
    Tokens,
)
from scripted.portable.subject import PortableSubject
from scripted.subject.mutant import Mutant
from scripted.subject.violation import Violation

__all__ = [
    "Abort",
    "Add",
    "Answer",
    "Batch",
    "BatchFailed",
    "BatchResult",
    "Capabilities",
    "FlushCache",
    "Limits",
    "Mutant",
    "Pause",
    "PauseMode",
    "PortableSubject",
    "Refused",
    "Resume",
    "Share",
    "Stepped",
    "Tokens",
    "Violation",
]
