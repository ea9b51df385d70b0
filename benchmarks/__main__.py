"""``python -m benchmarks``."""

from __future__ import annotations

from lockstep.interruption import interruptible

if __name__ == "__main__":
    with interruptible("benchmarks"):
        from benchmarks.everything import main

        main()
