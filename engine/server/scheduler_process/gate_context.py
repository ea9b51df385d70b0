"""The scheduler process as its gate sees it: everything that the gate may read or wait on.

Built once, before the loop. The settings name the gate by a dotted path, so production never loads a harness.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from engine.core.errors import ConfigError
from engine.core.limits import Limits
from engine.core.scheduler.ports import Gate, Outbox, Pipeline
from engine.core.scheduler.scheduler import Scheduler
from engine.process.clock import Clock
from engine.process.control import Control
from engine.process.inbox import Inbox
from engine.process.settings import ServerSettings


@dataclass(frozen=True, kw_only=True)
class SchedulerPlace:
    """The surroundings of a scheduler process. ``base_url`` is this server's own; ``stage_pids`` are in stage order.

    ``stage_pids`` is empty when the model runs in the scheduler process. ``handed`` is the descriptor of the socket
    over which the supervisor passes the connections of stages on other machines.
    """

    settings: ServerSettings
    limits: Limits
    private_dir: Path
    base_url: str
    stage_pids: tuple[int, ...]
    handed: int | None = None


@dataclass(frozen=True, kw_only=True)
class GateContext(SchedulerPlace):
    """The objects of the scheduler process, and its surroundings.

    ``stuck_stage`` maps an overdue microbatch to the process that holds it up and that process's state; None without
    stage processes.
    """

    scheduler: Scheduler
    pipeline: Pipeline
    inbox: Inbox
    outbox: Outbox
    control: Control
    clock: Clock
    stuck_stage: Callable[[int], tuple[str, str]] | None = None


GateFactory = Callable[[GateContext], Gate]


def load_gate(context: GateContext) -> Gate:
    """Build the gate that the settings name. Raises ConfigError if there is no such factory."""
    factory = cast(GateFactory, load_attribute(context.settings.gate))
    return factory(context)


def load_attribute(dotted_path: str) -> Any:
    """Import the object at 'package.module:name'. Raises ConfigError if it cannot be imported."""
    module_name, _, name = dotted_path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(
            f"gate must be an importable 'package.module:factory', got {dotted_path!r} ({exc}); check its spelling "
            "and that its package is installed"
        ) from exc
