"""The base workloads as schedules."""

from __future__ import annotations

from typing import Final

from scripted.adapters.lockstep.workloads import TEXTS
from scripted.core.schedule import Schedule

WORKLOADS: Final = {name: Schedule.parse(text) for name, text in TEXTS.items()}
