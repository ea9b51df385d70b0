"""Handles: a script's view of its requests, from the scheduler's side and the client's; for every adapter.

A handle belongs to one life of its rid: if the rid is used again, the old handle does not change. "Finished" is
observed in the scheduler's terminal reply, never inferred from absence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Generic

from typing_extensions import TypeVar

from scripted.script.clients import AskedOfEachChoice, Call, ClientView
from scripted.script.values import Condition, Listed, Nameless

STATUSES: Final = frozenset({"waiting", "running", "finished", "aborted", "unknown"})


def status_of(word: str) -> str:
    """Make a status that only compares with ``STATUSES``."""
    return Condition(word, "status", STATUSES)


class BaseRequest(Nameless, ABC):
    """One request of a script. An adapter's subclass reads its scheduler's view of the request."""

    _ask = "its .rid, .status, .finished or another attribute"

    def __init__(self, rid: str, prompt_ids: Sequence[int], max_new_tokens: int, client: ClientView) -> None:
        self.rid = rid
        self.prompt_ids: tuple[int, ...] = Listed(prompt_ids)
        self.max_new_tokens = max_new_tokens
        self.client = client

    @property
    def req(self) -> Any:
        """The scheduler's live object; None before the request's first step and after its last."""
        return None

    @property
    def choices(self) -> tuple[Any, ...]:
        """The handles of its choices if it was started with n > 1, otherwise itself."""
        return (self,)

    @property
    @abstractmethod
    def finish_reason(self) -> str | None:
        """``length``, ``stop``, ``abort``, ``error`` or another reason of the engine; None before the end."""

    @property
    @abstractmethod
    def output_ids(self) -> tuple[int, ...]:
        """The tokens that the scheduler emitted."""

    @property
    @abstractmethod
    def chunks_done(self) -> int:
        """Forward passes over chunks of its prompt if the prompt was split; a retraction does not reset it."""

    @property
    @abstractmethod
    def is_chunking(self) -> bool:
        """True while the request is partly prefilled."""

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """True while the request owns memory and has not ended."""

    @property
    @abstractmethod
    def is_prefilled(self) -> bool:
        """True while its whole prompt has been launched."""

    @property
    def error(self) -> str | None:
        """The error that ended the request, if any."""
        return None

    @property
    @abstractmethod
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache at the last admission."""

    @property
    @abstractmethod
    def remaining_prompt_tokens(self) -> int:
        """Tokens still to be launched before the request can decode."""

    @property
    @abstractmethod
    def kv_pages(self) -> int:
        """Pages that the request uses, cached ones included; 0 while it owns no memory."""

    @property
    @abstractmethod
    def retractions(self) -> int:
        """How often the request was sent back to the queue."""

    @property
    def finished(self) -> bool:
        """True once the scheduler has sent the terminal reply, with any reason."""
        return self.finish_reason is not None

    @property
    def status(self) -> str:
        """``waiting``, ``running``, ``finished`` or ``aborted``."""
        reason = self.finish_reason
        if reason is not None:
            return status_of("aborted" if reason == "abort" else "finished")
        return status_of("running" if self.is_running else "waiting")

    def __repr__(self) -> str:
        return (
            f"<{self.rid}: {self.status}, prompt={len(self.prompt_ids)}, output_ids={list(self.output_ids)}, "
            f"finish_reason={self.finish_reason!r}>"
        )


class Choices(BaseRequest):
    """A request with n > 1 choices, each with its own handle in ``choices``.

    Waits, aborts and disconnects take it as a whole. ``status`` is ``running`` while any choice runs, and ``aborted``
    if all were aborted. It refuses attributes of a single request, such as ``output_ids``: read them from a choice.
    """

    _ask = "its .choices, .status or .finished"

    def __init__(self, rid: str, choices: Sequence[BaseRequest], client: ClientView) -> None:
        super().__init__(rid, choices[0].prompt_ids, choices[0].max_new_tokens, client)
        self._choices = tuple(choices)

    @property
    def choices(self) -> tuple[Any, ...]:
        return self._choices

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self._choices)

    @property
    def status(self) -> str:
        found = {str(choice.status) for choice in self._choices}
        return status_of(next(word for word in ("running", "waiting", "finished", "aborted") if word in found))

    finish_reason = AskedOfEachChoice()
    output_ids = AskedOfEachChoice()
    req = AskedOfEachChoice()
    error = AskedOfEachChoice()
    chunks_done = AskedOfEachChoice()
    is_chunking = AskedOfEachChoice()
    is_running = AskedOfEachChoice()
    is_prefilled = AskedOfEachChoice()
    retractions = AskedOfEachChoice()
    cached_tokens = AskedOfEachChoice()
    remaining_prompt_tokens = AskedOfEachChoice()
    kv_pages = AskedOfEachChoice()

    def __repr__(self) -> str:
        return f"<{self.rid}: choices={list(self._choices)}>"


_HandleT = TypeVar("_HandleT", bound=BaseRequest, default=Any)


class Handles(Generic[_HandleT]):
    """The handles of the current script. Among several lives of a rid, the oldest that has not ended is live."""

    def __init__(self) -> None:
        self._live: dict[str, deque[_HandleT]] = {}
        self.all: list[_HandleT] = []
        # Requests with several choices; the choices themselves are in ``all``.
        self.several: list[Choices] = []
        self.calls: list[Call] = []

    def start(self, handle: _HandleT) -> None:
        """Add the handle for a new life of its rid."""
        self._live.setdefault(handle.rid, deque()).append(handle)
        self.all.append(handle)

    def known_rids(self) -> set[str]:
        """Return every rid that the script has started."""
        return {handle.rid for handle in self.all} | {handle.rid for handle in self.several}

    def latest(self, rid: str) -> _HandleT | Choices | None:
        """Return the handle for the last life of a rid, or None."""
        every: list[_HandleT | Choices] = [*self.all, *self.several]
        return next((handle for handle in reversed(every) if handle.rid == rid), None)

    def live(self) -> dict[str, _HandleT]:
        """Return the handles of requests that have not ended, by rid."""
        for lives in self._live.values():
            while lives and lives[0].finished:
                lives.popleft()
        return {rid: lives[0] for rid, lives in self._live.items() if lives}

    def open_calls(self) -> dict[str, Call]:
        """Return the unanswered administrative calls by call id."""
        return {call.call_id: call for call in self.calls if call.call_id is not None and not call.done}

    def start_over(self) -> None:
        self._live.clear()
        self.all.clear()
        self.several.clear()
        self.calls.clear()
