"""Messages between the scheduler process and its stages.

Every struct is frozen, typed and decoded by type; nothing is pickled. Each stage gets plans and control messages over
one ordered channel, so that a control message takes effect between two known microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.core.frames import decoder_of
from engine.core.messages import Completion, GrammarReady, TransferEvent
from engine.core.plan import GrammarOrder, LoraOrder, Microbatch, TransferOrder

# ---- from the scheduler to a stage ----


class Launch(msgspec.Struct, frozen=True, tag=True):
    microbatch: Microbatch


class FailNextStep(msgspec.Struct, frozen=True, tag=True):
    """Make the stage's next forward pass raise; with ``on`` False, cancel that."""

    on: bool = True


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Ask for a ``StageView`` with the same ``seq``."""

    seq: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Reset the stage's counters and slot records; sent only after a flush, when no prefix is cached."""


class Settle(msgspec.Struct, frozen=True, tag=True):
    """Commit or discard the change that the stage has prepared for the control of this number."""

    microbatch_id: int
    commit: bool


class OrderGrammar(msgspec.Struct, frozen=True, tag=True):
    """Make the last stage compile a grammar concurrently with the computation, or forget one."""

    order: GrammarOrder


class OrderLora(msgspec.Struct, frozen=True, tag=True):
    """Read the stage's share of a LoRA concurrently with the computation, or drop one that was read."""

    order: LoraOrder


class EndStage(msgspec.Struct, frozen=True, tag=True):
    """End the stage's loop."""


class OrderTransfer(msgspec.Struct, frozen=True, tag=True):
    """Send or receive KV concurrently with the computation, or stop a transfer."""

    order: TransferOrder


StageMessage = Launch | FailNextStep | Describe | Forget | Settle | OrderGrammar | OrderLora | EndStage | OrderTransfer

# ---- from a stage to the scheduler ----


class StageView(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A stage's counters and slot records at a known place between two microbatches.

    ``last_microbatch_id`` is -1 before the first. ``slots_digest`` covers the token and the position in every KV slot,
    so it is equal on all stages that have computed the same microbatches. ``sizes`` are the lengths of all containers
    that the stage's loop and runner hold, by their paths.
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
    """A stage has prepared the change of a control and waits for ``Settle``, or with ``error`` has failed."""

    microbatch_id: int
    stage: int
    error: str | None


class LoraShareRead(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A stage has read its share of a LoRA, or with ``error`` has failed."""

    version: int
    stage: int
    error: str | None


class TransferDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A stage's share of a transfer has ended; ``event`` covers only that stage."""

    stage: int
    event: TransferEvent


StageReport = Completion | StageView | ControlDone | GrammarReady | LoraShareRead | TransferDone

# Each raises BadFrameError for anything else.
decode_stage_message: Callable[[bytes], StageMessage] = decoder_of(StageMessage)
decode_stage_report: Callable[[bytes], StageReport] = decoder_of(StageReport)


def stage_address(private_dir: Path, stage: int) -> Path:
    return private_dir / f"stage-{stage}"


def hidden_address(private_dir: Path, stage: int) -> Path:
    """Return the address where a stage listens for the hidden states of the previous stage."""
    return private_dir / f"hidden-{stage}"
