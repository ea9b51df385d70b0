"""Actions on SGLang's host tier and storage: copies take long, are lost, or never come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from scripted.core.action import Action, SearchBase, verb
from scripted.core.errors import BadCall
from scripted.sdk.signals import SignalAction

if TYPE_CHECKING:
    from scripted.script.context import BaseContext

HOLD: Final = "hold-tier"
RELEASE: Final = "release-tiers"
FAIL: Final = "fail-storage"
FORGET: Final = "forget-stored"
TIERS: Final = ("host", "storage")


class _OfHost(SignalAction, frozen=True, kw_only=True, omit_defaults=True):
    """Base of those that only a host tier knows."""

    needs: ClassVar = "enable_hierarchical_cache"
    needed: ClassVar = "enable_hierarchical_cache=True, which this configuration has not"


class _OfStorage(SignalAction, frozen=True, kw_only=True, omit_defaults=True):
    """Base of those that only a storage knows."""

    is_extra: ClassVar = True
    needs: ClassVar = "has_storage"
    needed: ClassVar = "hicache_storage_backend='dynamic', which this configuration has not"


class HoldTier(_OfHost, frozen=True, kw_only=True, omit_defaults=True, tag="hold-tier"):
    """From now on no copy to or from a tier, ``host`` or ``storage``, ends."""

    tier: str = TIERS[0]

    examples: ClassVar = ("hold-tier", "hold-tier tier=storage")

    @staticmethod
    @verb
    def hold_tier(t: BaseContext, tier: str = TIERS[0]) -> None:
        """Let nothing that is carried to or from this tier end until ``release_tiers``."""
        if tier not in TIERS:
            raise BadCall(f"hold_tier() takes {' or '.join(TIERS)}, got {tier!r}")
        HoldTier(tier=tier).tell(t)

    @property
    def value(self) -> int:
        """The number of the tier."""
        return TIERS.index(self.tier)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        tiers = TIERS[: 1 + base.config.has_storage] if cls.is_known(base.config) else ()
        return [cls(tier=tier) for tier in tiers]


class ReleaseTiers(_OfHost, frozen=True, kw_only=True, omit_defaults=True, tag="release-tiers"):
    """It ends again."""

    examples: ClassVar = ("release-tiers",)
    added_beside: ClassVar = "hold-tier"

    @staticmethod
    @verb
    def release_tiers(t: BaseContext) -> None:
        """Let what is carried end again."""
        ReleaseTiers().tell(t)


class FailStorage(_OfStorage, frozen=True, kw_only=True, omit_defaults=True, tag="fail-storage"):
    """Of the pages that are read together next, only so many come."""

    pages: int = 0

    examples: ClassVar = ("fail-storage", "fail-storage pages=1")

    @staticmethod
    @verb
    def fail_storage(t: BaseContext, pages: int = 0) -> None:
        """Let only so many come of the pages that are read together next."""
        FailStorage(pages=pages).tell(t)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return (cls(), cls(pages=2)) if cls.is_known(base.config) else ()


class ForgetStored(_OfStorage, frozen=True, kw_only=True, omit_defaults=True, tag="forget-stored"):
    """The storage has nothing any more."""

    examples: ClassVar = ("forget-stored",)

    @staticmethod
    @verb
    def forget_stored(t: BaseContext) -> None:
        """Let the storage lose all that it has."""
        ForgetStored().tell(t)


_TIERED: Final = {"enable_hierarchical_cache": (True,)}
_STORED: Final = {**_TIERED, "hicache_storage_backend": ("dynamic",)}
# Each with the settings without which it does nothing.
ACTIONS: Final[Mapping[type[Action], Mapping[str, Sequence[object]]]] = {
    HoldTier: _TIERED,
    ReleaseTiers: _TIERED,
    FailStorage: _STORED,
    ForgetStored: _STORED,
}
# The settings that do nothing without a host tier, or a storage, either.
NEEDED_BY_SETTINGS: Final = {
    **dict.fromkeys(("hicache_ratio", "hicache_write_policy", "hicache_storage_backend"), _TIERED),
    **dict.fromkeys(("hicache_storage_prefetch_policy", "hicache_host_memory_mode", "prefetch_threshold"), _STORED),
}
