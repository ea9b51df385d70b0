"""The plugin in SGLang's group ``sglang.srt.plugins``, which SGLang calls in each of its processes."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
from typing import Any


def install() -> None:
    """Record each scheduler that this process makes if LOCKSTEP_RECORD names a folder; otherwise import nothing."""
    if not os.environ.get("LOCKSTEP_RECORD"):
        return
    try:
        from sglang.srt.managers.scheduler import Scheduler

        if not hasattr(Scheduler.__init__, "__wrapped__"):
            Scheduler.__init__ = _recorded(Scheduler.__init__)
            if multiprocessing.parent_process() is None:
                # Only the server's first process takes the signal, and the others need not import this.
                from sglang.srt.managers.tokenizer_manager import SignalHandler

                SignalHandler.sigterm_handler = _asking_first(SignalHandler.sigterm_handler)
    except Exception:
        # A server should rather start without its recorder than not at all.
        logging.getLogger(__name__).exception("nothing is recorded")


def _recorded(own: Any) -> Any:
    @functools.wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        try:
            from scripted_sglang.flight.hook import attach

            attach(self)
        except Exception:
            logging.getLogger(__name__).exception("this scheduler is not recorded")

    return init


def _asking_first(own: Any) -> Any:
    """Wrap the signal that has a server drain its requests: one that is stuck never ends, and the server is killed."""

    @functools.wraps(own)
    def handle(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            if self.tokenizer_manager.rid_to_state:
                from scripted.sdk.flight.ending import ask_engines

                ask_engines()
        except Exception:
            logging.getLogger(__name__).exception("the engines may leave no flight")
        own(self, *args, **kwargs)

    return handle
