"""Actions on memory: replace weights; reserve pages, rows and tree nodes; evict cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

import msgspec

from engine.core.config import EMBEDDED_MODEL
from engine.core.messages import EvictCache, ReleasePressure, SetPressure, UpdateWeights
from scripted.core.action import Action, RunLike, SearchBase, verb
from scripted.core.errors import BadCall
from scripted.core.phrases import plural, printable
from scripted.core.verb import Verb
from scripted.script.clients import Call
from scripted.sdk.action_bases import as_seconds
from scripted_lockstep.actions.action import EngineCall, EventReader, Intervention
from scripted_lockstep.actions.calls import DEFERRED_S, check_timeout

if TYPE_CHECKING:
    from scripted.script.context import BaseContext

_LEFT_PAGES: Final = 1


class _Scarce(NamedTuple):
    """A resource that an operator reserves: its field in the event, its limit in the scheduler, its verb, its name."""

    event: str
    most: str
    verb: str
    one: str


_SCARCE: Final = {
    "pages": _Scarce("leave_pages", "most_free_pages", "exhaust_kv", "free page"),
    "rows": _Scarce("leave_rows", "most_free_rows", "exhaust_rows", "free row"),
    "unlocked": _Scarce("leave_unlocked", "most_unlocked_nodes", "exhaust_locks", "unlocked node"),
    "window": _Scarce("leave_window_pages", "most_free_window_pages", "exhaust_window", "free window page"),
}


def _press(t: BaseContext, call: str, name: str, value: int) -> None:
    """Leave this much of a resource. Raises BadCall for an impossible amount."""
    scarce = _SCARCE[name]
    most = getattr(t.scheduler.pressure, scarce.most)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise BadCall(f"{call} takes a whole number >= 0, got {value!r}")
    if value > most:
        state, what = scarce.one.split(" ", 1)
        raise BadCall(
            f"{call} is at most {most} now, because no more {what}s can be {state} while requests own the rest; "
            f"got {value}"
        )
    if value == most:
        t.count_ineffective("pressure that keeps nothing back")
    t.run.act(Press(**{name: value}))


def _weights_of(seed: int) -> str:
    """Name the embedded model's weights of ``seed`` for an update."""
    return f"{EMBEDDED_MODEL}:{seed}"


def _seed_of(weights: str | None) -> int | None:
    """Return the seed of the embedded weights that an update names; None for other weights."""
    model, _, seed = (weights or "").partition(":")
    return int(seed) if model == EMBEDDED_MODEL and seed.isdecimal() else None


