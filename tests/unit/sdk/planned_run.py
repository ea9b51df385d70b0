"""Plans written by hand, judged as those of a scheduler are: a step is what the test says that it is."""

from __future__ import annotations

from typing import Any

import pytest

from scripted.core.prompts import prompt_ids
from scripted.core.tokens import tokens_alone
from scripted.sdk import (
    Abort,
    Add,
    Answer,
    Batch,
    Capabilities,
    Limits,
    Load,
    PauseMode,
    Rows,
    Share,
    Stepped,
    Tokens,
    Violation,
)
from scripted.sdk.fresh import Fresh
from scripted.sdk.images import images_in, with_images
from scripted.sdk.oracle import SdkOracle
from scripted.sdk.pipeline import SimulatedRunner

LIMITS = Limits(block_size=4, blocks=8, batch_tokens=16, batch_requests=3, context_tokens=32, depth=2)
STOP = PauseMode(name="stop")
KEEP = PauseMode(name="keep", stops_running=False)
ABORT = PauseMode(name="abort", aborts=True)


class FakeMachine:
    """Counts and containers as a test sets them."""

    def __init__(self) -> None:
        self.is_idle = True
        self.numbers = {"waiting": 0, "blocks_free": 8}
        self.requests: dict[str, int] = {}

    def counts(self) -> dict[str, int]:
        return dict(self.numbers)


class PlannedRun:
    """Steps of no scheduler at all: events, the plan of a batch, replies; each is judged at once.

    A result is taken when the test asks for it, and is an event of the next step.
    """

    def __init__(self, limits: Limits = LIMITS, **can: Any) -> None:
        self.can = Capabilities(**can)
        self.machine = FakeMachine()
        self.pipeline = SimulatedRunner(limits, self.can)
        self.oracle = SdkOracle(limits, self.can, Fresh(FakeMachine(), (), ()))
        self.events: list[Any] = []
        self.batches = 0

    def add(
        self,
        rid: str,
        prompt: int = 6,
        *,
        seed: int = 0,
        new: int = 2,
        stop: tuple[int, ...] = (),
        images: int = 0,
        lora: int = 0,
    ) -> Add:
        seen = images_in(prompt, images, seed)
        ids = with_images(prompt_ids(prompt, seed), seen)
        message = Add(rid=rid, prompt_ids=ids, max_new_tokens=new, stop_token_ids=stop, images=seen, lora=lora)
        self.oracle.arrive(rid)
        self.pipeline.begin(message)
        self.events.append(message)
        return message

    def abort(self, rid: str) -> None:
        self.events.append(Abort(rid=rid))

    def take_result(self) -> Any:
        result = self.pipeline.next_completion(0)
        assert result is not None, "nothing is in flight"
        self.events.append(result)
        return result

    def step(
        self,
        *shares: Share,
        replies: tuple[Any, ...] = (),
        preempted: tuple[str, ...] = (),
        name: int = 0,
        copies: tuple[tuple[int, int], ...] = (),
        mirrored: tuple[Rows, ...] = (),
        loads: tuple[Load, ...] = (),
        carried: tuple[tuple[int, int], ...] = (),
        encoded: tuple[tuple[str, int], ...] = (),
        dropped: tuple[int, ...] = (),
    ) -> None:
        """Run and judge one step that launches these shares and sends these replies."""
        events, self.events = self.events, []
        self.batches += bool(shares)
        more: dict[str, Any] = {"copies": copies, "mirrored": mirrored, "encoded": encoded, "dropped": dropped}
        batch = Batch(id=name or self.batches, shares=shares, **more) if shares else None
        stepped = Stepped(microbatch=batch, replies=replies, preempted=preempted, loads=loads, copies=carried)
        self.pipeline.follow(events, stepped)
        if batch is not None:
            self.pipeline.launch(batch)
        self.oracle.after_step(events, stepped, self.machine, self.pipeline)

    def launch(self, rid: str, start: int, count: int, *blocks: int, **more: Any) -> None:
        """Run one step that launches a share of one request, and take its result at once."""
        self.step(share(rid, start, count, *blocks, **more))
        self.take_result()


def share(rid: str, start: int, count: int, *blocks: int, **more: Any) -> Share:
    return Share(rid=rid, start=start, count=count, block_ids=blocks, **more)


def alone(message: Add) -> tuple[int, ...]:
    return tokens_alone(message.prompt_ids, message.max_new_tokens, message.stop_token_ids)


def told(rid: str, *tokens: int, end: str | None = None) -> Tokens:
    return Tokens(rid=rid, token_ids=tokens, finish_reason=end)


def answered(call_id: str, *, ok: bool = True) -> Answer:
    return Answer(call_id=call_id, ok=ok)


def planned_run() -> PlannedRun:
    """Make the run of most tests of checks: with every pause, and with batches that fail."""
    return PlannedRun(pause_modes=(STOP, KEEP, ABORT), fail=True)


def refused(words: str):
    return pytest.raises(Violation, match=words)
