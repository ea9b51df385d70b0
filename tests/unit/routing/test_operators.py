"""Acts over all engines: done by all or by none, for any behaviour at any step, and never two versions of weights."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from thinned import thinned

from engine.core.routing.operators import Ask, Operators, Order, Outcome, Seen, State, Verb

NAMES = ("a", "b", "c")
START = "start"
ACTS = 400
VERBS = (Verb.PAUSE, Verb.CONTINUE, Verb.FLUSH, Verb.UPDATE, Verb.SLEEP, Verb.WAKE)
MOST_EVENTS = 20_000


@dataclass
class Played:
    """One engine: its state, its unanswered asks, and the versions of the weights at its requests' starts."""

    paused: str | None = None
    weights: str = START
    sleep_level: int = 0
    asked: Ask | None = None
    is_up: bool = True
    own_requests: list[str] = field(default_factory=list)
    # Requests that did not come through the router.
    others: int = 0

    @property
    def state(self) -> State:
        return State(self.paused, self.weights, self.sleep_level)

    def do(self, ask: Ask) -> None:
        match ask.verb:
            case Verb.PAUSE:
                self.paused = ask.argument
            case Verb.CONTINUE:
                self.paused = None
            case Verb.UPDATE:
                self.weights, self.sleep_level = ask.argument, min(self.sleep_level, 1)
            case Verb.SLEEP:
                self.sleep_level = max(self.sleep_level, ask.level)
            case Verb.WAKE:
                assert self.sleep_level < 2, "an engine is woken without weights"
                self.sleep_level = 0
            case Verb.FLUSH:
                assert not self.own_requests, "an engine is flushed under its requests"