class Update(EngineCall, frozen=True, kw_only=True, omit_defaults=True, tag="update"):
    """Replaces the weights by the embedded weights of ``seed``, or by the weights in ``path_of_weights``.

    With ``timeout_s`` the update may be deferred. ``back``: return to the initial weights, without naming them.
    """

    seed: int = 1
    timeout_s: float | None = None
    path_of_weights: str | None = None
    back: bool = False

    examples: ClassVar = ("update", "update seed=3 timeout_s=2.5")
    event: ClassVar = UpdateWeights
    route: ClassVar = "/update_weights_from_disk"
    shell_words: ClassVar = {"update": "update_weights"}

    @staticmethod
    @verb
    def update_weights(t: BaseContext, model_path: str, timeout_s: float | None = None) -> Call:
        """POST ``/update_weights_from_disk``: 'embedded:SEED', or in the server tier any folder of the same model.

        ``timeout_s``, in virtual seconds, is how long it may wait for a quiescent engine. The configured weights are
        restored before the next script.
        """
        if not isinstance(model_path, str):
            raise BadCall(f"update_weights() takes model_path as a text, such as 'embedded:7', got {model_path!r}")
        check_timeout("update_weights()", timeout_s)
        return Update(path_of_weights=model_path, timeout_s=timeout_s).post(t)

    @property
    def kind(self) -> str:
        return "update" if self.timeout_s is None else "update-later"

    @property
    def weights(self) -> str:
        """Return the new weights for the route."""
        if self.path_of_weights is not None:
            return self.path_of_weights
        return EMBEDDED_MODEL if self.back else _weights_of(self.seed)

    @property
    def body(self) -> Mapping[str, object]:
        return {"model_path": self.weights} | ({} if self.timeout_s is None else {"timeout": self.timeout_s})

    def message(self, call_id: str) -> UpdateWeights:
        path = None if self.back else self.weights
        return UpdateWeights(call_id=call_id, model_path=path, timeout_s=as_seconds(self.timeout_s))

    def verbs(self) -> tuple[Verb, ...]:
        later = {} if self.timeout_s is None else {"timeout_s": self.timeout_s}
        return (Verb("update_weights", self.weights, **later),)

    @classmethod
    def of_model(cls, model: str, timeout_s: float | None = None) -> Update:
        """Return an update to weights of another seed of this embedded model."""
        name = model.partition(":")[0]
        path = None if name == EMBEDDED_MODEL else f"{name}:1"
        return cls(timeout_s=timeout_s, path_of_weights=path)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        update = cls.of_model(base.config.model)
        name = base.config.model.partition(":")[0]
        back = cls(back=True, path_of_weights=None if name == EMBEDDED_MODEL else name)
        return update, cls.of_model(base.config.model, DEFERRED_S), back

    @classmethod
    def read_back(cls, event: UpdateWeights, reader: EventReader) -> Update:
        """Read the action back; embedded weights replace any others."""
        if event.model_path is None:
            return cls(back=True, timeout_s=event.timeout_s)
        seed = _seed_of(event.model_path)
        return cls(timeout_s=event.timeout_s) if seed is None else cls(seed=seed, timeout_s=event.timeout_s)

    @classmethod
    def words(cls, event: UpdateWeights) -> str:
        return f"weights {printable(event.model_path or 'as configured')}"


