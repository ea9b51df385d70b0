"""A stage process as the supervisor starts it: the stage's own loop, plus a watch on the supervisor.

The loop itself belongs to the pipeline. A stage has no last word to say, so the end of the supervisor ends it at once.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from engine.errors import ProcessDiedError
from engine.launch.control import Control, Ready, Serving
from engine.launch.settings import ServerSettings
from engine.limits import Limits

__all__ = ["run_stage_process"]


def run_stage_process(
    control: Control, settings: ServerSettings, limits: Limits, stage: int, private_dir: Path
) -> None:
    """Load one stage's weights and compute until the supervisor says otherwise or is gone."""
    from engine.pipeline.stage import run_stage

    threading.Thread(target=_end_with_supervisor, args=(control,), name="supervisor-watch", daemon=True).start()
    run_stage(settings, limits, stage, private_dir, lambda: control.send(Ready()))


def _end_with_supervisor(control: Control) -> None:
    """Block on the control pipe and end the process at the first word that is not good news."""
    try:
        while isinstance(control.receive(), Serving):
            continue
    except ProcessDiedError:
        os._exit(1)
    os._exit(0)
