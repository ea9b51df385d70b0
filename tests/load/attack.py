"""An attack on servers of its own, on loopback: bad and large bodies, slow and leaving clients, pages, kills, a soak.

Run: ``python tests/load/attack.py``, for minutes. Prints one table and exits with status 1 when something did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import multiprocessing
import os
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import httpx
import psutil
from bad_bodies import large_bodies, nearly_right, short_bodies
from load_server import CLIENT_TIMEOUT_S, END_BOUND_S, LoadedServer
from rich.console import Console
from rich.table import Table
from stalls import stalled_s
from victim import Victim

from engine.server.launch.preload import PreloadedParent
from lockstep.process_control import die_with_parent

P = ParamSpec("P")
Done = TypeVar("Done")

# Before there were bounds a large body stopped every stream for 3 to 25 s. A machine that is busy stops them for less;
# on one that does nothing else the longest stall was 51 ms.
STALL_BOUND_S = 2.0
QUIET_STALL_BOUND_S = 0.1
QUIET_LOAD = 0.5
FINAL_MESSAGE_BOUND_S = 2.0
MOST_ANSWER_BYTES = 16_384
MOST_BODY_BYTES = 16 * 2**20
MOST_LOG_LINES = 20
MAX_CONNECTIONS = 48
HEADER_TIMEOUT_S = 1.0
STREAMS_AT_DEATH = 4
SOAK_CLIENTS = 8
GROWTH_BOUND_MB = 64.0
CALM_S = 0.5
LEAST_NICE = 19
JSON = {"content-type": "application/json"}
PAGE = {"origin": "http://evil.example", "content-type": "text/plain"}
OPERATORS = ("/flush_cache", "/pause_generation", "/abort_request", "/update_weights_from_disk", "/start_profile")
# Of the event loop, in CPU time: for any body or answer, and for bodies that are short. The longest turns of short ones
# took 9 ms on a machine with AVX-512 and 19 on one with AVX2.
MOST_TURN_S = 0.05
MOST_SHORT_TURN_S = 0.02
SHORT_BODIES = "short bodies"
ROOMY_TOKENS = 16_384
TURNS = "LOOP_TURNS"
# By the number of the server's stages.
VICTIMS: Mapping[int, Sequence[str]] = {1: ("scheduler", "frontend", "reader"), 2: ("stage-0", "stage-1", "scheduler")}


@dataclass(frozen=True)
class AttackPlan:
    """How much of everything. ``large_bytes`` is the size of a large body, ``leaves`` how many leave each large answer.

    Large answers repeat what they say of ``prompt_tokens`` for so many ``choices``, up to what a server allows.
    ``judges_pace``: a wait of the victim beyond ``stall_bound_s`` is a complaint.
    """

    seed: int = 1
    bodies: int = 2000
    large_bytes: int = MOST_BODY_BYTES - 2**16
    prompt_tokens: int = 2000
    choices: int = 24
    slow_clients: int = 3 * MAX_CONNECTIONS
    leaving_clients: int = 50
    leaves: int = 8
    soak_requests: int = 5000
    judges_pace: bool = True
    stall_bound_s: float = STALL_BOUND_S


class LargeAnswer(NamedTuple):
    """The large answer to a short body: bytes in, status, bytes out, and seconds taken."""

    body_bytes: int
    status: int
    answer_bytes: int
    taken_s: float


@dataclass
class AttackResult:
    """The result of an attack; ``complaints`` is empty for a server that held."""

    statuses: Counter[int] = field(default_factory=Counter)
    answer_bytes: int = 0
    large_answers: dict[str, LargeAnswer] = field(default_factory=dict)
    calm_stall_s: float = 0.0
    stalls_s: dict[str, float] = field(default_factory=dict)
    # The longest turn of the front end's loop in each part, where its turns are measured.
    turns_s: dict[str, float] = field(default_factory=dict)
    final_messages_s: dict[str, float] = field(default_factory=dict)
    grown_mb: dict[str, float] = field(default_factory=dict)
    # How the server ended each slow client: the status of its answer, or 0 for an end without one.
    slow_ends: Counter[int] = field(default_factory=Counter)
    log_lines: int = 0
    complaints: list[str] = field(default_factory=list)


def run_attack(parent: PreloadedParent, folder: Path, plan: AttackPlan) -> AttackResult:
    """Everything that a server must survive, while a victim reads its streams."""
    result = AttackResult()
    server = LoadedServer(
        parent,
        folder,
        max_connections=MAX_CONNECTIONS,
        header_timeout_s=HEADER_TIMEOUT_S,
        body_timeout_s=HEADER_TIMEOUT_S * 10,
    )
    try:
        asyncio.run(_attack(server, result, plan))
        server.process.drain()
        if (status := server.process.wait(END_BOUND_S)) != 0:
            result.complaints.append(f"the exit status must be 0 after an attack, is {status}")
        log = (folder / "log").read_text()
        result.log_lines = len(log.splitlines())
        if "Traceback" in log or result.log_lines > MOST_LOG_LINES:
            result.complaints.append(f"the log has {result.log_lines} lines: {log[-2000:]}")
    finally:
        server.kill()
    return result


def run_short_bodies(parent: PreloadedParent, folder: Path, result: AttackResult) -> None:
    """The costliest bodies that are read in the event loop, to a server with room for what they ask."""
    server = LoadedServer(parent, folder, max_total_tokens=ROOMY_TOKENS, max_running_requests=128)
    try:
        asyncio.run(_send_short(server, result))
    finally:
        server.kill()
    result.complaints += [
        f"a turn of the loop must take {1000 * bound_s:.0f} ms at most, one took {1000 * turn_s:.1f} with {name}"
        for name, turn_s in result.turns_s.items()
        if turn_s > (bound_s := MOST_SHORT_TURN_S if name.startswith(SHORT_BODIES) else MOST_TURN_S)
    ]


async def _send_short(server: LoadedServer, result: AttackResult) -> None:
    """Each twice: the shorter of both turns is the body's, what else is in the longer one is not."""
    async with server.http() as http:
        for path, body in short_bodies():
            turns_s = [await _turn_of_body(http, result, path, body) for _ in range(2)]
            name = f"{SHORT_BODIES} to {path}"
            result.turns_s[name] = max(result.turns_s.get(name, 0.0), min(turns_s))


