"""Tracks every request and call of a run, from events, plans and replies alone: promised, computed, answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol, runtime_checkable

from scripted.core.promises.waste import Preemptions
from scripted.core.violation import Bounds, Violation

OWN_ENDS: Final = ("length", "stop")
REFUSED: Final = "refused"
# What is said of a launch after an abort where no such launch is declared.
_NO_LATE_LAUNCH: Final = "; Capabilities(late_launches=1) says that it may be launched once more"


def overrun(said: Sequence[int], most: int) -> str:
    """Return the end of an error for an output over its limit, with both lengths; empty for any other output."""
    return f": {len(said)} tokens, of at most {most}" if len(said) > most else ""


@runtime_checkable
class RequestMessage(Protocol):
    @property
    def rid(self) -> str: ...

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...


class Life:
    """One request's life; a rid may have several, one after the other.

    ``computed``: the next position to compute; None if it starts over, possibly from a prefix hit. ``end``: its finish
    reason, or ``refused``; None while it lives. ``aborted``: its client aborted it; ``late`` counts its launches since.
    ``failed``: a batch that contained it failed. ``since``: the step in which it arrived or was last launched.
    ``said``: its output tokens. ``follows``: it starts when the previous request with its rid ends on its own; if that
    one ends otherwise, it ends too.
    """

    __slots__ = ("aborted", "computed", "end", "failed", "follows", "late", "launched", "message", "said", "since")

    def __init__(self, message: Any, step: int, *, follows: bool = False) -> None:
        self.follows = follows
        self.message = message
        self.since = step
        self.said: list[int] = []
        self.computed: int | None = None
        self.launched = False
        self.end: str | None = None
        self.aborted = False
        self.late = 0
        self.failed = False

    @property
    def state(self) -> str:
        """Its state in one word: waiting, preempted, prefill, decode, or how it ended."""
        if self.end is not None:
            return self.end
        if self.computed is None:
            return "preempted" if self.launched else "waiting"
        return "prefill" if self.computed < len(self.message.prompt_ids) else "decode"


class Account:
    """All requests and calls of one run, in order of arrival; ``calls`` maps call ids to answers.

    With ``context_tokens``, the account compares each output with the output of the request run alone; without it, the
    adapter does, and also judges finish reasons. A request may be launched ``late_launches`` times after its abort.
    ``step`` is the current step; ``moved``: a request began or lost its blocks since the run last looked.
    """

    def __init__(
        self, context_tokens: int | None = None, late_launches: int = 0, block_size: int = 1, most_in_vain: int = 1
    ) -> None:
        self.preemptions = Preemptions(block_size, most_in_vain)
        self._context_tokens = context_tokens
        self._late_launches = late_launches
        self.step = 0
        self.moved = False
        self.lives: list[Life] = []
        self.live: dict[str, Life] = {}
        self.calls: dict[str, object] = {}
        # The open calls, each with its kind of message.
        self._asked: dict[str, str] = {}
        # Requests that arrived while another with their rid was alive. Unless they follow it, one of the two must end
        # within the step.
        self._behind: dict[str, deque[Life]] = {}
        # Requests counted as refused although the refusal may mean the earlier one: it names only the rid.
        self._or_refused: dict[str, Life] = {}

    @property
    def is_settled(self) -> bool:
        """Whether every request has ended and every call has been answered."""
        return not self.live and not self._asked

    def begin(self, message: RequestMessage, *, follows: bool = False) -> None:
        life, rid = Life(message, self.step, follows=follows), message.rid
        self.preemptions.gains += 1
        self.lives.append(life)
        if rid in self.live:
            self._behind.setdefault(rid, deque()).append(life)
        else:
            self.live[rid] = life

    def latest(self, rid: str) -> Life | None:
        """Return the last request with this rid that was not refused; None if there is none."""
        lives = (life for life in reversed(self.lives) if life.message.rid == rid and life.end != REFUSED)
        return next(lives, None)

    def abort(self, rid: str) -> None:
        """Note that a client aborts this rid, which may be unknown."""
        self.preemptions.gains += 1
        if rid in self.live:
            self.live[rid].aborted = True
            for life in self._behind.get(rid, ()):
                life.aborted = True

    def abort_all(self) -> None:
        for rid in self.live:
            self.abort(rid)

    def fail(self, rids: Iterable[str]) -> None:
        """Note that a batch with these requests failed: their positions in flight were not computed."""
        for rid in rids:
            for life in (self.live.get(rid), *self._behind.get(rid, ())):
                if life is not None and (life is self.live.get(rid) or not life.follows):
                    life.failed, life.computed = True, None

    def ask(self, call_id: str, kind: str) -> None:
        self._asked[call_id] = kind
        self.calls[call_id] = None
        self.preemptions.gains += 1

    # -- replies --

    def tell(self, rid: str, token_ids: tuple[int, ...], reason: str | None) -> None:
        """Judge a reply with tokens, a finish reason, or both. Raises Violation for a reply that was not due."""
        life = self.live.get(rid) or self._addressed(rid, f"is told {list(token_ids)} ({reason})")
        if token_ids:
            if not life.launched:
                raise Violation(f"{rid} is told tokens, but nothing of it was ever computed")
            life.said += token_ids
        if self._context_tokens is not None:
            self._compare(life, self._context_tokens, reason)
        if reason is None:
            return
        if reason == "abort" and not life.aborted:
            raise Violation(f"{rid} ends with abort, but nothing aborted it")
        if reason == "error" and not life.failed:
            raise Violation(f"{rid} ends with an error, but no batch of it failed")
        self.end(rid, reason)

    def _compare(self, life: Life, context_tokens: int, reason: str | None) -> None:
        message, said = life.message, life.said
        most = max(0, min(message.max_new_tokens, context_tokens - len(message.prompt_ids)))
        alone = message.alone(most)
        if tuple(said) != alone[: len(said)]:
            limit = overrun(said, most)
            if limit and most < message.max_new_tokens:
                limit += f", which a context of {context_tokens} leaves beside its prompt"
            raise Violation(f"{message.rid} says {said}, but alone it says {list(alone)}{limit}")
        if reason in OWN_ENDS:
            last = "stop" if said and said[-1] in message.stop_token_ids else "length"
            if tuple(said) != alone or reason != last:
                raise Violation(
                    f"{message.rid} ends with {reason} after {said}, but alone it says {list(alone)}: {last}"
                )
        elif reason not in (None, "abort", "error"):
            raise Violation(f"{message.rid} ends with {reason!r}, which is not length, stop, abort or error")

    def refuse(self, rid: str, reason: str) -> None:
        """Judge the refusal of a request. Raises Violation for a request that had begun."""
        if self._behind.get(rid):
            refused = self._behind[rid].popleft()
            refused.end = REFUSED
            if not self.live[rid].launched:
                self._or_refused[rid] = refused
            return
        life = self._addressed(rid, "is refused")
        if life.said or life.launched:
            raise Violation(f"{rid} is refused ({reason}) after it had begun")
        self.end(rid, REFUSED)

    def answer(self, call_id: str, answer: object) -> None:
        """Judge the answer to a call. Raises Violation for an unknown call or a second answer."""
        if self.calls.get(call_id, answer) is not None:
            what = "was answered before" if call_id in self.calls else "was never made"
            raise Violation(f"the call {call_id} is answered, but it {what}")
        self._asked.pop(call_id, None)
        self.calls[call_id] = answer

    def end(self, rid: str, reason: str) -> None:
        self._or_refused.pop(rid, None)
        self.live.pop(rid).end = reason
        self.preemptions.end(rid)
        behind = self._behind.get(rid)
        while behind and behind[0].follows and reason not in OWN_ENDS:
            behind.popleft().end = reason
        if behind:
            self.live[rid] = behind.popleft()
            self.live[rid].since = self.step

    def check_names(self) -> None:
        """Check after a step that no two live requests share a rid, unless one follows the other. Raises Violation."""
        if self._behind:
            twice = [rid for rid, behind in self._behind.items() if not all(life.follows for life in behind)]
            if twice:
                raise Violation(f"two requests of one rid are alive: {', '.join(twice)}")
            self._behind = {rid: behind for rid, behind in self._behind.items() if behind}

    @property
    def open_kinds(self) -> set[str]:
        """The kinds of the calls without an answer."""
        return set(self._asked.values())

    def check_end(self, why: str = "") -> None:
        """Check at the end of a run that every request has ended and every call was answered. Raises Violation."""
        open_ones = [f"{rid} ({life.state})" for rid, life in self.live.items()]
        open_ones += [f"{call_id} ({kind}, never answered)" for call_id, kind in self._asked.items()]
        self.check_stands(open_ones, why)

    def check_stands(self, open_ones: Iterable[str], why: str = "") -> None:
        """Raise Violation if anything is still open although nothing more can happen."""
        waiting = ", ".join(open_ones)
        if waiting:
            raise Violation(f"nothing happens any more, but something waits forever: {waiting}{why}")

    def _addressed(self, rid: str, what: str) -> Life:
        life = self.live.get(rid)
        if life is None:
            ended = next((life.end for life in reversed(self.lives) if life.message.rid == rid), None)
            why = "there is no such request" if ended is None else f"it has ended ({ended})"
            raise Violation(f"{rid} {what}, but {why}")
        return life

    # -- plans --

    def compute(self, rid: str, start: int, count: int, comes_next: int | None) -> None:
        """Check that ``count`` positions from ``start`` on are the request's next ones. Raises Violation if not.

        ``comes_next`` is the position after them; None if the request may continue anywhere.
        """
        life = self.live.get(rid)
        if life is None:
            what = "has ended" if any(one.message.rid == rid for one in self.lives) else "never arrived"
            raise Violation(f"{rid} is launched, but {what}")
        if life.aborted and (other := self._or_refused.pop(rid, life)) is not life and not other.aborted:
            life.end, other.end = REFUSED, None
            life = self.live[rid] = other
        if life.aborted:
            life.late += 1
            if life.late > self._late_launches:
                again = f" {life.late - 1} launches ago" if self._late_launches else _NO_LATE_LAUNCH
                raise Violation(f"{rid} is launched, but it was aborted{again}")
        if count < 1 or start < 0:
            raise Violation(f"{rid} computes {count} positions from {start} on")
        if life.computed is not None and start != life.computed:
            what = "again" if start < life.computed else "too early"
            raise Violation(
                f"{rid} computes position {start} {what}: position {life.computed} comes next",
                bounds=None if start < life.computed else Bounds(rid, first=life.computed),
            )
        if life.computed is None:
            self.moved = True
            self.preemptions.begin(rid)
        else:
            self.preemptions.compute(start, count)
        life.launched = True
        life.computed = comes_next
        life.since = self.step

    def goes_on(self, rid: str, position: int) -> None:
        """Set a request's next position once it is known how many of the last computed ones count."""
        if rid in self.live and self.live[rid].computed is not None:
            self.live[rid].computed = position

    def lose_blocks(self, rids: Iterable[str]) -> None:
        """Note that these requests were preempted and must be computed again."""
        for rid in rids:
            if rid in self.live:
                if self.live[rid].computed is not None:
                    self.preemptions.lose(rid)
                self.begin_again(rid)

    def begin_again(self, rid: str) -> None:
        """Note that the request's next launch starts over, from position 0 or from a prefix hit."""
        if rid in self.live:
            self.live[rid].computed = None
            self.moved = True
