"""``engine serve``: from settings to a supervised server, and its exit status."""

from __future__ import annotations

import typer

from engine.settings_sources import TracedSettings
from lockstep.interruption import EXIT_INTERRUPTED


def serve(traced: TracedSettings) -> None:
    """Serve a model over HTTP. With no arguments: the embedded model, which needs no download."""
    from engine.launch.supervisor import supervise  # --help and bad flags need none of it

    try:
        status = supervise(traced.settings)
    except KeyboardInterrupt:  # Before the supervisor listens to signals there is nothing to take down.
        status = EXIT_INTERRUPTED
    raise typer.Exit(status)
