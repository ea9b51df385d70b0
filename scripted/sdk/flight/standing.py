"""Reports which requests are stuck, since when, what each waits for, who holds that, and where the chain ends.

The words are the same for every engine. ``Watch`` follows the steps of one scheduler from outside; a hint names a cause
that only the scheduler knows, such as a grammar that has not compiled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec

from scripted.core.phrases import plural
from scripted.sdk.capabilities import Limits
from scripted.sdk.messages import Add, Event, Pause, Resume, Stepped, Tokens

Kind: TypeAlias = Literal["blocks", "budget", "load", "grammar", "seat", "result", "peer", "pause", "turn", "nothing"]
# Resources from outside the scheduler, which it is not to blame for.
OUTSIDE: Final[frozenset[Kind]] = frozenset({"load", "grammar", "result", "peer", "pause"})
_SHOWN: Final = 4
_LONGEST_CHAIN: Final = 16


class Hint(NamedTuple):
    """The resource that a request waits for, in its scheduler's words; ``holders`` are the requests that hold it."""

    kind: Kind
    text: str
    holders: tuple[str, ...] = ()


class Stand(msgspec.Struct, frozen=True, kw_only=True):
    """A stuck request: where it is, since which step, and what it waits for. ``root`` ends its chain of holders."""

    rid: str
    place: str
    since: int
    kind: Kind
    text: str
    holders: tuple[str, ...] = ()
    chain: tuple[str, ...] = ()
    root: str = ""

    @property
    def line(self) -> str:
        return f"{self.rid}: {self.place} since step {self.since}, waits for {self.text}"


@runtime_checkable
class TellsWhoStands(Protocol):
    """An adapter that reads recordings of its scheduler and reports the requests stuck at their end."""

    def stands_in(self, path: Path) -> Sequence[Stand]:
        """Read the recording and return its stuck requests. Raises the reader's error for a bad file."""
        ...


@runtime_checkable
class AsksServers(Protocol):
    """An adapter that can ask a running server at a URL for its last steps."""

    def recording_of_server(self, url: str) -> Path:
        """Have the server write its last steps, and return the file. Raises ScriptDefinitionError if it cannot."""
        ...


class _Life:
    """``computed`` is the next position, None before the request begins; ``since`` is the step of its last progress."""

    __slots__ = ("blocks", "computed", "flights", "launched", "most", "prompt", "said", "since")

    def __init__(self, prompt: int, most: int, step: int) -> None:
        self.prompt = prompt
        self.most = most
        self.since = step
        self.said = 0
        self.computed: int | None = None
        self.launched = False
        self.blocks = 0
        self.flights: list[int] = []

    @property
    def place(self) -> str:
        if self.computed is None:
            return "preempted" if self.launched else "waiting"
        return "computing its prompt" if self.computed < self.prompt else "running"


