"""A script's hold on what it has begun: the handle of a request, and of an administrative call.

Both read what the judge has noted of events, plans and replies. Neither changes anything.
"""

from __future__ import annotations

from typing import Final

from scripted.errors import BadCall
from scripted.rig.values import Listed, Nameless, Word
from scripted.sdk.account import Account, Life
from scripted.sdk.messages import Answer

__all__ = ["Call", "RequestHandle", "status_of"]

_STATUSES: Final = frozenset(
    {"waiting", "prefill", "decode", "preempted", "finished", "aborted", "refused", "unknown"},
)
_FINISH_REASONS: Final = frozenset({"length", "stop", "abort", "error", "refused"})
_ENDED: Final = {"length": "finished", "stop": "finished", "error": "finished", "abort": "aborted"}


def status_of(word: str) -> str:
    """A status that can only be compared with one that there is."""
    return Word(word, "status", _STATUSES)


class RequestHandle(Nameless):
    """One life of a rid: what the scheduler launched of it and told its client."""

    _ask = "its .rid, .status, .is_finished or another attribute"

    def __init__(
        self, rid: str, prompt_ids: tuple[int, ...], max_new_tokens: int, account: Account, index: int
    ) -> None:
        self.rid = rid
        self.prompt_ids: tuple[int, ...] = Listed(prompt_ids)
        self.max_new_tokens = max_new_tokens
        self.preemptions = 0
        self._account = account
        # Requests arrive in the order in which the script has begun them.
        self._index = index
        self._had_computed = False

    def note_step(self, *, is_preempted: bool) -> None:
        """A step has ended, and this request has not; one that had computed nothing lost nothing."""
        self.preemptions += is_preempted and self._had_computed
        self._had_computed = self.computed > 0

    @property
    def _life(self) -> Life | None:
        """None before the first step that sees it."""
        lives = self._account.lives
        return lives[self._index] if self._index < len(lives) else None

    @property
    def status(self) -> str:
        """``waiting``, ``prefill``, ``decode``, ``preempted``, ``finished``, ``aborted`` or ``refused``."""
        life = self._life
        state = "waiting" if life is None else life.state
        return status_of(_ENDED.get(state, state))

    @property
    def is_finished(self) -> bool:
        """True once its client was told the end, whatever the reason."""
        return self._life is not None and self._life.end is not None

    @property
    def finish_reason(self) -> str | None:
        """``length``, ``stop``, ``abort``, ``error`` or ``refused``; None before the end."""
        end = None if self._life is None else self._life.end
        return None if end is None else Word(end, "finish_reason", _FINISH_REASONS)

    @property
    def output_ids(self) -> tuple[int, ...]:
        """The tokens that its client was told."""
        return Listed(() if self._life is None else self._life.said)

    @property
    def computed(self) -> int:
        """Positions that were launched, those of a prefix hit included; 0 again after a preemption."""
        return 0 if self._life is None else self._life.computed or 0

    def __repr__(self) -> str:
        return (
            f"<{self.rid}: {self.status.value if isinstance(self.status, Word) else self.status}, "
            f"prompt={len(self.prompt_ids)}, computed={self.computed}, output_ids={list(self.output_ids)}, "
            f"finish_reason={self.finish_reason!r}>"
        )


class Call(Nameless):
    """One administrative call. ``done``: its answer is there. ``was_read``: the script has looked at the answer."""

    _ask = "its .done or .ok"

    def __init__(self, name: str, account: Account, call_id: list[str], *, must_be_read: bool) -> None:
        self.name = name
        self.must_be_read = must_be_read
        self.was_read = False
        self._account = account
        self._call_id = call_id

    @property
    def _answer(self) -> Answer | None:
        return self._account.calls.get(self._call_id[0]) if self._call_id else None

    @property
    def done(self) -> bool:
        """The answer is there."""
        return self._answer is not None

    @property
    def ok(self) -> bool:
        """What was asked for was done. Raises BadCall before the answer is there."""
        return self._read("ok").ok

    @property
    def text(self) -> str:
        """The text of the answer. Raises BadCall before it is there."""
        return self._read("text").text

    def _read(self, what: str) -> Answer:
        answer = self._answer
        if answer is None:
            raise BadCall(
                f"t.{self.name} has no answer yet, so it has no .{what}; "
                "wait for it: yield from t.run_until(lambda: call.done)"
            )
        self.was_read = True
        return answer

    def __repr__(self) -> str:
        answer = self._answer
        return f"<{self.name}: {'no answer yet' if answer is None else f'ok={answer.ok}, text={answer.text!r}'}>"
