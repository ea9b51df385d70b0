"""Peers that generate without a server: a worker gets one batch of requests over its pipes, a row a client.

Their tokens a second include no streaming, so they must not be compared with servers.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.peers.results import FIRST_TOKENS, PeerResult
from benchmarks.peers.served import LONG_PROMPT_WORDS, LONG_REQUESTS, PROMPT_WORDS, Workload
from benchmarks.processes import Family

__all__ = ["Offline", "OfflinePeer"]

_ROOT: Final = Path(__file__).parents[2]
_WORKERS: Final = "benchmarks.peers.workers"
_WARM_UP_ROWS: Final = 2
_WARM_UP_TOKENS: Final = 4
_WARM_UP_SEED: Final = 7_777


class OfflinePeer(msgspec.Struct, frozen=True, kw_only=True):
    """A worker to start: its name, its environment's Python, its module, and whether it keeps prefixes.

    A ``bound`` is not an engine but a limit that none can exceed: servers are compared with it.
    """

    name: str
    python: str
    worker: str
    keeps_prefixes: bool = True
    bound: bool = False


class _Answer(msgspec.Struct):
    seconds: float | None = None


class Offline:
    """A worker that has loaded the model, and its measurements so far."""

    def __init__(self, peer: OfflinePeer, folder: Path, dtype: str, scratch: Path) -> None:
        self.name = peer.name
        self.result = PeerResult(name=peer.name, served=peer.bound)
        self._peer = peer
        self._memory: list[float] = []
        self.family = Family(
            [peer.python, "-m", f"{_WORKERS}.{peer.worker}", str(folder), dtype],
            environment={"PYTHONPATH": str(_ROOT)},
            log=scratch / f"{peer.name}.log",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            self._answer()
        except BaseException:
            self.family.stop()
            raise

    def warm_up(self) -> None:
        """Send it several requests at once."""
        self._seconds(_WARM_UP_ROWS, PROMPT_WORDS + 1, _WARM_UP_TOKENS, _WARM_UP_SEED)

    def throughput(self, clients: int, work: Workload, seed: int) -> None:
        """Measure tokens a second of one batch, and CPU for each token."""
        before = self.family.cpu_s()
        seconds = self._seconds(clients, PROMPT_WORDS + 1, work.output_tokens, seed)
        tokens = clients * work.output_tokens
        cpu_ms = (self.family.cpu_s() - before) * 1e3
        self.result.tokens_per_s.setdefault(clients, []).append(tokens / seconds)
        self.result.cpu_ms_per_token.setdefault(clients, []).append(cpu_ms / tokens)
        self._note_memory()

    def first_tokens(self, seed: int) -> None:
        """Measure one token of a long prompt, and of the same prompt again if prefixes are kept."""
        kinds = FIRST_TOKENS if self._peer.keeps_prefixes else FIRST_TOKENS[:1]
        for kind in kinds:
            times = sorted(self._seconds(1, LONG_PROMPT_WORDS + 1, 1, seed + number) for number in range(LONG_REQUESTS))
            self.result.ttft_ms.setdefault(kind, []).append(times[len(times) // 2] * 1e3)
        self._note_memory()

    def _note_memory(self) -> None:
        self._memory.append(self.family.memory_mib())
        self.result.serving_mib = max(self._memory)

    def _seconds(self, rows: int, prompt: int, tokens: int, seed: int) -> float:
        asked = {"rows": rows, "prompt_tokens": prompt, "new_tokens": tokens, "seed": seed}
        pipe = self.family.process.stdin
        assert pipe is not None, "the worker was started with pipes"
        pipe.write(msgspec.json.encode(asked) + b"\n")
        pipe.flush()
        seconds = self._answer().seconds
        assert seconds is not None, "a worker answers a batch with its time"
        return seconds

    def _answer(self) -> _Answer:
        pipe = self.family.process.stdout
        assert pipe is not None, "the worker was started with pipes"
        line = pipe.readline()
        if not line:
            raise SystemExit(f"{self.name} ended:\n{self.family.said()}")
        return msgspec.json.decode(line, type=_Answer)
