"""Measured times of registered files, kept in `ci/measured.json` and refreshed by `suite --record-times`.

A file that was never measured on a kind of hardware counts with its registration's estimate.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ci.errors import TimesError
from ci.registry import Registry, RegistryFinding
from ci.suites import Hardware
from lockstep.documents import DocumentError, document

TIMES_PATH = "ci/measured.json"
ESTIMATE_FACTOR_MAX = 2.0
# Below this, a shared machine's start-up noise exceeds any difference that an estimate could show.
ESTIMATE_FLOOR_S = 2.0


@dataclass(frozen=True)
class MeasuredTimes:
    seconds: Mapping[str, Mapping[str, float]]

    @classmethod
    def load(cls, root: Path) -> "MeasuredTimes":
        """Read the stored times; a repository without the file has measured nothing yet. Raises `TimesError`."""
        path = root / TIMES_PATH
        if not path.exists():
            return cls({})
        try:
            return cls(document(path.read_bytes(), dict[str, dict[str, float]]))
        except (OSError, DocumentError) as exc:
            raise TimesError(f"{path}: {exc}; delete it and run `python -m ci suite --record-times`") from exc

    def get(self, hardware: Hardware, path: str) -> float | None:
        """Return the measured seconds, or None if this file was never measured on this hardware."""
        return self.seconds.get(hardware, {}).get(path)

    def updated(
        self, hardware: Hardware, measured: Iterable[tuple[str, float]], known: frozenset[str]
    ) -> "MeasuredTimes":
        """Return times with new values for these paths, and without paths that are no longer registered."""
        merged = {**self.seconds.get(hardware, {}), **{path: round(seconds, 2) for path, seconds in measured}}
        kept = {path: seconds for path, seconds in sorted(merged.items()) if path in known}
        return MeasuredTimes({**self.seconds, hardware.value: kept})

    def save(self, root: Path) -> Path:
        """Write the file, sorted and with one value per line, for readable diffs."""
        path = root / TIMES_PATH
        encoded = msgspec.json.encode(self.seconds, order="sorted")
        path.write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")
        return path


def estimate_findings(registry: Registry, times: MeasuredTimes) -> list[RegistryFinding]:
    """Return a finding for each estimate that is off its measured time by more than a factor of two."""
    findings = []
    for file in registry.files:
        for entry in file.registrations:
            measured = times.get(entry.hardware, file.path)
            if measured is None:
                continue
            low, high = sorted((max(entry.est_time_s, ESTIMATE_FLOOR_S), max(measured, ESTIMATE_FLOOR_S)))
            if high > ESTIMATE_FACTOR_MAX * low:
                problem = f"est_time={entry.est_time_s:g} but the file was measured at {measured:g} s"
                remedy = f"set est_time={max(1, round(measured))}"
                findings.append(RegistryFinding(file.path, entry.line, problem, remedy))
    return findings
