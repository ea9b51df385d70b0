"""The pipeline as the loop sees it: launch a microbatch, later take its completion.

Implementations stand beside this file: ``local`` (the model in this process), ``staged`` (one process a stage),
``simulated`` (tokens from KV fingerprints, no model). The scheduler core knows none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from engine.messages import PipelineEvent
from engine.plan import Microbatch

__all__ = ["Pipeline"]


class Pipeline(Protocol):
    """Runs microbatches in launch order and returns their completions in that same order."""

    def launch(self, microbatch: Microbatch) -> None:
        """Hand a microbatch to the first stage. Never blocks on the computation."""
        ...

    def next_completion(self, timeout_s: float | None) -> PipelineEvent | None:
        """The next completion in launch order; waits up to ``timeout_s`` seconds (None: for ever, 0: not at all).

        A pipeline that computes in this process computes here. Returns None when the time is up.
        """
        ...

    @property
    def ready(self) -> bool:
        """True when ``next_completion(0)`` would return one without a readable wake source: work in this process."""
        ...

    def wake_sources(self) -> Sequence[Any]:
        """What to register with a ``zmq.Poller`` to learn that ``next_completion(0)`` may return something."""
        ...

    def close(self) -> None:
        """Release sockets and memory; idempotent."""
        ...
