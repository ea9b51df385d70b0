"""The requests of a benchmark: synthetic ones from a seed, or those of a recording.

Owns prompts and lengths; equal plans give equal requests. Knows no server and no time but the recorded one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.bench.plan import Arrivals, BenchPlan, arrival_times
from engine.errors import ConfigError

_TEXT = (
    "able about after again air also animal answer around ask away back because before big book both boy built by came "
    "city close come country cut day different do door down draw each earth eat end even every eye face family far "
    "father feet few find first follow food form found four from get girl give go good great group grow half hand hard"
)
WORDS = _TEXT.split()
WARMUP_SEED_OFFSET = 1_000_003


class BenchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request, and one line of a recording as JSON. ``prompt`` is a text or token ids.

    ``at_s`` is when it is due, in seconds from the start; None: when a client is free.
    """

    prompt: str | list[int]
    max_tokens: int
    at_s: float | None = None


def requests_of(plan: BenchPlan) -> tuple[list[BenchRequest], list[BenchRequest]]:
    """The warm-up's requests and the measured ones. Raises ConfigError for a recording that cannot be used."""
    warmup = _synthetic(plan, plan.warmup, plan.seed + WARMUP_SEED_OFFSET)
    measured = _recorded(plan, plan.recording) if plan.recording else _synthetic(plan, plan.requests, plan.seed)
    if plan.rate_per_s is not None:
        times = arrival_times(plan, len(measured))
        measured = [msgspec.structs.replace(request, at_s=at_s) for request, at_s in zip(measured, times, strict=True)]
    return warmup, measured


def _synthetic(plan: BenchPlan, count: int, seed: int) -> list[BenchRequest]:
    """Prompts that share their first ``prefix_words`` words and nothing after them."""
    prefix = random.Random(plan.seed).choices(WORDS, k=plan.prefix_words)  # noqa: S311 - a workload, no secret
    generator = random.Random(seed)  # noqa: S311
    return [
        BenchRequest(
            # The number comes first, so that no two prompts share a prefix that was not asked for.
            prompt=" ".join([*prefix, f"{seed}.{number}", *generator.choices(WORDS, k=plan.input_words)]),
            max_tokens=plan.output_tokens,
        )
        for number in range(count)
    ]


def _recorded(plan: BenchPlan, recording: str) -> list[BenchRequest]:
    path = Path(recording)
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as exc:
        raise ConfigError(f"recording must be a readable file, got {recording}: {exc}; check the path") from exc
    decoder = msgspec.json.Decoder(BenchRequest)
    found = [_decoded(decoder, path, number, line) for number, line in enumerate(lines, start=1)]
    if not found:
        raise ConfigError(f"recording must hold a request a line, but {recording} is empty; record some")
    if plan.chat and any(isinstance(request.prompt, list) for request in found):
        raise ConfigError(f"chat needs prompts of text, but {recording} has token ids; leave --chat out")
    if plan.arrivals is Arrivals.RECORDED:
        return _in_order(found[: plan.requests], recording)
    chosen = itertools.islice(itertools.cycle(found), plan.requests)
    return [BenchRequest(prompt=request.prompt, max_tokens=request.max_tokens) for request in chosen]


def _decoded(decoder: msgspec.json.Decoder[BenchRequest], path: Path, number: int, line: str) -> BenchRequest:
    try:
        return decoder.decode(line)
    except ValueError as exc:
        raise ConfigError(f"{path}:{number} must be a request like {{'prompt': .., 'max_tokens': ..}}: {exc}") from exc


def _in_order(found: Sequence[BenchRequest], recording: str) -> list[BenchRequest]:
    if any(request.at_s is None for request in found):
        raise ConfigError(f"recorded arrivals need at_s in every line of {recording}; add it or choose other arrivals")
    return sorted(found, key=lambda request: request.at_s or 0.0)
