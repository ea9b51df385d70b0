"""A fleet in a script: several engines with roles, the links between them, and one clock.

A step of the script is one step of each engine, in the order of their names in ``t.engines``. What an engine says to
another arrives in that one's next step, unless its link is held, slow or cut. Each engine keeps every promise of an
engine by itself, and each has the verbs of ``t``. In the sim tier only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from engine.config import EngineConfig
from engine.messages import (
    Abort,
    AbortAll,
    ContinueGeneration,
    Delivery,
    FinishReason,
    FlushCache,
    Generate,
    GetStats,
    PrefillDropped,
    PrefillFailed,
    PrefillWanted,
    Refusal,
    ReleasePressure,
    Reply,
    SamplingParams,
    TokenOutput,
)
from engine.scheduler import StepResult
from scripted.adapters.lockstep.script.delivery import check_answers
from scripted.adapters.lockstep.script.reset import HARNESS_CALL, RESET_BUDGET_STEPS
from scripted.adapters.lockstep.simulated.transfers import SentPages
from scripted.adapters.lockstep.step_words import call_names, log_of
from scripted.core.violation import Violation
from scripted.errors import BadCall, NotIdle
from scripted.report.step_log import StepLog
from scripted.script.wait import Steps

# The role of an engine, by the first letter of its name.
ROLES: Final = {"p": "prefill", "d": "decode", "e": "both"}
_COMPARED: Final = ("length", "stop")
_OF_A_SCRIPT: Final = "scripts "
_PASSED_FOR_NOBODY: Final = "time that passed for nobody"
_BROKEN: Final = "the connection to it broke"

# What one engine says to another: a prompt that is wanted, the end of that wish, an answer, or pages of KV.
Said = PrefillWanted | PrefillDropped | TokenOutput | Refusal | PrefillFailed | SentPages


class Link:
    """The way from one engine to another. Messages of one kind stay in order; pages may overtake answers, if told to.

    ``delay`` is in steps beyond the next one. What a cut link carries is lost, and both ends learn that it broke.
    """

    def __init__(self) -> None:
        self.delay = 0
        self.is_cut = False
        self.is_held = False
        self.holds_pages = False
        self._on_its_way: deque[tuple[int, Said]] = deque()

    def send(self, message: Said, step: int) -> None:
        """It arrives in a later step."""
        self._on_its_way.append((step + 1 + self.delay, message))

    def take(self, step: int) -> list[Said]:
        """What arrives now."""
        arrived: list[Said] = []
        left: deque[tuple[int, Said]] = deque()
        for due, message in self._on_its_way:
            held = self.is_held or (self.holds_pages and isinstance(message, SentPages))
            if held or due > step:
                left.append((due, message))
            else:
                arrived.append(message)
        self._on_its_way = left
        return arrived

    @property
    def keeps_some(self) -> bool:
        """Something is on its way that does not arrive before it is released."""
        return any(
            self.is_held or (self.holds_pages and isinstance(message, SentPages)) for _, message in self._on_its_way
        )

    def lose(self) -> None:
        """All that is on its way is lost."""
        self._on_its_way.clear()

    @property
    def on_its_way(self) -> tuple[Said, ...]:
        """What was sent and has not arrived."""
        return tuple(message for _, message in self._on_its_way)


class FleetEngine:
    """One engine: ``t`` has its verbs, waits and queries; ``run`` is what is under it."""

    run: Any
    t: Any

    def __init__(self, name: str) -> None:
        self.name = name
        self.previous: StepResult | None = None
        self.is_dead = False
        # Of a decode engine: the prefill engine of each transfer that it has asked for and not heard the end of.
        self.asked: dict[int, str] = {}
        # Of a prefill engine: by rid, the decode engine and its number for what that wants.
        self.serving: dict[str, tuple[str, int]] = {}

    def step(self) -> StepResult:
        """One step of the loop."""
        run = self.run
        run.begin_composing()
        step = run.compose(self.previous)
        result: StepResult = run.scheduler.step(step.events, step.now)
        for order in result.grammars:
            run.world.pipeline.order_grammar(order)
        for transfer in result.transfers:
            run.world.pipeline.order_transfer(transfer)
        if result.microbatch is not None:
            run.world.pipeline.launch(result.microbatch)
        if result.replies:
            run.world.clients.send(result.replies)
        self.previous = result
        run.take_step(result)
        return result


class Fleet:
    """The engines of one script by name; ``fleet["d0"]`` is the ``t`` of one of them."""

    def __init__(self, engines: Sequence[FleetEngine], remake: Callable[[FleetEngine], None]) -> None:
        self._engines = {engine.name: engine for engine in engines}
        self._remake = remake
        self._links = {(one, other): Link() for one in self._engines for other in self._engines if one != other}
        self._step = 0
        self._turn = 0
        for engine in engines:
            engine.run.world.clients.choose_prefill = self._choose

    def __getitem__(self, name: str) -> Any:
        return self.engine(name).t

    @property
    def names(self) -> tuple[str, ...]:
        """All engines, in their order."""
        return tuple(self._engines)

    # -- links --

    def hold(self, sender: str, receiver: str) -> None:
        """Keep all that one engine says to another on its way."""
        self._link(sender, receiver).is_held = True

    def hold_pages(self, sender: str, receiver: str) -> None:
        """Keep the KV that one engine sends to another on its way; answers pass it."""
        self._link(sender, receiver).holds_pages = True

    def release(self, sender: str, receiver: str) -> None:
        """Let through what is held."""
        link = self._link(sender, receiver)
        link.is_held = link.holds_pages = False

    def slow(self, sender: str, receiver: str, steps: int) -> None:
        """From now on what one engine says to another takes so many steps longer."""
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 0:
            raise BadCall(f"fleet.slow() takes steps >= 0, got {steps!r}")
        self._link(sender, receiver).delay = steps

    def cut(self, one: str, other: str) -> None:
        """Cut two engines off from each other: what is on its way is lost, and both learn that it broke."""
        for link in (self._link(one, other), self._link(other, one)):
            link.is_cut = True
            link.lose()
        self._break(one, other)
        self._break(other, one)

    def heal(self, one: str, other: str) -> None:
        """Let two engines reach each other again."""
        self._link(one, other).is_cut = self._link(other, one).is_cut = False

    def on_its_way(self, sender: str, receiver: str) -> tuple[Said, ...]:
        """What one engine has said to another and that one has not heard."""
        return self._link(sender, receiver).on_its_way

    # -- deaths --

    def kill(self, name: str) -> None:
        """An engine dies with all that it holds. Its clients and the other engines learn that the connection broke."""
        engine = self.engine(name)
        if engine.is_dead:
            raise BadCall(f"fleet.kill({name!r}) takes an engine that lives, it was killed before")
        engine.is_dead = True
        for (sender, receiver), link in self._links.items():
            if name in (sender, receiver):
                link.lose()
        for other in self._engines:
            if other != name:
                self._break(other, name)

    def restart(self, name: str) -> None:
        """A dead engine comes back as a new one; its ``t`` is another object: ask the fleet for it again."""
        engine = self.engine(name)
        if not engine.is_dead:
            raise BadCall(f"fleet.restart({name!r}) takes an engine that was killed; fleet.kill({name!r}) does that")
        self._remake(engine)
        engine.previous, engine.is_dead = None, False
        engine.asked.clear()
        engine.serving.clear()
        engine.run.world.clients.choose_prefill = self._choose

    # -- one step --

    def step(self) -> None:
        """One step of each engine that lives. Raises Violation, which names the engine."""
        self._step += 1
        for engine in self._engines.values():
            if engine.is_dead:
                continue
            for sender in self._engines:
                if sender != engine.name:
                    for message in self._link(sender, engine.name).take(self._step):
                        self._hear(engine, sender, message)
            try:
                result = engine.step()
            except Violation as exc:
                raise Violation(f"engine {engine.name}: {exc}") from exc
            self._tell(engine, result.replies)
            self._carry(engine)

    def _hear(self, engine: FleetEngine, sender: str, message: Said) -> None:
        """What another engine said becomes an event of this one's next step."""
        run = engine.run
        match message:
            case PrefillWanted():
                generate = _asked_of(message, sender, run.scheduler.limits.pp_size, self._timeout_of(sender))
                engine.serving[generate.rid] = sender, message.transfer
                run.deliveries.append(generate)
                run.arrived.append(generate)
            case PrefillDropped():
                for rid, owner in list(engine.serving.items()):
                    if owner == (sender, message.transfer):
                        run.arrived.append(Abort(rid=rid))
            case SentPages():
                run.world.pipeline.transfers.arrive(message.transfer, message.first, message.contents)
            case PrefillFailed():
                if engine.asked.pop(message.transfer, None) is not None:
                    run.arrived.append(message)
            case TokenOutput() | Refusal():
                raise AssertionError(f"{message} is no message between engines")

    def _tell(self, engine: FleetEngine, replies: Sequence[Reply]) -> None:
        for reply in replies:
            match reply:
                case PrefillWanted():
                    engine.asked[reply.transfer] = reply.at
                    self._send(engine, reply.at, reply)
                case PrefillDropped():
                    at = engine.asked.pop(reply.transfer, None)
                    if at is not None:
                        self._send(engine, at, reply)
                case TokenOutput() | Refusal() if reply.rid in engine.serving:
                    self._answer(engine, reply)
                case _:
                    pass

    def _answer(self, engine: FleetEngine, reply: TokenOutput | Refusal) -> None:
        """What a prefill engine says to a decode engine of the end of a prompt: nothing but that it failed."""
        reason = reply.finish_reason if isinstance(reply, TokenOutput) else FinishReason.ERROR
        if reason is None:
            return
        receiver, transfer = engine.serving.pop(reply.rid)
        engine.run.deliveries[:] = [one for one in engine.run.deliveries if one.rid != reply.rid]
        if reason is not FinishReason.LENGTH:
            why = reply.message if isinstance(reply, Refusal) else reply.error or f"it ended with {reason}"
            self._send(engine, receiver, PrefillFailed(transfer=transfer, error=why))

    def _carry(self, engine: FleetEngine) -> None:
        transfers = engine.run.world.pipeline.transfers
        for pages in transfers.sent:
            self._send(engine, pages.to, pages)
        transfers.sent.clear()

    def _send(self, engine: FleetEngine, receiver: str, message: Said) -> None:
        if self._link(engine.name, receiver).is_cut or self.engine(receiver).is_dead:
            if isinstance(message, PrefillWanted):
                engine.asked.pop(message.transfer, None)
                engine.run.arrived.append(PrefillFailed(transfer=message.transfer, error=f"{receiver}: {_BROKEN}"))
            return
        self._link(engine.name, receiver).send(message, self._step)

    def _break(self, name: str, other: str) -> None:
        """An engine learns that its connections to another broke."""
        engine = self.engine(name)
        if engine.is_dead:
            return
        for transfer, at in list(engine.asked.items()):
            if at == other:
                del engine.asked[transfer]
                engine.run.arrived.append(PrefillFailed(transfer=transfer, error=f"{other}: {_BROKEN}"))
        for rid, (receiver, _) in list(engine.serving.items()):
            if receiver == other:
                engine.run.arrived.append(Abort(rid=rid))

    def _timeout_of(self, name: str) -> float:
        return float(self.engine(name).run.scheduler.limits.prefill_timeout_s)

    def _choose(self) -> str | None:
        """The prefill engine of the next request: one after the other, of those that live."""
        alive = [engine.name for engine in self._engines.values() if engine.run.scheduler.limits.prefills]
        alive = [name for name in alive if not self._engines[name].is_dead]
        self._turn += 1
        return alive[(self._turn - 1) % len(alive)] if alive else None

    def engine(self, name: str) -> FleetEngine:
        """One engine, with its run. Raises BadCall."""
        if name not in self._engines:
            raise BadCall(f"this fleet has no engine {name!r}; it has {', '.join(self._engines)}")
        return self._engines[name]

    def _link(self, sender: str, receiver: str) -> Link:
        self.engine(sender)
        self.engine(receiver)
        if sender == receiver:
            raise BadCall(f"a link joins two engines, got {sender!r} twice")
        return self._links[sender, receiver]

    # -- the end of the script --

    def finish(self) -> Steps:
        """End what the script left, and look at every engine that lives. Raises Violation, or NotIdle."""
        for link in self._links.values():
            link.is_held = link.holds_pages = False
        living = [engine for engine in self._engines.values() if not engine.is_dead]
        for engine in living:
            engine.run.let_go()
            engine.run.inject(ReleasePressure())
            engine.run.arrived += [ContinueGeneration(call_id=HARNESS_CALL), AbortAll()]
        yield
        for _ in range(RESET_BUDGET_STEPS):
            if all(engine.run.scheduler.is_fully_idle and not engine.run.arrived for engine in living):
                break
            yield
        for engine in living:
            busy = engine.run.scheduler.books.what_is_busy()
            if not engine.run.scheduler.is_fully_idle:
                raise NotIdle(f"engine {engine.name} did not get idle after everything was aborted: {busy}")
            engine.run.oracle.at_rest(engine.run.machine)
            check_answers(engine.run.handles.all)
            engine.run.inject(FlushCache(call_id=HARNESS_CALL), GetStats(call_id="stats"))
        yield
        for engine in living:
            try:
                engine.run.oracle.at_end(engine.run.machine)
            except Violation as exc:
                raise Violation(f"engine {engine.name}: {exc}") from exc

    # -- looking --

    def logs(self, steps: int) -> tuple[tuple[str, StepLog], ...]:
        """The last steps of each engine, for a report."""
        runs = [(engine.name, engine.run) for engine in self._engines.values()]
        logs = [
            (name, log_of(run.records[-steps:], run.scheduler.limits, call_names(run.records))) for name, run in runs
        ]
        return tuple(logs)

    @property
    def held_links(self) -> tuple[tuple[str, str], ...]:
        """The ends of each link that keeps something back."""
        return tuple(ends for ends, link in self._links.items() if link.keeps_some)

    @property
    def is_moving(self) -> bool:
        """Something arrives in a step to come."""
        return any(link.on_its_way and not link.keeps_some for link in self._links.values())

    @property
    def traffic(self) -> dict[tuple[str, str], tuple[Said, ...]]:
        """What is on each link."""
        return {ends: link.on_its_way for ends, link in self._links.items()}

    def loose_ends(self, ends: dict[str, int]) -> dict[str, int]:
        """What a script leaves with its own engine, and with these: a step of one of them is a step of the script."""
        # Time passes for all engines.
        counted = {name: count for name, count in ends.items() if name != _PASSED_FOR_NOBODY}
        for engine in self._engines.values():
            for name, count in engine.t.loose_ends().items():
                if not name.startswith(_OF_A_SCRIPT) and name != _PASSED_FOR_NOBODY:
                    counted[name] = counted.get(name, 0) + count
        runs = [engine.run for engine in self._engines.values()]
        if any(run.did_something(record) for run in runs for record in run.records):
            counted = {name: count for name, count in counted.items() if not name.startswith(_OF_A_SCRIPT)}
        return counted

    @property
    def compared(self) -> int:
        """Outputs that were equal to those of the same requests run alone."""
        handles = [handle for engine in self._engines.values() for handle in engine.run.handles.all]
        return sum(handle.finish_reason in _COMPARED for handle in handles)


def role_of(name: str) -> str:
    """The role of an engine of this name. Raises BadCall for a name that says none."""
    role = ROLES.get(name[:1]) if isinstance(name, str) else None
    if role is None or not name.isidentifier():
        raise BadCall(
            f"an engine of a fleet is called p..., d... or e..., which prefill, decode or do both, got {name!r}"
        )
    return role


def config_of(name: str, config: EngineConfig) -> EngineConfig:
    """The configuration of an engine of a fleet. Raises ConfigError for one that no such role has."""
    return config.model_copy(update={"role": role_of(name)})


def _asked_of(wanted: PrefillWanted, sender: str, stages: int, timeout_s: float) -> Generate:
    """What the route of a prefill engine makes of a decode engine's wish."""
    return Generate(
        rid=f"{sender}-{wanted.transfer}-{wanted.rid}",
        prompt_ids=wanted.ids,
        sampling=SamplingParams(max_new_tokens=0, temperature=0.0),
        priority=wanted.priority,
        timeout_s=timeout_s,
        cache_salt=wanted.cache_salt,
        deliver=Delivery(
            to=(sender,) * stages,
            transfer=wanted.transfer,
            first_page=wanted.first_page,
            weights=wanted.weights,
        ),
    )
