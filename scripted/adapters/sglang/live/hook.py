"""The hook in SGLang's scheduler process: its event loop is its own, and stops at the gate where it waits anyway."""

from __future__ import annotations

import os

from sglang.srt.managers.scheduler import Scheduler

from scripted.adapters.sglang.adapter import ADAPTER
from scripted.adapters.sglang.config import SglangSettings
from scripted.adapters.sglang.live.machine import LiveSglang
from scripted.adapters.sglang.live.stops import SglangStops
from scripted.sdk.live.scripts import serve_scripts
from scripted.sdk.live.wire import PORT_VARIABLE


def install() -> None:
    """Let the event loop stop at the gate. SGLang calls this once in each of its processes."""
    if PORT_VARIABLE not in os.environ:
        return
    own_loop = Scheduler.run_event_loop

    def run_event_loop(scheduler: Scheduler) -> None:
        stops = SglangStops(scheduler)
        serve_scripts(stops, ADAPTER, SglangSettings, lambda port: LiveSglang(scheduler, stops, port))
        own_loop(scheduler)

    Scheduler.run_event_loop = run_event_loop
