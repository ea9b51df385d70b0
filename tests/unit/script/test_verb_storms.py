"""Random verbs, several in a step, in any state: each has an effect or is refused, and none breaks the harness."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from thinned import thinned

from engine import EngineConfig
from scripted import BadCall, RequestRefused, ScriptedSim

CONFIGS = (
    EngineConfig(),
    EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=64),
    EngineConfig(max_running_requests=2, max_queued_requests=3, max_total_tokens=256, page_size=4),
    EngineConfig(pp_size=2, pp_async_depth=1, chunked_prefill_size=32, mixed_chunk=True, host_kv_tokens=256),
    EngineConfig(async_scheduling=True),
    EngineConfig(schedule_policy="priority", priority_preemption=True, max_running_requests=1),
)
SCRIPTS_A_CASE = 10
ODD_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"n": 3},
    {"rid": "x"},
    {"return_logprob": True},
    {"stream": False},
    {"priority": 3},
    {"stop": ["a"]},
)


class Storm:
    """The verbs that one script may call, with arguments drawn from its numbers."""

    def __init__(self, t: Any, numbers: random.Random) -> None:
        self._t, self._numbers = t, numbers
        self._requests: list[Any] = []
        stages = t.scheduler.limits.pp_size
        pick = numbers.randrange
        self._rare: tuple[Callable[[], object], ...] = (
            lambda: t.hold_results(),
            lambda: t.release_results(*([1] if pick(2) else [])),
            lambda: t.clock.advance(numbers.choice((0.1, 1, 5))),
            lambda: t.exhaust_kv(leave_pages=pick(4)),
            lambda: t.exhaust_rows(leave_rows=pick(2)),
            lambda: t.exhaust_locks(leave_unlocked=pick(3)),
            lambda: t.release_exhausted(),
            lambda: t.evict(*([pick(3)] if pick(2) else [])),
            lambda: t.fail_next_step(pick(stages)),
            lambda: t.stall_stage(pick(stages)),
            lambda: t.resume_stage(pick(stages)),
            lambda: pick(6) == 0 and t.kill_stage(pick(stages)),
        )
        self._common: tuple[Callable[[], object], ...] = (
            self._start,
            self._start,
            lambda: self._requests and t.abort(numbers.choice(self._requests)),
            lambda: self._requests and t.disconnect(numbers.choice(self._requests)),
            lambda: t.abort_all(),
            lambda: t.flush_cache(timeout_s=numbers.choice((None, 2))),
            lambda: t.pause_generation(mode=numbers.choice(("retract", "in_place", "abort"))),
            lambda: t.continue_generation(),
        )

    def call_one(self) -> bool:
        """Call a verb; return whether it was refused."""
        try:
            self._numbers.choice(self._numbers.choice((self._common, self._rare)))()
        except (BadCall, RequestRefused):
            return True
        return False

    def _start(self) -> None:
        numbers = self._numbers
        if self._requests and numbers.randrange(6) == 0:
            values: dict[str, Any] = {"after": numbers.choice(self._requests), "prompt_len": 5}
        else:
            values = {"prompt_len": numbers.choice((1, 16, 40, 130)), "prompt_seed": numbers.randrange(3)}
        values |= {"max_new_tokens": numbers.choice((1, 2, 6, 20))} | numbers.choice(ODD_ARGUMENTS)
        self._requests.append(self._t.start_req(**values))


def storm(t: Any, seed: int, calls: list[bool]) -> Iterator[None]:
    numbers = random.Random(seed)
    verbs = Storm(t, numbers)
    for _ in range(numbers.randint(4, 18)):
        calls += [verbs.call_one() for _ in range(numbers.choice((0, 1, 1, 2, 3)))]
        yield


@pytest.mark.parametrize("case", thinned(range(60), one_in=30))
def test_verbs_in_any_state_break_nothing(case: int) -> None:
    """A client that hung up in the step of its abort, or of a failed choice's, was waited for by an internal error."""
    calls: list[bool] = []
    for seed in range(case * SCRIPTS_A_CASE, (case + 1) * SCRIPTS_A_CASE):
        with ScriptedSim.start(CONFIGS[seed % len(CONFIGS)]) as sim:
            sim.run(storm, seed, calls)
    assert sum(not refused for refused in calls) > 2 * sum(calls), "most of the calls had an effect"
