"""Several machines under one clock, and the links between them, which may delay or lose messages.

It knows no scheduler and no message: a member sends its machine's messages, and turns incoming ones into events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar, runtime_checkable

from scripted.core.errors import BadCall
from scripted.core.violation import Violation
from scripted.script.static_checks import check_count


def role_in(roles: Mapping[str, str], name: object) -> str:
    """Return the role of a machine by the first letter of its name. Raises BadCall for a name without a role."""
    role = roles.get(name[:1]) if isinstance(name, str) and name.isidentifier() else None
    if role is None:
        known = ", ".join(f"{letter}... ({role})" for letter, role in roles.items())
        raise BadCall(f"an engine of a fleet is called by its role, {known}, got {name!r}")
    return role


@runtime_checkable
class MaybeBulk(Protocol):
    """A message that states whether it is bulk data, such as pages of KV."""

    @property
    def is_bulk(self) -> bool: ...


class Link:
    """A one-way link between two machines. Messages stay in order, except that others overtake held bulk data.

    ``delay`` counts steps beyond the next one. Cutting a link loses the messages on it, and both ends learn of it.
    """

    def __init__(self) -> None:
        self.delay = 0
        self.is_cut = False
        self.is_held = False
        self.holds_bulk = False
        self._on_its_way: deque[tuple[int, object]] = deque()

    def send(self, message: object, step: int) -> None:
        """Send a message, which arrives in a later step."""
        self._on_its_way.append((step + 1 + self.delay, message))

    def take(self, step: int) -> list[object]:
        """Take the messages that arrive in this step."""
        if not self._on_its_way:
            return []
        arrived: list[object] = []
        left: deque[tuple[int, object]] = deque()
        for due, message in self._on_its_way:
            if self._keeps(message) or due > step:
                left.append((due, message))
            else:
                arrived.append(message)
        self._on_its_way = left
        return arrived

    def _keeps(self, message: object) -> bool:
        return self.is_held or (self.holds_bulk and isinstance(message, MaybeBulk) and message.is_bulk)

    @property
    def keeps_some(self) -> bool:
        """Whether a message on the link is held until it is released."""
        return any(self._keeps(message) for _, message in self._on_its_way)

    @property
    def is_moving(self) -> bool:
        """Whether a message on the link will arrive by itself."""
        return any(not self._keeps(message) for _, message in self._on_its_way)

    def lose(self) -> None:
        """Lose every message on the link."""
        self._on_its_way.clear()

    @property
    def on_its_way(self) -> tuple[object, ...]:
        """The messages that have been sent and have not arrived."""
        return tuple(message for _, message in self._on_its_way)


class Member(ABC):
    """One machine of a fleet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        # It takes no new requests, and leaves once its current ones have ended.
        self.is_draining = False
        # Messages since its last step, each with its receiver.
        self.said: list[tuple[str, object]] = []

    @abstractmethod
    def step(self) -> None:
        """Run one step of the machine. Raises Violation."""

    def take_said(self) -> Sequence[tuple[str, object]]:
        """Take the messages of the last step in order, each with its receiver."""
        said, self.said = self.said, []
        return said

    @abstractmethod
    def receive(self, sender: str, message: object) -> None:
        """Turn another machine's message into an event of the next step."""

    @abstractmethod
    def on_unsent(self, receiver: str, message: object) -> None:
        """Handle a message that could not be sent because the link is cut or the receiver is dead."""

    @abstractmethod
    def on_connected(self, other: str) -> None:
        """Handle the news that another machine can be reached, possibly again."""

    @abstractmethod
    def on_disconnected(self, other: str) -> None:
        """Handle the loss of the connections to another machine."""


_M = TypeVar("_M", bound=Member)


