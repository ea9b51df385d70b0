"""The handlers of this process's signals, which every process that it forks inherits."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

# The other signals end no process, or belong to pytest.
WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def restored() -> Iterator[list[str]]:
    """Restore the handlers at the end; the list then has the names of the signals whose handlers had changed."""
    before = {number: signal.getsignal(number) for number in WATCHED}
    changed: list[str] = []
    try:
        yield changed
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)
                changed.append(number.name)
