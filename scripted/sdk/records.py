"""The input of a step, and a step written down."""

from __future__ import annotations

import msgspec

from scripted.sdk.messages import Event, Stepped


class Step(msgspec.Struct, frozen=True):
    """The input of one step."""

    events: tuple[Event, ...]
    now: float


class Record(msgspec.Struct, frozen=True):
    """One step written down; without ``stepped`` the machine died in it, of ``error``."""

    step: Step
    stepped: Stepped | None
    counts: dict[str, int]
    error: str | None = None
