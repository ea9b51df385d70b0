"""Numbers of each peer, and comparisons of two within a round. Measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from benchmarks.machine import Machine

__all__ = ["CLIENTS", "FIRST_TOKENS", "PeerResult", "PeersRun", "Ratio", "ratios", "tail_ratios"]

CLIENTS: Final = (1, 8, 32)
FIRST_TOKENS: Final = ("cold", "again")


class PeerResult(msgspec.Struct, kw_only=True):
    """The numbers of one peer. Lists have one value a round, by the number of clients or by the kind of prompt.

    ``start_s`` lasts until /health answers, ``first_answer_s`` until the first token; ``kept_answer_s`` is the same for
    a second start. Memory is the largest proportional share (PSS) of all its processes together. ``later_ttft_ms`` are
    medians over the later turns of conversations, ``goodput_per_s`` is in requests a second. ``equal_ttft_p99_ms`` and
    ``equal_gap_p99_ms`` are tails under the same Poisson arrivals for all servers.
    """

    name: str
    served: bool = True
    start_s: float | None = None
    first_answer_s: float | None = None
    kept_answer_s: float | None = None
    start_cpu_s: float | None = None
    kept_cpu_s: float | None = None
    idle_cpu_percent: float | None = None
    load_mib: float | None = None
    serving_mib: float | None = None
    tokens_per_s: dict[int, list[float]] = {}
    cpu_ms_per_token: dict[int, list[float]] = {}
    ttft_ms: dict[str, list[float]] = {}
    ttft_p99_ms: dict[int, list[float]] = {}
    gap_p99_ms: dict[int, list[float]] = {}
    longest_gap_ms: dict[int, list[float]] = {}
    later_ttft_ms: list[float] = []
    equal_ttft_p99_ms: list[float] = []
    equal_gap_p99_ms: list[float] = []
    goodput_per_s: list[float] = []
    failed: int = 0


class PeersRun(msgspec.Struct, kw_only=True):
    """One run of the benchmark: machine, setting and results.

    ``clients`` are the numbers of clients that load each server in turn, ``kinds`` are the checkpoints besides the
    plain one, ``load_after`` is the load average at its end. ``equal_rates_per_s`` are the rounds' rates of Poisson
    arrivals, which every server keeps up with; ``slo_first_ms`` and ``slo_gap_ms`` are the bounds of the goodput.
    """

    machine: Machine
    began: str
    shape: str
    dtype: str
    prompt_tokens: int
    output_tokens: int
    rounds: int
    weights_mib: float
    results: list[PeerResult]
    clients: list[int] = msgspec.field(default_factory=lambda: list(CLIENTS))
    kinds: list[str] = []
    load_after: float | None = None
    equal_rates_per_s: list[float] = []
    slo_first_ms: float | None = None
    slo_gap_ms: float | None = None


class Ratio(msgspec.Struct, frozen=True):
    """The advantage of the first of two peers, round by round: more tokens a second, or less time."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{self.median:.2f} ({min(self.values):.2f} to {max(self.values):.2f})"


def ratios(own: PeerResult, other: PeerResult) -> Iterator[tuple[str, Ratio]]:
    """Return the ratios by name, over rounds that both completed. More than 1 means that the first one is ahead."""
    for clients in own.tokens_per_s:
        pairs = _paired(own.tokens_per_s.get(clients), other.tokens_per_s.get(clients))
        if pairs:
            name = f"{clients} clients" if clients > 1 else "1 client"
            yield name, Ratio(tuple(ours / theirs for ours, theirs in pairs))
    for kind in FIRST_TOKENS:
        pairs = _paired(own.ttft_ms.get(kind), other.ttft_ms.get(kind))
        if pairs:
            yield f"512 {kind}", Ratio(tuple(theirs / ours for ours, theirs in pairs))
    for clients in own.cpu_ms_per_token:
        pairs = _paired(own.cpu_ms_per_token.get(clients), other.cpu_ms_per_token.get(clients))
        if pairs:
            yield f"CPU a token, {clients}", Ratio(tuple(theirs / ours for ours, theirs in pairs))


def tail_ratios(own: PeerResult, other: PeerResult) -> Iterator[tuple[str, Ratio]]:
    """Return the ratios of tails, later turns and goodput, as ``ratios`` does."""
    for clients in own.ttft_p99_ms:
        for name, ours, theirs in (
            ("first token p99", own.ttft_p99_ms, other.ttft_p99_ms),
            ("gap p99", own.gap_p99_ms, other.gap_p99_ms),
            ("longest gap", own.longest_gap_ms, other.longest_gap_ms),
        ):
            pairs = _paired(ours.get(clients), theirs.get(clients))
            if pairs:
                yield f"{name}, {clients}", Ratio(tuple(theirs / ours for ours, theirs in pairs))
    for name, ours_ms, theirs_ms in (
        ("first token p99, equal rate", own.equal_ttft_p99_ms, other.equal_ttft_p99_ms),
        ("gap p99, equal rate", own.equal_gap_p99_ms, other.equal_gap_p99_ms),
        ("later turns", own.later_ttft_ms, other.later_ttft_ms),
    ):
        pairs = _paired(ours_ms, theirs_ms)
        if pairs:
            yield name, Ratio(tuple(theirs / ours for ours, theirs in pairs))
    pairs = _paired(own.goodput_per_s, other.goodput_per_s)
    if pairs:
        yield "goodput", Ratio(tuple(ours / theirs for ours, theirs in pairs))


def _paired(ours: Sequence[float] | None, theirs: Sequence[float] | None) -> list[tuple[float, float]]:
    # Not strict: in an interrupted run one peer has a round more than the other, and a failed peer has none.
    return [pair for pair in zip(ours or (), theirs or (), strict=False) if all(pair)]
