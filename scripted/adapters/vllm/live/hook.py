"""The hook in vLLM's engine process: its busy loop is its own, and stops at the gate where it waits anyway."""

from __future__ import annotations

import os
from collections.abc import Callable

from vllm.v1.engine.core import EngineCoreProc

from scripted.adapters.vllm.adapter import ADAPTER
from scripted.adapters.vllm.config import VllmSettings
from scripted.adapters.vllm.live.machine import LiveVllm
from scripted.adapters.vllm.live.stops import VllmStops
from scripted.sdk.live.scripts import serve_scripts
from scripted.sdk.live.wire import PORT_VARIABLE


def install() -> None:
    """Let the busy loop stop at the gate. vLLM calls this in each of its processes, maybe twice."""
    own_loop: Callable[[EngineCoreProc], None] = EngineCoreProc.run_busy_loop
    if own_loop.__module__ == __name__ or PORT_VARIABLE not in os.environ:
        return

    def run_busy_loop(core: EngineCoreProc) -> None:
        stops = VllmStops(core)
        serve_scripts(stops, ADAPTER, VllmSettings, lambda port: LiveVllm(core, stops, port))
        own_loop(core)

    EngineCoreProc.run_busy_loop = run_busy_loop
