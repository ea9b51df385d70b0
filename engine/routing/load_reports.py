"""What engines say of their load, told to a placement: also that one has dropped its cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.routing.fleet import ReplicaLoad
from engine.routing.placement import Placement


class LoadReports:
    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        # What was cached at the last report: pages, and the version of the weights that they are of.
        self._cached: dict[str, tuple[int, int]] = {}

    def take(self, name: str, load: Mapping[str, Any]) -> None:
        """Report the load of an engine that takes requests."""
        pages, version = cached = load["cached_pages"], load["weights_version"]
        pages_before, version_before = self._cached.get(name, cached)
        self._cached[name] = cached
        self._placement.report(
            name,
            ReplicaLoad(
                running=load["num_running_reqs"],
                waiting=load["num_waiting_reqs"],
                pending_prefill_tokens=load["num_pending_tokens"],
                free_pages=load["free_pages"],
            ),
            is_flushed=version != version_before or (pages_before > 0 and pages == 0),
        )

    def forget(self, name: str) -> None:
        self._cached.pop(name, None)
