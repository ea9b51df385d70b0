"""The base workloads as schedules."""

from __future__ import annotations

from scripted_lockstep.space.workloads import TEXTS

from scripted.core.schedule import Schedule

WORKLOADS = {name: Schedule.parse(text) for name, text in TEXTS.items()}
