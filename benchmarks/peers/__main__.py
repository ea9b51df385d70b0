"""Compares servers: throughput, tails, first tokens, later turns, goodput, CPU, memory and start.

Servers run at the same time and take turns; ``engine bench``'s client loads them. Peers without a server take part in
the same rounds. Peers come from their own environments. Run: ``python -m benchmarks.peers --help``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from benchmarks.checkpoints import EXPERTS, SHAPES, make_checkpoint
from benchmarks.machine import Machine
from benchmarks.measurement import in_turn, output_file
from benchmarks.peers.offline import Offline, OfflinePeer
from benchmarks.peers.results import CLIENTS, PeerResult, PeersRun, ratios, tail_ratios
from benchmarks.peers.served import PROMPT_WORDS, Served, ServedPeer, Workload, started
from benchmarks.peers.shown import console_tables, write_page
from benchmarks.quantized import QUANTIZED, quantize
from lockstep.interruption import interruptible

_MIB: Final = 2**20
_CONTEXT_TOKENS: Final = 2048
# All run at once, so none may take all of the machine's free memory.
_OWN_KV_TOKENS: Final = {"S": 131_072, "M": 8_192}
_VLLM_KV_GIB: Final = 2
_WORKLOADS: Final = {
    "S": Workload(output_tokens=64, requests_a_client=8, equal_requests=48, slo_first_ms=50, slo_gap_ms=10),
    "M": Workload(output_tokens=32, requests_a_client=4, equal_requests=24, slo_first_ms=500, slo_gap_ms=100),
}
# The rate of arrivals that is the same for all, as a share of the slowest server's throughput.
_EQUAL_RATE_SHARE: Final = 0.7
_OWN: Final = ("openvino", "torch", "offline")
_RESULTS: Final = Path("out/peers.json")
# The module has no main of its own.
_TRANSFORMERS_SERVE: Final = "from transformers.cli.transformers import main; main()"
# A peer's environment must have these.
_NEEDED: Final = {
    "vllm": ("vllm",),
    "transformers": ("transformers", "uvicorn"),
    "genai": ("openvino_genai", "optimum.intel"),
    "llama": ("llama_cpp", "gguf"),
}


def main() -> None:
    """Start the named peers, measure them in turns, print tables and the winners, write the JSON and the page."""
    arguments = _arguments()
    work = _workload(arguments)
    console = Console(width=None if sys.stdout.isatty() else 240, highlight=False)
    machine = Machine.here()
    console.print(f"{machine.processor_class}: {machine}")
    with tempfile.TemporaryDirectory() as scratch_name, ExitStack() as stack:
        scratch = Path(scratch_name)
        folder = scratch / "model"
        make_checkpoint(folder, arguments.dtype, arguments.shape)
        asked = list(_started(arguments, folder, scratch, stack, console))
        if not asked:
            raise SystemExit("something to measure must be named; see --help")
        run = PeersRun(
            machine=machine,
            began=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            shape=arguments.shape,
            dtype=arguments.dtype,
            prompt_tokens=PROMPT_WORDS + 1,
            output_tokens=work.output_tokens,
            rounds=arguments.rounds,
            weights_mib=sum(file.stat().st_size for file in folder.glob("*.safetensors")) / _MIB,
            results=[one.result for one in asked],
            clients=arguments.clients,
            kinds=[*arguments.quantized, *arguments.experts],
            slo_first_ms=work.slo_first_ms if arguments.goodput else None,
            slo_gap_ms=work.slo_gap_ms if arguments.goodput else None,
        )
        for _ in _measure(asked, run, work, arguments, console):
            # After each measurement, so that an interrupted run keeps its results.
            run.load_after = round(os.getloadavg()[0], 1)
            _write(run, arguments.json)
    for table in console_tables(run):
        console.print(table)
    for line in _ahead(run.results):
        console.print(line)
    if arguments.page is not None:
        write_page(run, arguments.page)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--vllm-python", type=Path, help="the python of an environment with vLLM for CPUs")
    parser.add_argument("--transformers-python", type=Path, help="the python of one with transformers[serving]")
    parser.add_argument("--genai-python", type=Path, help="the python of one with openvino-genai and optimum-intel")
    parser.add_argument("--llama-python", type=Path, help="the python of one with llama-cpp-python and gguf")
    parser.add_argument("--generate", action="store_true", help="transformers.generate too, without a server")
    parser.add_argument(
        "--products", action="store_true", help="the matrix products alone on OpenVINO, as a bound for servers"
    )
    parser.add_argument("--own", default=",".join(_OWN), help=f"some of {', '.join(_OWN)}: how this engine is measured")
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="'OPTIONS'",
        help="one more server of ours with these options of `engine serve`; may be repeated",
    )
    parser.add_argument(
        "--goodput", action="store_true", help="also search each server's goodput, once: it takes minutes"
    )
    parser.add_argument("--slo-first-ms", type=float, help="its bound of the first token; unset: 50 for S, 500 for M")
    parser.add_argument("--slo-gap-ms", type=float, help="its bound of each gap; unset: 10 for S, 100 for M")
    parser.add_argument(
        "--quantized",
        action="append",
        default=[],
        choices=tuple(QUANTIZED),
        help="one more server of ours with OpenVINO, of the checkpoint with layers of this kind; may be repeated",
    )
    parser.add_argument(
        "--experts",
        action="append",
        default=[],
        choices=EXPERTS,
        help="one more server of ours with torch, of a checkpoint with experts; may be repeated",
    )
    parser.add_argument("--tree", type=Path, help="one more server of ours with OpenVINO, of another source tree")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="S")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--clients",
        type=lambda text: [int(word) for word in text.split(",")],
        default=list(CLIENTS),
        help=f"how many load each server at once, in turn (default: {','.join(map(str, CLIENTS))})",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=output_file, default=_RESULTS, help="where the numbers go")
    parser.add_argument("--page", type=output_file, help="a page to bring up, a table for each class of machines")
    arguments = parser.parse_args()
    arguments.own = [name for name in arguments.own.split(",") if name]
    unknown = set(arguments.own) - set(_OWN)
    if unknown:
        parser.error(f"--own must name some of {', '.join(_OWN)}, got {', '.join(sorted(unknown))}")
    if threads := os.environ.get("OMP_NUM_THREADS"):
        parser.error(f"OMP_NUM_THREADS={threads} bounds the threads of some servers and not of others: unset it")
    for name, modules in _NEEDED.items():
        if (python := getattr(arguments, f"{name}_python")) is not None and (why := _why_not(python, modules)):
            parser.error(f"--{name}-python must be able to import {' and '.join(modules)}, but: {why}")
    return arguments


def _workload(arguments: argparse.Namespace) -> Workload:
    work = _WORKLOADS[arguments.shape]
    return msgspec.structs.replace(
        work,
        slo_first_ms=arguments.slo_first_ms or work.slo_first_ms,
        slo_gap_ms=arguments.slo_gap_ms or work.slo_gap_ms,
    )


def _why_not(python: Path, modules: Sequence[str]) -> str | None:
    """Return in a line why an environment lacks a module; None if it has all."""
    try:
        tried = subprocess.run(  # noqa: S603 - the user's environments
            [python, "-c", f"import {', '.join(modules)}"], capture_output=True, text=True, check=False
        )
    except OSError as exc:
        return str(exc)
    return None if tried.returncode == 0 else tried.stderr.strip().splitlines()[-1]


def _started(
    arguments: argparse.Namespace, folder: Path, scratch: Path, stack: ExitStack, console: Console
) -> Iterator[Served | Offline]:
    """Start all peers; the servers' idle CPU is measured before any load."""
    servers = []
    for served in served_peers(arguments, folder, scratch):
        console.print(f"starting: {served.name}")
        server = started(served, folder, scratch)
        stack.callback(server.family.stop)
        servers.append(server)
    for server in servers:
        server.idle()
    yield from servers
    for offline in _offline_peers(arguments):
        console.print(f"starting: {offline.name}, offline")
        worker = Offline(offline, folder, arguments.dtype, scratch)
        stack.callback(worker.family.stop)
        yield worker


