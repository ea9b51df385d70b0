"""The counts and sizes of a new machine, which every machine must return to by the end of a run."""

from __future__ import annotations

from collections.abc import Collection

from scripted.core.sizes import grown, sizes_of
from scripted.sdk.messages import SdkMachine


class Fresh:
    """Taken from a new machine of one configuration.

    ``may_grow`` are parts of container paths that need not be empty again, such as statistics. Objects of the classes
    ``leaves`` never change and are not inspected.
    """

    def __init__(self, machine: SdkMachine, may_grow: Collection[str], leaves: Collection[type]) -> None:
        self._may_grow = tuple(may_grow)
        self._leaves = tuple(leaves)
        self._counts = dict(machine.counts())
        self._sizes = sizes_of(*self._leaves, machine=machine)

    def grown(self, machine: SdkMachine) -> str | None:
        """Describe how a machine differs from a new one at its end; None if it does not."""
        counts = machine.counts()
        other = [
            f"{name} is {count} instead of {self._counts[name]}"
            for name, count in counts.items()
            if count != self._counts[name]
        ]
        if other:
            return ", ".join(other)
        found = grown(self._sizes, sizes_of(*self._leaves, machine=machine), "in a new one")
        larger = [text for path, text in found.items() if not any(part in path for part in self._may_grow)]
        if not larger:
            return None
        first = next(path for path, text in found.items() if text in larger)
        hint = f"may_grow=({first!r},) says that it may, as the index of a cache does"
        return f"something has grown: {'; '.join(larger)}; {hint}"
