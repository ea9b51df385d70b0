"""What a script sees of a machine between two steps: a frozen snapshot, with the machine's own counts as attributes."""

from __future__ import annotations

from typing import Any

import msgspec

from scripted.core.phrases import nearest
from scripted.errors import BadCall, UnknownName
from scripted.rig.values import Listed, Word
from scripted.sdk.messages import Batch
from scripted.sdk.script.gate import ScriptGate

__all__ = ["Arrival", "BatchInFlight", "State", "batch_in_flight", "take_state"]


class BatchInFlight(msgspec.Struct, frozen=True, kw_only=True):
    """A batch whose result is not back, due in step ``due_at_step`` or later.

    ``positions`` are the positions that each of its requests computes, ``blocks`` the block table of each.
    """

    id: int
    rids: tuple[str, ...]
    positions: dict[str, tuple[int, ...]]
    blocks: dict[str, tuple[int, ...]]
    tokens: int
    launched_at_step: int
    due_at_step: int


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """What no step has seen yet: ``start``, ``abort``, ``flush``, ``pause`` or ``continue``, and whose it is."""

    kind: str
    rid: str | None = None


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The machine between two steps. Each of its ``counts`` is an attribute too, unless there is one of that name here.

    ``paused`` is the mode of the pause, or None. ``is_idle``: the machine says so, and nothing has arrived.
    """

    step: int
    now: float
    arrived: tuple[Arrival, ...]
    in_flight: tuple[BatchInFlight, ...]
    paused: str | None
    is_idle: bool
    counts: dict[str, int]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self.counts:
            return self.counts[name]
        known = [*self.__struct_fields__, *self.counts]
        raise UnknownName(f"t.state has no {name!r}{nearest(name, known)}; it has {', '.join(known)}")

    def __bool__(self) -> bool:
        raise BadCall("t.state is always true, so asking it tests nothing; ask one of its attributes")

    def __str__(self) -> str:
        counts = " ".join(f"{name}={count}" for name, count in self.counts.items())
        arrived = ", ".join(one.kind if one.rid is None else f"{one.kind} {one.rid}" for one in self.arrived)
        flights = ", ".join(f"{batch.id} of {' '.join(batch.rids)}" for batch in self.in_flight)
        return (
            f"step {self.step}: {counts}; batches in flight: {flights or 'none'}"
            + (f"; not yet seen: {arrived}" if arrived else "")
            + (f"; paused ({self.paused})" if self.paused else "")
        )


def take_state(gate: ScriptGate, pauses: frozenset[str]) -> State:
    """Snapshot a run; ``pauses`` are the modes that there can be."""
    paused, arrived = gate.oracle.paused, gate.arrived
    return State(
        step=gate.step,
        now=gate.clock.now(),
        arrived=Listed(Arrival(kind=action.kind, rid=getattr(action, "rid", None)) for action in arrived),
        in_flight=Listed(batch_in_flight(gate, batch) for batch in gate.oracle.in_flight),
        paused=None if paused is None else Word(paused.name, "a pause's mode", pauses),
        is_idle=bool(gate.machine.is_idle) and not arrived,
        counts=dict(gate.machine.counts()),
    )


def batch_in_flight(gate: ScriptGate, batch: Batch) -> BatchInFlight:
    """A batch as scripts see it."""
    # A result that is due in the coming step is still listed.
    due = gate.due_steps[batch.id]
    return BatchInFlight(
        id=batch.id,
        rids=Listed(share.rid for share in batch.shares),
        positions={share.rid: Listed(range(share.start, share.start + share.count)) for share in batch.shares},
        blocks={share.rid: Listed(share.block_ids) for share in batch.shares},
        tokens=sum(share.count for share in batch.shares),
        launched_at_step=due - gate.machine.depth,
        due_at_step=due,
    )
