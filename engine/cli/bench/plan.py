"""The plan of a benchmark: the server, the requests, their arrivals. Checked before anything is sent.

Owns the absolute arrival schedule, which depends only on the plan, never on the speed of replies; and the prompts,
synthetic from a seed or from a recording: equal plans give equal requests.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from engine.core.errors import ConfigError

MAX_REQUESTS = 1_000_000
MAX_URL_CHARS = 2048


class Arrivals(StrEnum):
    """The arrivals of requests: at random or even intervals, as recorded, or whenever one of N clients is free."""

    POISSON = "poisson"
    CONSTANT = "constant"
    RECORDED = "recorded"
    CLOSED = "closed"


class BenchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark. Raises ConfigError for a value that breaks a rule.

    ``rate_per_s`` belongs to poisson and constant arrivals, ``clients`` to closed ones; word counts to synthetic
    prompts, of which ``long_percent`` have ``long_words`` instead of ``input_words``. A conversation, the unit of
    arrivals, has ``turns`` requests: each one after the first has the whole conversation before its words, and is due
    ``think_s`` after the reply. With a ``recording`` the requests come from that file. The bounds ``slo_`` are for the
    first token and for each gap of a request.
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
    turns: int = 1
    think_s: float = 0.0
    long_words: int = 0
    long_percent: float = 0.0
    slo_first_ms: float | None = None
    slo_gap_ms: float | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    recording: str | None = None
    request_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        self._require(_is_url(self.url), "url", "be http://HOST:PORT, or begin with https://")
        self._require(1 <= self.requests <= MAX_REQUESTS, "requests", f"be from 1 to {MAX_REQUESTS}")
        self._require(0 <= self.warmup <= MAX_REQUESTS, "warmup", f"be from 0 to {MAX_REQUESTS}")
        for name in ("input_words", "output_tokens"):
            self._require(getattr(self, name) >= 1, name, "be >= 1")
        self._require(self.prefix_words >= 0, "prefix_words", "be >= 0")
        self._require(self.temperature >= 0, "temperature", "be >= 0")
        self._require(self.request_timeout_s > 0, "request_timeout_s", "be > 0 seconds")
        self._check_workload()
        self._check_arrivals()

    def _check_workload(self) -> None:
        self._require(1 <= self.turns <= MAX_REQUESTS, "turns", f"be from 1 to {MAX_REQUESTS}")
        self._require(self.turns == 1 or self.recording is None, "turns", "be 1 with a recording")
        self._require(self.think_s >= 0, "think_s", "be >= 0 seconds")
        self._require(0 <= self.long_percent <= 100, "long_percent", "be from 0 to 100")
        if self.long_percent:
            self._require(self.long_words >= 1, "long_words", "be >= 1 with long_percent")
        else:
            self._require(self.long_words == 0, "long_words", "be 0 without long_percent")
        for name in ("slo_first_ms", "slo_gap_ms"):
            bound = getattr(self, name)
            self._require(bound is None or bound > 0, name, "be > 0 milliseconds")

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


def _is_url(url: str) -> bool:
    """Return whether a text is the URL of a server, which the HTTP client can read."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    is_plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= MAX_URL_CHARS
    return is_plain and parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0


def arrival_times(plan: BenchPlan, count: int) -> list[float]:
    """Return the time at which each of ``count`` requests or conversations is due, in seconds from the start.

    Only for arrivals with a rate.
    """
    assert plan.rate_per_s is not None, "only arrivals with a rate have a schedule"
    if plan.arrivals is Arrivals.CONSTANT:
        return [number / plan.rate_per_s for number in range(count)]
    generator = random.Random(plan.seed)  # noqa: S311 - a schedule, no secret
    times, now_s = [], 0.0
    for _ in range(count):
        times.append(now_s)
        now_s += generator.expovariate(plan.rate_per_s)
    return times


