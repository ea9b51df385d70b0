"""Operators' acts, which apply to all engines of a router or to none: pause, flush, weight update, sleep and wake.

A machine without sockets, threads and clocks: it takes events and returns the calls to engines. Owns the wanted state
of each engine; an engine in any other state takes no requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Final


class Verb(StrEnum):
    """A kind of call to one engine: a look at its state, or a change of it."""

    LOOK = "look"
    PAUSE = "pause"
    CONTINUE = "continue"
    FLUSH = "flush"
    UPDATE = "weight update"
    SLEEP = "sleep"
    WAKE = "wake"


@dataclass(frozen=True, slots=True)
class State:
    """The state of an engine that operators change: its pause mode, if any, the source of its weights, and its sleep
    level, 0 while it is awake and 2 if it has no weights to wake with.

    For an engine without requests all pause modes are the same. A wanted state without weights keeps the current ones.
    """

    paused: str | None
    weights: str | None
    sleep_level: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """A call to one engine. ``argument`` is the mode of a pause or a sleep, or the path of an update; ``level`` is a
    sleep's.
    """

    engine: str
    verb: Verb
    argument: str = ""
    level: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """The answer to a look: the engine's state, and its number of requests."""

    state: State
    alive: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """An operator's act: one of the verbs that change an engine."""

    verb: Verb
    argument: str = ""
    level: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an act. ``is_refusal``: engines refused, and none was lost or slow."""

    is_done: bool
    words: str
    is_refusal: bool = False


class Stage(IntEnum):
    """The stages of an act. All engines end one before the next begins; ``CHANGE`` is the last that may fail."""

    LOOK = 0
    DRAIN = 1
    STOP = 2
    CHECK = 3
    CHANGE = 4
    SETTLE = 5


# The reasons why an engine takes no requests until it is known to be in the wanted state.
OWED: Final = "has yet to catch up with the operators' last call"
SLOW: Final = "has not yet answered the last call"
Message = Ask | Outcome
# The pause around a flush or an update: no engine has requests, so the modes are equal.
STOP_MODE: Final = "in_place"
# The mode in which an engine that comes back follows sleeping engines. It ends no request.
SLEEP_MODE: Final = "retract"
# These need idle engines: new requests wait at the router until the act ends.
_QUIET: Final = (Verb.FLUSH, Verb.UPDATE)


@dataclass(slots=True)
class _Engine:
    """``known`` is its state, or None. ``wanted`` is the state after the acts so far; None before the first.

    An engine that is not known to be in its wanted state is ``owed``. ``asked`` is the unanswered call.
    """

    asked: Ask | None = None
    known: State | None = None
    before: State | None = None
    wanted: State | None = None
    owed: bool = False


@dataclass(slots=True)
class _Act:
    order: Order
    stage: Stage = Stage.LOOK
    waiting: set[str] = field(default_factory=set)
    faults: dict[str, str] = field(default_factory=dict)
    has_failed: bool = False
    is_refusal: bool = True


class Operators:
    """Runs one act at a time. Every method takes an event and returns the asks to send.

    ``stage`` counts the stages of all acts; a time limit belongs to one stage. Every ask is answered once, by
    ``answered`` or by ``unanswered``.
    """

    def __init__(self, engines: tuple[str, ...]) -> None:
        self._engines = {name: _Engine() for name in engines}
        self._act: _Act | None = None
        self._out: list[Message] = []
        self.stage = 0

    @property
    def is_acting(self) -> bool:
        return self._act is not None

    @property
    def is_closed(self) -> bool:
        """Return whether no engine takes requests now."""
        return self._act is not None and self._act.order.verb in _QUIET

    @property
    def is_draining(self) -> bool:
        """Return whether the act waits for the end of all sent requests."""
        return self._act is not None and self._act.stage is Stage.DRAIN

    @property
    def is_changing(self) -> bool:
        """Return whether the act waits for the change itself, which may take longer than other stages."""
        return self._act is not None and self._act.stage is Stage.CHANGE

    def why_not(self, name: str) -> str:
        """Return why an engine takes no requests; empty if it takes them."""
        return OWED if self._engines[name].owed else ""

    # -- events --

    def begin(self, order: Order, away: Mapping[str, str]) -> list[Message]:
        """Begin an act for an operator. The engines in ``away`` take no requests, each for a reason."""
        if self._act is not None:
            words = f"{order.verb} refused: a {self._act.order.verb} of all engines is in progress; ask again"
            return [Outcome(is_done=False, words=words)]
        why_not = {name: self.why_not(name) or (SLOW if one.asked else "") for name, one in self._engines.items()}
        away = {name: why for name, why in why_not.items() if why} | dict(away)
        if away:
            causes = "; ".join(f"{name} {why}" for name, why in away.items())
            words = f"{order.verb} refused: every engine must take requests, but {causes}; nothing was changed"
            return [Outcome(is_done=False, words=words)]
        self._act = _Act(order)
        for engine in self._engines.values():
            engine.known = engine.before = None
        self._enter(Stage.LOOK)
        return self._taken()

    def answered(self, name: str, *, ok: bool, words: str, seen: Seen | None = None) -> list[Message]:
        """Take an engine's answer: it has done or refused the ask, or with ``seen`` answered a look."""
        engine, ask = self._engines[name], self._take_ask(name)
        if ok:
            _learn(engine, ask, seen)
            is_checked = self._act is not None and self._act.stage is Stage.CHECK and name in self._act.waiting
            if seen is not None and is_checked and seen.alive:
                ok, words = False, f"has {seen.alive} requests that did not come through this router"
        self._after(name, "" if ok else f"refused: {words}", is_refusal=True)
        return self._taken()

    def unanswered(self, name: str, why: str) -> list[Message]:
        """Note that an engine was lost before it answered. Whether it has done the ask is unknown."""
        self._take_ask(name)
        self._engines[name].known = None
        self._after(name, why, is_refusal=False)
        return self._taken()

    def lost(self, name: str, why: str) -> list[Message]:
        """Note that an engine takes no requests any more. Its open asks may still be answered."""
        engine, act = self._engines[name], self._act
        engine.known = None
        engine.owed = engine.owed or engine.wanted is not None
        if act is not None:
            act.faults.setdefault(name, why)
            act.is_refusal = False
            act.waiting.discard(name)
            self._advance()
        return self._taken()

    def met(self, name: str) -> list[Message]:
        """Note that an engine answers. One that owes a change is asked for its state."""
        engine = self._engines[name]
        if engine.owed and engine.asked is None and (self._act is None or self._act.stage is Stage.SETTLE):
            engine.known = None
            self._settle(name)
        return self._taken()

    def operated_alone(self, name: str) -> None:
        """Note that an operator has changed one engine, which may have left its wanted state."""
        engine = self._engines[name]
        if not engine.owed:
            engine.wanted = None

    def drained(self) -> list[Message]:
        """Go on: every request that was sent has ended."""
        if self.is_draining:
            self._enter(Stage.STOP)
        return self._taken()

    def late(self, stage: int, why: str) -> list[Message]:
        """End a stage whose time is up: engines without an answer are at fault, and ``why`` describes the wait."""
        act = self._act
        if act is None or stage != self.stage:
            return []
        act.is_refusal = self.is_draining
        for name in act.waiting or ("the router",):
            act.faults.setdefault(name, why)
        act.waiting.clear()
        self._advance()
        return self._taken()

    # -- the act --

    def _enter(self, stage: Stage) -> None:
        act = self._act
        assert act is not None, "a stage is one of an act"
        act.stage = stage
        self.stage += 1
        if stage is Stage.DRAIN:
            return
        if stage is Stage.SETTLE:
            self._decide(act)
        for name, engine in self._engines.items():
            if stage is Stage.SETTLE:
                # Lost and slow engines follow after the act.
                if engine.asked is None and engine.known is not None:
                    self._settle(name)
                    if engine.asked is not None:
                        act.waiting.add(name)
            elif (ask := self._ask_of(name, act)) is not None:
                act.waiting.add(name)
                self._ask(ask)
        self._advance()

    def _ask_of(self, name: str, act: _Act) -> Ask | None:
        """Return the ask to an engine in a stage; None if it has nothing to do."""
        state, order = self._engines[name].known, act.order
        if act.stage in (Stage.LOOK, Stage.CHECK):
            return Ask(name, Verb.LOOK)
        if act.stage is Stage.STOP:
            assert state is not None, f"{name} has been looked at"
            return None if state.paused else Ask(name, Verb.PAUSE, STOP_MODE)
        return Ask(name, order.verb, order.argument, order.level)

    def _advance(self) -> None:
        """Go on when the stage is over: to the next one, or back as soon as one engine is at fault."""
        act = self._act
        if act is None or act.waiting or (act.stage is Stage.DRAIN and not act.faults):
            return
        if act.stage is Stage.SETTLE:
            self._end(act)
        elif act.faults:
            act.has_failed = True
            self._enter(Stage.SETTLE)
        else:
            if act.stage is Stage.LOOK:
                for engine in self._engines.values():
                    engine.before = engine.known
            is_short = act.stage is Stage.LOOK and act.order.verb not in _QUIET
            self._enter(Stage.CHANGE if is_short else Stage(act.stage + 1))

    def _decide(self, act: _Act) -> None:
        """Note the wanted state of each engine: the old or the changed one."""
        for name, engine in self._engines.items():
            if engine.before is None:
                continue  # Engines were only asked for their state.
            earlier = None if engine.wanted is None else engine.wanted.weights
            wanted = engine.before if act.has_failed else _changed(engine.before, act.order)
            engine.wanted = wanted if act.order.verb is Verb.UPDATE else replace(wanted, weights=earlier)
            engine.owed = engine.asked is not None or self._missing(name) is not None

    def _after(self, name: str, fault: str, *, is_refusal: bool) -> None:
        """Note the end of an ask, of the act or of an engine that catches up."""
        act, engine = self._act, self._engines[name]
        if act is not None and name in act.waiting:
            if not fault and act.stage is Stage.SETTLE:
                self._settle(name)
                if engine.asked is not None:
                    return
            if fault:
                act.faults.setdefault(name, fault)
                act.is_refusal = act.is_refusal and is_refusal
            act.waiting.discard(name)
            self._advance()
        elif engine.owed and not fault and (act is None or act.stage is Stage.SETTLE):
            self._settle(name)

    def _end(self, act: _Act) -> None:
        self._act = None
        causes = "; ".join(f"{name} {why}" for name, why in act.faults.items())
        owed = ", ".join(name for name, engine in self._engines.items() if engine.owed)
        later = f"; no requests go to {owed} until {'they are' if ',' in owed else 'it is'} like the others"
        if act.has_failed:
            words = f"{act.order.verb} refused: {causes}; the other engines are as they were{later if owed else ''}"
        else:
            count = len(self._engines)
            engines = "1 engine" if count == 1 else f"{count} engines"
            words = f"{act.order.verb} done by {engines}{f'; {causes}{later}' if owed else ''}"
        self._out.append(Outcome(not act.has_failed, words, is_refusal=act.has_failed and act.is_refusal))

    # -- one engine --

    def _settle(self, name: str) -> None:
        """Ask an engine for the next step to its wanted state, if one is missing."""
        engine = self._engines[name]
        if engine.wanted is None or engine.asked is not None:
            return
        missing = self._missing(name)
        if missing is None:
            engine.owed = False
        else:
            self._ask(missing)

    def _missing(self, name: str) -> Ask | None:
        """Return the next ask towards an engine's wanted state."""
        known, wanted = self._engines[name].known, self._engines[name].wanted
        if known is None or wanted is None:
            return Ask(name, Verb.LOOK)
        if wanted.weights is not None and known.weights != wanted.weights:
            return Ask(name, Verb.UPDATE, wanted.weights)
        if known.paused != wanted.paused:
            return Ask(name, Verb.PAUSE, wanted.paused) if wanted.paused else Ask(name, Verb.CONTINUE)
        if known.sleep_level < wanted.sleep_level:
            return Ask(name, Verb.SLEEP, SLEEP_MODE, wanted.sleep_level)
        if known.sleep_level > 1 >= wanted.sleep_level and known.weights is not None:
            # It has no weights to wake with before an update.
            return Ask(name, Verb.UPDATE, known.weights)
        if known.sleep_level and not wanted.sleep_level:
            return Ask(name, Verb.WAKE)
        return None

    def _ask(self, ask: Ask) -> None:
        engine = self._engines[ask.engine]
        assert engine.asked is None, f"{ask.engine} is asked two things at once: {engine.asked} and {ask}"
        engine.asked = ask
        self._out.append(ask)

    def _take_ask(self, name: str) -> Ask:
        engine = self._engines[name]
        ask, engine.asked = engine.asked, None
        assert ask is not None, f"{name} answers what it was not asked"
        return ask

    def _taken(self) -> list[Message]:
        out, self._out = self._out, []
        return out


def _learn(engine: _Engine, ask: Ask, seen: Seen | None) -> None:
    """Note the change by a completed ask."""
    if ask.verb is Verb.LOOK:
        assert seen is not None, "a look is answered with what was seen"
        engine.known = seen.state
    elif engine.known is not None:
        engine.known = _changed(engine.known, Order(ask.verb, ask.argument, ask.level))


def _changed(state: State, order: Order) -> State:
    match order.verb:
        case Verb.PAUSE:
            return replace(state, paused=order.argument)
        case Verb.CONTINUE:
            return replace(state, paused=None)
        case Verb.UPDATE:
            return replace(state, weights=order.argument, sleep_level=min(state.sleep_level, 1))
        case Verb.SLEEP:
            return replace(state, sleep_level=max(state.sleep_level, order.level))
        case Verb.WAKE:
            return replace(state, sleep_level=0)
        case _:
            return state
