"""The base of actions that only one kind of machine has: each becomes a ``Signal``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

from scripted.core.action import Action, RunLike, SearchBase, rid_of, verbs_of
from scripted.core.errors import BadCall
from scripted.sdk.messages import Signal

if TYPE_CHECKING:
    from scripted.script.context import BaseContext


class SignalAction(Action, frozen=True, kw_only=True, omit_defaults=True):
    """The signal has the action's tag, its ``rid`` if it has one, and its ``value``.

    ``needs`` is the property of a configuration that the signal acts on; the error without it says ``needed``.
    ``least`` is the smallest ``value``.
    """

    needs: ClassVar[str] = ""
    needed: ClassVar[str] = ""
    least: ClassVar[int] = 0
    event: ClassVar = Signal

    @property
    def value(self) -> Any:
        """The value of the signal: the first field that is not the rid."""
        first = self._first_field()
        return 0 if first == "rid" else msgspec.structs.asdict(self)[first]

    @classmethod
    def _first_field(cls) -> str:
        return next(iter(cls.__struct_fields__), "rid")

    def apply(self, run: RunLike) -> None:
        run.give(Signal(name=self.kind, value=self.value, rid=rid_of(self) or ""))

    def tell(self, t: BaseContext) -> None:
        """Send the signal. Raises BadCall for a wrong value, or if there is nothing to act on."""
        (verb,) = verbs_of(type(self))
        if not self.is_known(t.run.config):
            raise BadCall(f"{verb}() needs {self.needed}")
        if not isinstance(self.value, int) or self.value < self.least:
            raise BadCall(f"{verb}() takes {self.__struct_fields__[0]} of {self.least} or more, got {self.value!r}")
        t.run.act(self)

    @classmethod
    def read_back(cls, event: Signal, reader: Any) -> Self | None:
        """Return the action of a recorded signal, with the schedule's name of its request."""
        if event.name != cls.__struct_config__.tag:
            return None
        fields: dict[str, Any] = {} if cls._first_field() == "rid" else {cls._first_field(): event.value}
        if event.rid and "rid" in cls.__struct_fields__:
            fields["rid"] = reader.name_of(event.rid)
        return cls(**fields)

    @classmethod
    def is_known(cls, config: msgspec.Struct) -> bool:
        """Whether machines of this configuration have what the signal acts on. ``needs`` may name a property."""
        return not cls.needs or bool(getattr(config, cls.needs))

    def reaches(self, run: RunLike) -> bool:
        return self.is_known(run.config)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return super().extras(base) if cls.is_known(base.config) else ()
