"""The hook in SGLang's scheduler process: SGLang's own event loop stops at the gate wherever it waits."""

from __future__ import annotations

from sglang.srt.managers.scheduler import Scheduler

from scripted.sdk.live.scripts import hook_loop
from scripted_sglang.adapter import ADAPTER
from scripted_sglang.config import SglangSettings
from scripted_sglang.live.machine import LiveSglang
from scripted_sglang.live.stops import SglangStops


def install() -> None:
    """Install the hook. SGLang calls this once in each of its processes."""
    hook_loop(
        Scheduler, "run_event_loop", adapter=ADAPTER, config=SglangSettings, stops=SglangStops, machine=LiveSglang
    )
