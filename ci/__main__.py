"""`python -m ci`."""

import signal
import sys

EXIT_INTERRUPTED = 130


def _run() -> None:
    """Run the command. Ctrl-C ends it, also during its imports, with one line and a shell's exit status."""
    # A cancelled job or a `timeout` sends SIGTERM: end as with Ctrl-C, which also ends pytest and its servers.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from ci.cli import main

        main()
    except (KeyboardInterrupt, SystemExit) as exc:
        # Typer ends an interrupted command with this status and prints nothing.
        if isinstance(exc, SystemExit) and exc.code != EXIT_INTERRUPTED:
            raise
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stderr.write("ci: interrupted\n")
        raise SystemExit(EXIT_INTERRUPTED) from None


if __name__ == "__main__":
    _run()