async def _turn_of_body(http: httpx.AsyncClient, result: AttackResult, path: str, body: bytes) -> float:
    _longest_turn_s()
    _note(result, await http.post(path, content=body, headers=JSON), body)
    # The turn in which an answer is sent is over when the next one is answered.
    await http.get("/version")
    return _longest_turn_s() or 0.0


def run_deaths(parent: PreloadedParent, folder: Path, victims: Mapping[int, Sequence[str]] = VICTIMS) -> AttackResult:
    """Kill each process, on a new server each time, with streams open. ``victims`` are their names by stages."""
    result = AttackResult()
    for stages, names in victims.items():
        for name in names:
            place = folder / f"{stages}-{name}"
            place.mkdir()
            server = LoadedServer(parent, place, pp_size=stages)
            try:
                victim = _reader_pid(server) if name == "reader" else server.serving.pids[name]
                result.final_messages_s[f"{name} of {stages}"] = asyncio.run(_die(server, name, victim, result))
                _check_gone(server, name, result)
            finally:
                server.kill()
    return result


async def _attack(server: LoadedServer, result: AttackResult, plan: AttackPlan) -> None:
    async with server.http() as http, server.http() as quiet:
        victim = Victim(quiet)
        async with victim.reading():
            await _measured(result, victim, "calm", lambda: asyncio.sleep(CALM_S))
            result.calm_stall_s = result.stalls_s.pop("calm")
            await _measured(result, victim, "bad bodies", lambda: _send_bodies(http, result, plan))
            await _measured(result, victim, "large bodies", lambda: _send_large(server, result, plan))
            await _measured(result, victim, "large answers", lambda: _ask_for_much(server, result, plan))
            await _measured(result, victim, "pages", lambda: _send_as_page(http, result))
            await _measured(result, victim, "leaving clients", lambda: _leave_uploads(server, plan))
            await _measured(result, victim, "left answers", lambda: _leave_large(server, result, plan))
            await _measured(result, victim, "slow clients", lambda: _be_slow(server, result, plan))
            before = server.resident_mb()
            await _measured(result, victim, "soak", lambda: _soak(http, result, plan))
            result.grown_mb = {name: mb - before[name] for name, mb in server.resident_mb().items()}
        result.complaints += [f"the victim got {line}" for line in victim.broken]
        if victim.events < 100:
            result.complaints.append(f"the victim must have read much to tell something, read {victim.events} events")
        await server.wait_idle(http)
    worst = max(result.stalls_s.values())
    if plan.judges_pace and worst > max(plan.stall_bound_s, 5 * result.calm_stall_s):
        result.complaints.append(f"the victim must never wait for {plan.stall_bound_s} s, waited: {result.stalls_s}")
    if result.answer_bytes > MOST_ANSWER_BYTES:
        result.complaints.append(f"the longest answer to a bad input has {result.answer_bytes} bytes")
    result.complaints += [
        f"{name} must not grow, grew by {mb:.0f} MB" for name, mb in result.grown_mb.items() if mb > GROWTH_BOUND_MB
    ]
    result.complaints += server.complaints


