"""What each client was promised and told, and what each request has computed: from events, plans and replies alone."""

from __future__ import annotations

from collections.abc import Iterable

from scripted.core.tokens import tokens_alone
from scripted.core.violation import Violation
from scripted.sdk.messages import Add, Answer, Refused, Share, Tokens

__all__ = ["Account", "Life"]

_OWN_ENDS = ("length", "stop")


class Life:
    """One request. ``computed`` is the position that comes next; None when it must begin anew, maybe after a hit.

    ``end`` is its finish reason, or ``refused``; None while it lives. ``aborted``: its client gave it up.
    """

    __slots__ = ("_most", "aborted", "computed", "end", "failed", "launched", "message", "said")

    def __init__(self, message: Add, context_tokens: int) -> None:
        self.message = message
        self._most = min(message.max_new_tokens, context_tokens - len(message.prompt_ids))
        self.said: list[int] = []
        self.computed: int | None = None
        self.launched = False
        self.end: str | None = None
        self.aborted = False
        self.failed = False

    @property
    def alone(self) -> tuple[int, ...]:
        """What it says when nothing disturbs it."""
        message = self.message
        return tokens_alone(message.prompt_ids, self._most, message.stop_token_ids)

    @property
    def state(self) -> str:
        """A word for it: waiting, prefill, decode, or how it ended."""
        if self.end is not None:
            return self.end
        if self.computed is None:
            return "preempted" if self.launched else "waiting"
        return "prefill" if self.computed < len(self.message.prompt_ids) else "decode"


class Account:
    """All requests and calls of one run, in the order in which they arrived."""

    def __init__(self, context_tokens: int) -> None:
        self._context_tokens = context_tokens
        self.lives: list[Life] = []
        self.live: dict[str, Life] = {}
        self.calls: dict[str, Answer | None] = {}

    @property
    def is_settled(self) -> bool:
        """Every request has ended and every call is answered."""
        return not self.live and all(answer is not None for answer in self.calls.values())

    def begin(self, message: Add) -> None:
        """A request arrives."""
        life = Life(message, self._context_tokens)
        self.lives.append(life)
        self.live[message.rid] = life

    def end(self, rid: str, reason: str) -> None:
        """Its client hears no more of it."""
        self.live.pop(rid).end = reason

    # -- replies --

    def tell(self, reply: Tokens | Refused | Answer) -> None:
        """A client is told something. Raises Violation when it was not promised this."""
        match reply:
            case Tokens():
                self._tell_tokens(reply)
            case Refused():
                life = self._addressed(reply.rid, "is refused")
                if life.said or life.launched:
                    raise Violation(f"{reply.rid} is refused ({reply.reason}) after it had begun")
                self.end(reply.rid, "refused")
            case Answer():
                self._answer(reply)

    def _tell_tokens(self, reply: Tokens) -> None:
        life = self._addressed(reply.rid, f"is told {list(reply.token_ids)} ({reply.finish_reason})")
        said, alone = [*life.said, *reply.token_ids], life.alone
        if tuple(said) != alone[: len(said)]:
            raise Violation(f"{reply.rid} says {said}, but alone it says {list(alone)}")
        if reply.token_ids and life.computed is None and not life.launched:
            raise Violation(f"{reply.rid} is told tokens, but nothing of it was ever computed")
        life.said = said
        reason = reply.finish_reason
        if reason is None:
            return
        if reason in _OWN_ENDS:
            last = "stop" if said and said[-1] in life.message.stop_token_ids else "length"
            if tuple(said) != alone or reason != last:
                raise Violation(f"{reply.rid} ends with {reason} after {said}, but alone it says {list(alone)}: {last}")
        elif reason == "abort" and not life.aborted:
            raise Violation(f"{reply.rid} ends with abort, but nothing aborted it")
        elif reason == "error" and not life.failed:
            raise Violation(f"{reply.rid} ends with an error, but no batch of it failed")
        elif reason not in ("abort", "error"):
            raise Violation(f"{reply.rid} ends with {reason!r}, which is not length, stop, abort or error")
        self.end(reply.rid, reason)

    def _addressed(self, rid: str, what: str) -> Life:
        life = self.live.get(rid)
        if life is None:
            ended = next((life.end for life in reversed(self.lives) if life.message.rid == rid), None)
            why = "there is no such request" if ended is None else f"it has ended ({ended})"
            raise Violation(f"{rid} {what}, but {why}")
        return life

    def _answer(self, answer: Answer) -> None:
        if self.calls.get(answer.call_id, answer) is not None:
            what = "was answered before" if answer.call_id in self.calls else "was never made"
            raise Violation(f"the call {answer.call_id} is answered, but it {what}")
        self.calls[answer.call_id] = answer

    # -- plans --

    def compute(self, share: Share, known_tokens: int) -> None:
        """A request computes positions, as the pipeline understood the share; then it has this many tokens.

        Raises Violation unless they are the next ones.
        """
        life = self.live.get(share.rid)
        if life is None:
            what = "has ended" if any(one.message.rid == share.rid for one in self.lives) else "never arrived"
            raise Violation(f"{share.rid} is in a batch, but {what}")
        if life.aborted:
            raise Violation(f"{share.rid} is in a batch, but it was aborted")
        if share.count < 1 or share.start < 0:
            raise Violation(f"{share.rid} computes {share.count} positions from {share.start} on")
        if life.computed is not None and share.start != life.computed:
            what = "again" if share.start < life.computed else "too early"
            raise Violation(f"{share.rid} computes position {share.start} {what}: position {life.computed} comes next")
        life.launched = True
        # Of the guesses those that were right were computed; the token after them was sampled, and comes next.
        life.computed = known_tokens - 1 if share.draft_ids else share.start + share.count

    def lose_blocks(self, rids: Iterable[str]) -> None:
        """These were preempted: they compute again."""
        for rid in rids:
            if rid in self.live:
                self.live[rid].computed = None
