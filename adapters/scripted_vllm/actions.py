"""Actions on vLLM's scheduler besides the common ones.

Its KV connector offers, delays and fails loads, and grammars compile late.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec

from scripted.core.action import Action, Culprit, RunLike, SearchBase, verb
from scripted.core.errors import BadCall
from scripted.core.prompts import prompt_ids
from scripted.sdk import Add
from scripted.sdk.actions import SleepAll, SubmitRequest, WakeAll
from scripted.sdk.signals import SignalAction

if TYPE_CHECKING:
    from scripted.script.context import BaseContext

FAIL: Final = "fail-load"
OFFER: Final = "offer"
HOLD: Final = "hold-transfers"
RELEASE: Final = "release-transfers"
HOLD_GRAMMARS: Final = "hold-grammars"
RELEASE_GRAMMARS: Final = "release-grammars"
END_SESSION: Final = "end-session"
# In a fleet: a request's transfer has ended; a value other than 0 means that no KV arrived.
ENDED: Final = "transfer-ended"
UNKNOWN: Final = -1


class _OfConnector(SignalAction, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the actions that need a connector."""

    needs: ClassVar = "has_connector"
    needed: ClassVar = "a connector: kv_connector must be 'sync' or 'async', got 'none'"

    @property
    def culprit(self) -> Culprit:
        return Culprit.CONNECTOR