async def _measured(result: AttackResult, victim: Victim, name: str, act: Callable[[], Awaitable[None]]) -> None:
    since = time.monotonic()
    _longest_turn_s()
    await act()
    # The gap that is open now counts when it ends.
    await asyncio.sleep(0.05)
    result.stalls_s[name] = victim.worst_stall_s(since)
    if (turn_s := _longest_turn_s()) is not None:
        result.turns_s[name] = turn_s


def _longest_turn_s() -> float | None:
    """The longest turn since the last call, in CPU time; None where ``loop_turns`` does not measure them."""
    if TURNS not in os.environ:
        return None
    with Path(os.environ[TURNS]).open("r+b") as file:
        (longest_s,) = struct.unpack("d", file.read(8))
        file.seek(0)
        file.write(struct.pack("d", 0.0))
    return float(longest_s)


def _note(result: AttackResult, answer: httpx.Response, sent: bytes, fine: tuple[int, ...] = ()) -> None:
    """Count an answer to a bad input; one that blames the server is a complaint."""
    result.statuses[answer.status_code] += 1
    if answer.status_code >= 500 and answer.status_code not in fine:
        result.complaints.append(f"{answer.status_code} to {sent[:200]!r}: {answer.text[:200]}")
    if answer.status_code != 200:
        result.answer_bytes = max(result.answer_bytes, len(answer.content))


async def _send_bodies(http: httpx.AsyncClient, result: AttackResult, plan: AttackPlan) -> None:
    for path, body in nearly_right(plan.seed, plan.bodies):
        try:
            answer = await http.post(path, content=body, headers=JSON)
        except httpx.TimeoutException:
            result.complaints.append(f"no answer within {CLIENT_TIMEOUT_S:.0f} s to {path} {body[:200]!r}")
            return
        # A request may ask for a time limit that is over before it starts.
        _note(result, answer, body, fine=(504,))


async def _send_large(server: LoadedServer, result: AttackResult, plan: AttackPlan) -> None:
    """Runs in a process of its own: making and sending such bodies here would keep the victim from reading."""
    answers = await _apart(plan, _answers_to_large, server.serving.base_url, plan.large_bytes)
    for status, size, text, body in answers:
        result.statuses[status] += 1
        result.answer_bytes = max(result.answer_bytes, size)
        if status not in (400, 413):
            result.complaints.append(f"{status} to a large bad body, {body!r}: {text}")


async def _apart(plan: AttackPlan, act: Callable[P, Done], *args: P.args, **named: P.kwargs) -> Done:
    """Act in a process of its own, and wait for its end in a thread: in the loop the victim would wait with it."""
    sender = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _yield_cores, (plan.judges_pace,))
    try:
        acting = functools.partial(act, *args, **named)
        return await asyncio.get_running_loop().run_in_executor(sender, acting)
    finally:
        await asyncio.to_thread(sender.shutdown)


def _yield_cores(judges_pace: bool) -> None:
    """Leave the cores to the server, as a client on another machine does; on a busy machine it would never get one.

    Where the kernel groups processes by session, niceness counts inside a session alone, and a group has its own.
    """
    if not judges_pace:
        return
    os.setsid()
    die_with_parent(os.getppid(), signal.SIGKILL)  # no signal of a terminal reaches it any more
    os.nice(LEAST_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(LEAST_NICE), encoding="ascii")


