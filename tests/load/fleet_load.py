"""Two prefill and two decode engines and a router as processes, under 64 clients, with faults; every answer judged.

    python tests/load/fleet_load.py --clients 64 --seconds 60

Short and long prompts, whole answers and streams. A prefill engine is killed and started again, the other one stopped
for a while and resumed, and a decode engine killed. No answer may be lost without a word, differ from that of one
engine, or come more than two seconds after the death that cut it, without waits for a core; in the end nothing is left
on any engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from stalls import stalled_s

ROOT: Final = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from engine.server.launch.preload import PreloadedParent  # noqa: E402 - found from the repository's root
from tests.unit.frontend.real_servers import RealServer  # noqa: E402
from tests.unit.router.test_router_on_servers import router_before  # noqa: E402
from tests.unit.server.fleets import fleet_of, left, signal_all, until, until_asked  # noqa: E402

LAST_WORD_S: Final = 2.0
STOPPED_S: Final = 3.0
PROMPT_TOKENS: Final = (9, 40, 130, 300, 700, 1500, 3000)
# Of all answers so many are asked of one engine again, and compared.
COMPARED: Final = 400


@dataclass
class Sent:
    """One request and its outcome."""

    body: dict[str, Any]
    began: float
    ended: float = 0.0
    # How long processes had waited for a core until its end.
    stalled: float = 0.0
    tokens: list[int] = field(default_factory=list)
    error: str | None = None
    is_whole: bool = False


async def ask(http: httpx.AsyncClient, sent: Sent) -> None:
    """Send a request and take its answer to the last word."""
    try:
        async with http.stream("POST", "/generate", json=sent.body) as response:
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if not data or data == "[DONE]":
                    sent.is_whole |= data == "[DONE]"
                    continue
                piece = json.loads(data)
                if "error" in piece:
                    sent.error = str(piece["error"]["message"])
                else:
                    sent.tokens += piece["output_ids"]
                    sent.is_whole |= not sent.body["stream"]
    except httpx.HTTPError as exc:
        sent.error = f"LOST: {type(exc).__name__}: {exc}"
    sent.ended, sent.stalled = time.monotonic(), stalled_s()


async def client(number: int, url: str, until_s: float) -> list[Sent]:
    """Send one request after the other until the time is over."""
    rng, asked = random.Random(number), list[Sent]()
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http:
        while time.monotonic() < until_s:
            seed, tokens = rng.randrange(12), rng.choice(PROMPT_TOKENS)
            ids = [seed + 1, *((seed * 7 + place * 13) % 200 + 1 for place in range(tokens - 1))]
            sampling = {"max_new_tokens": rng.choice((2, 8, 24)), "temperature": 0, "ignore_eos": True}
            sent = Sent({"input_ids": ids, "sampling_params": sampling, "stream": rng.random() < 0.7}, time.monotonic())
            asked.append(sent)
            await ask(http, sent)
            if sent.error is not None:
                await asyncio.sleep(0.2)
    return asked


async def load(url: str, clients: int, seconds: float, faults: list[Any]) -> list[Sent]:
    """Run all clients at once, and the faults beside them, each at its share of the time."""
    begin = time.monotonic()
    tasks = [asyncio.create_task(client(number, url, begin + seconds)) for number in range(clients)]
    for part, fault in faults:
        await asyncio.sleep(max(0.0, begin + part * seconds - time.monotonic()))
        await asyncio.to_thread(fault)
    return [sent for asked in await asyncio.gather(*tasks) for sent in asked]


def judge(asked: list[Sent], deaths: list[tuple[float, float]], alone: RealServer) -> list[str]:
    """List the complaints about these answers; of each kill its time, and the waits for a core until then."""
    wrong = [f"lost: {sent.error}" for sent in asked if sent.error is not None and sent.error.startswith("LOST")]
    wrong += [f"no last word: {sent.body}" for sent in asked if sent.error is None and not sent.is_whole]
    for sent in asked:
        # Of those that a death cut, the last one came before the end of the request.
        before = [death for death in deaths if sent.began <= death[0] <= sent.ended]
        if sent.error is None or "died" not in sent.error or not before:
            continue
        killed, stalled = before[-1]
        if (sent.ended - killed) - (sent.stalled - stalled) > LAST_WORD_S:
            wrong.append(f"told {sent.ended - killed:.1f} s after the death: {sent.error}")
    rng = random.Random(0)
    whole = [sent for sent in asked if sent.error is None]
    for sent in rng.sample(whole, min(COMPARED, len(whole))):
        expected = alone.http.post("/generate", json=sent.body | {"stream": False}).json()["output_ids"]
        if sent.tokens != expected:
            wrong.append(f"{len(sent.body['input_ids'])} tokens are answered with {sent.tokens}, alone with {expected}")
    return wrong


def main() -> None:
    """Print one row, and exit with 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        PreloadedParent.start() as parent,
        fleet_of(parent, Path(folder), chunked_prefill_size=512) as fleet,
    ):
        alone = fleet.serve()
        prefills = [fleet.prefill() for _ in range(2)]
        decodes = [fleet.decode() for _ in range(2)]
        for decode in decodes:
            until_asked(decode)
        deaths: list[tuple[float, float]] = []

        def kill(server: RealServer) -> None:
            deaths.append((time.monotonic(), stalled_s()))
            signal_all(server, signal.SIGKILL)

        def start_again() -> None:
            prefills[0].process.kill()
            prefills[0].process.wait(30)
            prefills[0] = fleet.prefill(fleet.prefill_ports[0])

        def stop_for_a_while() -> None:
            signal_all(prefills[1], signal.SIGSTOP)
            time.sleep(STOPPED_S)
            signal_all(prefills[1], signal.SIGCONT)

        faults = [
            (0.2, lambda: kill(prefills[0])),
            (0.35, start_again),
            (0.5, stop_for_a_while),
            (0.75, lambda: kill(decodes[0])),
        ]
        with router_before(*(decode.url for decode in decodes)) as front:
            url = str(front.base_url).rstrip("/")
            until(lambda: all(not one["why_not"] for one in front.get("/health").json()["engines"]))
            asked = asyncio.run(load(url, options.clients, options.seconds, faults))
        wrong = judge(asked, deaths, alone)
        for server in (*prefills, decodes[1]):
            until(lambda server=server: not left(server), f"nothing is left on {server.url}")  # type: ignore[misc]
        pages = sum(int(prefill.stats()["pages_sent"]) for prefill in prefills)
    errors = Counter("error" if sent.error else "whole" for sent in asked)
    console = Console()
    console.print(
        f"{options.clients} clients, {options.seconds:g} s: {len(asked)} requests, {errors['whole']} whole, "
        f"{errors['error']} ended with an error, {pages} pages sent by the engines that live; {len(wrong)} complaints"
    )
    console.print("\n".join(sorted(set(wrong))[:20]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
