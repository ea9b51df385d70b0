"""The totals that follow from what clients were told, by the names of the engine's counters. It only counts."""

from __future__ import annotations

__all__ = ["Totals"]


class Totals:
    """What was counted since the engine was new; the names are those of the engine's counters."""

    __slots__ = (
        "accepted_tokens",
        "cached_tokens",
        "drafted_tokens",
        "forward_ct",
        "generated_tokens",
        "lora_evictions",
        "lora_loads",
        "prompt_tokens",
        "requests_aborted",
        "requests_finished",
        "requests_refused",
        "requests_started",
        "requests_timed_out",
        "retractions",
        "weights_version",
    )

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)

    accepted_tokens: int
    cached_tokens: int
    drafted_tokens: int
    forward_ct: int
    generated_tokens: int
    lora_evictions: int
    lora_loads: int
    prompt_tokens: int
    requests_aborted: int
    requests_finished: int
    requests_refused: int
    requests_started: int
    requests_timed_out: int
    retractions: int
    weights_version: int

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return {name: getattr(self, name) for name in self.__slots__}