def _answers_to_large(base_url: str, size: int) -> list[tuple[int, int, str, bytes]]:
    """Status, length and beginning of the answer to each large body, and the beginning of the body."""
    answers = []
    with httpx.Client(base_url=base_url, timeout=CLIENT_TIMEOUT_S, headers=JSON) as http:
        for path, body in (*large_bodies(size), ("/generate", b"x" * (MOST_BODY_BYTES + 1))):
            # A client that still sends may find the connection closed before it reads why.
            with contextlib.suppress(httpx.WriteError, httpx.ReadError):
                try:
                    answer = http.post(path, content=body)
                except httpx.TimeoutException:
                    answers.append((0, 0, f"no answer within {CLIENT_TIMEOUT_S:.0f} s", body[:100]))
                    continue
                answers.append((answer.status_code, len(answer.content), answer.text[:200], body[:100]))
    return answers


async def _ask_for_much(server: LoadedServer, result: AttackResult, plan: AttackPlan) -> None:
    """Also in a process of its own, which reads what comes."""
    result.large_answers = await _apart(plan, _large_answers, server.serving.base_url, plan.prompt_tokens, plan.choices)
    result.complaints += [
        f"{name} must be {'refused' if 'n=64' in name else 'answered'}, got {answer}"
        for name, answer in result.large_answers.items()
        if answer.status != (400 if "n=64" in name else 200)
    ]


