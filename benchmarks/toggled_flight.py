"""Runs a server's module with a flight recorder that SIGUSR1 turns off and on again.

`python -m benchmarks.toggled_flight MODULE ARGUMENTS...`. Processes that the server forks or spawns have the same
handler. Toggle only between loads: the recorder ends its recording at a request that arrived while it was off.
"""

from __future__ import annotations

import runpy
import signal
import sys
from collections.abc import Callable
from typing import Final

from scripted.sdk.flight.hooks import Hooks


class _Toggle:
    """Passes the calls of an engine on to its recorder unless it is off."""

    def __init__(self) -> None:
        self._is_off = False
        self._own = Hooks.note

    def flip(self, *_: object) -> None:
        self._is_off = not self._is_off

    def note(self, hooks: Hooks, note: Callable[..., None] | None, *args: object, **kwargs: object) -> None:
        if not self._is_off:
            self._own(hooks, note, *args, **kwargs)


_TOGGLE: Final = _Toggle()


def _note(hooks: Hooks, note: Callable[..., None] | None, *args: object, **kwargs: object) -> None:
    _TOGGLE.note(hooks, note, *args, **kwargs)


# At import: a spawned process imports this module and does not run it.
setattr(Hooks, "note", _note)  # noqa: B010 - mypy refuses the assignment of a method
signal.signal(signal.SIGUSR1, _TOGGLE.flip)

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    # Not as the main module: a spawned process imports this one.
    runpy.run_module(sys.argv[0], run_name="__main__")