def served_peers(arguments: argparse.Namespace, folder: Path, scratch: Path) -> Iterator[ServedPeer]:
    kv_tokens = str(_OWN_KV_TOKENS[arguments.shape])
    own = (sys.executable, "-m", "engine", "serve", "--model", str(folder), "--max-total-tokens", kv_tokens)
    # A new folder for kept data, so that the first start is really the first.
    kept = {"XDG_CACHE_HOME": str(scratch / "cache")}
    if importlib.util.find_spec("openvino") is not None:
        computed = (*own, "--backend", "openvino")
        if "openvino" in arguments.own:
            yield ServedPeer(name="lockstep, OpenVINO", command=computed, environment=kept, keeps=True)
        for kind in arguments.quantized:
            quantize(folder, kind, scratch / kind)
            # The served name is the same for all.
            command = (*computed, "--model", str(scratch / kind), "--served-model-name", str(folder))
            yield ServedPeer(name=f"lockstep, OpenVINO, {kind}", command=command, environment=kept, keeps=True)
        if arguments.tree is not None:
            other = {"PYTHONPATH": str(arguments.tree), "XDG_CACHE_HOME": str(scratch / "other-cache")}
            yield ServedPeer(
                name="lockstep, OpenVINO, other tree",
                command=computed,
                environment=other,
                keeps=True,
                working_folder=arguments.tree,
            )
    if "torch" in arguments.own:
        yield ServedPeer(name="lockstep, torch", command=(*own, "--backend", "torch"))
    for options in arguments.variant:
        yield ServedPeer(name=f"lockstep {options}", command=(*own, *shlex.split(options)), environment=kept)
    for kind in arguments.experts:
        make_checkpoint(scratch / kind, arguments.dtype, arguments.shape, kind)
        named = ("--model", str(scratch / kind), "--served-model-name", str(folder), "--backend", "torch")
        yield ServedPeer(name=f"lockstep, torch, {kind}", command=(*own, *named))
    if arguments.vllm_python is not None:
        server = ("-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", arguments.dtype)
        limits = ("--max-model-len", str(_CONTEXT_TOKENS))
        space = {"VLLM_CPU_KVCACHE_SPACE": str(_VLLM_KV_GIB), "VLLM_CACHE_ROOT": str(scratch / "vllm")}
        vllm = (str(arguments.vllm_python), *server, *limits)
        yield ServedPeer(name="vLLM, default", command=vllm, environment=space)
        # By default it leaves a core to its front end.
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        bound = space | {"VLLM_CPU_OMP_THREADS_BIND": cores}
        yield ServedPeer(name="vLLM, every core", command=vllm, environment=bound)
    if arguments.transformers_python is not None:
        serve = ("-c", _TRANSFORMERS_SERVE, "serve", str(folder), "--continuous-batching")
        transformers = (str(arguments.transformers_python), *serve)
        yield ServedPeer(name="transformers serve", command=transformers, ignore_eos=False)


