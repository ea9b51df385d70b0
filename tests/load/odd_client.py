"""An odd client: chance requests, right, wrong and damaged, to servers of its own, each answer judged.

Run: ``python tests/load/odd_client.py --requests 3000``, for minutes; ``--only NAME`` for one of the servers. Prints a
table and exits with status 1 when an answer was not as it must be; the seed and the number repeat a request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from load_server import LoadedServer
from odd_judge import OddAnswer, complaint_about
from odd_requests import RIGHT_KEY, OddRequest, odd_requests
from rich.console import Console
from rich.table import Table

from engine.server.launch.preload import PreloadedParent

CLIENTS = 4
SHOWN_COMPLAINTS = 20
SHOWN_CHARS = 1500
# A request without a right to go on this long has hung: none here says much.
HANG_S = 40.0
PROBE = {"text": "the same as ever", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
NEIGHBOUR = {"text": "a stream", "sampling_params": {"max_new_tokens": 64, "ignore_eos": True}}
NEIGHBOURS = 3
# Each ends in the stage by its own fault, or at a bound of its own, after its prompt was computed beside decodes.
OWN_FAULTS: dict[str, dict[str, Any]] = {
    "a grammar that leads nowhere": {"ebnf": "start: /[a-d]{4}/ MORE\nMORE: /x/ & /y/"},
    "a grammar beyond a bound, late": {
        "ebnf": "start: /[a-d]{4}/ t\nt: "
        + " | ".join(f"r{number}" for number in range(2100))
        + "".join(f'\nr{number}: "x" s{number}\ns{number}: "c"' for number in range(2100))
    },
    "choices of it": {"ebnf": "start: /[a-d]{4}/ MORE\nMORE: /x/ & /y/", "n": 3, "temperature": 1.0},
    "biases against all": {"logit_bias": {str(token): -100 for token in range(256)}, "temperature": 1e-300},
    "nothing to say": {"max_new_tokens": 0},
}
DRAFTS = {"speculative_algorithm": "draft_model", "speculative_draft_model": "embedded"}
LORAS = {"lora": "x=embedded-lora:1", "max_loras": 2}
# Each has other features together, and another family of calls.
SERVERS: dict[str, dict[str, Any]] = {
    "plain": {"mixed_chunk": False, "priority_preemption": False, "schedule_policy": "fcfs"},
    "look-up": {"speculative_algorithm": "ngram", "speculative_ngram_min": 1, "tool_call_parser": "llama3"},
    "draft": {**DRAFTS, "api_key": RIGHT_KEY, "tool_call_parser": "mistral", "reasoning_parser": "deepseek-r1"},
    "loras": {
        **LORAS,
        "pp_size": 2,
        "dynamic_chunking": True,
        "tool_call_parser": "qwen3_coder",
        "reasoning_parser": "qwen3",
    },
    "host": {"host_kv_tokens": 4096, "max_total_tokens": 1024, "async_scheduling": True, "tool_call_parser": "glm45"},
    "window": {"model": "embedded-window", "served_model_name": "embedded", "tool_call_parser": "deepseek"},
    "all": {**DRAFTS, **LORAS, "host_kv_tokens": 2048, "tool_call_parser": "llama4"},
}


@dataclass
class OddResult:
    """The result of a run; ``complaints`` is empty for a server that held."""

    statuses: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)


def run_odd(parent: PreloadedParent, folder: Path, *, seed: int, count: int, **settings: Any) -> OddResult:
    """Send the requests of a seed to one server, then end it: nothing may be left of them."""
    result = OddResult()
    server = LoadedServer(parent, folder, **settings)
    try:
        asyncio.run(_send_all(server, result, seed, count))
        # The operators' log has the whole path of a LoRA that cannot be loaded; clients are told its last part.
        server.end(may_say="could not load the LoRA")
    finally:
        server.kill()
        result.complaints += server.complaints
    return result


async def _send_all(server: LoadedServer, result: OddResult, seed: int, count: int) -> None:
    requests = enumerate(odd_requests(seed, count))
    async with server.http() as http:
        before = await _probe(http)
        await _fail_beside_streams(http, result)
        await asyncio.gather(*(_client(http, requests, result, seed) for _ in range(CLIENTS)))
        await http.post("/continue_generation")
        await server.wait_idle(http)
        after = await _probe(http)
        if after != before:
            result.complaints.append(f"the same request must say the same after all others: {before}, then {after}")
        await server.wait_idle(http)


async def _fail_beside_streams(http: httpx.AsyncClient, result: OddResult) -> None:
    """Requests that fail alone, each while others decode: what ends there ends without them."""

    async def neighbour(fault: str, first: asyncio.Event) -> None:
        answer, reason = OddAnswer(), None
        async with http.stream("POST", "/generate", json=NEIGHBOUR | {"stream": True}) as response:
            async for line in response.aiter_lines():
                first.set()
                if line:
                    answer.events.append(line.removeprefix("data: "))
        with contextlib.suppress(ValueError, LookupError):
            reason = json.loads(answer.events[-2])["meta_info"]["finish_reason"]
        if reason != "length":
            result.complaints.append(f"a stream must not end for its neighbour's fault, beside {fault}: got {answer}")

    for name, fields in OWN_FAULTS.items():
        begun = [asyncio.Event() for _ in range(NEIGHBOURS)]
        streams = [asyncio.create_task(neighbour(name, first)) for first in begun]
        await asyncio.gather(*(first.wait() for first in begun))
        answer = await http.post("/generate", json={"text": "a neighbour " * 20, "sampling_params": fields})
        await asyncio.gather(*streams)
        if answer.status_code not in (200, 400):
            result.complaints.append(f"{name} must not be the server's fault: {answer.status_code} {answer.text}")


async def _client(
    http: httpx.AsyncClient, requests: Iterator[tuple[int, OddRequest]], result: OddResult, seed: int
) -> None:
    for number, request in requests:
        answer = await _ask(http, request)
        status = "left" if answer.left else "cut" if answer.cut else str(answer.status)
        result.statuses[status] += 1
        complaint = complaint_about(request, answer)
        if complaint is not None:
            sent = request.content[:SHOWN_CHARS].decode(errors="replace")
            result.complaints.append(f"{complaint}\n  {request.path} #{number} of seed {seed}: {sent}\n  got {answer}")
        if answer.cut and len(result.complaints) > SHOWN_COMPLAINTS:
            return


async def _ask(http: httpx.AsyncClient, request: OddRequest) -> OddAnswer:
    """Send one request and return its answer, as far as the client stayed for it."""
    answer = OddAnswer()
    try:
        async with (
            asyncio.timeout(HANG_S),
            http.stream(request.method, request.path, content=request.content, headers=request.headers) as response,
        ):
            answer.status, answer.headers = response.status_code, dict(response.headers)
            if not answer.streams:
                answer.body = await response.aread()
                return answer
            async for line in response.aiter_lines():
                if request.leaves_after is not None and len(answer.events) >= request.leaves_after:
                    answer.left = True
                    return answer
                if line:
                    answer.events.append(line.removeprefix("data: "))
    except (httpx.TransportError, TimeoutError) as exc:
        answer.cut = f"{type(exc).__name__}: {exc}"
    return answer


async def _probe(http: httpx.AsyncClient) -> list[int]:
    await http.post("/flush_cache", params={"timeout": "10"})
    ids: list[int] = (await http.post("/generate", json=PROBE)).json()["output_ids"]
    return ids


def _show(console: Console, results: dict[str, OddResult], seconds: float) -> None:
    table = Table(title=f"Odd requests, {seconds:.0f} s", title_justify="left")
    statuses = sorted({status for result in results.values() for status in result.statuses})
    for column in ("server", *statuses, "complaints"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for name, result in results.items():
        counts = [str(result.statuses[status]) for status in statuses]
        table.add_row(name, *counts, str(len(result.complaints)))
    console.print(table)
    for name, result in results.items():
        for complaint in result.complaints[:SHOWN_COMPLAINTS]:
            console.print(f"wrong on {name}: {complaint}", highlight=False, markup=False)


def main() -> None:
    """Send, judge, show, and fail when something was not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1500, help="to each server")
    parser.add_argument("--only", choices=SERVERS, nargs="*", default=list(SERVERS))
    flags = parser.parse_args()
    begun, results = time.monotonic(), {}
    with PreloadedParent.start() as parent:
        for name in flags.only:
            with tempfile.TemporaryDirectory() as folder:
                results[name] = run_odd(parent, Path(folder), seed=flags.seed, count=flags.requests, **SERVERS[name])
    _show(Console(), results, time.monotonic() - begun)
    sys.exit(1 if any(result.complaints for result in results.values()) else 0)


if __name__ == "__main__":
    main()