class BaseFleet(Generic[_M]):
    """Machines by name, in the order of their steps, and a link in each direction between any two."""

    def __init__(self, members: Sequence[_M]) -> None:
        self._members = {member.name: member for member in members}
        self._links = {(one, other): Link() for one in self._members for other in self._members if one != other}
        self._step = 0
        # Whether anything arrived in the last step.
        self.has_heard = False
        for name in self._members:
            self._introduce(name)

    # -- machines --

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all machines, in order."""
        return tuple(self._members)

    @property
    def members(self) -> tuple[_M, ...]:
        """All machines, in order."""
        return tuple(self._members.values())

    @property
    def living(self) -> list[_M]:
        """The machines that have not been killed."""
        return [member for member in self._members.values() if not member.is_dead]

    def engine(self, name: str) -> _M:
        """Return the machine with this name. Raises BadCall."""
        if name not in self._members:
            raise BadCall(f"this fleet has no engine {name!r}; it has {', '.join(self._members)}")
        return self._members[name]

    def kill(self, name: str) -> None:
        """Kill a machine and everything it holds. Its clients and the other machines lose their connections to it."""
        member = self.engine(name)
        if member.is_dead:
            raise BadCall(f"fleet.kill({name!r}) takes an engine that lives, and this one was killed before")
        member.is_dead = True
        for ends, link in self._links.items():
            if name in ends:
                link.lose()
        for other in self._members:
            if other != name:
                self._part(other, name)

    def replace(self, member: _M) -> None:
        """Replace a dead machine with a new one of the same name."""
        if not self.engine(member.name).is_dead:
            raise BadCall(
                f"fleet.restart({member.name!r}) takes an engine that was killed; fleet.kill({member.name!r}) does that"
            )
        self._members[member.name] = member
        self._introduce(member.name)

    # -- links --

    def hold(self, sender: str, receiver: str) -> None:
        """Hold every message from one engine to another."""
        self._link(sender, receiver).is_held = True

    def hold_pages(self, sender: str, receiver: str) -> None:
        """Hold the KV that one engine sends to another; other messages overtake it."""
        self._link(sender, receiver).holds_bulk = True

    def release(self, sender: str, receiver: str) -> None:
        """Release the messages held on a link."""
        link = self._link(sender, receiver)
        link.is_held = link.holds_bulk = False

    def release_all(self) -> None:
        """Release the messages held on any link."""
        for link in self._links.values():
            link.is_held = link.holds_bulk = False

    def slow(self, sender: str, receiver: str, steps: int) -> None:
        """Delay the messages from one engine to another by this many steps from now on."""
        self._link(sender, receiver).delay = check_count("fleet.slow()", "steps", steps, least=0)

    def cut(self, one: str, other: str) -> None:
        """Cut the links between two engines: messages on them are lost, and both engines learn of it."""
        for link in (self._link(one, other), self._link(other, one)):
            link.is_cut = True
            link.lose()
        self._part(one, other)
        self._part(other, one)

    def heal(self, one: str, other: str) -> None:
        """Restore the links between two engines."""
        self._link(one, other).is_cut = self._link(other, one).is_cut = False
        for name, met in ((one, other), (other, one)):
            if not self.engine(name).is_dead and not self.engine(met).is_dead:
                self.engine(name).on_connected(met)

    def on_its_way(self, sender: str, receiver: str) -> tuple[object, ...]:
        """Return the messages in transit from one engine to another."""
        return self._link(sender, receiver).on_its_way

    @property
    def links(self) -> dict[tuple[str, str], Link]:
        """All links by sender and receiver."""
        return self._links

    def carries(self, name: str) -> bool:
        """Return whether a message is in transit to or from this machine."""
        return any(name in ends and link.on_its_way for ends, link in self._links.items())

    @property
    def held_links(self) -> tuple[tuple[str, str], ...]:
        """The sender and receiver of each link that holds a message."""
        return tuple(ends for ends, link in self._links.items() if link.keeps_some)

    @property
    def is_moving(self) -> bool:
        """Whether a message will arrive by itself in a later step."""
        return any(link.is_moving for link in self._links.values())

    # -- one step --

    def step(self) -> None:
        """Deliver messages to each living machine and run one step of it. Raises Violation that names the machine."""
        self._step += 1
        self.has_heard = False
        for member in self.living:
            try:
                self._deliver(member)
                member.step()
            except Violation as exc:
                raise Violation(f"engine {member.name}: {exc}", inner=exc) from exc
            for receiver, message in member.take_said():
                self._send(member, receiver, message)

    # -- private --

    def _deliver(self, member: _M) -> None:
        """Deliver the messages that arrive at a machine now."""
        for sender in self._members:
            if sender != member.name:
                for message in self._links[sender, member.name].take(self._step):
                    self.has_heard = True
                    member.receive(sender, message)

    def _send(self, member: _M, receiver: str, message: object) -> None:
        link = self._link(member.name, receiver)
        if link.is_cut or self.engine(receiver).is_dead:
            member.on_unsent(receiver, message)
        else:
            link.send(message, self._step)

    def _introduce(self, name: str) -> None:
        """Introduce a machine to the living machines that can reach it, and them to it."""
        for other in self.living:
            if other.name != name and not self._links[other.name, name].is_cut:
                other.on_connected(name)
                self.engine(name).on_connected(other.name)

    def _part(self, name: str, other: str) -> None:
        if not (member := self.engine(name)).is_dead:
            member.on_disconnected(other)

    def _link(self, sender: str, receiver: str) -> Link:
        self.engine(sender)
        self.engine(receiver)
        if sender == receiver:
            raise BadCall(f"a link joins two engines, got {sender!r} twice")
        return self._links[sender, receiver]
