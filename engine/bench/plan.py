"""What a benchmark is to do: which server, what requests, when they arrive. Checked before anything is sent.

Owns the absolute arrival schedule: when a request is due depends on the plan alone, never on how fast answers come.
"""

from __future__ import annotations

import random
from enum import StrEnum

import msgspec

from engine.errors import ConfigError

MAX_REQUESTS = 1_000_000


class Arrivals(StrEnum):
    """When requests arrive: at random or even distances, as recorded, or whenever one of N clients is free."""

    POISSON = "poisson"
    CONSTANT = "constant"
    RECORDED = "recorded"
    CLOSED = "closed"


class BenchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark. Raises ConfigError for a value that breaks a rule.

    ``rate_per_s`` belongs to poisson and constant arrivals, ``clients`` to closed ones; words are those of synthetic
    prompts. With a ``recording`` the requests come from that file.
    """

    url: str
    model: str = ""
    chat: bool = False
    arrivals: Arrivals = Arrivals.CLOSED
    rate_per_s: float | None = None
    clients: int | None = None
    requests: int = 100
    warmup: int = 4
    prefix_words: int = 0
    input_words: int = 128
    output_tokens: int = 128
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    recording: str | None = None
    request_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        self._require(self.url.startswith(("http://", "https://")), "url", "begin with http:// or https://")
        self._require(1 <= self.requests <= MAX_REQUESTS, "requests", f"be from 1 to {MAX_REQUESTS}")
        self._require(0 <= self.warmup <= MAX_REQUESTS, "warmup", f"be from 0 to {MAX_REQUESTS}")
        for name in ("input_words", "output_tokens"):
            self._require(getattr(self, name) >= 1, name, "be >= 1")
        self._require(self.prefix_words >= 0, "prefix_words", "be >= 0")
        self._require(self.temperature >= 0, "temperature", "be >= 0")
        self._require(self.request_timeout_s > 0, "request_timeout_s", "be > 0 seconds")
        self._check_arrivals()

    def _check_arrivals(self) -> None:
        rated = self.arrivals in (Arrivals.POISSON, Arrivals.CONSTANT)
        if rated:
            self._require(
                self.rate_per_s is not None and self.rate_per_s > 0, "rate_per_s", f"be > 0 for {self.arrivals}"
            )
        else:
            self._require(self.rate_per_s is None, "rate_per_s", f"be unset for {self.arrivals} arrivals")
        if self.arrivals is Arrivals.CLOSED:
            self._require(self.clients is not None and self.clients >= 1, "clients", "be >= 1 for closed arrivals")
        else:
            self._require(self.clients is None, "clients", f"be unset for {self.arrivals} arrivals")
        if self.arrivals is Arrivals.RECORDED:
            self._require(self.recording is not None, "recording", "name a file for recorded arrivals")

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise ConfigError(f"{name} must {rule}, got {getattr(self, name)!r}; see `engine bench --help`")


def arrival_times(plan: BenchPlan, count: int) -> list[float]:
    """When each of ``count`` requests is due, in seconds from the start. Only for arrivals with a rate."""
    assert plan.rate_per_s is not None, "only arrivals with a rate have a schedule of their own"
    if plan.arrivals is Arrivals.CONSTANT:
        return [number / plan.rate_per_s for number in range(count)]
    generator = random.Random(plan.seed)  # noqa: S311 - a schedule, no secret
    times, now_s = [], 0.0
    for _ in range(count):
        times.append(now_s)
        now_s += generator.expovariate(plan.rate_per_s)
    return times
