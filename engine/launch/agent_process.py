"""An agent by order, in a process of its own: ``python -m engine.launch.agent_process PID``, its order on stdin.

Ends with the process that started it, even if that is killed. Everything else is the agent's own.
"""

from __future__ import annotations

import signal
import sys

import msgspec

from engine.launch.agent import AgentOptions, run_agent
from engine.links.endpoint import parse_endpoint
from engine.links.secret import Secret
from engine.placement.ray_order import StageOrder
from engine.process.inheritance import die_with_parent, take_no_input

__all__ = ["main", "run_ordered_agent"]


def main(parent_pid: int) -> int:
    """Run the agent; its exit status."""
    die_with_parent(parent_pid, signal.SIGKILL)
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=StageOrder)
    take_no_input()
    return run_ordered_agent(order)


def run_ordered_agent(order: StageOrder) -> int:
    """Run an agent as it was ordered, until its server ends: the exit status."""
    way = order.way
    return run_agent(
        AgentOptions(
            join=parse_endpoint(way.join, "join"),
            secret=Secret(order.secret),
            stage=order.stage,
            node=order.node,
            address=order.address,
            listen=parse_endpoint(way.listen, "listen") if way.listen else None,
            advertise=parse_endpoint(way.advertise, "advertise") if way.advertise else None,
            timeout_s=order.timeout_s,
        )
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
