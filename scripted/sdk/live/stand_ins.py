"""The device and the oracle of a live run, whose engine really computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from scripted.core.account import OWN_ENDS, Account, Life, overrun
from scripted.core.errors import BadCall
from scripted.core.violation import Violation
from scripted.sdk.capabilities import Capabilities, Limits
from scripted.sdk.live.weights import UpdateWeights, WeightsOfRequests
from scripted.sdk.messages import Add, Batch, BatchResult, Event, Stepped
from scripted.sdk.oracle import SdkOracle
from scripted.sdk.script.run import SdkRun


class LiveDevice:
    """Knows which batches are in flight; the engine's own workers compute them."""

    understood: Batch | None = None
    violation: Violation | None = None
    corrupted: frozenset[str] = frozenset()
    # Withdrawn outputs; there are none without guesses.
    shortened: Mapping[str, int] = MappingProxyType({})
    from_logits: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._in_flight: deque[int] = deque()

    def begin(self, request: Add, *, is_queued: bool = False) -> None:
        """Do nothing: the model makes the tokens."""

    def follow(self, events: Sequence[Event], stepped: Stepped) -> None: ...

    def lora_of(self, rid: str) -> int:
        """Return 0: a live engine has no LoRAs here."""
        del rid
        return 0

    def known_tokens(self, rid: str) -> int:
        """Return 0: only requests with guesses are asked, and there are none."""
        del rid
        return 0

    def has_logits(self, rid: str) -> bool:
        """Return False: a live engine keeps no logits here."""
        del rid
        return False

    def holds(self, rid: str, block_ids: Sequence[int], first: int, end: int) -> bool:
        """Return True: a real engine's KV is judged by the tokens computed from it."""
        del rid, block_ids, first, end
        return True

    def fail_next_batch(self) -> None:
        """Raises BadCall."""
        raise BadCall("a batch of a real engine does not fail on command; write this script for the sim tier")

    def launch(self, microbatch: Batch) -> None:
        """Allow the batch's result from now on."""
        self._in_flight.append(microbatch.id)

    def next_completion(self, timeout_s: float | None) -> BatchResult | None:
        """Return the oldest result; its tokens are in the replies of the step that takes it."""
        del timeout_s
        return BatchResult(batch_id=self._in_flight.popleft(), token_ids=()) if self._in_flight else None


class LiveOracle(SdkOracle):
    """Checks all promises that need no simulated runner; compares tokens with those of the request run alone."""

    def __init__(self, limits: Limits, can: Capabilities) -> None:
        super().__init__(limits, can, None)
        # The model's tokens are unknown until the end.
        self.account = Account(None, can.late_launches)
        self._weights = WeightsOfRequests(self.account)

    def after_step(self, events: Sequence[Event], stepped: Stepped, machine: Any, pipeline: Any) -> None:
        super().after_step(events, stepped, machine, pipeline)
        self._weights.lose_blocks(stepped.preempted)

    def _follow(self, event: Event) -> None:
        super()._follow(event)
        self._weights.follow(event)

    def at_end(self, machine: Any) -> None:
        """Check the end of a run after a flush: the pool is whole, and tokens equal those of each request run alone."""
        super().at_end(machine)
        free = machine.counts()["blocks_free"]
        if free != self._limits.blocks:
            raise Violation(f"everything has ended, but only {free} of {self._limits.blocks} blocks are free")
        alone: dict[tuple[object, ...], tuple[int, ...]] = {}
        for life in self.account.lives:
            message = life.message
            key = message.prompt_ids, message.max_new_tokens, message.stop_token_ids, self._weights.history(life)
            if life.said and key not in alone:
                alone[key] = machine.say_alone(message, key[-1])
            if life.said:
                _compare(life, alone[key], self._weights.comparable(life))


def _compare(life: Life, alone: tuple[int, ...], most: int | None) -> None:
    said = tuple(life.said)
    ends_alike = life.end in OWN_ENDS and most is None
    if said[:most] != (alone if ends_alike else alone[: len(said[:most])]):
        limit = overrun(said, life.message.max_new_tokens)
        raise Violation(f"{life.message.rid} says {list(said)}, but alone it says {list(alone)}{limit}")


class LiveRun(SdkRun):
    """A run whose machine is a real engine."""

    tier = "server"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_type = self.context_with(UpdateWeights)