class _OfTransfers(_OfConnector, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the actions on transfers, some of which HiSparse has too."""

    needs: ClassVar = "has_transfers"


class FailLoad(_OfConnector, frozen=True, kw_only=True, omit_defaults=True, tag="fail-load"):
    """Fails the oldest pending load, or the next one, from this block on.

    With a ``rid`` it fails a load of this request.
    """

    block: int = 0
    rid: str | None = None

    examples: ClassVar = ("fail-load", "fail-load block=1", "fail-load rid=a")

    @staticmethod
    @verb
    def fail_load(t: BaseContext, *, block: int = 0, rid: Any = None) -> None:
        """Fail the oldest pending load, or the next one, or the next of a request, from this block on."""
        FailLoad(block=block, rid=_named(t, "fail_load()", rid)).tell(t)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return (cls(), cls(block=1)) if cls.is_known(base.config) else ()


class OfferPrefixes(_OfConnector, frozen=True, kw_only=True, omit_defaults=True, tag="offer"):
    """Makes the connector offer this many tokens of each later prompt; -1 makes it answer that it does not know yet.

    With a ``rid`` it offers them to this request alone, until the next offer to all.
    """

    tokens: int
    rid: str | None = None

    examples: ClassVar = ("offer tokens=4", "offer tokens=-1", "offer tokens=4 rid=a")
    least: ClassVar = UNKNOWN

    @staticmethod
    @verb
    def offer_prefixes(t: BaseContext, tokens: int, *, rid: Any = None) -> None:
        """Let the connector offer this many tokens of each later prompt, or of one request; -1: not known yet."""
        OfferPrefixes(tokens=tokens, rid=_named(t, "offer_prefixes()", rid)).tell(t)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        sizes = (0, base.config.block_size, base.config.max_model_len, UNKNOWN)
        return [cls(tokens=size) for size in sizes] if cls.is_known(base.config) else ()


class HoldConnector(_OfTransfers, frozen=True, kw_only=True, omit_defaults=True, tag="hold-transfers"):
    """Keeps asynchronous loads and saves from ending."""

    examples: ClassVar = ("hold-transfers",)
    is_extra: ClassVar = True

    @staticmethod
    @verb
    def hold_transfers(t: BaseContext) -> None:
        """Let no load or save end until ``release_transfers``."""
        HoldConnector().tell(t)


class ReleaseConnector(_OfTransfers, frozen=True, kw_only=True, omit_defaults=True, tag="release-transfers"):
    """Lets loads and saves end again; with a ``rid`` only the next one of this request, while the others are held."""

    rid: str | None = None

    examples: ClassVar = ("release-transfers", "release-transfers rid=a")
    added_beside: ClassVar = "hold-transfers"

    @staticmethod
    @verb
    def release_transfers(t: BaseContext, *, rid: Any = None) -> None:
        """Let loads and saves end again; with a request only its next one, while the others are held."""
        ReleaseConnector(rid=_named(t, "release_transfers()", rid)).tell(t)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Yield a release of all transfers if there is a hold. Only recordings and scripts release single requests."""
        is_held = HoldConnector in base.kinds and cls.is_known(base.config)
        return (cls(),) if is_held else ()


class HoldCompilation(SignalAction, frozen=True, kw_only=True, omit_defaults=True, tag="hold-grammars"):
    """Keeps grammars from being compiled."""

    examples: ClassVar = ("hold-grammars",)

    @staticmethod
    @verb
    def hold_grammars(t: BaseContext) -> None:
        """Let no grammar be compiled until ``release_grammars``."""
        HoldCompilation().tell(t)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return (cls(),) if any(isinstance(start, SubmitRequest) and start.grammar for start in base.starts) else ()


class ReleaseCompilation(SignalAction, frozen=True, kw_only=True, omit_defaults=True, tag="release-grammars"):
    """Lets grammars be compiled again."""

    examples: ClassVar = ("release-grammars",)
    added_beside: ClassVar = "hold-grammars"

    @staticmethod
    @verb
    def release_grammars(t: BaseContext) -> None:
        """Let grammars be compiled again."""
        ReleaseCompilation().tell(t)


class SendMore(Action, frozen=True, kw_only=True, omit_defaults=True, tag="more"):
    """Sends a session ``tokens`` more prompt tokens, which it takes after its current answer."""

    rid: str
    tokens: int
    new: int = 2
    seed: int = 0

    examples: ClassVar = ("more a tokens=5", "more a tokens=1 new=4 seed=2")
    part_of: ClassVar = "sessions"

    @staticmethod
    @verb
    def send_more(t: BaseContext, r: Any, tokens: int, *, new: int = 2, seed: int = 0) -> Any:
        """Send a session more input; returns the handle of its answer, which follows the current one."""
        more = SendMore(rid=t.rid_of("send_more()", r), tokens=tokens, new=new, seed=seed)
        if not isinstance(tokens, int) or tokens < 1:
            raise BadCall(f"send_more() takes tokens of 1 or more, got {tokens!r}")
        message = more.message(t.run)
        if message is None:
            raise BadCall(
                f"send_more() needs a live session with room for {tokens} tokens, got {more.rid!r}; start one with "
                "session=1, and yield once before you send more"
            )
        return t.run.start(message)

    def message(self, run: RunLike) -> Add | None:
        """Return the session's next request; None if it ends, already got input in this step, or fills the context."""
        before = self._before(run)
        context = run.config.max_model_len
        if before is None:
            return None
        # Its whole output, part of which may be still to come, without the last token.
        said = before.alone(max(0, min(before.max_new_tokens, context - len(before.prompt_ids))))[:-1]
        prompt = (*before.prompt_ids, *said, *prompt_ids(self.tokens, self.seed))
        if len(prompt) >= context and run.config.checks_sessions:
            return None
        return msgspec.structs.replace(
            before,
            prompt_ids=prompt,
            max_new_tokens=self.new,
            stop_token_ids=(),
            arrival=run.oracle.arrive(self.rid),
            session=self.tokens,
        )

    def _before(self, run: RunLike) -> Add | None:
        """Return the last request of a live session; None if there is none."""
        if not run.machine.is_session(self.rid) or any(getattr(one, "rid", "") == self.rid for one in run.given):
            return None
        life = next(life for life in reversed(run.oracle.account.lives) if life.message.rid == self.rid)
        return life.message if life.message.session and not life.aborted else None

    def apply(self, run: RunLike) -> None:
        message = self.message(run)
        if message is not None:
            run.device.begin(message, is_queued=message.rid in run.oracle.account.live)
            run.give(message)

    def reaches(self, run: RunLike) -> bool:
        return self._before(run) is not None

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Add one token, or two blocks that share a prefix with other prompts."""
        sizes = (1, 2 * base.config.block_size)
        return [cls(rid=rid, tokens=size, new=3) for rid in _sessions_of(base) for size in sizes]


class EndSession(SignalAction, frozen=True, kw_only=True, omit_defaults=True, tag="end-session"):
    """Ends the input of a session."""

    rid: str

    examples: ClassVar = ("end-session a",)

    @staticmethod
    @verb
    def end_session(t: BaseContext, r: Any) -> None:
        """End the input of a session."""
        EndSession(rid=t.rid_of("end_session()", r)).tell(t)

    def reaches(self, run: RunLike) -> bool:
        return bool(run.machine.is_session(self.rid))

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return [cls(rid=rid) for rid in _sessions_of(base)]


def _named(t: BaseContext, call: str, request: Any) -> str | None:
    """Return the rid of a verb's optional request."""
    return None if request is None else t.rid_of(call, request)


def _sessions_of(base: SearchBase) -> Iterable[str]:
    return dict.fromkeys(one.rid for one in base.starts if isinstance(one, SubmitRequest) and one.session)


_CONNECTED: Final = {"kv_connector": ("sync", "async")}
_STRUCTURED: Final = {"structured_output": (True,)}
_SLEEPING: Final = {"enable_sleep_mode": (True,)}
# Each action with the settings that it needs.
ACTIONS: Final[Mapping[type[Action], Mapping[str, Sequence[object]]]] = {
    FailLoad: _CONNECTED,
    OfferPrefixes: _CONNECTED,
    HoldConnector: _CONNECTED,
    ReleaseConnector: _CONNECTED,
    HoldCompilation: _STRUCTURED,
    ReleaseCompilation: _STRUCTURED,
    SendMore: {},
    EndSession: {},
    SleepAll: _SLEEPING,
    WakeAll: _SLEEPING,
}
# Settings that also need a connector.
NEEDED_BY_SETTINGS: Final[Mapping[str, Mapping[str, Sequence[object]]]] = {
    **dict.fromkeys(
        ("kv_role", "kv_load_failure_policy", "kv_offered_tokens", "kv_transfer_steps", "kv_saves"), _CONNECTED
    ),
    "kv_saves_aborted": {**_CONNECTED, "kv_saves": (True,)},
}
