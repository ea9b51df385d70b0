"""The ``scripted`` command, also as ``python -m scripted``."""

from __future__ import annotations

from scripted import require_own_engine


def main() -> None:
    """Run the command; its imports take a while, and may be interrupted as all else."""
    require_own_engine()
    from engine.extras import naming_the_extra
    from engine.interruption import interruptible

    with interruptible("scripted"), naming_the_extra("scripted"):
        from scripted.cli import main as run

        run()


if __name__ == "__main__":
    main()