def _bodies_of_large_answers(tokens: int, n: int) -> dict[str, tuple[str, dict[str, Any]]]:
    ids = [7] * tokens
    completion = {"prompt": ids, "max_tokens": 1}
    sampling = {"max_new_tokens": 1, "n": n}
    streamed = {"stream": True, "max_output_tokens": 1}
    scored = {"return_logprob": True, "top_logprobs_num": 20, "logprob_start_len": 0}
    return {
        "prompt_logprobs=20": ("/v1/completions", completion | {"prompt_logprobs": 20}),
        "prompt_logprobs=20, n=64": ("/v1/completions", completion | {"prompt_logprobs": 20, "n": 64}),
        f"echo, logprobs=20, n={n}": ("/v1/completions", completion | {"echo": True, "logprobs": 20, "n": n}),
        "n=128": ("/v1/completions", completion | {"n": 128}),
        f"logprob_start_len=0, n={n}": ("/generate", {"input_ids": ids, "sampling_params": sampling, **scored}),
        # The events of a response repeat what was asked for.
        "instructions": ("/v1/responses", {"input": "x", "instructions": "i" * (tokens // 2), **streamed}),
    }


def _large_answers(base_url: str, tokens: int, n: int) -> dict[str, LargeAnswer]:
    answers = {}
    with httpx.Client(base_url=base_url, timeout=CLIENT_TIMEOUT_S) as http:
        for name, (path, fields) in _bodies_of_large_answers(tokens, n).items():
            body = json.dumps(fields).encode()
            begun = time.monotonic()
            try:
                answer = http.post(path, content=body, headers=JSON)
                size, taken_s = len(answer.content), time.monotonic() - begun
                answers[f"{path} with {name}"] = LargeAnswer(len(body), answer.status_code, size, taken_s)
            except httpx.TimeoutException:
                answers[f"{path} with {name}"] = LargeAnswer(len(body), 0, 0, CLIENT_TIMEOUT_S)
    return answers


async def _send_as_page(http: httpx.AsyncClient, result: AttackResult) -> None:
    """The requests of a page of another origin, and of one whose host name was rebound to this server."""
    for path in OPERATORS:
        for headers in (PAGE, {**PAGE, **JSON}, {"host": "evil.example"}):
            answer = await http.post(path, content=b"{}", headers=headers)
            _note(result, answer, path.encode())
            if answer.status_code != 403:
                result.complaints.append(f"a page got {answer.status_code} from {path} with {headers}")
        result.statuses[(await http.get(path)).status_code] += 1


async def _leave_uploads(server: LoadedServer, plan: AttackPlan) -> None:
    """Clients that go away in the middle of a body."""
    head = b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 999999\r\n\r\n"
    for number in range(plan.leaving_clients):
        _, writer = await _connect(server)
        writer.write(head + b'{"text": "' + b"x" * number * 100)
        await writer.drain()
        writer.transport.abort()


async def _leave_large(server: LoadedServer, result: AttackResult, plan: AttackPlan) -> None:
    """Clients that go away at each part of the time that a large answer took to come."""
    bodies = _bodies_of_large_answers(plan.prompt_tokens, plan.choices)
    for (path, fields), answer in zip(bodies.values(), result.large_answers.values(), strict=True):
        body = json.dumps(fields).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        for part in range(plan.leaves if answer.status == 200 else 0):
            _, writer = await _connect(server)
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            await asyncio.sleep(answer.taken_s * (part + 0.5) / plan.leaves)
            writer.transport.abort()


async def _be_slow(server: LoadedServer, result: AttackResult, plan: AttackPlan) -> None:
    """More connections than there is room for, none of which finishes its header; then a client that does.

    None of them is silent: silent ones give way to it at once. The server ends each of them.
    """
    held = []
    for number in range(plan.slow_clients):
        reader, writer = await _connect(server)
        with contextlib.suppress(ConnectionError):
            writer.write([b"P", b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1\r\n"][number % 2])
        held.append((reader, writer))
    deadline = time.monotonic() + END_BOUND_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            async with server.http() as fresh:
                answer = await fresh.get("/health")
                result.statuses[answer.status_code] += 1
                if answer.status_code == 200:
                    break
        if time.monotonic() > deadline:
            result.complaints.append("slow clients keep others out after their time is over")
            break
        await asyncio.sleep(0.1)
    try:
        async with asyncio.timeout(END_BOUND_S):
            result.slow_ends.update(await asyncio.gather(*(_status_at_end(reader) for reader, _ in held)))
    except TimeoutError:
        result.complaints.append("a slow client is neither refused nor cut")
    for _, writer in held:
        writer.close()


async def _status_at_end(reader: asyncio.StreamReader) -> int:
    """Wait until the server ends a connection; return its status, 0 without one."""
    told = b""
    with contextlib.suppress(ConnectionError):
        told = await reader.read()
    return int(told.split()[1]) if told else 0


async def _soak(http: httpx.AsyncClient, result: AttackResult, plan: AttackPlan) -> None:
    """Short requests, good and bad in turn, by several clients at once."""

    async def client(first: int) -> None:
        for number in range(first, plan.soak_requests, SOAK_CLIENTS):
            good = number % 2 == 0
            body = {"text": f"s{number}", "sampling_params": {"max_new_tokens": 1}} | ({} if good else {"bad-key": 1})
            answer = await http.post("/generate", json=body)
            if answer.status_code != (200 if good else 400) and answer.status_code != 429:
                result.complaints.append(f"{answer.status_code} to {body}: {answer.text[:200]}")

    await asyncio.gather(*(client(first) for first in range(SOAK_CLIENTS)))


async def _connect(server: LoadedServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = httpx.URL(server.serving.base_url)
    return await asyncio.open_connection(url.host, url.port)


def _reader_pid(server: LoadedServer) -> int:
    """The process that forks those that read long bodies."""
    (reader,) = psutil.Process(server.serving.pids["frontend"]).children()
    return reader.pid


async def _die(server: LoadedServer, name: str, pid: int, result: AttackResult) -> float:
    """Kill a process with streams open; the seconds until the last of them ended, without waits for a core."""
    body = {"text": "d", "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    begun = asyncio.Semaphore(0)

    async def stream() -> tuple[float, str]:
        last = ""
        with contextlib.suppress(httpx.TransportError):
            async with http.stream("POST", "/generate", json=body) as response:
                async for line in response.aiter_lines():
                    if line:
                        last = line
                        begun.release()
        return time.monotonic(), last

    async with server.http() as http:
        tasks = [asyncio.create_task(stream()) for _ in range(STREAMS_AT_DEATH)]
        await begun.acquire()
        killed = time.monotonic() - stalled_s()
        os.kill(pid, signal.SIGKILL)
        ends = await asyncio.gather(*tasks)
        stalled = stalled_s()
    for _, last in ends:
        if name == "frontend":
            continue  # The supervisor is the one that would report it.
        told = _error_of(last)
        if "process died" not in told or "Traceback" in told:
            result.complaints.append(f"a stream at the death of {name} must end with its name, ended with {last[:200]}")
    return max(0.0, max(ended for ended, _ in ends) - stalled - killed)


def _error_of(line: str) -> str:
    with contextlib.suppress(ValueError):
        event: Any = json.loads(line.removeprefix("data: "))
        if isinstance(event, dict) and "error" in event:
            return str(event["error"]["message"])
    return ""


def _check_gone(server: LoadedServer, name: str, result: AttackResult) -> None:
    status = server.process.wait(END_BOUND_S)
    if status != 1:
        result.complaints.append(f"the exit status must be 1 after the death of {name}, is {status}")
    if not (server.folder / "log").read_text().startswith("error: "):
        result.complaints.append(f"the log must say that {name} died")


def _show(console: Console, lived: AttackResult, died: AttackResult) -> None:
    table = Table(title="Under attack", title_justify="left")
    table.add_column("what")
    table.add_column("seen", justify="right")
    for status, count in sorted(lived.statuses.items()):
        table.add_row(f"inputs answered with {status}", str(count))
    table.add_row("longest answer to a bad input", f"{lived.answer_bytes} bytes")
    for name, answer in lived.large_answers.items():
        table.add_row(f"{name}: bytes in, status, bytes out", ", ".join(f"{value:,}" for value in answer[:3]))
    table.add_row("worst stall of the victim, calm", f"{lived.calm_stall_s * 1000:.0f} ms")
    for name, stall_s in lived.stalls_s.items():
        table.add_row(f"worst stall of the victim, {name}", f"{stall_s * 1000:.0f} ms")
    for name, turn_s in lived.turns_s.items():
        table.add_row(f"longest turn of the event loop, CPU time, {name}", f"{turn_s * 1000:.1f} ms")
    table.add_row("deaths survived by their clients", str(len(died.final_messages_s)))
    table.add_row("slowest final message", f"{max(died.final_messages_s.values()):.2f} s")
    for name, mb in lived.grown_mb.items():
        table.add_row(f"growth of {name} in the soak", f"{mb:.1f} MB")
    table.add_row("lines in the log", str(lived.log_lines))
    console.print(table)
    for complaint in lived.complaints + died.complaints:
        console.print(f"[red]wrong[/red]: {complaint}", highlight=False)


def main() -> None:
    """Attack, show what was seen, and fail when something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bodies", type=int, default=AttackPlan.bodies)
    parser.add_argument("--requests", type=int, default=AttackPlan.soak_requests)
    flags = parser.parse_args()
    bound_s = QUIET_STALL_BOUND_S if os.getloadavg()[0] < QUIET_LOAD else STALL_BOUND_S
    plan = AttackPlan(seed=flags.seed, bodies=flags.bodies, soak_requests=flags.requests, stall_bound_s=bound_s)
    with (
        tempfile.NamedTemporaryFile() as turns,
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as two,
        tempfile.TemporaryDirectory() as short,
        tempfile.TemporaryDirectory() as measured,
    ):
        turns.write(bytes(8))
        turns.flush()
        # What a server's processes are forked from runs this in each of them.
        os.environ |= {TURNS: turns.name, "PYTHONPATH": str(Path(__file__).parents[1] / "unit" / "spoiling")}
        Path(measured, "spoil.py").write_text(Path(__file__).with_name("loop_turns.py").read_text())
        os.chdir(measured)
        with PreloadedParent.start("spoiled_forks") as parent:
            lived = run_attack(parent, Path(one), plan)
            run_short_bodies(parent, Path(short), lived)
            died = run_deaths(parent, Path(two))
            died.complaints += [
                f"the last word after the death of {name} must come in {FINAL_MESSAGE_BOUND_S} s, took {taken_s:.2f}"
                for name, taken_s in died.final_messages_s.items()
                if taken_s > FINAL_MESSAGE_BOUND_S
            ]
    _show(Console(), lived, died)
    sys.exit(1 if lived.complaints or died.complaints else 0)


if __name__ == "__main__":
    main()
