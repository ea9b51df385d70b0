"""The adapter ``lockstep-sessions``: the front end's state machine of requests under the ordinary search."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from scripted.core.mutant import read_mutants
from scripted.sdk import Capabilities, SchedulerAdapter
from scripted_lockstep.sessions.machine import LIMITS, SessionsMachine
from scripted_lockstep.sessions.settings import SessionSettings

_CHAT: Final = {"protocol": ("chat", "messages", "responses")}
_SCORED: Final = {"protocol": ("completions", "chat", "native")}
_COMPLETIONS: Final = {"protocol": ("completions",)}
MUTANTS: Final = read_mutants(Path(__file__).with_name("mutants.toml"))

ADAPTER: Final = SchedulerAdapter(
    "lockstep-sessions",
    config=SessionSettings,
    machine=SessionsMachine,
    limits=lambda settings: msgspec.structs.replace(LIMITS, depth=settings.depth),
    can=lambda _: Capabilities(flush=False, chunked=False, preemption=False, fail=True),
    settings={
        "n": (1, 3),
        "prompts": (2,),
        "lag": (2, 3),
        "delay": (1, 3),
        "retries": (1, 2),
        "turn_tokens": (1, 1000),
        "turn_outputs": (1, 32),
        "turn_values": (1, 4, 1000),
        "tops": (1, 2),
    },
    needed={
        "reasoning": _CHAT,
        "tools": _CHAT,
        "parallel": {"tools": ("hermes", "mistral")},
        "scores": _SCORED,
        "shows_special": {"special": (True,)},
        "echo": _COMPLETIONS,
        "prompts": _COMPLETIONS,
        "retries": {"delay": (1, 3)},
        "hasty": {"delay": (1, 3)},
    },
    # Requests of one rid whose ends cross, refusals among them; time limits; calls; plain text; short
    # chats that are sent whole.
    scenes={
        "retries": {"retries": ("other",), "event-abort": ("on",), "outputs": ("long",), "arrival": ("together",)},
        "refused": {
            "refuses": ("early", "in_turn"),
            "retries": ("other",),
            "event-abort": ("on",),
            "requests": ("many",),
        },
        "hasty": {"hasty": ("other",), "refuses": ("in_turn",), "requests": ("several",)},
        "late": {"times_out": ("other",), "event-abort": ("on",), "requests": ("several",)},
        "blocks": {"protocol": ("messages", "responses"), "tools": ("hermes", "mistral"), "event-abort": ("on",)},
        "calls": {"tools": ("hermes", "mistral"), "outputs": ("long",)},
        "native": {"protocol": ("native",), "requests": ("several",)},
        "scores": {"protocol": ("native",), "scores": ("other",), "turn_values": ("other",), "requests": ("several",)},
        "plain": {"protocol": ("chat", "messages", "responses"), "requests": ("several",)},
        "whole": {"protocol": ("chat",), "stream": ("other",), "outputs": ("one",), "requests": ("several",)},
    },
    mutants=MUTANTS,
    packages=("engine",),
)
