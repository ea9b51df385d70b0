"""A load run against a server of its own: many streaming clients, operators that disturb them, every invariant on.

Run: ``python tests/load/load.py --clients 64 --seconds 60 --stages 1 4``, and ``--kill`` for the death of a stage.
Prints what was done and exits with status 1 when anything was not as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from clients import Client
from load_server import LoadedServer
from operators import Operators
from outcome import DEATH_BOUND_S, Outcome, complaint_about, complaint_after_death
from rich.console import Console
from rich.table import Table
from scripted_lockstep.tiers.server.placed_stages import PlacedStages
from stalls import stalled_s
from workload import Workload

from engine.process.settings import ServerSettings
from engine.server.launch.preload import PreloadedParent
from scripted.core.phrases import plural

# Given the pids of processes by their names, in order of preference; returns the name of the one that it hit, and for
# how many seconds that may go unnoticed.
Fault = Callable[[dict[str, int]], tuple[str, float]]

# Greedy answers that are compared with the same request alone on an idle server.
COMPARED_ANSWERS = 12
# What must have happened for a calm end to mean anything, beside a retraction.
ENOUGH_ANSWERS = 20
# How much longer a load lasts, at most, until that has happened.
ENOUGH_WITHIN_S = 120.0
# Two tokens whose log-probabilities are nearer than this are a tie: batches of different sizes round differently.
TIE_NATS = 1e-4
SHOWN_COMPLAINTS = 20


@dataclass
class LoadResult:
    """The result of a run; ``complaints`` is empty for a server that held."""

    stages: int
    outcomes: list[Outcome] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    stats: dict[str, Any] = field(default_factory=dict)
    grown_mb: dict[str, float] = field(default_factory=dict)
    compared: int = 0
    ties: int = 0
    final_message_s: float = 0.0
    cut_streams: int = 0
    complaints: list[str] = field(default_factory=list)

    @property
    def endings(self) -> Counter[tuple[str, str]]:
        """How many requests of each behaviour ended in each way."""
        return Counter((str(outcome.ask.behaviour), outcome.ending) for outcome in self.outcomes)


@dataclass(frozen=True, kw_only=True)
class Load:
    """The server of a run, its clients and its length in seconds. With ``placed`` the server's stages are there."""

    parent: PreloadedParent
    folder: Path
    stages: int
    clients: int
    seconds: float
    seed: int
    placed: PlacedStages | None = None
    # After which a placed stage that says nothing counts as dead.
    silence_s: float = ServerSettings().heartbeat_timeout_s
    # From a death to the last word of every stream, but for the time in which processes wait for a core or a disk.
    death_bound_s: float = DEATH_BOUND_S
    # Called when a third of the load is over.
    disturb: Callable[[], None] | None = None


def run_load(load: Load, *, record: Path | None = None) -> LoadResult:
    """Load a server, let it come to rest, compare, end it; ``record`` keeps its every step."""
    result = LoadResult(load.stages)
    with _served(load, result, record) as server:
        asyncio.run(_load(load, server, result))
        server.end()
    return result


def run_death(load: Load, *, fault: Fault | None = None) -> LoadResult:
    """Load a server, kill a computing process at the end, and check that every client gets an error.

    ``fault`` does something else to one of the stages, which it is given in an order by the seed.
    """
    result = LoadResult(load.stages)
    stages = random.Random(load.seed).sample(range(load.stages), load.stages)
    victims = [f"stage-{number}" for number in stages]
    if load.stages == 1:
        victims = ["scheduler"]
    victim, unnoticed_s = victims[0], 0.0

    def kill(server: LoadedServer) -> None:
        nonlocal victim, unnoticed_s
        pids = {name: server.serving.pids[name] for name in victims}
        if fault is None:
            os.kill(pids[victim], signal.SIGKILL)
        else:
            victim, unnoticed_s = fault(pids)

    with _served(load, result) as server:
        died, stall_s = asyncio.run(_load_until_death(load, server, result, kill))
        server.check_death()
    bound_s = load.death_bound_s + stall_s
    found = (complaint_after_death(outcome, victim, died + unnoticed_s, bound_s) for outcome in result.outcomes)
    result.complaints += [complaint for complaint in found if complaint]
    result.final_message_s = max((outcome.ended - died for outcome in result.outcomes), default=0.0)
    result.cut_streams = sum(outcome.started < died < outcome.ended for outcome in result.outcomes)
    return result


