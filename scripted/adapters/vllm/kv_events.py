"""What subscribers to KV events of vLLM know: which blocks are said to be in the prefix cache, and whether they are."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import NullEventPublisher

from scripted.adapters.vllm.announced import not_cached, take_events
from scripted.sdk import Violation


class Subscriber(NullEventPublisher):  # type: ignore[misc] # vLLM is not there for mypy
    """In the place of vLLM's publisher. ``said`` are the blocks, by group and hash, as of the events that came."""

    def __init__(self) -> None:
        self.said: set[tuple[int, Any]] = set()

    def publish(self, events: Any) -> None:
        take_events(self.said, events.events)

    def check(self, pool: Any) -> None:
        """With the events that are on their way, nothing is said to be cached that is not. Raises Violation."""
        missing = not_cached(pool, self.said)
        if missing:
            groups = sorted({group for group, _ in missing})
            raise Violation(
                f"KV events say that {len(missing)} blocks of group {', '.join(map(str, groups))} are in the prefix "
                "cache, which are not"
            )
