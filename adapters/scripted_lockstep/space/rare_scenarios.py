"""Rare scenarios of the engine's generated targets: orders and amounts that independent draws rarely produce.

A request that ends while it is in flight, a queue in which only the last request fits, an operator who asks for another
amount. They are drawn last, so that the rest of a target does not depend on them. Some need features and have targets
of their own: long equal prompts, a prompt that is loaded from the host, a stream of small requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Final, get_args

import msgspec

from engine.core.config import EngineConfig
from engine.core.limits import Limits
from engine.core.messages import PauseMode
from engine.core.scheduler.planner import ADMISSION_TRIES_LIMIT_REQUESTS
from engine.core.scheduler.shared_prompts import LEAST_SPARED_TOKENS
from scripted.core.action import Action
from scripted.core.common_actions import HoldResults, ReleaseResults
from scripted.core.placed_action import Placed
from scripted.core.schedule import Schedule
from scripted.search.strategies import extras_of
from scripted_lockstep.actions import (
    AbortEverything,
    AbortRequest,
    DisconnectClient,
    Evict,
    PauseServing,
    Press,
    Relieve,
    ResumeServing,
    StartRequest,
)

CAUGHT: Final = "caught"
CROWD: Final = "crowd"
PRESSED: Final = "pressed-again"
EQUALS: Final = "equals"
LOADS: Final = "loads"
STREAM: Final = "stream"
AHEAD: Final = "caught-ahead"
SHORT: Final = "short-of-pages"
PASSED: Final = "passed-over"
OFTEN: Final = "used-often"
LORAS: Final = "stream-of-loras"
_POLICY: Final = EngineConfig.model_fields["schedule_policy"]
# Read from the choices, so that a new policy is drawn too.
REORDERING_POLICIES: Final = tuple(name for name in get_args(_POLICY.annotation) if name != _POLICY.default)
PREEMPTING: Final = "preempting"
# Scenarios that only add to a target, listed as often as they are to be drawn.
RARE_SCENARIOS: Final = (CAUGHT, PRESSED, CAUGHT, CROWD, CAUGHT, PRESSED)
# Scenarios with targets of their own: the features that they need, with the levels to draw from.
SCENES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    # Several microbatches, each or some with room for a whole prompt.
    EQUALS: {"scale": ("large",), "stages": ("two", "more"), "chunk": ("roomy", "off", "ragged"), "requests": ("one",)},
    LOADS: {"host": ("small", "small", "large"), "requests": ("one",)},
    # Two microbatches of one request are in flight when it is ended.
    AHEAD: {"stages": ("async",), "requests": ("several",)},
    # Decodes get no page, and the victim is not the request launched last.
    PASSED: {"requests": ("one",), "pool": ("tight",)},
    LORAS: {"requests": ("stream",), "loras": ("one", "several")},
    OFTEN: {"requests": ("one",)},
    SHORT: {
        "pool": ("tight",),
        "outputs": ("long",),
        "requests": ("several",),
        "policy": ("priority", PREEMPTING, "priority", "lpm"),
    },
    STREAM: {"requests": ("stream",), "policy": (*REORDERING_POLICIES, PREEMPTING), "rows": ("one", "few")},
}
_LARGEST: Final = 60
# A prompt is split into at most this many parts; in a crowd into a third of that.
MOST_PARTS: Final = 24
_ROWS: Final = 3
_STAGGERED: Final = ((2, 3, 5), (1, 2, 3, 5, 8), (4, 6, 9, 12))


def scenario_additions(scenario: str, rng: random.Random, schedule: Schedule, limits: Limits) -> Iterator[Placed]:
    """Yield the events that a scenario adds. If a crowd would take too long, end a request in flight instead."""
    if scenario == PRESSED:
        return _pressed_again(rng, schedule, limits)
    if scenario == EQUALS and limits.total_pages * limits.page_size > least_spared(limits) + 4 * limits.page_size:
        return _equal_prompts(rng, schedule, limits)
    if scenario == LOADS and limits.host_pages:
        return _host_loads(rng, limits)
    if scenario == OFTEN:
        return _used_often(rng, limits)
    if scenario in (STREAM, LORAS, SHORT):
        return iter(())
    tokens = (rng.choice((7, 8, 9)) if scenario == PASSED else 6) * limits.total_pages * limits.page_size // 10
    tokens = min(tokens, limits.context_length - 2, tokens if limits.chunking else limits.prefill_budget_tokens)
    if scenario == PASSED:
        return _passed_over(rng, tokens, limits)
    if scenario == CROWD and 1 < tokens <= min(_LARGEST, MOST_PARTS // 3 * limits.prefill_budget_tokens):
        return _crowd(rng, tokens, limits)
    return _caught_in_flight(rng, schedule)


def least_spared(limits: Limits) -> int:
    """Return the tokens of the fewest pages that are worth waiting for."""
    return -(-LEAST_SPARED_TOKENS // limits.page_size) * limits.page_size


def _caught_in_flight(rng: random.Random, schedule: Schedule) -> Iterator[Placed]:
    """Hold results, and end their requests meanwhile; usually with another event at the same time.

    Many requests have a twin that comes with or after them, and shares or waits for their work in flight.
    """
    starts = [(placed.step, placed.action) for placed in schedule.placed if isinstance(placed.action, StartRequest)]
    # A long prompt is in flight for longer than others.
    step, start = rng.choice((rng.choice(starts), max(starts, key=lambda one: one[1].prompt)))
    if rng.random() < 0.35:
        # Two requests in one microbatch get prompt logprobs, and one ends while it is in flight. Other requests would
        # take their place in that microbatch: mostly they come when those are done.
        late = schedule.last_step + rng.randint(6, 24)
        step = rng.choice((step, late, late))
        for number in range(2):
            pair = StartRequest(rid=f"w{number}", prompt=rng.randint(2, 9), seed=20 + number, logprobs_from=0)
            yield Placed(step, pair)
        yield from _end_in_flight(
            rng, rng.choice(("w0", "w0", "w0", "w1")), step + rng.choice((0, 0, 1)), by_itself=True
        )
        return
    if rng.random() < 0.5:
        twin = msgspec.structs.replace(start, rid=f"{start.rid}-w", seed=rng.choice((start.seed, 7)))
        yield Placed(step + rng.choice((0, 0, 1, 2)), twin)
    yield from _end_in_flight(rng, start.rid, step + rng.choice((0, 0, 1, 1, 2, 4, 8)), schedule)


def _end_in_flight(
    rng: random.Random, rid: str, held: int, schedule: Schedule | None = None, *, by_itself: bool = False
) -> Iterator[Placed]:
    """Hold results, and end a request meanwhile, mostly ``by_itself`` if set; usually with another event."""
    back = PauseServing(mode=PauseMode.RETRACT)
    alone: list[Action] = [AbortRequest(rid=rid), DisconnectClient(rid=rid)]
    ends = alone * (6 if by_itself else 1)
    ends += [back, back, AbortRequest(rid=rid), AbortEverything(), PauseServing(mode=PauseMode.ABORT)]
    end, by = held + rng.randint(1, 3), rng.choice(ends)
    yield Placed(held, HoldResults())
    yield Placed(end, by)
    if isinstance(by, PauseServing) and rng.random() < 0.8:
        # So that others continue beside the microbatch in flight.
        yield Placed(end + rng.randint(0, 1), ResumeServing())
    if schedule is not None and rng.random() < 0.7:
        others = [*ends, *[extra for extra in extras_of(schedule) if not extra.is_start]]
        kind = rng.choice([*dict.fromkeys(other.kind for other in others)])
        yield Placed(held + rng.randint(0, 5), rng.choice([other for other in others if other.kind == kind]))
    yield Placed(end + rng.randint(1, 5), ReleaseResults(count=rng.choice((None, 1, 1, 2))))


def _equal_prompts(rng: random.Random, schedule: Schedule, limits: Limits) -> Iterator[Placed]:
    """Start long prompts with a common beginning close together: all, most or little of each.

    Often the first one's work is lost; small prompts follow.
    """
    page = limits.page_size
    most = min(limits.total_pages * page, limits.context_length) - 3
    shared = max(1, min(least_spared(limits) + rng.choice((-1, 0, 1, 1, 2)) * page, most - 1))
    step = rng.randint(1, 1 + schedule.last_step // 2)
    first, rest = step, rng.choice(((1,), (1, page), (1, page, shared + page + 1)))
    for number in range(rng.randint(2, 4)):
        prompt = min(shared + rng.choice(rest), most)
        yield Placed(step, StartRequest(rid=f"e{number}", prompt=prompt, new=1, shared=shared, tail=number))
        step += rng.choice((0, 0, 0, 1, 2))
    for number in range(rng.randint(0, 2)):
        small = StartRequest(rid=f"f{number}", prompt=rng.randint(1, page + 1), new=rng.randint(1, 3), seed=5)
        yield Placed(step + rng.randint(0, 2), small)
    held = first + rng.choice((0, 0, 1, 1, 2, 4))
    if rng.random() < 0.7:
        yield from _end_in_flight(rng, "e0", held)
    elif rng.random() < 0.6:
        yield Placed(held, HoldResults())
        yield Placed(held + rng.randint(2, 6), ReleaseResults())


def _host_loads(rng: random.Random, limits: Limits) -> Iterator[Placed]:
    """Compute prompts, evict them to the host and start them again; a load is often in flight when its request ends."""
    page = limits.page_size
    pages = max(1, min(limits.host_pages, limits.total_pages // 2 - 1, rng.randint(1, 5)))
    step, starts = 1, list[StartRequest]()
    for number in range(rng.randint(1, 2)):
        starts.append(StartRequest(rid=f"l{number}", prompt=pages * page + 1, new=1, seed=11 + number))
        yield Placed(step, starts[-1])
        step += rng.randint(5, 12)
    yield Placed(step, Evict(pages=rng.choice((None, None, pages))))
    # Copies to the host go with the next microbatch; a large prompt also takes the place of returning pages.
    large = max(1, min((limits.total_pages - rng.randint(1, 3)) * page, limits.context_length - 6))
    prompt = rng.choice((rng.randint(1, page), large if limits.chunking else 1))
    yield Placed(step + 1, StartRequest(rid="m", prompt=prompt, new=rng.randint(1, 6), seed=13))
    step += rng.randint(4, 12)
    for number, start in enumerate(starts):
        yield Placed(step, msgspec.structs.replace(start, rid=f"l{number}-w", new=rng.randint(1, 4)))
        if rng.random() < 0.6:
            yield from _end_in_flight(rng, f"l{number}-w", step + rng.randint(0, 1))
        step += rng.randint(0, 6)
    if rng.random() < 0.5:
        yield Placed(step + rng.randint(4, 12), msgspec.structs.replace(starts[0], rid="l-x"))
        yield Placed(step + rng.randint(1, 12), Evict())


def _passed_over(rng: random.Random, tokens: int, limits: Limits) -> Iterator[Placed]:
    """Keep starting small requests, with one to three early ones that do not fit beside several of them.

    By the time the first of them starts, the others have been overtaken too often.
    """
    for number in range(rng.choice((1, 2, 2, 2, 2, 3))):
        start = StartRequest(rid=f"q{number}", prompt=max(1, tokens), new=rng.choice((1, 1, 3, 6)), seed=9 + number)
        yield Placed(rng.randint(2, 5), start)
    # Of equal lengths they would end together, and leave room for all.
    outputs, rate, prompt = rng.choice(_STAGGERED), rng.choice((1, 2, 2)), rng.randint(1, limits.page_size + 1)
    for number in range(rng.randint(26, 36)):
        small = StartRequest(rid=f"r{number}", prompt=prompt, new=rng.choice(outputs), seed=0)
        yield Placed(1 + number // rate, small)


def _used_often(rng: random.Random, limits: Limits) -> Iterator[Placed]:
    """Hit one prefix more often than the tree counts, beside a prefix that is never hit; then evict pages."""
    page = limits.page_size
    pages = max(1, min(limits.total_pages // 2 - 1, rng.randint(1, 3)))
    yield Placed(1, StartRequest(rid="o", prompt=pages * page + 1, new=1, seed=15))
    step = limits.depth + 2
    # Uses that come together, or while one is in flight, count as one.
    gap = rng.choice((1, limits.depth, limits.depth + 1))
    for number in range(rng.choice((36, 36, 80)) + rng.randint(0, 8)):
        yield Placed(step, StartRequest(rid=f"o{number}", prompt=page + 1, new=1, seed=16))
        step += gap
    yield Placed(step + rng.randint(0, 3), Evict(pages=rng.choice((None, None, pages))))
    if limits.chunking:
        # A prefix that no prompt has hit: its request ends before its last part.
        tokens = max(page, min(limits.prefill_budget_tokens + page, limits.total_pages // 3 * page))
        yield Placed(2, StartRequest(rid="u", prompt=tokens, new=1, seed=17))
        yield Placed(2 + limits.depth + rng.randint(0, 2), AbortRequest(rid="u"))


def _crowd(rng: random.Random, tokens: int, limits: Limits) -> Iterator[Placed]:
    """Start a request that takes most of the pool, then many that do not fit beside it, then small ones."""
    step = rng.randint(1, 4)
    yield Placed(step, StartRequest(rid="q", prompt=tokens, new=rng.randint(4, 16), seed=9, ignore_eos=True))
    for number in range(ADMISSION_TRIES_LIMIT_REQUESTS + rng.choice((-1, -1, 0, 0, 1, 3))):
        step += rng.choice((0, 0, 0, 1))
        yield Placed(step, StartRequest(rid=f"q{number}", prompt=tokens, new=1, seed=10 + number))
    for number in range(rng.randint(1, 3)):
        step += rng.choice((0, 0, 1, 3))
        yield Placed(step, StartRequest(rid=f"t{number}", prompt=rng.randint(1, limits.page_size), new=1, seed=8))


def _pressed_again(rng: random.Random, schedule: Schedule, limits: Limits) -> Iterator[Placed]:
    """Have an operator reserve memory several times, in different amounts."""
    most = {"pages": limits.total_pages // 2, "rows": _ROWS, "window": limits.window_pages // 2}
    what = rng.choice([name for name, count in most.items() if count])
    step = rng.randint(1, schedule.last_step)
    for _ in range(rng.randint(2, 4)):
        yield Placed(step, Press(**{what: rng.randint(0, most[what])}))
        step += rng.randint(0, 5)
    yield Placed(step, Relieve())
