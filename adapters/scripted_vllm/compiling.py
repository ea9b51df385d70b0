"""Grammars that are being compiled: how long each takes, and which ones a schedule holds."""

from __future__ import annotations

from scripted.sdk import Add, Signal
from scripted_vllm.actions import HOLD_GRAMMARS
from scripted_vllm.grammar import Compiler


class Grammars:
    """Grammars that are compiling, each for a number of steps unless they are held."""

    def __init__(self, steps: int, compiler: Compiler) -> None:
        self.holds = False
        self._steps = steps
        self._compiler = compiler
        self._now = 0
        # By request: the step in which its grammar is done, and whether it compiles.
        self._waiting: dict[str, tuple[int, bool]] = {}

    @property
    def go_on(self) -> bool:
        return bool(self._waiting) and not self.holds

    def begin(self, step: int) -> None:
        """Begin a step: finish the grammars that are due."""
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
