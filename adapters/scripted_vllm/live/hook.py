"""The hook in vLLM's engine process: vLLM's own busy loop stops at the gate wherever it waits."""

from __future__ import annotations

from vllm.v1.engine.core import EngineCoreProc

from scripted.sdk.live.scripts import hook_loop
from scripted_vllm.adapter import ADAPTER
from scripted_vllm.config import VllmSettings
from scripted_vllm.live.machine import LiveVllm
from scripted_vllm.live.stops import VllmStops


def install() -> None:
    """Install the hook. vLLM calls this in each of its processes, possibly twice."""
    hook_loop(EngineCoreProc, "run_busy_loop", adapter=ADAPTER, config=VllmSettings, stops=VllmStops, machine=LiveVllm)
