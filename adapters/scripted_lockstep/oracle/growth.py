"""Checks for growth: an engine that is idle again is as small as a new one, and so are its stages."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

import msgspec

from engine.core.limits import Limits
from engine.core.scheduler import Scheduler
from engine.core.scheduler.sizes import sizes_of as digested_sizes_of
from scripted.core.sizes import grown, sizes_of
from scripted.core.violation import Violation

# The path of the container of a stage's LoRAs.
_HELD_LORAS: Final = ".lora.held"


class Grown(Violation):
    """An engine has grown. It is not reused, because the next script would be blamed for the growth."""


def check_sizes(scheduler: Scheduler) -> None:
    """Check the sizes of an idle and flushed engine that each step's digest covers. Raises Violation."""
    limits = scheduler.limits
    window = (limits.window_pages, 0) if limits.window_tokens else ()
    host = (limits.host_pages, 0) if limits.host_pages else ()
    sizes = (0, 0, 0, limits.total_pages, 0, limits.rows, *window, *host)
    digested = digested_sizes_of(scheduler)
    if digested != sizes:
        raise Violation(f"the sizes of an idle engine are digested as {digested}, but they are {sizes}")


def check_growth(scheduler: Scheduler) -> None:
    """Compare an idle and flushed engine with a new one with the same LoRAs. Raises Grown, which names the larger
    parts.
    """
    limits = scheduler.limits
    loras = tuple([(lora.name, lora.path) for lora in scheduler.features.loras.known.values()])
    if loras != limits.loras:
        limits = msgspec.structs.replace(limits, loras=loras)
    _compare("in a new engine", _when_new(limits), sizes_of(scheduler=scheduler))


def check_stages(before: Mapping[str, int], now: Mapping[str, int], *, loras: int = 0) -> None:
    """Compare flushed stages with their sizes before the first script. Raises Grown, which names the larger parts.

    ``loras`` is the scheduler's count of resident LoRAs: every stage must hold as many.
    """
    held = {path: count for path, count in now.items() if path.endswith(_HELD_LORAS)}
    if any(count != loras for count in held.values()):
        raise Grown(f"{loras} LoRAs are resident, but the stages hold {held}")
    inside = f"{_HELD_LORAS}[]"
    _compare("before the first script", {**before, **held}, {p: count for p, count in now.items() if inside not in p})


def _compare(when: str, before: Mapping[str, int], now: Mapping[str, int]) -> None:
    found = grown(before, now, when)
    if found:
        raise Grown(f"the engine is idle and flushed, but it has grown: {'; '.join(found.values())}")


@functools.lru_cache(maxsize=256)
def _when_new(limits: Limits) -> dict[str, int]:
    return sizes_of(scheduler=Scheduler(limits))
