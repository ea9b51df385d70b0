"""Messages between the engines of a fleet and their effects, for scripts and for the search alike.

A decode engine asks for prompts and drops its calls; a prefill engine sends pages, and reports failures. Its own
scheduler does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from engine.core.limits import Limits
from engine.core.messages import (
    Abort,
    Delivery,
    FinishReason,
    Generate,
    PrefillDropped,
    PrefillFailed,
    PrefillWanted,
    Refusal,
    Reply,
    SamplingParams,
    TokenOutput,
)
from scripted.script.fleet import Member
from scripted_lockstep.simulated.transfers import ConfirmedPages, SentPages, SimulatedTransfers

_BROKEN: Final = "the connection to it broke"
_DRAINING: Final = "is draining"
# The statuses of replies to prompts that were not computed.
REFUSED: Final = 409
UNAVAILABLE: Final = 503


# A message of another engine to the scheduler; pages are for the stages.
Heard = Generate | Abort | PrefillFailed | ConfirmedPages


class WiredEngine(Protocol):
    """An engine whose messages travel over a fleet's links."""

    name: str


class Wires:
    """Carries the messages of a fleet's links between processes; does nothing between simulated engines.

    Each method returns once its effect is complete: a message has left a process, or has arrived at the other gate.
    """

    def leave(self, engine: WiredEngine, said: PrefillWanted | PrefillDropped) -> None:
        """A decode engine has sent this message."""

    def answer(self, engine: WiredEngine, receiver: str, transfer: int, *, failed: bool) -> None:
        """A prefill engine has answered a decode engine; a failure continues with ``bring``."""

    def bring(self, sender: str, engine: WiredEngine, heard: Heard) -> None:
        """A message arrives at an engine."""

    def hand_on(self, sender: str, engine: WiredEngine, pages: SentPages, error: str | None) -> None:
        """Pages arrive at an engine, which drops them if there is an ``error``."""

    def break_off(self, engine: WiredEngine, heard: Abort | PrefillFailed) -> None:
        """A connection of an engine breaks, which the engine notices."""

    def kill(self, engine: Any) -> None:
        """An engine dies and its state is lost."""


