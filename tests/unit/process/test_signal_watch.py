"""Signals that ask a process to end reach it."""

from __future__ import annotations

import os
import select
import signal

from engine.process.signals import SignalWatch


def test_a_signal_that_the_thread_which_started_this_process_blocked_is_seen() -> None:
    """A06: threads of Ray block SIGINT. An engine whose parent was killed under one served on forever."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with SignalWatch() as watch:
            os.kill(os.getpid(), signal.SIGINT)
            assert select.select([watch], [], [], 5)[0]
            assert watch.take() == [signal.SIGINT]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