class Fleet:
    """A router that runs the machine over engines that are played, and checks what it promises after every event."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.machine = Operators(NAMES)
        # How often something goes wrong, as a part of the most that does.
        self.trouble = 1.0
        self.engines = {name: Played() for name in NAMES}
        self.outcomes: list[Outcome] = []
        self.seen: Counter[str] = Counter()

    def take(self, messages: list[Ask | Outcome]) -> None:
        for message in messages:
            if isinstance(message, Outcome):
                self.outcomes.append(message)
            else:
                engine = self.engines[message.engine]
                assert engine.asked is None, f"{message.engine} is asked two things at once"
                engine.asked = message

    @property
    def open_engines(self) -> list[str]:
        """Where a request may be sent now."""
        if self.machine.is_closed:
            return []
        return [name for name, one in self.engines.items() if one.is_up and not self.machine.why_not(name)]

    def answer(self, name: str) -> None:
        """An engine does what it was asked, refuses it, or is lost with it."""
        engine = self.engines[name]
        ask = engine.asked
        assert ask is not None
        kind = self.draw.random() / self.trouble
        engine.asked = None
        if not engine.is_up or kind < 0.04:
            if self.draw.random() < 0.5 and engine.is_up and not (ask.verb is Verb.WAKE and engine.sleep_level > 1):
                engine.do(ask)  # It was done, and only the answer was lost.
            self.seen[f"lost with {ask.verb}"] += 1
            self.take(self.machine.unanswered(name, "is gone"))
        elif kind < 0.1 and ask.verb is not Verb.LOOK:
            self.seen[f"refused {ask.verb}"] += 1
            self.take(self.machine.answered(name, ok=False, words="no"))
        else:
            if ask.verb is Verb.WAKE and engine.sleep_level > 1:
                self.seen["refused wake without weights"] += 1
                self.take(self.machine.answered(name, ok=False, words="its weights were dropped"))
                return
            engine.do(ask)
            alive = len(engine.own_requests) + engine.others
            look = Seen(engine.state, alive) if ask.verb is Verb.LOOK else None
            self.take(self.machine.answered(name, ok=True, words="done", seen=look))

    def event(self) -> None:
        kind, name = self.draw.random(), self.draw.choice(NAMES)
        engine = self.engines[name]
        if kind < 0.3:
            if not self.open_engines:
                return
            at = self.engines[self.draw.choice(self.open_engines)]
            at.own_requests.append(at.weights)
        elif kind < 0.5:
            del engine.own_requests[:1]
        elif kind < 0.5 + 0.001 * self.trouble:
            engine.others = 1 - engine.others
        elif kind < 0.5 + 0.003 * self.trouble:
            # A look that failed although the engine is there.
            self.take(self.machine.lost(name, "is gone"))
        elif kind < 0.5 + 0.006 * self.trouble and engine.is_up:
            engine.is_up = False
            engine.own_requests.clear()
            engine.others = 0
            self.take(self.machine.lost(name, "is gone"))
        elif kind < 0.6 and not engine.is_up:
            self.come_back(name)
        elif kind < 0.65 and engine.is_up:
            self.take(self.machine.met(name))
        elif kind < 0.65 + 0.004 * self.trouble and self.machine.is_acting:
            self.seen["late"] += 1
            self.take(self.machine.late(self.machine.stage, "did not answer within 5 s"))
        elif engine.asked is not None:
            self.answer(name)
        if self.machine.is_draining and not any(one.own_requests for one in self.engines.values()):
            self.take(self.machine.drained())
        for one in self.engines.values():
            assert all(began == one.weights for began in one.own_requests), (
                "a request was computed by two versions of the weights"
            )

    def come_back(self, name: str) -> None:
        """Another process, with the weights of the start; what the first one was asked is lost."""
        engine = self.engines[name]
        engine.is_up, engine.paused, engine.weights, engine.sleep_level = True, None, START, 0
        if engine.asked is not None:
            engine.asked = None
            self.take(self.machine.unanswered(name, "is gone"))
        self.take(self.machine.met(name))

    def act(self, order: Order) -> None:
        """Run one act from its beginning to its end, and check the final state."""
        before = {name: one.state for name, one in self.engines.items()}
        died: set[str] = set()
        self.outcomes.clear()
        away = {name: "is gone" for name, one in self.engines.items() if not one.is_up}
        self.take(self.machine.begin(order, away))
        for _ in range(MOST_EVENTS):
            if self.outcomes:
                break
            was_up = {name for name, one in self.engines.items() if one.is_up}
            self.event()
            died |= was_up - {name for name, one in self.engines.items() if one.is_up}
        assert self.outcomes, f"{order} has no end"
        (outcome,) = self.outcomes
        self.seen[f"{order.verb} {outcome.is_done}"] += 1
        for name, engine in self.engines.items():
            is_owed = bool(self.machine.why_not(name))
            state = engine.state
            assert not is_owed or name in outcome.words, f"{name} is not like the others and not named: {outcome.words}"
            if is_owed or not engine.is_up or engine.asked is not None:
                continue
            if outcome.is_done:
                was = before[name]
                like = Played(paused=was.paused, weights=was.weights or START, sleep_level=was.sleep_level)
                like.do(Ask(name, order.verb, order.argument, order.level))
                wanted = like.state
                assert state == wanted, f"{name} is said to have done {order} and is {state}"
            elif name not in died:
                assert state == before[name], f"{name} was not put back after {order}: {state}, not {before[name]}"

    def quiet(self) -> None:
        """Everything comes back and answers: nothing may be owed forever."""
        trouble, self.trouble = self.trouble, 1e-9
        for name, engine in self.engines.items():
            engine.others = 0
            engine.own_requests.clear()
            if not engine.is_up:
                self.come_back(name)
        for _ in range(60):
            for name, engine in self.engines.items():
                if engine.asked is not None:
                    self.answer(name)
                self.take(self.machine.met(name))
        owed = [name for name in NAMES if self.machine.why_not(name)]
        assert not owed, f"{owed} are kept out forever"
        self.trouble = trouble


@pytest.mark.parametrize("seeds", thinned([range(7), range(7, 20)], one_in=2), ids=("first", "more"))
def test_acts_with_engines_that_die_are_slow_and_refuse_at_every_step(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        fleet = Fleet(seed)
        for number in range(ACTS):
            verb = fleet.draw.choice((*VERBS, Verb.UPDATE, Verb.UPDATE, Verb.WAKE))
            level = fleet.draw.choice((1, 2)) if verb is Verb.SLEEP else 0
            argument = {Verb.PAUSE: fleet.draw.choice(("retract", "in_place")), Verb.UPDATE: f"w{number}"}.get(verb, "")
            for _ in range(fleet.draw.randrange(20)):
                fleet.event()
            if number % 5:
                fleet.quiet()
            fleet.trouble = fleet.draw.choice((1e-9, 0.3, 1.0))
            fleet.act(Order(verb, argument, level))
        fleet.quiet()
        seen += fleet.seen
    for verb in VERBS:
        for what in (f"{verb} True", f"{verb} False", f"refused {verb}", f"lost with {verb}"):
            assert seen[what] > 10, (what, seen)
    assert seen["late"] > 20, seen
    assert seen["refused wake without weights"] > 20, seen


def test_an_engine_that_restarts_gets_the_weights_of_the_others_before_its_first_request() -> None:
    machine = Operators(("a",))
    machine.begin(Order(Verb.UPDATE, "new"), {})
    look = Seen(State(None, START))
    machine.answered("a", ok=True, words="", seen=look)
    machine.drained()
    machine.answered("a", ok=True, words="")
    machine.answered("a", ok=True, words="", seen=Seen(State("in_place", START)))
    machine.answered("a", ok=True, words="")
    (outcome,) = machine.answered("a", ok=True, words="")
    assert isinstance(outcome, Outcome)
    assert outcome.is_done
    machine.lost("a", "is gone")
    assert machine.why_not("a"), "an engine takes requests with the weights of its start"
    assert machine.met("a") == [Ask("a", Verb.LOOK)]
    assert machine.why_not("a")
    assert machine.answered("a", ok=True, words="", seen=look) == [Ask("a", Verb.UPDATE, "new")]
    assert machine.why_not("a")
    assert machine.answered("a", ok=True, words="") == []
    assert not machine.why_not("a")