class Press(Intervention, frozen=True, kw_only=True, omit_defaults=True, tag="pressure"):
    """Reserves memory until exactly these pages or rows are free, or tree nodes unlocked.

    ``window``: pages of the window pool, in an engine whose model has window layers.
    """

    pages: int | None = None
    rows: int | None = None
    unlocked: int | None = None
    window: int | None = None

    examples: ClassVar = ("pressure pages=1", "pressure rows=0", "pressure unlocked=0", "pressure window=0")
    event: ClassVar = SetPressure

    @staticmethod
    @verb
    def exhaust_kv(t: BaseContext, leave_pages: int) -> None:
        """Withhold pages from requests until exactly ``leave_pages`` are free; evicts unlocked cache only if
        necessary.
        """
        _press(t, "exhaust_kv(leave_pages)", "pages", leave_pages)

    @staticmethod
    @verb
    def exhaust_window(t: BaseContext, leave_pages: int) -> None:
        """Withhold pages of the window pool from requests until exactly ``leave_pages`` are free.

        Only for a model with window layers. Cached prefixes lose window pages only if necessary.
        """
        if not t.scheduler.limits.window_tokens:
            raise BadCall(
                "exhaust_window(leave_pages) needs a model with window layers, and this one has none; "
                "use EngineConfig(model='embedded-window'), or exhaust_kv for the pages of all other layers"
            )
        _press(t, "exhaust_window(leave_pages)", "window", leave_pages)

    @staticmethod
    @verb
    def exhaust_rows(t: BaseContext, leave_rows: int) -> None:
        """Withhold rows from requests until exactly ``leave_rows`` are free."""
        _press(t, "exhaust_rows(leave_rows)", "rows", leave_rows)

    @staticmethod
    @verb
    def exhaust_locks(t: BaseContext, leave_unlocked: int) -> None:
        """Lock nodes of the prefix tree until exactly ``leave_unlocked`` are unlocked, so that no other is evicted."""
        _press(t, "exhaust_locks(leave_unlocked)", "unlocked", leave_unlocked)

    @property
    def kind(self) -> str:
        return "-".join(["pressure", *self._asked])

    @property
    def _asked(self) -> dict[str, int]:
        return {name: count for name, count in msgspec.structs.asdict(self).items() if count is not None}

    def operator_event(self) -> SetPressure:
        return SetPressure(**{_SCARCE[name].event: count for name, count in self._asked.items()})

    def reaches(self, run: RunLike) -> bool:
        """Return whether requests own little enough memory to leave this much, which the verb requires."""
        if self.window is not None and not run.machine.limits.window_tokens:
            return False
        pressure = run.machine.scheduler.pressure
        return all(count <= getattr(pressure, _SCARCE[name].most) for name, count in self._asked.items())

    def is_distinct(self, run: RunLike) -> bool:
        """Return whether there is a node to lock, if nothing else is reserved."""
        return self._asked.keys() != {"unlocked"} or bool(run.machine.scheduler.pressure.most_unlocked_nodes)

    def verbs(self) -> tuple[Verb, ...]:
        return tuple(Verb(_SCARCE[name].verb, count) for name, count in self._asked.items())

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Return one page, no row, no unlocked node; and no window page if the model has window layers."""
        everywhere = cls(pages=_LEFT_PAGES), cls(rows=0), cls(unlocked=0)
        return (*everywhere, cls(window=0)) if base.limits.window_tokens else everywhere

    @classmethod
    def read_back(cls, event: SetPressure, reader: EventReader) -> Press:
        return cls(**{name: getattr(event, scarce.event) for name, scarce in _SCARCE.items()})

    @classmethod
    def words(cls, event: SetPressure) -> str:
        left = [(getattr(event, scarce.event), scarce.one) for scarce in _SCARCE.values()]
        return "pressure: " + ", ".join(plural(count, what) for count, what in left if count is not None)


class Relieve(Intervention, frozen=True, kw_only=True, omit_defaults=True, tag="relieve"):
    """Releases all reserved memory."""

    examples: ClassVar = ("relieve",)
    event: ClassVar = ReleasePressure
    phrase: ClassVar = "pressure off"

    @staticmethod
    @verb
    def release_exhausted(t: BaseContext) -> None:
        """Release everything that the ``exhaust`` verbs withhold."""
        t.run.act(Relieve())

    def reaches(self, run: RunLike) -> bool:
        return bool(run.machine.is_pressed)


class Evict(Intervention, frozen=True, kw_only=True, omit_defaults=True, tag="evict"):
    """Evicts ``pages`` pages of unlocked cache, least recently used first; by default all."""

    pages: int | None = None

    examples: ClassVar = ("evict", "evict pages=1")
    event: ClassVar = EvictCache

    @staticmethod
    @verb
    def evict(t: BaseContext, pages: int | None = None) -> int:
        """Evict unlocked cache, all of it or ``pages`` pages, least recently used first. Returns the number of
        pages.
        """
        tree = t.scheduler.memory.tree
        before: int = tree.evictable_pages
        if pages is not None and (not isinstance(pages, int) or not 0 <= pages <= before):
            raise BadCall(f"evict() takes 0 to {before} pages, which is all the unlocked cache there is, got {pages!r}")
        t.run.act(Evict(pages=pages))
        after: int = tree.evictable_pages
        if after == before and pages != 0:
            t.count_ineffective("evictions that evicted nothing")
        return before - after

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        del base
        return cls(), cls(pages=1)

    def reaches(self, run: RunLike) -> bool:
        return bool(run.machine.scheduler.memory.tree.evictable_pages >= max(1, self.pages or 0))

    def is_distinct(self, run: RunLike) -> bool:
        """Return whether it evicts a page, and with a number fewer pages than all."""
        return bool(run.machine.scheduler.memory.tree.evictable_pages > (self.pages or 0))

    @classmethod
    def words(cls, event: EvictCache) -> str:
        return "evict the cache" if event.pages is None else f"evict {plural(event.pages, 'page')}"
