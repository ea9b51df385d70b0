"""The ``engine`` command, also as ``python -m engine``."""

from __future__ import annotations

from lockstep.extras import naming_the_extra
from lockstep.interruption import interruptible


def main() -> None:
    """Run the command; its imports take a while, and may be interrupted as all else."""
    with interruptible("engine"), naming_the_extra("engine"):
        from engine.cli import main as run

        run()


if __name__ == "__main__":
    main()
