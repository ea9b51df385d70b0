"""The base workloads as schedules."""

from __future__ import annotations

from typing import Final

from scripted.subject.schedule import Schedule
from scripted.subjects.lockstep.workloads import TEXTS

__all__ = ["WORKLOADS"]

WORKLOADS: Final = {name: Schedule.parse(text) for name, text in TEXTS.items()}
