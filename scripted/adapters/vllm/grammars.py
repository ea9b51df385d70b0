"""The grammars that are being compiled, each in so many steps unless they are held."""

from __future__ import annotations

from typing import Any

from scripted.adapters.vllm.actions import HOLD_GRAMMARS
from scripted.sdk import Add, Signal


class Grammars:
    def __init__(self, steps: int, compiler: Any) -> None:
        self.holds = False
        self._steps = steps
        self._compiler = compiler
        self._now = 0
        # When each is done, and whether it compiles, by the request.
        self._waiting: dict[str, tuple[int, bool]] = {}

    @property
    def go_on(self) -> bool:
        return bool(self._waiting) and not self.holds

    def begin(self, step: int) -> None:
        """A step begins: what is due is done."""
        self._now = step
        for request_id, (due, compiles) in list(self._waiting.items()):
            if due <= step and not self.holds:
                del self._waiting[request_id]
                self._compiler.finish(request_id, compiles)

    def add(self, request_id: str, request: Add) -> None:
        if request.grammar:
            self._waiting[request_id] = self._now + self._steps, request.grammar > 0

    def take(self, signal: Signal) -> None:
        self.holds = signal.name == HOLD_GRAMMARS
