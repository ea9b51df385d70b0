"""An agent by order, in a process of its own: ``python -m engine.launch.agent_process PID``, order and secret on stdin.

Ends with the process that started it, even if that is killed. Everything else is the agent's own.
"""

from __future__ import annotations

import signal
import sys

import msgspec

from engine.launch.agent import run_agent
from engine.links.secret import Secret
from engine.placement.stage_order import StageOrder
from engine.process.inheritance import die_with_parent, take_no_input

__all__ = ["main"]


def main(parent_pid: int) -> int:
    """Run the agent; its exit status."""
    die_with_parent(parent_pid, signal.SIGKILL)
    order, secret = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[StageOrder, str])
    take_no_input()
    return run_agent(order, Secret(secret))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
