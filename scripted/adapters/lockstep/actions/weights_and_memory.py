"""What happens to memory: weights that are replaced, pages, rows and tree nodes that an operator keeps or evicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final

import msgspec

from engine.config import EMBEDDED_MODEL
from engine.messages import EvictCache, ReleasePressure, SetPressure, UpdateWeights
from scripted.adapters.lockstep.actions.action import AdministrativeCall, EventReader, Intervention
from scripted.adapters.lockstep.actions.calls import DEFERRED_S, as_seconds
from scripted.core.action import Action, RunLike, SearchBase
from scripted.core.phrases import plural, printable
from scripted.core.shell_words import ShellWord, alone, numbered, only
from scripted.core.verb import Verb

__all__ = ["Evict", "Press", "Relieve", "Update"]

_LEFT_PAGES: Final = 1


def _read_update(words: list[str]) -> Verb:
    return Verb("update_weights", only("update", words, "weights, for instance embedded:7"))


def _weights_of(seed: int) -> str:
    """The embedded model's weights of ``seed``, as an update names them."""
    return f"{EMBEDDED_MODEL}:{seed}"


def _seed_of(weights: str | None) -> int | None:
    """The seed of the embedded model's weights that an update names; None for any others."""
    model, _, seed = (weights or "").partition(":")
    return int(seed) if model == EMBEDDED_MODEL and seed.isdecimal() else None


class Update(AdministrativeCall, frozen=True, kw_only=True, omit_defaults=True, tag="update"):
    """The weights become the embedded ones of ``seed``, or those of ``path_of_weights``.

    With ``timeout_s`` the update waits for its chance.
    """

    seed: int = 1
    timeout_s: float | None = None
    path_of_weights: str | None = None

    examples: ClassVar = ("update", "update seed=3 timeout_s=2.5")
    event: ClassVar = UpdateWeights
    route: ClassVar = "/update_weights_from_disk"
    shell_words: ClassVar = (
        ShellWord("update", "WEIGHTS", "update the weights, for instance to embedded:7", _read_update),
    )

    @property
    def kind(self) -> str:
        """A deferred one is a kind of its own."""
        return "update" if self.timeout_s is None else "update-later"

    @property
    def weights(self) -> str:
        """The new weights, as the route takes them."""
        return _weights_of(self.seed) if self.path_of_weights is None else self.path_of_weights

    @property
    def body(self) -> Mapping[str, Any]:
        """The weights, and the timeout."""
        return {"model_path": self.weights} | ({} if self.timeout_s is None else {"timeout": self.timeout_s})

    def message(self, call_id: str) -> UpdateWeights:
        return UpdateWeights(call_id=call_id, model_path=self.weights, timeout_s=as_seconds(self.timeout_s))

    def verbs(self) -> tuple[Verb, ...]:
        later = {} if self.timeout_s is None else {"timeout_s": self.timeout_s}
        return (Verb("update_weights", self.weights, **later),)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """At once, and deferred."""
        return cls(), cls(timeout_s=DEFERRED_S)

    def smaller(self) -> Iterator[Action]:
        if self.timeout_s is not None:
            yield msgspec.structs.replace(self, timeout_s=None)

    @classmethod
    def read_back(cls, event: UpdateWeights, reader: EventReader) -> Update:
        """The embedded weights as they were; embedded ones stand in for any others."""
        seed = _seed_of(event.model_path)
        return cls(timeout_s=event.timeout_s) if seed is None else cls(seed=seed, timeout_s=event.timeout_s)

    @classmethod
    def words(cls, event: UpdateWeights) -> str:
        return f"weights {printable(event.model_path or 'as configured')}"


