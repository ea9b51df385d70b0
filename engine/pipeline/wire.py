"""What travels between the scheduler process and its stages.

Every struct is frozen, typed and decoded by type; nothing is ever pickled. Plans and control messages share one ordered
channel a stage, so that a control message takes effect between two known microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.core.frames import decoder_of
from engine.core.messages import Completion, GrammarReady, TransferEvent
from engine.core.plan import GrammarOrder, Microbatch, TransferOrder

# ---- from the scheduler to a stage ----


class Launch(msgspec.Struct, frozen=True, tag=True):
    microbatch: Microbatch


class FailNextStep(msgspec.Struct, frozen=True, tag=True):
    """Make the stage's next forward raise; with ``on`` False take that back."""

    on: bool = True


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Answer with a ``StageView`` that carries the same ``seq``."""

    seq: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Reset the stage's counters and slot records; sent only after a flush, when no prefix is cached."""


class Settle(msgspec.Struct, frozen=True, tag=True):
    """Go on with what a control, launched under this number, has made the stage prepare; or let go of it."""

    microbatch_id: int
    commit: bool


class OrderGrammar(msgspec.Struct, frozen=True, tag=True):
    """To the last stage: compile a grammar beside the computation, or forget it."""

    order: GrammarOrder


class EndStage(msgspec.Struct, frozen=True, tag=True):
    """End the stage's loop."""


class OrderTransfer(msgspec.Struct, frozen=True, tag=True):
    """Send or receive KV beside the computation, or end that."""

    order: TransferOrder


StageMessage = Launch | FailNextStep | Describe | Forget | Settle | OrderGrammar | EndStage | OrderTransfer

# ---- from a stage to the scheduler ----


class StageView(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A stage's own view of what it has done, at a known place between two microbatches.

    ``last_microbatch_id`` is -1 before the first. ``slots_digest`` covers which token of which position every KV slot
    holds, so it is equal on all stages that have done the same microbatches. ``sizes`` are the entries of every
    container that the stage's loop and runner hold, by its path.
    """

    seq: int
    stage: int
    last_microbatch_id: int
    microbatches: int
    failed: int
    tokens: int
    slots_written: int
    slots_digest: str
    sizes: dict[str, int] = {}


class ControlDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A stage has done what a microbatch without tokens says, up to ``Settle``, or with ``error`` could not."""

    microbatch_id: int
    stage: int
    error: str | None


class TransferDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A stage's share of a transfer is over: ``event`` as if there were no other stage."""

    stage: int
    event: TransferEvent


StageReport = Completion | StageView | ControlDone | GrammarReady | TransferDone

# Each raises BadFrameError for anything else.
decode_stage_message: Callable[[bytes], StageMessage] = decoder_of(StageMessage)
decode_stage_report: Callable[[bytes], StageReport] = decoder_of(StageReport)


def stage_address(private_dir: Path, stage: int) -> Path:
    return private_dir / f"stage-{stage}"


def hidden_address(private_dir: Path, stage: int) -> Path:
    """Where a stage listens for the stage before, which sends hidden states."""
    return private_dir / f"hidden-{stage}"
