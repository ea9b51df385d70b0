"""`python -m ci`."""

import signal
import sys

EXIT_INTERRUPTED = 130


def _run() -> None:
    """Run the command. Ctrl-C, its imports included, ends it with one line and the status that shells know."""
    try:
        from ci.cli import main

        main()
    except (KeyboardInterrupt, SystemExit) as exc:
        # The library of the command line ends an interrupted command with this status, and without a word.
        if isinstance(exc, SystemExit) and exc.code != EXIT_INTERRUPTED:
            raise
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stderr.write("ci: interrupted\n")
        raise SystemExit(EXIT_INTERRUPTED) from None


if __name__ == "__main__":
    _run()
