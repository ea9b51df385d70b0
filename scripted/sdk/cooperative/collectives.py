"""Collectives of ranks as rendezvous: each waits until all ranks have entered the same one.

Ranks are threads of one ``Threads``. A rank that enters another collective than the others, or none, is a deadlock,
whose report lists the last collectives of every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from scripted.core.violation import Violation
from scripted.sdk.cooperative.baton import Baton

# How many collectives of each rank the report of a deadlock shows.
_SHOWN: Final = 6


class Collectives:
    """The group of ranks 0 to ``size - 1``. ``enter`` is the base of ``all_gather``, ``all_reduce`` and ``barrier``.

    The machine calls ``check`` after each step in which nothing from outside can move a rank any more.
    """

    def __init__(self, threads: Baton, size: int) -> None:
        self.size = size
        self._threads = threads
        # The names of the collectives that each rank has entered; the last one may still be open.
        self._entered: list[tuple[str, ...]] = [()] * size
        self._given: dict[int, Any] = {}
        self._results: list[Sequence[Any] | None] = [None] * size

    def enter(self, rank: int, name: str, value: Any = None) -> Sequence[Any]:
        """Wait until every rank has entered the collective ``name``; return their values by rank. Raises Violation."""
        others = {one: self._entered[one][-1] for one in self._given}
        self._entered[rank] = (*self._entered[rank], name)[-_SHOWN:]
        self._given[rank] = value
        for other, entered in others.items():
            if entered != name:
                raise Violation(
                    f"rank {rank} enters {name!r} while rank {other} waits in {entered!r}: a deadlock{self._drawing()}"
                )
        if len(self._given) == self.size:
            values = [self._given[one] for one in range(self.size)]
            self._given.clear()
            self._results = [values] * self.size
        else:
            self._threads.wait(f"the collective {name!r}", lambda: self._results[rank] is not None)
        result, self._results[rank] = self._results[rank], None
        assert result is not None, "a rank leaves a collective when it has its result"
        return result

    def all_gather(self, rank: int, name: str, value: Any) -> Sequence[Any]:
        return self.enter(rank, name, value)

    def all_reduce(self, rank: int, name: str, value: Any, by: Callable[[Sequence[Any]], Any] = sum) -> Any:
        """Return the sum of all values, or the result of ``by``."""
        return by(self.enter(rank, name, value))

    def barrier(self, rank: int, name: str = "barrier") -> None:
        self.enter(rank, name)

    @property
    def is_open(self) -> bool:
        """Whether some ranks wait in a collective for the others."""
        return bool(self._given)

    def check(self) -> None:
        """Check that no rank waits for ranks that will never enter. Raises Violation."""
        if self._given:
            inside = ", ".join(f"rank {rank}" for rank in sorted(self._given))
            absent = ", ".join(f"rank {rank}" for rank in range(self.size) if rank not in self._given)
            names = " and ".join(dict.fromkeys(repr(self._entered[rank][-1]) for rank in sorted(self._given)))
            raise Violation(
                f"ranks wait in a collective that others never enter: {inside} in {names}, without {absent}: "
                f"a deadlock{self._drawing()}"
            )

    def _drawing(self) -> str:
        """Draw the last collectives of every rank, one rank per line."""
        waits = self._threads.waits
        lines = []
        for rank, names in enumerate(self._entered):
            entered = " > ".join(names) or "none"
            there = "waits there" if rank in self._given else "outside"
            lines.append(f"\n  rank {rank}: {entered} ({there})")
        others = "; ".join(f"{name} waits for {what}" for name, what in waits.items() if what)
        return "".join(lines) + (f"\n  {others}" if others else "")
