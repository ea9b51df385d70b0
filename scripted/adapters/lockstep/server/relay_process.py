"""The relay itself: ``python -m scripted.adapters.lockstep.server.relay_process``, started by ``relay.Relay``.

Reads its routes from stdin, says its ports on stdout, takes one order a connection of its Unix socket, and ends with
its stdin. Imports neither engine nor torch.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from scripted.adapters.lockstep.server.links import Links
from scripted.adapters.lockstep.server.relay import MAX_ORDER_BYTES, Ports, RelayPlan, decode_order


def main() -> None:
    plan = msgspec.json.decode(sys.stdin.buffer.readline(), type=RelayPlan)
    asyncio.run(_relay(plan))


async def _relay(plan: RelayPlan) -> None:
    links = Links(plan.routes)
    ports = await links.open()
    orders = await asyncio.start_unix_server(_take_orders(links), plan.orders_path)
    sys.stdout.buffer.write(msgspec.json.encode(Ports(ports=ports)) + b"\n")
    sys.stdout.buffer.flush()
    try:
        await asyncio.to_thread(_await_end_of, sys.stdin.fileno())
    finally:
        orders.close()
        Path(plan.orders_path).unlink(missing_ok=True)
        # Open connections would keep the loop; their ends are this process's end.
        sys.stdout.flush()
        os._exit(0)


def _take_orders(links: Links) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = b""
        try:
            links.obey(decode_order(await reader.read(MAX_ORDER_BYTES)))
        except (KeyError, ValueError) as exc:
            answer = f"{type(exc).__name__}: {exc}".encode()
        writer.write(answer)
        writer.close()

    return take


def _await_end_of(fd: int) -> None:
    while os.read(fd, 1):
        continue


if __name__ == "__main__":
    main()