_TEXT = (
    "able about after again air also animal answer around ask away back because before big book both boy built by came "
    "city close come country cut day different do door down draw each earth eat end even every eye face family far "
    "father feet few find first follow food form found four from get girl give go good great group grow half hand hard"
)
WORDS = _TEXT.split()
WARMUP_SEED_OFFSET = 1_000_003


class BenchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request, and one line of a recording as JSON. ``prompt`` is a text or token ids.

    ``at_s`` is the time at which it is due, in seconds from the start; None: when a client is free, or at its turn.
    """

    prompt: str | list[int]
    max_tokens: int
    at_s: float | None = None


def requests_of(plan: BenchPlan) -> tuple[list[BenchRequest], list[BenchRequest]]:
    """Return the warm-up requests and the measured ones. Raises ConfigError for an unusable recording."""
    warmup = _synthetic(plan, plan.warmup, plan.seed + WARMUP_SEED_OFFSET)
    measured = _recorded(plan, plan.recording) if plan.recording else _synthetic(plan, plan.requests, plan.seed)
    if plan.rate_per_s is not None:
        for place, at_s in enumerate(arrival_times(plan, -(-len(measured) // plan.turns))):
            first = place * plan.turns
            measured[first] = msgspec.structs.replace(measured[first], at_s=at_s)
    return warmup, measured


def conversations_of(plan: BenchPlan, requests: Sequence[BenchRequest]) -> list[Sequence[BenchRequest]]:
    """Return the requests by conversation, in order; the last one may be shorter."""
    return [requests[first : first + plan.turns] for first in range(0, len(requests), plan.turns)]


def _synthetic(plan: BenchPlan, count: int, seed: int) -> list[BenchRequest]:
    """Make prompts that share their first ``prefix_words`` words and nothing after them.

    A later turn has only its own words; the first turn has the prefix.
    """
    prefix = random.Random(plan.seed).choices(WORDS, k=plan.prefix_words)  # noqa: S311 - a workload, no secret
    generator = random.Random(seed)  # noqa: S311
    made = []
    for number in range(count):
        is_first = number % plan.turns == 0
        is_long = is_first and plan.long_percent > 0 and generator.random() * 100 < plan.long_percent
        words = generator.choices(WORDS, k=plan.long_words if is_long else plan.input_words)
        # The number comes first, so that no two prompts share a longer prefix.
        prompt = " ".join([*(prefix if is_first else ()), f"{seed}.{number}", *words])
        made.append(BenchRequest(prompt=prompt, max_tokens=plan.output_tokens))
    return made


def _recorded(plan: BenchPlan, recording: str) -> list[BenchRequest]:
    path = Path(recording)
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as exc:
        raise ConfigError(f"recording must be a readable file, got {recording}: {exc}; check the path") from exc
    decoder = msgspec.json.Decoder(BenchRequest)
    found = [_decoded(decoder, path, number, line) for number, line in enumerate(lines, start=1)]
    if not found:
        raise ConfigError(f"recording must hold one request per line, but {recording} is empty; record some")
    if plan.chat and any(isinstance(request.prompt, list) for request in found):
        raise ConfigError(f"chat needs text prompts, but {recording} has token ids; leave --chat out")
    if plan.arrivals is Arrivals.RECORDED:
        if any(request.at_s is None for request in found[: plan.requests]):
            why = f"recorded arrivals need at_s in every line of {recording}"
            raise ConfigError(f"{why}; add it or choose other arrivals")
        return sorted(found[: plan.requests], key=lambda request: request.at_s or 0.0)
    chosen = itertools.islice(itertools.cycle(found), plan.requests)
    return [BenchRequest(prompt=request.prompt, max_tokens=request.max_tokens) for request in chosen]


def _decoded(decoder: msgspec.json.Decoder[BenchRequest], path: Path, number: int, line: str) -> BenchRequest:
    try:
        return decoder.decode(line)
    except ValueError as exc:
        raise ConfigError(f"{path}:{number} must be a request like {{'prompt': .., 'max_tokens': ..}}: {exc}") from exc