def _offline_peers(arguments: argparse.Namespace) -> Iterator[OfflinePeer]:
    if "offline" in arguments.own:
        yield OfflinePeer(name="lockstep", python=sys.executable, worker="own")
    if arguments.genai_python is not None:
        yield OfflinePeer(name="OpenVINO GenAI", python=str(arguments.genai_python), worker="genai")
    if arguments.llama_python is not None:
        python = str(arguments.llama_python)
        yield OfflinePeer(name="llama.cpp", python=python, worker="llama", keeps_prefixes=False)
    if arguments.products:
        name = "matrix products alone"
        yield OfflinePeer(name=name, python=sys.executable, worker="products", keeps_prefixes=False, bound=True)
    if arguments.generate:
        name = "transformers.generate"
        yield OfflinePeer(name=name, python=sys.executable, worker="transformers_generate", keeps_prefixes=False)


def _measure(
    asked: Sequence[Served | Offline], run: PeersRun, work: Workload, arguments: argparse.Namespace, console: Console
) -> Iterator[None]:
    """Measure all in turns, in reverse order in every second round; yield after each measurement.

    No two rounds send the same prompts.
    """
    for one in asked:
        one.warm_up()
    servers = [one for one in asked if isinstance(one, Served)]
    for number in range(arguments.rounds):
        console.print(f"round {number + 1} of {arguments.rounds}")
        order, servers_in_turn = in_turn(asked, number), in_turn(servers, number)
        for clients in arguments.clients:
            for one in order:
                one.throughput(clients, work, seed=1000 * number + clients)
                yield
        for one in order:
            one.first_tokens(seed=1000 * number + 500)
            yield
        for server in servers_in_turn:
            server.conversations(work, seed=1000 * number + 600)
            yield
        if servers:
            run.equal_rates_per_s.append(_rate_of_the_slowest(servers, work))
        for server in servers_in_turn:
            server.equal_rate(work, run.equal_rates_per_s[-1], seed=1000 * number + 700)
            yield
    for server in servers if arguments.goodput else ():
        console.print(f"goodput: {server.name}")
        server.goodput(work, seed=1000 * arguments.rounds)
        yield


def _rate_of_the_slowest(servers: Sequence[Served], work: Workload) -> float:
    """Return the requests a second of the slowest server in this round, less a margin for bursts."""
    slowest = min(max(rounds[-1] for rounds in server.result.tokens_per_s.values()) for server in servers)
    return _EQUAL_RATE_SHARE * slowest / work.output_tokens


def _write(run: PeersRun, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(run)) + b"\n")


def _ahead(results: Sequence[PeerResult]) -> Iterator[str]:
    """Return a line for each number in which another peer is better than the first of its kind."""
    for served in (True, False):
        of_a_kind = [result for result in results if result.served is served]
        for other in of_a_kind[1:]:
            for name, ratio in (*ratios(of_a_kind[0], other), *tail_ratios(of_a_kind[0], other)):
                if ratio.median < 1:
                    yield f"{other.name} is ahead of {of_a_kind[0].name} at {name}: {ratio}"


if __name__ == "__main__":
    with interruptible("benchmarks.peers"):
        main()
