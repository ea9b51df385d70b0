"""The hook in SGLang's scheduler process: its event loop is its own, and stops at the gate where it waits anyway."""

from __future__ import annotations

from sglang.srt.managers.scheduler import Scheduler

from scripted.adapters.sglang.adapter import ADAPTER
from scripted.adapters.sglang.config import SglangSettings
from scripted.adapters.sglang.live.machine import LiveSglang
from scripted.adapters.sglang.live.stops import SglangStops
from scripted.sdk.live.scripts import hook_loop


def install() -> None:
    """SGLang calls this once in each of its processes."""
    hook_loop(
        Scheduler, "run_event_loop", adapter=ADAPTER, config=SglangSettings, stops=SglangStops, machine=LiveSglang
    )
