"""What may happen to vLLM's scheduler beside what happens to any: its KV connector offers, delays and fails, and
grammars are late.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

from scripted.core.action import Action, RunLike, SearchBase, verb
from scripted.errors import BadCall
from scripted.sdk import Signal

FAIL: Final = "fail-load"
OFFER: Final = "offer"
HOLD: Final = "hold-transfers"
RELEASE: Final = "release-transfers"
HOLD_GRAMMARS: Final = "hold-grammars"
RELEASE_GRAMMARS: Final = "release-grammars"
UNKNOWN: Final = -1


class _OfConnector(Action, frozen=True, kw_only=True, omit_defaults=True):
    """Base of those that only a connector knows."""

    def reaches(self, run: RunLike) -> bool:
        """There is a connector."""
        return bool(run.config.has_connector)


def _check_connector(t: Any, verb_name: str) -> None:
    if not t.run.config.has_connector:
        raise BadCall(f"{verb_name}() needs a connector: kv_connector must be 'sync' or 'async', got 'none'")


class FailLoad(_OfConnector, frozen=True, kw_only=True, omit_defaults=True, tag="fail-load"):
    """Of the next load, or of the oldest that is under way, all from the block of this number on does not arrive."""

    block: int = 0

    examples: ClassVar = ("fail-load", "fail-load block=1")

    @staticmethod
    @verb
    def fail_load(t: Any, *, block: int = 0) -> None:
        """Let the oldest load, or the next one, bring only what is before this block of the request."""
        _check_connector(t, "fail_load")
        if not isinstance(block, int) or block < 0:
            raise BadCall(f"fail_load() takes a block that is 0 or more, got {block!r}")
        t.run.act(FailLoad(block=block))

    def apply(self, run: RunLike) -> None:
        run.give(Signal(name=FAIL, value=self.block))

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """All of it, and all but the first block."""
        return (cls(), cls(block=1)) if base.config.has_connector else ()


class OfferPrefixes(_OfConnector, frozen=True, kw_only=True, omit_defaults=True, tag="offer"):
    """From now on this many tokens of each prompt are outside; -1: the connector cannot say yet."""

    tokens: int

    examples: ClassVar = ("offer tokens=4", "offer tokens=-1")

    @staticmethod
    @verb
    def offer_prefixes(t: Any, tokens: int) -> None:
        """From now on the connector offers this many tokens of each prompt; with -1 it cannot say yet."""
        _check_connector(t, "offer_prefixes")
        if not isinstance(tokens, int) or tokens < UNKNOWN:
            raise BadCall(f"offer_prefixes() takes a number of tokens, or -1, got {tokens!r}")
        t.run.act(OfferPrefixes(tokens=tokens))

    def apply(self, run: RunLike) -> None:
        run.give(Signal(name=OFFER, value=self.tokens))

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Nothing, one block, all, and no answer."""
        sizes = (0, base.config.block_size, base.config.max_model_len, UNKNOWN)
        return [cls(tokens=size) for size in sizes] if base.config.has_connector else ()


class HoldTransfers(_OfConnector, frozen=True, kw_only=True, omit_defaults=True, tag="hold-transfers"):
    """Loads and saves that are not waited for do not end from now on."""

    examples: ClassVar = ("hold-transfers",)

    @staticmethod
    @verb
    def hold_transfers(t: Any) -> None:
        """Let no load or save end until ``release_transfers``."""
        _check_connector(t, "hold_transfers")
        t.run.act(HoldTransfers())

    def apply(self, run: RunLike) -> None:
        run.give(Signal(name=HOLD))

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return (cls(),) if base.config.has_connector else ()


class ReleaseTransfers(_OfConnector, frozen=True, kw_only=True, omit_defaults=True, tag="release-transfers"):
    """They end again."""

    examples: ClassVar = ("release-transfers",)
    added_beside: ClassVar = "hold-transfers"

    @staticmethod
    @verb
    def release_transfers(t: Any) -> None:
        """Let loads and saves end again."""
        _check_connector(t, "release_transfers")
        t.run.act(ReleaseTransfers())

    def apply(self, run: RunLike) -> None:
        run.give(Signal(name=RELEASE))


class HoldGrammars(Action, frozen=True, kw_only=True, omit_defaults=True, tag="hold-grammars"):
    """From now on no grammar is compiled."""

    examples: ClassVar = ("hold-grammars",)

    @staticmethod
    @verb
    def hold_grammars(t: Any) -> None:
        """Let no grammar be compiled until ``release_grammars``."""
        t.run.act(HoldGrammars())

    def apply(self, run: RunLike) -> None:
        run.give(Signal(name=HOLD_GRAMMARS))

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Where there is one."""
        return (cls(),) if any(getattr(start, "grammar", 0) for start in base.starts) else ()


class ReleaseGrammars(Action, frozen=True, kw_only=True, omit_defaults=True, tag="release-grammars"):
    """Grammars are compiled again."""

    examples: ClassVar = ("release-grammars",)
    added_beside: ClassVar = "hold-grammars"

    @staticmethod
    @verb
    def release_grammars(t: Any) -> None:
        """Let grammars be compiled again."""
        t.run.act(ReleaseGrammars())

    def apply(self, run: RunLike) -> None:
        run.give(Signal(name=RELEASE_GRAMMARS))


_CONNECTED: Final = {"kv_connector": ("sync", "async")}
_STRUCTURED: Final = {"structured_output": (True,)}
# Each with the settings without which it does nothing.
ACTIONS: Final[Mapping[type[Action], Mapping[str, Sequence[object]]]] = {
    **dict.fromkeys((FailLoad, OfferPrefixes, HoldTransfers, ReleaseTransfers), _CONNECTED),
    **dict.fromkeys((HoldGrammars, ReleaseGrammars), _STRUCTURED),
}
# The settings that do nothing without a connector either.
NEEDED_BY_SETTINGS: Final = dict.fromkeys(
    ("kv_role", "kv_load_failure_policy", "kv_offered_tokens", "kv_transfer_steps", "kv_saves"), _CONNECTED
)
