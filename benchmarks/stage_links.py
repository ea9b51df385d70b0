"""The cost of TCP between the scheduler and its stages, compared with Unix sockets; on loopback, without network time.

Measures one frame's round trip between two processes; then servers of four stages in turn: forked, joined by hand, and
placed by Ray if it is installed. On a busy machine read the CPU time per token: agents are separate process sessions,
to which Linux gives separate shares.
"""

from __future__ import annotations

import importlib.util
import socket
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import httpx
import psutil

from benchmarks.measurement import Measurement, in_turn
from engine.pipeline.channel import StageChannel, StageChannels, hand_over
from engine.pipeline.wires import Address
from engine.process.control import Serving
from engine.process.links.connection import LinkAddress
from engine.process.links.endpoint import Endpoint
from engine.process.links.listener import LinkListener, bound_at
from engine.process.links.proof import Claim, Role
from engine.process.links.secret import Secret
from engine.process.settings import ServerSettings
from engine.server.launch.child import fork_child
from engine.server.launch.preload import PreloadedParent, ServerProcess
from engine.server.placement.messages import StageOrder

__all__ = ["measure"]

STAGES: Final = 4
ROUNDS: Final = 16
STREAMS: Final = 8
TOKENS: Final = 128
FRAMES: Final = 2000
FRAME_BYTES: Final = 200
# A new cluster on loopback, independent of any other.
_OF: Final[dict[str, dict[str, Any]]] = {"local": {}, "join": {}, "ray": {"ray_address": "local"}}
SECRET: Final = Secret.new()
SILENCE_S: Final = 5.0
START_TIMEOUT_S: Final = 120.0
# The Ray cluster ends with its server.
END_TIMEOUT_S: Final = 60.0
UNIX, TCP, RAY = "Unix sockets", "TCP", "TCP, placed by Ray"
Placement: TypeAlias = Literal["local", "join", "ray"]
PLACEMENTS: Final[dict[str, Placement]] = {UNIX: "local", TCP: "join"}
if importlib.util.find_spec("ray"):
    PLACEMENTS[RAY] = "ray"


def measure() -> Iterator[Measurement]:
    """Measure a frame's round trip; tokens a second of eight streams, time between tokens of one, CPU time a token."""
    frames = _found((UNIX, TCP))
    for number in range(ROUNDS):
        for name in in_turn([*frames], number):
            frames[name].append(_frame_us(name))
    rates, gaps, costs = _found(PLACEMENTS), _found(PLACEMENTS), _found(PLACEMENTS)
    with ExitStack() as stack:
        parent = stack.enter_context(PreloadedParent.start())
        servers = {name: _started(parent, placement, stack) for name, placement in PLACEMENTS.items()}
        for server in servers.values():
            _rate(server.base_url)
        for number in range(ROUNDS):
            for name in in_turn([*rates], number):
                server = servers[name]
                before = _processor_s(server)
                gaps[name].append(_gap_ms(server.base_url))
                rates[name].append(_rate(server.base_url))
                costs[name].append((_processor_s(server) - before) * 1000 / (TOKENS * (1 + STREAMS)))
    for found, what, unit in (
        (frames, f"a frame of {FRAME_BYTES} bytes from the scheduler to a stage and back", "us"),
        (rates, f"tokens of {STREAMS} streams, four stages", "tokens/s"),
        (gaps, "mean time between tokens of one stream, four stages", "ms"),
        (costs, "processor time a token of all processes, four stages", "ms"),
    ):
        for name, values in found.items():
            yield Measurement(
                name=f"{what}, {name}",
                value=statistics.median(values),
                unit=unit,
                spread=f"median of {ROUNDS} rounds in turn, {min(values):.2f} to {max(values):.2f}",
            )
        for name in [name for name in found if name != UNIX]:
            ratios = [one / unix for one, unix in zip(found[name], found[UNIX], strict=True)]
            yield Measurement(
                name=f"{what}, {name} to {UNIX}",
                value=statistics.median(ratios),
                unit="ratio",
                spread=f"median of {ROUNDS} rounds, {min(ratios):.2f} to {max(ratios):.2f}",
            )


def _found(names: Iterable[str]) -> dict[str, list[float]]:
    return {name: [] for name in names}


def _frame_us(name: str) -> float:
    """Return the median round trip of many frames that another process echoes."""
    with tempfile.TemporaryDirectory(prefix="links-") as folder:
        path = Path(folder) / "stage-0"
        handed, passed_on = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener = LinkListener(bound_at(Endpoint("127.0.0.1", 0), "listen"), SECRET, silence_s=SILENCE_S)
        claim = Claim(Role.PLANS, 0)
        address = path if name == UNIX else LinkAddress(listener.endpoint, SECRET, claim, SILENCE_S)
        channels = StageChannels([path if name == UNIX else None], handed)
        echo = fork_child("echo", lambda _: _echo(address))
        if name == TCP:
            hand_over(passed_on, 0, listener.wait_for(claim))
        times = []
        for _ in range(FRAMES):
            started = time.perf_counter()
            channels.send(0, bytes(FRAME_BYTES))
            while not channels.receive(None):
                pass
            times.append(time.perf_counter() - started)
        channels.close()
        while echo.alive:
            echo.listen()
        echo.close()
        listener.close()
        passed_on.close()
        return statistics.median(times) * 1_000_000


def _echo(address: Address) -> None:
    channel = StageChannel(address)
    while (frame := channel.receive()) is not None:
        channel.send(frame)


def _processor_s(server: Serving) -> float:
    """Sum the processor time of a server's processes; its agents use next to nothing."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in server.pids.values())


def _started(parent: PreloadedParent, placement: Placement, stack: ExitStack) -> Serving:
    """Start a server with four stages, which ends with the stack."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="links-")))
    settings = ServerSettings(port=0, pp_size=STAGES, placement=placement, stage_listen="127.0.0.1:0", **_OF[placement])
    server = stack.enter_context(closing(parent.serve(settings, folder, folder / "log")))
    agents: list[ServerProcess] = []
    if placement == "join":
        gathering = server.wait_gathering(START_TIMEOUT_S)
        order = StageOrder(join=gathering.join)
        agents = [
            stack.enter_context(closing(parent.join(order, gathering.secret_file, folder / "log")))
            for _ in range(STAGES)
        ]
    serving = server.wait_ready(START_TIMEOUT_S)
    stack.callback(_end, server, agents)
    return serving


def _end(server: ServerProcess, agents: list[ServerProcess]) -> None:
    server.terminate()
    for process in (server, *agents):
        process.wait(END_TIMEOUT_S)


def _rate(url: str) -> float:
    """Return the tokens per second of concurrent streams."""
    with ThreadPoolExecutor(STREAMS) as pool:
        started = time.monotonic()
        counts = list(pool.map(lambda number: len(_times(url, f"stream {number}")), range(STREAMS)))
        return sum(counts) / (time.monotonic() - started)


def _gap_ms(url: str) -> float:
    times = _times(url, "alone")
    return (times[-1] - times[0]) / (TOKENS - 1) * 1000


def _times(url: str, text: str) -> list[float]:
    """Return the arrival times of one stream's tokens."""
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"text": text, "stream": True, "sampling_params": sampling}
    with httpx.stream("POST", f"{url}/generate", json=body, timeout=START_TIMEOUT_S) as response:
        response.raise_for_status()
        return [time.monotonic() for line in response.iter_lines() if line.startswith("data: {")]
