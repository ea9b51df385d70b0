"""The ``scripted`` command, also as ``python -m scripted``."""

from __future__ import annotations

from lockstep.extras import naming_the_extra
from lockstep.interruption import interruptible


def main() -> None:
    """Run the command; its imports take a while and may be interrupted like everything else."""
    with interruptible("scripted"), naming_the_extra("scripted"):
        from scripted.cli import main as run

        run()


if __name__ == "__main__":
    main()
