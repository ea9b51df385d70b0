"""Failures of the simulated stages, in the words of real ones."""

from __future__ import annotations

from engine.core.messages import FinishReason, RequestError
from engine.core.plan import LoraUpdate, Microbatch, Segment


def dead_end(segment: Segment, length: int) -> RequestError:
    """Make the error of a request whose grammar has a dead end after this many tokens of output."""
    why = (
        f"the grammar cannot be followed after {length} tokens of output: nothing may come there; "
        "correct or simplify it"
    )
    return RequestError(segment.rid, why, FinishReason.INVALID)


def injected(stage: int | None, microbatch: Microbatch) -> str:
    """Return a failure in the words of a real stage."""
    why = "a failure was injected into this forward pass"
    if isinstance(microbatch, LoraUpdate):
        change = microbatch.change
        return f"stage {stage} could not load the LoRA {change.name!r} from {change.path}: {why}"
    if microbatch.is_control:
        return f"stage {stage}: {why}"
    return f"stage {stage} failed in microbatch {microbatch.id}: StepFailedError: {why}"
