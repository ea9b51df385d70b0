"""What is the engine's own in a test that is written from a schedule: its head, and how a broken run is ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.config import EngineConfig
from scripted.adapters.lockstep.actions import (
    Flush,
    PauseServing,
    Press,
    Relieve,
    ResumeServing,
    ResumeStage,
    SleepServing,
    StallStage,
    WakeServing,
)
from scripted.adapters.lockstep.configs import config_values
from scripted.core.action import Action
from scripted.core.common_actions import HoldResults, ReleaseResults
from scripted.core.placed import Placed
from scripted.core.written import TestHead
from scripted.search.execution import Outcome

_LONGEST_LINE: Final = 106


def settling(placed: Sequence[Placed], outcome: Outcome) -> list[Placed]:
    """What ended the run of a schedule, and what a run that broke off has left to be ended."""
    # The flush that ends every run of the search is not part of the schedule.
    implied = [one for one in outcome.implied if not isinstance(one.action, Flush)]
    open_ends: dict[type[Action], Action] = {}
    for one in (*placed, *implied):
        action = one.action
        if isinstance(action, StallStage):
            open_ends[ResumeStage] = ResumeStage(stage=action.stage)
        elif isinstance(action, HoldResults):
            open_ends[ReleaseResults] = ReleaseResults()
        elif isinstance(action, Press):
            open_ends[Relieve] = Relieve()
        elif isinstance(action, PauseServing):
            open_ends[ResumeServing] = ResumeServing()
        elif isinstance(action, SleepServing):
            open_ends[WakeServing] = WakeServing()
        elif not (isinstance(action, ReleaseResults) and action.count is not None):
            open_ends.pop(type(action), None)
    return implied + [Placed(outcome.steps + 1, action) for action in open_ends.values()]


def test_head(config: EngineConfig, body: str) -> TestHead:
    values = ", ".join(f"{name}={value!r}" for name, value in config_values(config).items())
    text = f"EngineConfig({values})"
    if len(text) >= _LONGEST_LINE:
        text = "EngineConfig(\n    " + values.replace(", ", ",\n    ") + ",\n)"
    return TestHead(
        decorator="@scripted(CONFIG)",
        imports=("from engine import EngineConfig",),
        more=("from scripted.core.prompts import prompt_of",) if "prompt_of(" in body else (),
        before=("", f"CONFIG = {text}"),
    )
