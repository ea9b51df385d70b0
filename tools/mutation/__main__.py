"""``python -m tools.mutation``."""

from __future__ import annotations

from engine.interruption import interruptible

if __name__ == "__main__":
    with interruptible("tools.mutation"):
        from tools.mutation.command import main

        main()