class Watch:
    """Follows requests by a scheduler's events, plans and replies. The caller numbers the steps."""

    def __init__(self, limits: Limits) -> None:
        self.lives: dict[str, _Life] = {}
        self.paused = ""
        self._limits = limits
        self._launched: dict[int, int] = {}
        self._batch_tokens = 0
        self._batch: tuple[str, ...] = ()

    def begin(self, rid: str, prompt: int, most: int, step: int) -> _Life:
        life = self.lives[rid] = _Life(prompt, most, step)
        return life

    def end(self, rid: str) -> None:
        self.lives.pop(rid, None)

    def follow(self, events: Sequence[Event], stepped: Stepped, step: int) -> None:
        for event in events:
            match event:
                case Add():
                    self.begin(event.rid, len(event.prompt_ids), event.max_new_tokens, step)
                case Pause():
                    self.paused = event.mode
                case Resume():
                    self.paused = ""
                case _:
                    pass
        for rid in stepped.preempted:
            if rid in self.lives:
                life = self.lives[rid]
                life.computed, life.blocks = None, 0
        for reply in stepped.replies:
            if isinstance(reply, Tokens):
                self._hear(reply, step)
        if stepped.microbatch is not None:
            self._launch(stepped, step)

    def land(self, batch: int) -> None:
        """Take the result of a batch."""
        self._launched.pop(batch, None)
        for life in self.lives.values():
            if batch in life.flights:
                life.flights.remove(batch)

    def fly(self, rid: str, batch: int, step: int) -> None:
        """Note that a batch with this request is in flight."""
        if rid in self.lives:
            self.lives[rid].flights.append(batch)
            self._launched[batch] = step

    def _hear(self, reply: Tokens, step: int) -> None:
        if reply.finish_reason is not None:
            self.end(reply.rid)
        elif reply.rid in self.lives and reply.token_ids:
            self.lives[reply.rid].said += len(reply.token_ids)
            self.lives[reply.rid].since = step

    def _launch(self, stepped: Stepped, step: int) -> None:
        batch = stepped.microbatch
        assert batch is not None, "only steps with a batch are launched"
        self._batch = tuple([share.rid for share in batch.shares])
        self._batch_tokens = sum([share.count for share in batch.shares])
        for share in batch.shares:
            self.fly(share.rid, batch.id, step)
            life = self.lives.get(share.rid)
            if life is not None:
                life.computed, life.launched, life.since = max(0, share.start) + share.count, True, step
                life.blocks = len(share.block_ids)

    # -- stuck requests --

    def stands(self, step: int, after: int, hints: Mapping[str, Hint], free: int | None = None) -> tuple[Stand, ...]:
        """Return the requests that have not moved for this many steps, longest first; ``free`` counts blocks."""
        waits = {rid: hints.get(rid) or self._wait_of(rid, free) for rid in self.lives}
        still = [rid for rid, life in self.lives.items() if step - life.since >= after]
        still.sort(key=lambda rid: self.lives[rid].since)
        return tuple([self._stand(rid, waits) for rid in still])

    def _stand(self, rid: str, waits: Mapping[str, Hint]) -> Stand:
        life, wait = self.lives[rid], waits[rid]
        chain = list(self._chain(rid, waits))
        last = chain[-1] if chain else rid
        is_circle = any(holder in (rid, *chain) for holder in waits[last].holders)
        root = f"{last} waits for {waits[last].text}" + (", in a circle" if is_circle else "")
        return Stand(
            rid=rid,
            place=life.place,
            since=life.since,
            kind=wait.kind,
            text=wait.text,
            holders=wait.holders,
            chain=tuple(
                [
                    f"{one}: {self.lives[one].place} since step {self.lives[one].since}, waits for {waits[one].text}"
                    for one in chain
                ]
            ),
            root=root,
        )

    def _chain(self, rid: str, waits: Mapping[str, Hint]) -> Iterator[str]:
        """Yield the chain of holders; among several holders, the one stuck longest."""
        seen = {rid}
        while len(seen) < _LONGEST_CHAIN:
            holders = [one for one in waits[rid].holders if one in self.lives and one not in seen]
            if not holders:
                return
            rid = min(holders, key=lambda one: self.lives[one].since)
            seen.add(rid)
            yield rid

    def _wait_of(self, rid: str, free: int | None) -> Hint:
        life = self.lives[rid]
        if life.flights:
            batch = life.flights[0]
            return Hint("result", f"the result of batch {batch}, launched in step {self._launched.get(batch, 0)}")
        if self.paused and (self.paused in _STOPPING or life.computed is None):
            return Hint("pause", f"the end of the pause {self.paused!r}")
        return self._begins(rid, free) if life.computed is None else self._goes_on(rid, free)

    def _begins(self, rid: str, free: int | None) -> Hint:
        life, size = self.lives[rid], self._limits.block_size
        running = [one for one, other in self.lives.items() if other.computed is not None]
        if len(running) >= self._limits.batch_requests:
            return Hint("seat", f"a seat, of {self._limits.batch_requests} held by {_names(running)}", tuple(running))
        needs = -(-min(life.prompt + life.said, self._limits.batch_tokens) // size)
        if free is not None and free < needs:
            return self._blocks(rid, needs, free)
        ahead = next((one for one in self.lives if self.lives[one].computed is None), rid)
        if ahead != rid:
            return Hint("turn", f"its turn behind {ahead}", (ahead,))
        room = "" if free is None else f"{plural(free, 'block')} and "
        return Hint("nothing", f"nothing: {room}a seat are free for its first {plural(needs, 'block')}")

    def _goes_on(self, rid: str, free: int | None) -> Hint:
        life, size = self.lives[rid], self._limits.block_size
        computed = life.computed or 0
        if free == 0 and life.blocks * size <= computed:
            return self._blocks(rid, 1, 0)
        if self._batch_tokens >= self._limits.batch_tokens and rid not in self._batch:
            return Hint("budget", f"the budget, used by {_names(self._batch)}", self._batch)
        return Hint("nothing", f"nothing: it has computed {computed} positions, and no result of it is out")

    def _blocks(self, rid: str, needs: int, free: int) -> Hint:
        holders = [one for one, other in self.lives.items() if other.blocks and one != rid]
        held = sum([self.lives[one].blocks for one in holders])
        have = f"{held} held by {_names(holders)}" if holders else "and no live request holds the others"
        return Hint("blocks", f"{plural(needs, 'block')}: {free} free, {have}", tuple(holders))


# Pause modes in which nothing is launched.
_STOPPING: Final = ("keep", "in_place", "retract")


def _names(rids: Collection[str]) -> str:
    shown = list(rids)[:_SHOWN]
    more = len(rids) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def report_of(stands: Sequence[Stand], died_of: str = "") -> Iterator[str]:
    """Yield the lines of a report: the engine's death, the roots, then each request with its chain."""
    if died_of:
        yield f"the engine died: {died_of}"
    if not stands:
        yield (
            "until then no request was stuck: each one had moved in the last steps"
            if died_of
            else "no request is stuck: each one has moved in the last steps"
        )
        return
    roots: dict[str, list[str]] = {}
    for stand in stands:
        roots.setdefault(stand.root, []).append(stand.rid)
    for root, rids in sorted(roots.items(), key=lambda item: -len(item[1])):
        yield f"{plural(len(rids), 'request')} {'stands' if len(rids) == 1 else 'stand'} still ({_names(rids)}): {root}"
    for stand in stands:
        yield f"  {stand.line}"
        for number, line in enumerate(stand.chain, 2):
            yield f"{'  ' * number}{line}"
