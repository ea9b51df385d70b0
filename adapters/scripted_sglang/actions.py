"""Actions on SGLang's host tier and storage, which delay or lose copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from scripted.core.action import Action, Culprit, SearchBase, verb
from scripted.core.errors import BadCall
from scripted.sdk.actions import SleepAll, WakeAll
from scripted.sdk.signals import SignalAction

if TYPE_CHECKING:
    from scripted.script.context import BaseContext

HOLD: Final = "hold-tier"
RELEASE: Final = "release-tiers"
FAIL: Final = "fail-storage"
FORGET: Final = "forget-stored"
TIERS: Final = ("host", "storage")


class _OfHost(SignalAction, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the actions that need a host tier."""

    needs: ClassVar = "enable_hierarchical_cache"
    needed: ClassVar = "enable_hierarchical_cache=True, which this configuration lacks"
    caused_by: ClassVar[Culprit] = Culprit.HARDWARE


class _OfStorage(SignalAction, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the actions that need storage."""

    is_extra: ClassVar = True
    needs: ClassVar = "has_storage"
    needed: ClassVar = "hicache_storage_backend='dynamic', which this configuration lacks"
    caused_by: ClassVar[Culprit] = Culprit.CONNECTOR


class HoldTier(_OfHost, frozen=True, kw_only=True, omit_defaults=True, tag="hold-tier"):
    """Withholds the ends of copies to and from a tier, ``host`` or ``storage``."""

    tier: str = TIERS[0]

    examples: ClassVar = ("hold-tier", "hold-tier tier=storage")

    @staticmethod
    @verb
    def hold_tier(t: BaseContext, tier: str = TIERS[0]) -> None:
        """Let no copy to or from this tier end until ``release_tiers``."""
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
    """Lets copies end again."""

    examples: ClassVar = ("release-tiers",)
    added_beside: ClassVar = "hold-tier"

    @staticmethod
    @verb
    def release_tiers(t: BaseContext) -> None:
        """Let copies end again."""
        ReleaseTiers().tell(t)


class FailStorage(_OfStorage, frozen=True, kw_only=True, omit_defaults=True, tag="fail-storage"):
    """Makes the next read of the storage return only this many pages."""

    pages: int = 0

    examples: ClassVar = ("fail-storage", "fail-storage pages=1")

    @staticmethod
    @verb
    def fail_storage(t: BaseContext, pages: int = 0) -> None:
        """Let the next read of the storage return only this many pages."""
        FailStorage(pages=pages).tell(t)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return (cls(), cls(pages=2)) if cls.is_known(base.config) else ()


class ForgetStored(_OfStorage, frozen=True, kw_only=True, omit_defaults=True, tag="forget-stored"):
    """Empties the storage."""

    examples: ClassVar = ("forget-stored",)

    @staticmethod
    @verb
    def forget_stored(t: BaseContext) -> None:
        """Empty the storage."""
        ForgetStored().tell(t)


_TIERED: Final = {"enable_hierarchical_cache": (True,)}
_STORED: Final = {**_TIERED, "hicache_storage_backend": ("dynamic",)}
# Each action with the settings that it needs.
ACTIONS: Final[Mapping[type[Action], Mapping[str, Sequence[object]]]] = {
    HoldTier: _TIERED,
    ReleaseTiers: _TIERED,
    FailStorage: _STORED,
    ForgetStored: _STORED,
    # They need enable_memory_saver, which generated targets do not set for them: of 48 that did, 44 ended with a
    # release or a resume in the wrong state, which hid everything else.
    SleepAll: {},
    WakeAll: {},
}
# Settings that need a host tier or a storage too.
NEEDED_BY_SETTINGS: Final = {
    **dict.fromkeys(("hicache_ratio", "hicache_write_policy", "hicache_storage_backend"), _TIERED),
    **dict.fromkeys(("hicache_storage_prefetch_policy", "hicache_host_memory_mode", "prefetch_threshold"), _STORED),
}
