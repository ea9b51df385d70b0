"""The world of one real engine of a fleet, in the script's process.

The scheduler that the script sees decides here, and every step is compared with the real one's, which gets the same
steps from the engine's gate. Clients and stages are real.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final, NoReturn

import msgspec
import zmq

from engine.core.errors import EngineError
from engine.core.limits import Limits
from engine.core.messages import (
    ClientMessage,
    Event,
    Generate,
    GrammarReady,
    LoraRead,
    PagesSent,
    PipelineEvent,
    PrefillWanted,
    Refusal,
    TransferEvent,
    encode,
)
from engine.core.messages import Reply as EngineReply
from engine.core.plan import ReceivePages, SendPages, StopTransfer
from engine.core.scheduler import Step, StepResult
from engine.frontend.text.answer import Decoder
from engine.pipeline.wire import StageView
from engine.process.death import read_death_report
from engine.process.kv_addresses import kv_addresses
from scripted.core.errors import BadCall, NoAnswer
from scripted.core.violation import Violation
from scripted.script.clients import ClientView
from scripted.script.options import DEFAULT_RESULT_TIMEOUT_S
from scripted_lockstep.script.world import World
from scripted_lockstep.simulated.transfers import PageContent, SimulatedTransfers
from scripted_lockstep.tiers.server.clients import HttpClients
from scripted_lockstep.tiers.server.wire import (
    Answered,
    Ask,
    Do,
    EnginePlace,
    FollowerReady,
    FollowerVerb,
    MessagesArrived,
    Unanswered,
    connected_socket,
    decode_reply,
)

BOOT_TIMEOUT_S: Final = 120.0
_END_TIMEOUT_S: Final = 30.0
# The engine's own waits end first, with better errors.
_PATIENCE_S: Final = 5.0


class FleetClients(HttpClients):
    """The clients of an engine of a fleet. ``choose_prefill`` chooses the prefill engine of a decode engine's request.

    The front end itself would choose by polled loads, which is not reproducible.
    """

    choose_prefill: Callable[[], str | None]

    def __init__(self, base_url: str, *, pause: Callable[[float], object]) -> None:
        super().__init__(base_url, pause=pause)
        self._chosen: dict[str, list[str | None]] = {}

    def generate(self, rid: str, body: dict[str, Any], first_page: int | None = None) -> ClientView:
        view = super().generate(rid, body, first_page)
        # One engine prefills all choices of an answer, chosen when the first of them arrives.
        choice: list[str | None] = []
        self._chosen |= {one.rid: choice for one in view.choices}
        return view

    def forget(self) -> None:
        super().forget()
        self._chosen.clear()

    def chosen(self, rid: str) -> str | None:
        """The prefill engine of a request that has arrived."""
        choice = self._chosen.pop(rid)
        if not choice:
            choice.append(self.choose_prefill())
        return choice[0]


class _NoPages:
    """A pool without contents: the real pages are in other processes."""

    def content(self, page: int) -> PageContent:
        del page
        return []

    def receive(self, page: int, content: PageContent) -> None:
        """Do nothing: the real stages have received it."""


class RemoteWorld(World):
    """An engine at ``place``. ``pause`` waits for an event of any engine, at most a number of seconds.

    ``urls`` of prefill engines and ``addresses`` of the stages of decode engines are those that this engine connects
    to, by name in the fleet.
    """

    tier = "server"
    clients: FleetClients
    clients_type: ClassVar = FleetClients

    def __init__(
        self, place: EnginePlace, context: zmq.Context[zmq.Socket[bytes]], pause: Callable[[float], object]
    ) -> None:
        self.name = place.name
        self.base_url = place.base_url
        self._private_dir = Path(place.private_dir)
        self._pause = pause
        self._answer_timeout_s = DEFAULT_RESULT_TIMEOUT_S
        self.is_dead = False
        self.urls: Mapping[str, str] = {}
        self.addresses: Mapping[str, tuple[str, ...]] = {}
        self.limits: Limits
        self.on_kill: Callable[[], None]
        self.on_sent: Callable[[Any], None]
        self.new_decoder: Callable[[], Decoder]
        self._messages: list[ClientMessage] = []
        self._answers: list[Answered | Unanswered | FollowerReady] = []
        self._ordered: dict[int, SendPages | ReceivePages] = {}
        # Readable when the supervisor is gone.
        self.pid = place.pid
        self.alive = os.pidfd_open(place.pid)
        self.socket = connected_socket(context, self._private_dir)
        self.clients = self.clients_type(place.base_url, pause=pause)
        # The stages, as verbs see them; they reset together with the idle scheduler.
        self.pipeline: Any = SimpleNamespace(
            fail_next_step=partial(self._ask, "fail_next_step"),
            spare_next_step=partial(self._ask, "spare_next_step"),
            forget=self._start_over,
            describe=partial(self._ask, "describe", kind=tuple[StageView, ...]),
        )

    # -- for the host --

    def await_ready(self) -> None:
        """Wait until the engine is up and frozen. Raises NoAnswer."""
        ready = self._next_answer(BOOT_TIMEOUT_S, "it to be frozen before its first step")
        assert isinstance(ready, FollowerReady), ready
        self.limits = ready.limits

    def begin(self, answer_timeout_s: float) -> None:
        """Start over for the next script. Raises EngineError for an engine that is not idle."""
        self.limit_waits(answer_timeout_s)
        self.forget()
        self.pipeline.forget()
        self._transfers.is_imagined = False

    def forget(self) -> None:
        """Drop all state of the last script."""
        self.clients.forget()
        self._messages.clear()
        self._ordered.clear()
        self._transfers = SimulatedTransfers(self.limits.page_size)

    def _start_over(self) -> None:
        """Reset the engine's scheduler and stages, and wait until they have."""
        self._ask("start_over")

    def receive(self) -> None:
        """Take the messages of the engine's gate without waiting."""
        while self.socket.poll(0):
            reply = decode_reply(self.socket.recv())
            if isinstance(reply, MessagesArrived):
                self._messages += reply.messages
            else:
                self._answers.append(reply)

    @property
    def sources(self) -> dict[Any, Callable[[], None]]:
        """The sources that become readable at an event of the engine or its clients, with callbacks."""
        return {self.socket: self.receive, self.clients.fileno(): self.clients.clear, self.alive: self.check_alive}

    def check_alive(self) -> None:
        """Raise Violation for an engine whose supervisor is gone, unless the script killed it."""
        if not self.is_dead:
            report = read_death_report(self._private_dir)
            cause = "it left no report" if report is None else f"{report.process}: {report.cause}"
            raise Violation(f"engine {self.name} died: {cause}")

    def kill(self, is_told: Callable[[], bool]) -> None:
        """Kill its processes, and wait until its clients have received an error."""
        self.is_dead = True
        self.on_kill()
        self.wait_until(is_told, "its clients to receive an error")
        self.close()

    def close(self) -> None:
        """Close the connections to the engine; idempotent."""
        if self.alive >= 0:
            os.close(self.alive)
            self.alive = -1
            self.socket.close(linger=0)
            self.clients.close()

    def wait_until(self, done: Callable[[], object], what: str, within_s: float | None = None) -> None:
        """Wait until ``done`` is true. Raises NoAnswer after ``within_s``, by default the script's timeout."""
        within_s = self._answer_timeout_s if within_s is None else within_s
        deadline = time.monotonic() + within_s
        while not done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise NoAnswer(f"engine {self.name}: waited {within_s} s for {what}")
            self._pause(left_s)

    def await_message(
        self, matches: Callable[[ClientMessage], bool], unless: Callable[[], object] = lambda: None
    ) -> ClientMessage:
        """Wait for a message that another engine has caused, and take it out of the arrivals."""
        found: list[ClientMessage] = []

        def is_here() -> bool:
            found.extend([message for message in self._messages if matches(message)][:1])
            return bool(found or unless())

        self.wait_until(is_here, "the message that another engine caused")
        if not found:
            # If its scheduler has died, its front end says so before its supervisor ends, which raises that.
            with contextlib.suppress(NoAnswer):
                self.wait_until(lambda: False, "the end of its supervisor", _END_TIMEOUT_S)
            raise Violation(f"the front end of {self.name} answered the decode engine itself: {unless()}")
        self._messages.remove(found[0])
        return found[0]

    def kv_addresses(self) -> tuple[str, ...]:
        """The addresses at which its stages take KV."""
        return kv_addresses(self._private_dir, self.limits.pp_size)

    # -- World --

    def limit_waits(self, seconds: float) -> None:
        self._answer_timeout_s = self.clients.answer_timeout_s = seconds
        self._ask("limit_waits", seconds)

    def take_messages(self) -> list[ClientMessage]:
        self.receive()
        messages, self._messages = self._messages, []
        if not self.limits.receives:
            return messages
        return [
            msgspec.structs.replace(one, prefill_at=self.clients.chosen(one.rid)) if isinstance(one, Generate) else one
            for one in messages
        ]

    def decoder(self) -> Decoder:
        return self.new_decoder()

    def wait(self) -> None:
        if not self._pause(self._answer_timeout_s):
            raise NoAnswer(
                f"nothing arrived at the gate of {self.name} within {self._answer_timeout_s} s of a call: the front "
                "end hangs"
            )

    def take_completion(self, microbatch_id: int) -> PipelineEvent:
        event: PipelineEvent = self._ask("take_completion", microbatch_id, kind=PipelineEvent)
        return event

    def take_grammar(self, grammar_id: int) -> GrammarReady:
        ready: GrammarReady = self._ask("take_grammar", grammar_id, kind=GrammarReady)
        return ready

    def take_lora(self, version: int) -> LoraRead:
        read: LoraRead = self._ask("take_lora", version, kind=LoraRead)
        return read

    def answer(self, replies: Sequence[EngineReply]) -> None:
        refusals = tuple(reply for reply in replies if isinstance(reply, Refusal))
        self._ask("answer", replies=refusals)

    @property
    def transfers(self) -> SimulatedTransfers:
        """The account of transfers; the pages themselves are real."""
        return self._transfers

    def ended_transfers(self, replies: Sequence[EngineReply], prompts: Sequence[Generate]) -> Sequence[TransferEvent]:
        """Return the transfers that the fleet's links have ended, once the engine's stages have ended them too."""
        self._transfers.want(replies)
        ended = self._transfers.take_ended(_NoPages(), 0, prompts, [])
        for pages in self._transfers.sent:
            self.on_sent(self._ordered[pages.sending])
        for event in ended:
            self._bring_about(event, self._ordered.pop(event.transfer), prompts)
            real = self._ask("take_transfer", event.transfer, kind=TransferEvent | None)
            if self._shape(real) != self._shape(event):
                raise Violation(f"engine {self.name}: expected {event}, its stages report {real}")
        return ended

    def _bring_about(self, event: TransferEvent, order: SendPages | ReceivePages, prompts: Sequence[Generate]) -> None:
        """End a transfer that no other engine ends."""

    def _shape(self, event: TransferEvent | None) -> object:
        """Return the fields that must agree at both ends of a transfer. The link knows whether pages have arrived."""
        return event.transfer if isinstance(event, PagesSent) else event

    def carry_out(self, step: Step, result: StepResult) -> None:
        """Have the real engine run the same step, and compare."""
        events = tuple([self.as_real(event) for event in step.events])
        self._note_orders(result)
        reply = self._ask(Do(step=msgspec.structs.replace(step, events=events)))
        if bytes(reply) != encode(self._real_result(result)):
            here, there = msgspec.to_builtins(self._real_result(result)), msgspec.msgpack.decode(reply)
            raise Violation(f"engine {self.name} and its scheduler here differ in a step: {there}, not {here}")

    def _note_orders(self, result: StepResult) -> None:
        for order in result.transfers:
            self._transfers.order(order)
            if not isinstance(order, StopTransfer):
                self._ordered[order.transfer] = order

    def kill_stage(self, stage: int) -> PipelineEvent:
        event: PipelineEvent = self._ask("kill_stage", stage, kind=PipelineEvent)
        return event

    def stall_stage(self, stage: int) -> None:
        self._ask("stall_stage", stage)

    def resume_stage(self, stage: int) -> None:
        self._ask("resume_stage", stage)

    def kill_scheduler(self, is_told: Callable[[], bool]) -> None:
        del is_told
        raise BadCall(
            f"kill_scheduler() is for t's own engine; fleet.kill({self.name!r}) kills an engine of a fleet with all "
            "its processes"
        )

    def as_real(self, event: Event) -> Event:
        """Return an event with the names by which the real engine knows the others."""
        if not isinstance(event, Generate):
            return event
        if event.deliver is not None:
            to = self.addresses[event.deliver.to[0]]
            return msgspec.structs.replace(event, deliver=msgspec.structs.replace(event.deliver, to=to))
        return (
            event
            if event.prefill_at is None
            else msgspec.structs.replace(event, prefill_at=self.urls[event.prefill_at])
        )

    # -- inside --

    def _real_result(self, result: StepResult) -> StepResult:
        replies = tuple(
            [
                msgspec.structs.replace(one, at=self.urls[one.at]) if isinstance(one, PrefillWanted) else one
                for one in result.replies
            ]
        )
        transfers = tuple(
            [
                msgspec.structs.replace(one, to=self.addresses[one.to[0]]) if isinstance(one, SendPages) else one
                for one in result.transfers
            ]
        )
        return msgspec.structs.replace(result, replies=replies, transfers=transfers)

    def _ask(
        self, what: FollowerVerb | Do, *numbers: float, replies: tuple[Refusal, ...] = (), kind: Any = None
    ) -> Any:
        """Send the engine's gate an order. Raises EngineError if it failed."""
        command = what if isinstance(what, Do) else Ask(verb=what, numbers=numbers, replies=replies)
        self.socket.send(encode(command))
        answer = self._next_answer(self._answer_timeout_s + _PATIENCE_S, f"the answer to {command}")
        if isinstance(answer, Unanswered):
            raise EngineError(f"engine {self.name}: {answer.error}")
        assert isinstance(answer, Answered), answer
        if isinstance(what, Do):
            return answer.value
        return None if kind is None else msgspec.msgpack.decode(answer.value, type=kind)

    def _next_answer(self, timeout_s: float, what: str) -> Answered | Unanswered | FollowerReady:
        self.wait_until(lambda: self._answers, what, timeout_s)
        return self._answers.pop(0)

    def _refuse_link(self, verb: str) -> NoReturn:
        raise BadCall(
            f"{verb}() is for the stages of t's own engine; fleet.hold, slow, cut and heal are for the links between "
            "engines"
        )