class Press(Intervention, frozen=True, kw_only=True, omit_defaults=True, tag="pressure"):
    """An operator keeps memory from requests: exactly these pages or rows are left free, or tree nodes unlocked.

    ``window``: pages of the window pool, in an engine whose model has window layers.
    """

    pages: int | None = None
    rows: int | None = None
    unlocked: int | None = None
    window: int | None = None

    examples: ClassVar = ("pressure pages=1", "pressure rows=0", "pressure unlocked=0", "pressure window=0")
    event: ClassVar = SetPressure
    is_strict: ClassVar[bool] = True
    shell_words: ClassVar = (
        numbered("exhaust_kv", "N", "keep pages from requests until N are free", "exhaust_kv"),
        numbered("exhaust_window", "N", "the same for pages of the window pool", "exhaust_window"),
        numbered("exhaust_rows", "N", "the same for rows", "exhaust_rows"),
        numbered("exhaust_locks", "N", "lock nodes of the prefix tree until N are unlocked", "exhaust_locks"),
    )

    @property
    def kind(self) -> str:
        """The scarce resource makes the kind."""
        return "-".join(["pressure", *(name for name in self.__struct_fields__ if getattr(self, name) is not None)])

    def operator_event(self) -> SetPressure:
        """What the operator does."""
        return SetPressure(
            leave_pages=self.pages,
            leave_rows=self.rows,
            leave_unlocked=self.unlocked,
            leave_window_pages=self.window,
        )

    def reaches(self, run: RunLike) -> bool:
        """Whether requests own so little that the pressure can be as asked for, as a script's verb demands."""
        if self.window is not None and not run.machine.limits.window_tokens:
            return False
        pressure = run.machine.scheduler.pressure
        most = (
            pressure.most_free_pages,
            pressure.most_free_rows,
            pressure.most_unlocked_nodes,
            pressure.most_free_window_pages,
        )
        asked = self.pages, self.rows, self.unlocked, self.window
        return all(count is None or count <= limit for count, limit in zip(asked, most, strict=True))

    def verbs(self) -> tuple[Verb, ...]:
        """``t.exhaust_kv(1)`` and its like."""
        given = {
            "exhaust_kv": self.pages,
            "exhaust_rows": self.rows,
            "exhaust_locks": self.unlocked,
            "exhaust_window": self.window,
        }
        return tuple(Verb(verb, count) for verb, count in given.items() if count is not None)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """One page, no row, no unlocked node; no window page where there are some."""
        everywhere = cls(pages=_LEFT_PAGES), cls(rows=0), cls(unlocked=0)
        return (*everywhere, cls(window=0)) if base.limits.window_tokens else everywhere

    @classmethod
    def read_back(cls, event: SetPressure, reader: EventReader) -> Press:
        return cls(
            pages=event.leave_pages,
            rows=event.leave_rows,
            unlocked=event.leave_unlocked,
            window=event.leave_window_pages,
        )

    @classmethod
    def words(cls, event: SetPressure) -> str:
        left = (
            (event.leave_pages, "free page"),
            (event.leave_rows, "free row"),
            (event.leave_unlocked, "unlocked node"),
            (event.leave_window_pages, "free window page"),
        )
        return "pressure: " + ", ".join(plural(count, what) for count, what in left if count is not None)


class Relieve(Intervention, frozen=True, kw_only=True, omit_defaults=True, tag="relieve"):
    """The operator gives everything back."""

    examples: ClassVar = ("relieve",)
    event: ClassVar = ReleasePressure
    phrase: ClassVar = "pressure off"
    shell_words: ClassVar = (alone("release_exhausted", "give back what the exhaust words keep", "release_exhausted"),)

    def operator_event(self) -> ReleasePressure:
        """What the operator does."""
        return ReleasePressure()

    def reaches(self, run: RunLike) -> bool:
        return bool(run.machine.is_pressed)

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("release_exhausted"),)


class Evict(Intervention, frozen=True, kw_only=True, omit_defaults=True, tag="evict"):
    """``pages`` pages of unlocked cache are evicted, least recently used first; without a number all."""

    pages: int | None = None

    examples: ClassVar = ("evict", "evict pages=1")
    event: ClassVar = EvictCache
    is_strict: ClassVar[bool] = True
    shell_words: ClassVar = (numbered("evict", "[PAGES]", "evict unlocked cache", "evict"),)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """All of it, and what was used longest ago."""
        del base
        return cls(), cls(pages=1)

    def operator_event(self) -> EvictCache:
        """What the operator does."""
        return EvictCache(pages=self.pages)

    def reaches(self, run: RunLike) -> bool:
        """Whether this much can be evicted."""
        return bool(run.machine.scheduler.memory.tree.evictable_pages >= max(1, self.pages or 0))

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("evict") if self.pages is None else Verb("evict", self.pages),)

    @classmethod
    def read_back(cls, event: EvictCache, reader: EventReader) -> Evict:
        return cls(pages=event.pages)

    @classmethod
    def words(cls, event: EvictCache) -> str:
        return "evict the cache" if event.pages is None else f"evict {plural(event.pages, 'page')}"
