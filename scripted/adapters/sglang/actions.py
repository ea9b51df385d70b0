"""What may happen to SGLang's host tier and storage: what is carried takes long, is lost, or does not come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

from scripted.core.action import Action, RunLike, SearchBase, verb
from scripted.errors import BadCall
from scripted.sdk import Signal

HOLD: Final = "hold-tier"
RELEASE: Final = "release-tiers"
FAIL: Final = "fail-storage"
FORGET: Final = "forget-stored"
TIERS: Final = ("host", "storage")


class _OfHost(Action, frozen=True, kw_only=True, omit_defaults=True):
    """Base of those that only a host tier knows."""

    def reaches(self, run: RunLike) -> bool:
        return bool(run.config.enable_hierarchical_cache)

    @classmethod
    def _all(cls, base: SearchBase, *some: Action) -> Iterable[Action]:
        return some if base.config.enable_hierarchical_cache else ()


class _OfStorage(Action, frozen=True, kw_only=True, omit_defaults=True):
    """Base of those that only a storage knows."""

    def reaches(self, run: RunLike) -> bool:
        return bool(run.config.has_storage)

    @classmethod
    def _all(cls, base: SearchBase, *some: Action) -> Iterable[Action]:
        return some if base.config.has_storage else ()


def _check(t: Any, action: Action, verb_name: str, needed: str) -> None:
    if not action.reaches(t.run):
        raise BadCall(f"{verb_name}() needs {needed}, which this configuration has not")


class HoldTier(_OfHost, frozen=True, kw_only=True, omit_defaults=True, tag="hold-tier"):
    """What is carried to and from a tier, ``host`` or ``storage``, does not end from now on."""

    tier: str = TIERS[0]

    examples: ClassVar = ("hold-tier", "hold-tier tier=storage")

    @staticmethod
    @verb
    def hold_tier(t: Any, tier: str = TIERS[0]) -> None:
        """Let nothing that is carried to or from this tier end until ``release_tiers``."""
        _check(t, HoldTier(), "hold_tier", "enable_hierarchical_cache=True")
        if tier not in TIERS:
            raise BadCall(f"hold_tier() takes {' or '.join(TIERS)}, got {tier!r}")
        t.run.act(HoldTier(tier=tier))

    def apply(self, run: RunLike) -> None:
        run.give(Signal(name=HOLD, value=TIERS.index(self.tier)))

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return cls._all(base, *(cls(tier=tier) for tier in TIERS[: 1 + base.config.has_storage]))


class ReleaseTiers(_OfHost, frozen=True, kw_only=True, omit_defaults=True, tag="release-tiers"):
    """It ends again."""

    examples: ClassVar = ("release-tiers",)
    added_beside: ClassVar = "hold-tier"

    @staticmethod
    @verb
    def release_tiers(t: Any) -> None:
        """Let what is carried end again."""
        _check(t, ReleaseTiers(), "release_tiers", "enable_hierarchical_cache=True")
        t.run.act(ReleaseTiers())

    def apply(self, run: RunLike) -> None:
        run.give(Signal(name=RELEASE))


class FailStorage(_OfStorage, frozen=True, kw_only=True, omit_defaults=True, tag="fail-storage"):
    """Of the pages that are read together next, only so many come."""

    pages: int = 0

    examples: ClassVar = ("fail-storage", "fail-storage pages=1")

    @staticmethod
    @verb
    def fail_storage(t: Any, pages: int = 0) -> None:
        """Let only so many come of the pages that are read together next."""
        _check(t, FailStorage(), "fail_storage", "hicache_storage_backend='dynamic'")
        if not isinstance(pages, int) or pages < 0:
            raise BadCall(f"fail_storage() takes pages of 0 or more, got {pages!r}")
        t.run.act(FailStorage(pages=pages))

    def apply(self, run: RunLike) -> None:
        run.give(Signal(name=FAIL, value=self.pages))

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return cls._all(base, cls(), cls(pages=2))


class ForgetStored(_OfStorage, frozen=True, kw_only=True, omit_defaults=True, tag="forget-stored"):
    """The storage has nothing any more."""

    examples: ClassVar = ("forget-stored",)

    @staticmethod
    @verb
    def forget_stored(t: Any) -> None:
        """Let the storage lose all that it has."""
        _check(t, ForgetStored(), "forget_stored", "hicache_storage_backend='dynamic'")
        t.run.act(ForgetStored())

    def apply(self, run: RunLike) -> None:
        run.give(Signal(name=FORGET))

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return cls._all(base, cls())


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
