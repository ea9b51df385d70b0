"""The demo: one race, shown on real processes against the bug and against the engine."""

from scripted_lockstep.demo.show import run_demo

__all__ = ["run_demo"]