class ConnectedEngine(Member):
    """One engine of a fleet, as the others see it; ``run`` is its run.

    ``asked``: a decode engine's prefill engine for each transfer without an answer. ``serving``: a prefill engine's
    decode engine and its number for each rid that it computes.
    """

    wires = Wires()

    def __init__(self, name: str, run: Any) -> None:
        super().__init__(name)
        self.run = run
        self.asked: dict[int, str] = {}
        self.serving: dict[str, tuple[str, int]] = {}

    @property
    def arrived(self) -> list[Any]:
        """The messages that its next step will see."""
        arrived: list[Any] = self.run.arrived
        return arrived

    @property
    def transfers(self) -> SimulatedTransfers:
        """Its end of the KV in flight."""
        transfers: SimulatedTransfers = self.run.device.transfers
        return transfers

    @property
    def limits(self) -> Limits:
        limits: Limits = self.run.machine.limits
        return limits

    def begin_prompt(self, prompt: Generate) -> None:
        """Another engine wants the KV of a prompt."""
        self.arrived.append(prompt)

    def end_prompt(self, rid: str) -> None:
        """A prompt is computed, or dropped."""

    def lose_call(self, transfer: int, why: str) -> None:
        """Lose the answer to a requested prompt."""
        failed = PrefillFailed(transfer=transfer, error=why)
        self.wires.break_off(self, failed)
        self.arrived.append(failed)

    def answer(self, receiver: str, transfer: int, error: str | None, status: int | None) -> None:
        """Notify a decode engine if its prompt failed."""
        del status
        if error is not None:
            self.said.append((receiver, PrefillFailed(transfer=transfer, error=error)))

    # -- the fleet --

    def receive(self, sender: str, message: Any) -> None:
        match message:
            case PrefillWanted():
                if self.is_draining:
                    self.answer(sender, message.transfer, _DRAINING, UNAVAILABLE)
                    return
                prompt = _prompt_of(message, sender, self.limits)
                self.serving[prompt.rid] = sender, message.transfer
                self.wires.bring(sender, self, prompt)
                self.begin_prompt(prompt)
            case PrefillDropped():
                for rid, owner in self.serving.items():
                    if owner == (sender, message.transfer):
                        self.wires.bring(sender, self, Abort(rid=rid))
                        self.arrived.append(Abort(rid=rid))
            case PrefillFailed():
                if self.asked.pop(message.transfer, None) is not None:
                    self.wires.bring(sender, self, message)
                    self.arrived.append(message)
            case ConfirmedPages():
                self.wires.bring(sender, self, message)
                self.transfers.confirm(message)
            case _:
                error = self.transfers.arrive(message)
                self.wires.hand_on(sender, self, message, error)
                self.said.append((sender, ConfirmedPages(message.sending, error)))

    def take_said(self) -> Sequence[tuple[str, Any]]:
        self.said += [(pages.to, pages) for pages in self.transfers.sent]
        self.transfers.sent.clear()
        return super().take_said()

    def on_unsent(self, receiver: str, message: Any) -> None:
        if isinstance(message, PrefillWanted):
            self._lose(message.transfer, receiver)
        elif isinstance(message, SentPages):
            self.transfers.break_off(receiver)

    def on_connected(self, other: str) -> None:
        """Do nothing: an engine calls others only when it wants a prompt."""

    def on_disconnected(self, other: str) -> None:
        self.transfers.break_off(other)
        for transfer, at in list(self.asked.items()):
            if at == other:
                self._lose(transfer, other)
        for rid, (receiver, _) in self.serving.items():
            if receiver == other:
                self.wires.break_off(self, Abort(rid=rid))
                self.arrived.append(Abort(rid=rid))

    def tell(self, replies: Sequence[Reply]) -> None:
        """Send on the replies of a step that are for other engines."""
        for reply in replies:
            match reply:
                case PrefillWanted():
                    self.asked[reply.transfer] = reply.at
                    self.wires.leave(self, reply)
                    self.said.append((reply.at, reply))
                case PrefillDropped():
                    at = self.asked.pop(reply.transfer, None)
                    if at is not None:
                        self.wires.leave(self, reply)
                        self.said.append((at, reply))
                case TokenOutput() | Refusal() if reply.rid in self.serving:
                    self._end(reply)
                case _:
                    pass

    # -- inside --

    def _end(self, reply: TokenOutput | Refusal) -> None:
        """Take a prefill engine's reply about a prompt of a decode engine."""
        reason = reply.finish_reason if isinstance(reply, TokenOutput) else FinishReason.ERROR
        if reason is None:
            return
        receiver, transfer = self.serving.pop(reply.rid)
        self.end_prompt(reply.rid)
        self.wires.answer(self, receiver, transfer, failed=reason is not FinishReason.LENGTH)
        if isinstance(reply, Refusal):
            self.answer(receiver, transfer, reply.message, REFUSED)
        elif reason is FinishReason.LENGTH:
            self.answer(receiver, transfer, None, None)
        else:
            self.answer(receiver, transfer, reply.error or f"it ended with {reason}", None)

    def _lose(self, transfer: int, other: str) -> None:
        self.asked.pop(transfer, None)
        self.lose_call(transfer, f"{other}: {_BROKEN}")


def _prompt_of(wanted: PrefillWanted, sender: str, limits: Limits) -> Generate:
    """Make the request that a prefill engine's route makes from a decode engine's call."""
    return Generate(
        rid=f"{sender}-{wanted.transfer}-{wanted.rid}",
        prompt_ids=wanted.ids,
        sampling=SamplingParams(max_new_tokens=0, temperature=0.0),
        priority=wanted.priority,
        timeout_s=limits.prefill_timeout_s,
        cache_salt=wanted.cache_salt,
        deliver=Delivery(
            to=(sender,) * limits.pp_size,
            transfer=wanted.transfer,
            first_page=wanted.first_page,
            weights=wanted.weights,
        ),
    )
