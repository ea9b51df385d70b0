"""Interrupts: Ctrl-C ends a command with one line on stderr and exit status 130, from its first import on.

Imports nothing slow, so that slow imports can run inside. Never cleans up: whoever started a process ends it while
the exception passes.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# The status that shells give to a process ended by SIGINT.
EXIT_INTERRUPTED: Final = 130


@contextmanager
def interruptible(command: str) -> Iterator[None]:
    """Run the command ``command``, imports included. Raises SystemExit if Ctrl-C ends it."""
    try:
        yield
    except KeyboardInterrupt:
        _tell(command)
        raise SystemExit(EXIT_INTERRUPTED) from None
    except SystemExit as exc:
        # The command line's library ends an interrupted command with this status and no message.
        if exc.code == EXIT_INTERRUPTED:
            _tell(command)
        raise


def _tell(command: str) -> None:
    # Everything is cleaned up. A second Ctrl-C would only add a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stderr.write(f"{command}: interrupted\n")