@contextlib.contextmanager
def _served(load: Load, result: LoadResult, record: Path | None = None) -> Iterator[LoadedServer]:
    """Start a server whose queue most of the clients fill; it is gone afterwards in any case."""
    server = LoadedServer(
        load.parent,
        load.folder,
        load.placed,
        pp_size=load.stages,
        pp_async_depth=load.stages // 2,
        heartbeat_timeout_s=load.silence_s,
        max_queued_requests=max(1, load.clients * 2 // 3),
        record="" if record is None else str(record),
    )
    try:
        yield server
    finally:
        server.kill()
        result.complaints += server.complaints


async def _load(load: Load, server: LoadedServer, result: LoadResult) -> None:
    before_mb = server.resident_mb()
    async with server.http() as http:
        crowd = [Client(http, Workload(load.seed, number)) for number in range(load.clients)]
        operators = Operators(http, load.seed)
        deadline = time.monotonic() + load.seconds
        # Clients end when their last request does, so operators must not leave the server paused before that.
        await asyncio.gather(operators.run(deadline), _disturb(load), *(client.run(deadline) for client in crowd))
        bound = deadline + ENOUGH_WITHIN_S
        while time.monotonic() < bound and not await _is_enough(http, _outcomes_of(crowd)):
            deadline = time.monotonic() + load.seconds
            await asyncio.gather(*(client.run(deadline) for client in crowd))
        result.outcomes = _outcomes_of(crowd)
        result.calls = operators.calls
        result.complaints += operators.complaints
        found = (complaint_about(outcome, operators.windows) for outcome in result.outcomes)
        result.complaints += [complaint for complaint in found if complaint]
        result.stats = await server.wait_idle(http)
        result.grown_mb = {name: mb - before_mb[name] for name, mb in server.resident_mb().items()}
        await _flush(http, server, result)
        await _compare(http, result, load.seed)


async def _is_enough(http: httpx.AsyncClient, outcomes: Sequence[Outcome]) -> bool:
    """Whether enough has happened; a slow link or machine needs longer for that."""
    answered = sum(bool(outcome.finish_reasons) for outcome in outcomes)
    if answered <= ENOUGH_ANSWERS or not any(_is_comparable(one) or one.cut for one in outcomes):
        return False
    return (await http.get("/server_info")).json()["stats"]["retractions"] > 0


async def _disturb(load: Load) -> None:
    if load.disturb is not None:
        await asyncio.sleep(load.seconds / 3)
        load.disturb()


async def _flush(http: httpx.AsyncClient, server: LoadedServer, result: LoadResult) -> None:
    """An idle server is flushed, and then every page is free."""
    response = await http.post("/flush_cache")
    stats = await server.wait_idle(http)
    if response.status_code != 200 or stats["pages_free"] != stats["pages_total"]:
        result.complaints.append(f"an idle server must be flushed, got {response.text}; {stats}")


async def _load_until_death(
    load: Load, server: LoadedServer, result: LoadResult, kill: Callable[[LoadedServer], None]
) -> tuple[float, float]:
    """Load until a while after the death; return its time, and for how long processes waited for a core since then."""
    async with server.http() as http:
        crowd = [Client(http, Workload(load.seed, number)) for number in range(load.clients)]
        no_end = time.monotonic() + load.seconds + 60
        tasks = [asyncio.create_task(client.run(no_end)) for client in crowd]
        await asyncio.sleep(load.seconds)
        died, stalled = time.monotonic(), stalled_s()
        # In a thread: streams are read while it takes its time.
        await asyncio.to_thread(kill, server)
        await asyncio.gather(*tasks)
        result.outcomes = _outcomes_of(crowd)
    return died, stalled_s() - stalled


def _outcomes_of(crowd: Sequence[Client]) -> list[Outcome]:
    return [outcome for client in crowd for outcome in client.outcomes]


def _is_comparable(outcome: Outcome) -> bool:
    """Whether it ended by itself, as the same request does alone."""
    return outcome.ask.greedy and not outcome.left and outcome.finish_reasons in (["length"], ["stop"])


async def _compare(http: httpx.AsyncClient, result: LoadResult, seed: int) -> None:
    """Ask again, alone, for some of the greedy answers that ended by themselves."""
    whole = [outcome for outcome in result.outcomes if _is_comparable(outcome)]
    for outcome in random.Random(seed).sample(whole, min(COMPARED_ANSWERS, len(whole))):
        again = outcome.ask.fields | {"stream": False, "return_logprob": True, "top_logprobs_num": 2}
        answer = (await http.post(outcome.ask.path, json=again)).raise_for_status().json()
        result.compared += 1
        if answer["output_ids"] == outcome.output_ids:
            continue
        if _differ_by_a_tie(answer, outcome.output_ids):
            result.ties += 1
        else:
            result.complaints.append(f"{outcome} said {outcome.output_ids}, and alone {answer['output_ids']}")


def _differ_by_a_tie(answer: dict[str, Any], ids: Sequence[int]) -> bool:
    """Whether the first token that differs was as likely, to rounding, as the one that was chosen."""
    for entry, token in zip(answer["meta_info"]["output_logprobs"], ids, strict=False):
        if entry["token_id"] != token:
            logprobs = dict(map(tuple, entry["top"]))
            return token in logprobs and abs(logprobs[token] - entry["logprob"]) < TIE_NATS
    return False


def _show(console: Console, title: str, result: LoadResult) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("behaviour", "ending", "requests"):
        table.add_column(column, justify="right" if column == "requests" else "left")
    for (behaviour, ending), count in sorted(result.endings.items()):
        table.add_row(behaviour, ending, str(count))
    console.print(table)
    console.print(f"operators: {dict(sorted(result.calls.items()))}")
    if result.stats:
        console.print(f"counters at rest: {result.stats}")
        console.print(f"grown by MB: { {name: round(mb, 1) for name, mb in result.grown_mb.items()} }")
        console.print(f"{result.compared} greedy answers compared with the same alone, {result.ties} differ by a tie")
    else:
        console.print(f"final message {result.final_message_s:.2f} s after the death")
    for complaint in result.complaints[:SHOWN_COMPLAINTS]:
        console.print(f"[red]wrong[/red]: {complaint}", highlight=False)
    console.print(f"{len(result.complaints)} complaints\n")


def main() -> None:
    """Run what the flags say and show it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64, help="concurrent clients")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the load, in seconds")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 4], help="numbers of stages to run with")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything that clients and operators do")
    end = parser.add_mutually_exclusive_group()
    end.add_argument("--kill", action="store_true", help="kill a process that computes at the end of the load")
    end.add_argument("--record", type=Path, metavar="FILE", help="record the run, for `scripted replay FILE`")
    flags = parser.parse_args()
    if flags.record is not None and len(flags.stages) > 1:
        parser.error("--record takes one run, and there is one for each number of --stages; give one number")
    console, wrong = Console(width=150), 0
    with PreloadedParent.start() as parent:
        for stages in flags.stages:
            with tempfile.TemporaryDirectory() as folder:
                load = Load(
                    parent=parent,
                    folder=Path(folder),
                    stages=stages,
                    clients=flags.clients,
                    seconds=flags.seconds,
                    seed=flags.seed,
                )
                result = run_death(load) if flags.kill else run_load(load, record=flags.record)
            _show(
                console,
                f"{flags.clients} clients, {flags.seconds:g} s, {plural(stages, 'stage')}, seed {flags.seed}",
                result,
            )
            wrong += len(result.complaints)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
