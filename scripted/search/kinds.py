"""Sorts the failures of a search by cause into kinds of failure, some of them known.

A failure is a known defect if that defect's fix prevents it. Otherwise it belongs to a kind if it has the kind's
settings and events, still fails with only these, and no longer fails in the same way without one of them. A failure
that no kind explains is shrunk, and then shrunk further while it fails in any way. It belongs to the kind with the same
wrong decision or the same simplest failure whose code it needs, more of it if the two do not fail alike.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeGuard, runtime_checkable

import msgspec

from scripted.core.defects import Defect, all_fixed, fixable, is_of
from scripted.core.placed_action import Placed
from scripted.core.refusals import HarnessError, ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.search.decisions import Decisions
from scripted.search.execution import Failure
from scripted.search.failure_database import SavedFailure
from scripted.search.other_tree import OtherTree
from scripted.search.shrinking import Shrunk, shrink, way_to_fail
from scripted.search.units import Finding

# How many kinds a search tells apart, and how many failures may wait to be sorted; more are only counted.
_KINDS_LIMIT: Final = 200
_WAITING_LIMIT: Final = 200
# The share of a search's time that goes to sorting, and how many seconds it may take at once.
_SHARE: Final = 0.3
_AT_ONCE_S: Final = 5.0
# Seconds for sorting the failures that still wait after the search.
_FINISH_S: Final = 30.0
# The search waits while a finding is shrunk; `scripted findings shrink` has more time.
_SHRINK_S: Final = 2.0
# Seconds for shrinking to a cause's simplest failure.
_SLIP_S: Final = 1.5
# Two failures with a smaller share of lines in common have different causes: any two events share some lines. The share
# depends on what else the two have in common: how they fail, and more if their wrong decisions differ; or the simplest
# failure alone, if neither has a wrong decision; or the wrong decision alone. A branch that leaves nothing to compute
# makes failures of any cause pass.
_ALIKE: Final = 0.3
_ALIKE_BUT_DECIDED: Final = 0.6
_OF_ONE_ROOT: Final = 0.5
_OF_ONE_DECISION: Final = 0.8
# A failure may contain the parts of several kinds.
_LAYERS: Final = 3


# A function and one of its lines.
_Line: TypeAlias = tuple[str, int]


@runtime_checkable
class HasParts(Protocol):
    """An adapter whose machine consists of several machines of another adapter, each with that adapter's defects.

    ``part_adapter`` is the adapter in whose table these defects are. ``fixed_settings`` say which machines there are:
    actions name these machines, so a schedule is not tried without them.
    """

    fixed_settings: Collection[str]

    @property
    def part_adapter(self) -> str: ...

    def retold(self, schedule: Schedule) -> Iterator[Schedule]:
        """Yield schedules of this adapter in which one machine may do what it does in its own adapter's schedule."""
        ...


class SchedulePart(NamedTuple):
    """A kind of event, or a setting or a field of an event that is not at its default."""

    event: str = ""
    name: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, self))


class Kind:
    """The failures of one cause. ``schedule`` is the smallest that shows it; None for a script.

    ``parts`` are the parts of ``schedule``, ``shapes`` the parts of all smallest schedules. ``decision`` is the
    scheduler's wrong decision. ``seen`` counts failures. ``defect`` names the known defect. ``number`` is the finding's
    number in the project's file; 0 if it is not kept. ``is_old``: an earlier search found it.
    """

    def __init__(
        self,
        finding: Finding,
        schedule: Schedule | None,
        failure: Failure,
        *,
        shrunk: Shrunk | None = None,
        decision: str = "",
        defect: Defect | None = None,
        number: int = 0,
    ) -> None:
        self.finding = finding
        self.schedule = schedule
        self.failure = failure
        self.shrunk = shrunk
        self.decision = decision
        # How its failures were found to fail; ``signatures`` also has the simplest failure.
        self.symptoms = {failure.signature, finding.failure.signature}
        self.signatures = set(self.symptoms)
        # The signature of the simplest failure; empty until the kind is examined.
        self.root = ""
        # The scheduler's lines that all of its failures need.
        self.needed: frozenset[_Line] = frozenset()
        self.is_examined = False
        self.defect = defect
        self.number = number
        self.is_old = bool(number)
        self.seen = 0 if defect or number else 1
        self.parts = frozenset() if schedule is None else parts_of(schedule)
        self.shapes = [] if schedule is None else [self.parts]

    def take(self, other: Kind) -> None:
        """Learn from another failure with this cause."""
        self.shapes += [other.parts] if other.parts not in self.shapes else []
        self.symptoms |= other.symptoms
        self.signatures |= other.signatures
        self.decision = self.decision or other.decision
        self.needed = self.needed & other.needed or self.needed

    @property
    def is_new(self) -> bool:
        return self.defect is None and not self.is_old

    @property
    def is_replayed(self) -> bool:
        """Return whether the schedule fails in a run from its beginning."""
        return self.shrunk is None or self.shrunk.fails

    @property
    def events(self) -> list[str]:
        """Return the kinds of event in the smallest schedule."""
        return sorted({part.event for part in self.parts if part.event})

    @property
    def settings(self) -> list[str]:
        """Return the settings of the smallest schedule that are not at their defaults."""
        return sorted(part.name for part in self.parts if not part.event)


class Sorter:
    """Sorts failures as they arrive. Calls ``on_new`` with each new kind.

    With ``against``, a schedule that also fails there is no finding, and ``in_both`` counts it. ``unsorted`` counts the
    failures that were not examined because of too many kinds or too little time.
    """

    def __init__(self, *, on_new: Callable[[Kind], None] = lambda _: None, against: OtherTree | None = None) -> None:
        self.kinds: list[Kind] = []
        self.gone: list[Defect] = []
        self.in_both = 0
        self.unsorted = 0
        self._on_new = on_new
        self._against = against
        self._waiting: list[Finding] = []
        # Known defects of one machine that have not been retold, and those of them that fail, once they are needed.
        self._of_parts: list[tuple[Defect, HasParts]] = []
        self._not_retold: list[tuple[Kind, HasParts]] = []
        self._sorted = Counter[str]()
        self._started = time.monotonic()
        self._spent_s = 0.0

    @property
    def new(self) -> list[Kind]:
        """Return the kinds that are neither known nor kept."""
        return [kind for kind in self.kinds if kind.is_new]

    def add_known(self, defect: Defect, adapter: str) -> None:
        """Run a known defect's schedules; if none fails, the defect is ``gone``."""
        tried = [_known(text, defect) for text in defect.schedules if is_of(text, adapter)]
        kinds = [kind for kind in tried if kind is not None]
        self.kinds += kinds
        if not kinds:
            self.gone.append(defect)

    def add_known_of_part(self, defect: Defect, whole: HasParts) -> None:
        """Recognize a known defect of one machine of the adapter ``whole``, which runs it when a failure may be it."""
        self._of_parts.append((defect, whole))

    def add_kept(self, saved: SavedFailure, failure: Failure) -> None:
        """Add a kept finding that still fails."""
        schedule = Schedule.parse(saved.schedule, of=saved.adapter)
        finding = Finding(str(schedule), (), failure, saved.adapter)
        kind = Kind(finding, schedule, failure, decision=saved.decision, number=saved.number)
        kind.shapes = [_fewest_parts(schedule, failure.signature)]
        self.kinds.append(kind)

    def add(self, finding: Finding) -> None:
        """Sort a failure now, or later if sorting has taken too much of the search's time."""
        elapsed = time.monotonic() - self._started
        self._waiting.append(finding)
        if len(self._waiting) > _WAITING_LIMIT:
            self._waiting.remove(max(self._waiting, key=self._often_sorted))
            self.unsorted += 1
        while self._waiting and self._spent_s < _AT_ONCE_S + _SHARE * elapsed:
            self._sort_newest()

    def finish(self, seconds: float = _FINISH_S) -> None:
        """Sort the failures that still wait, within the time limit."""
        until = time.monotonic() + seconds
        while self._waiting and time.monotonic() < until:
            self._sort_newest()
        self.unsorted += len(self._waiting)
        self._waiting.clear()

    def _often_sorted(self, finding: Finding) -> int:
        return self._sorted[finding.failure.signature]

    def _sort_newest(self) -> None:
        """Sort a failure of the least often sorted promise: common failures must not delay the others."""
        finding = min(self._waiting, key=self._often_sorted)
        self._waiting.remove(finding)
        self.sort(finding)

    def sort(self, finding: Finding) -> None:
        """Sort a failure now."""
        started = time.monotonic()
        self._sorted[finding.failure.signature] += 1
        schedule = finding.schedule
        if schedule is None:
            self._sort_script(finding)
        elif len(self.kinds) >= _KINDS_LIMIT:
            self.unsorted += 1
        else:
            self._sort(finding, schedule)
        self._spent_s += time.monotonic() - started

    def _sort_script(self, finding: Finding) -> None:
        """Sort a script's failure by promise, place and added events; a script cannot be shrunk."""
        events = sorted(one.action.kind for one in finding.extra)
        for kind in self.kinds:
            other = kind.finding
            if (
                kind.schedule is None
                and (other.target, other.failure.signature, other.failure.place)
                == (finding.target, finding.failure.signature, finding.failure.place)
                and sorted(one.action.kind for one in other.extra) == events
            ):
                kind.seen += 1
                return
        self._begin(Kind(finding, None, finding.failure))

    def _sort(self, finding: Finding, schedule: Schedule) -> None:
        signature = finding.failure.signature
        if not self._is_only_here(schedule, signature):
            self.in_both += 1
            return
        known = self._known_by_fix(schedule, signature)
        if known is not None:
            known.seen += 1
            return
        self._retell(signature)
        for _ in range(_LAYERS):
            kind, rest = self._explained(schedule, signature)
            if kind is None:
                break
            if rest is None:
                kind.seen += 1
                return
            schedule = rest
        shrunk = shrink(
            schedule, signature, budget_s=_SHRINK_S, keeps=lambda smaller: self._is_only_here(smaller, signature)
        )
        # A smaller action may be of another kind, and known as that.
        kind, rest = self._explained(shrunk.schedule, signature)
        if kind is not None and rest is None:
            kind.seen += 1
            return
        _, failure = way_to_fail(shrunk.schedule, signature)
        found = Kind(finding, shrunk.schedule, failure or finding.failure, shrunk=shrunk)
        same = self._same(found)
        if same is None:
            self._begin(found)
        else:
            same.seen += 1
            same.take(found)

    def _begin(self, kind: Kind) -> None:
        self.kinds.append(kind)
        self._on_new(kind)

    def _retell(self, signature: str) -> None:
        """Retell the machines' known defects that break this promise; compare one that cannot be retold as it is."""
        for defect, whole in self._of_parts:
            texts = [text for text in defect.schedules if is_of(text, whole.part_adapter)]
            kinds = [_known(text, defect) for text in texts]
            self._not_retold += [(kind, whole) for kind in kinds if kind is not None]
        self._of_parts.clear()
        for kind, whole in [one for one in self._not_retold if one[0].failure.signature == signature]:
            self._not_retold.remove((kind, whole))
            self.kinds += _retold(kind, whole, signature) or [kind]

    def _known_by_fix(self, schedule: Schedule, signature: str) -> Kind | None:
        """Return the known defect whose fix takes this failure away; the first of several that are needed together."""
        parts = parts_of(schedule)
        likely = sorted(self.kinds, key=lambda kind: (not any(shape <= parts for shape in kind.shapes), -kind.seen))
        known: dict[str, Kind] = {}
        for kind in likely:
            if kind.defect is not None:
                known.setdefault(kind.defect.id, kind)
        defects = fixable(kind.defect for kind in known.values() if kind.defect is not None)
        if not defects or _fails_fixed(schedule, signature, defects):
            return None
        for defect in defects:
            if not _fails_fixed(schedule, signature, [defect]):
                return known[defect.id]
        for defect in reversed(defects):
            rest = tuple(one for one in defects if one.id != defect.id)
            defects = defects if _fails_fixed(schedule, signature, rest) else rest
        return known[defects[0].id]

    def _explained(self, schedule: Schedule, signature: str) -> tuple[Kind | None, Schedule | None]:
        """Return the kind that explains this failure, or a schedule that fails in the same way without a kind's cause.

        A schedule may have two causes, and the second must not hide behind the first.
        """
        parts = parts_of(schedule)
        for kind in self.kinds:
            if kind.schedule == schedule and kind.failure.signature == signature:
                return kind, None
            for shape in kind.shapes:
                if not shape <= parts or not _shows(kind, restricted(schedule, shape)):
                    continue
                rests = [rest for part in sorted(shape) if _has_starts(rest := _without(schedule, part))]
                still = [rest for rest in rests if _fails(rest, signature)]
                if not still and (rests or signature == kind.failure.signature):
                    return kind, None
                if len(still) == len(rests) and still:
                    return kind, still[0]
        return None, None

    def _same(self, found: Kind) -> Kind | None:
        """Return the kind with the same cause for a failure that none explains: the one with most code in common."""
        self._examine(found)
        self._retell(found.root)
        alike: list[tuple[float, Kind]] = []
        for kind in self.kinds:
            is_near = kind.failure.signature in found.signatures or set(kind.settings) <= set(found.settings)
            if is_near or kind.decision == found.decision != "":
                self._examine(kind)
            needed = _needed_likeness(kind, found)
            if needed is not None and (likeness := _likeness(kind, found)) >= needed:
                alike.append((likeness - needed, kind))
        return max(alike, key=lambda one: one[0], default=(0.0, None))[1]

    def _examine(self, kind: Kind) -> None:
        """Find, once, a kind's simplest failure, its wrong decision and the code that it needs.

        Symptoms of one cause shrink to the same failure if a smaller schedule may fail in any way.
        """
        if kind.is_examined or kind.schedule is None:
            return
        kind.is_examined = True
        slipped = shrink(kind.schedule, kind.failure.signature, budget_s=_SLIP_S, slips=True, keeps=self._passes_there)
        root = _failure(slipped.schedule)
        kind.root = kind.failure.signature if root is None else root.signature
        kind.signatures.add(kind.root)
        decisions = Decisions(kind.schedule)
        branch = decisions.wrong()
        kind.decision = kind.decision if branch is None else str(branch)
        kind.needed = decisions.needed(_neighbours(kind))

    def _passes_there(self, schedule: Schedule) -> bool:
        return self._against is None or self._against.failure_of(schedule, "") is None

    def _is_only_here(self, schedule: Schedule, signature: str) -> bool:
        return self._against is None or self._against.failure_of(schedule, signature) is None


def _needed_likeness(kind: Kind, other: Kind) -> float | None:
    """Return how like two kinds must be to have one cause; None if nothing says that they have one.

    In a release with several defects the failure of one may shrink to that of another. So the simplest failure counts
    only beside a common symptom, or if neither has a wrong decision.
    """
    is_one_decision = kind.decision == other.decision != ""
    is_one_root = kind.root == other.root != ""
    is_alike = bool(kind.symptoms & other.symptoms)
    if is_one_decision:
        return _ALIKE if is_alike else _OF_ONE_DECISION
    if not is_one_root:
        return None
    if is_alike:
        return _ALIKE_BUT_DECIDED if kind.decision and other.decision else _ALIKE
    return None if kind.decision or other.decision else _OF_ONE_ROOT


def _likeness(kind: Kind, other: Kind) -> float:
    """Return the share of the shorter list's lines that are also in the other list.

    If the lines of one are unknown, return the share of parts that both have among all parts of the two.
    """
    if kind.needed and other.needed:
        return len(kind.needed & other.needed) / min(len(kind.needed), len(other.needed))
    return len(kind.parts & other.parts) / max(1, len(kind.parts | other.parts))


def _shows(kind: Kind, schedule: Schedule | None) -> bool:
    """Return whether a schedule with only a kind's parts breaks a promise that the kind breaks."""
    failure = _failure(schedule)
    return failure is not None and failure.signature in kind.signatures


def parts_of(schedule: Schedule) -> frozenset[SchedulePart]:
    """Return the parts of a schedule, without its numbers."""
    names = schedule.adapter.config_words(schedule.config).keys() - _fixed_settings(schedule)
    found = {SchedulePart(name=name) for name in names}
    for one in schedule.placed:
        found.add(SchedulePart(one.action.kind))
        found.update(SchedulePart(one.action.kind, name) for name in _set_fields(one))
    return frozenset(found)


def _fixed_settings(schedule: Schedule) -> Collection[str]:
    return frozenset(schedule.adapter.fixed_settings) if isinstance(schedule.adapter, HasParts) else ()


def restricted(schedule: Schedule, parts: frozenset[SchedulePart]) -> Schedule | None:
    """Return the schedule with only these parts: other settings and fields at their defaults, other events left out.

    None if the adapter refuses that schedule.
    """
    words = schedule.adapter.config_words(schedule.config)
    fixed = _fixed_settings(schedule)
    kept = {name: str(value) for name, value in words.items() if name in fixed or SchedulePart(name=name) in parts}
    try:
        placed = [_plain(one, parts) for one in schedule.placed if SchedulePart(one.action.kind) in parts]
        return schedule.with_config(schedule.adapter.read_config(kept)).of_placed(placed)
    except (ScriptDefinitionError, ValueError):
        return None


def _plain(placed: Placed, parts: frozenset[SchedulePart]) -> Placed:
    """Return the event with only these fields; the others get their defaults."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(placed.action)}
    kind = placed.action.kind
    plain = {name: defaults[name] for name in _set_fields(placed) if SchedulePart(kind, name) not in parts}
    return Placed(placed.step, msgspec.structs.replace(placed.action, **plain))


def _neighbours(kind: Kind) -> Iterator[Schedule]:
    """Return the smallest schedule without each of its parts in turn."""
    assert kind.schedule is not None, "it was shrunk"
    for part in sorted(kind.parts):
        if _has_starts(other := _without(kind.schedule, part)):
            yield other


def _has_starts(schedule: Schedule | None) -> TypeGuard[Schedule]:
    return schedule is not None and any(one.action.is_start for one in schedule.placed)


def _without(schedule: Schedule, part: SchedulePart) -> Schedule | None:
    return restricted(schedule, parts_of(schedule) - {part})


def _set_fields(placed: Placed) -> Iterator[str]:
    for field in msgspec.structs.fields(placed.action):
        has_default = field.default is not msgspec.NODEFAULT
        if has_default and field.name != "rid" and getattr(placed.action, field.name) != field.default:
            yield field.name


def _known(text: str, defect: Defect) -> Kind | None:
    """Return a known defect as a kind; None if its schedule passes or this version refuses it."""
    try:
        schedule = Schedule.parse(text)
    except (ScriptDefinitionError, ValueError):
        return None
    failure = _failure(schedule)
    return None if failure is None else _shown_by(schedule, defect, failure)


def _retold(kind: Kind, whole: HasParts, signature: str) -> list[Kind]:
    """Return a known defect of one machine as the whole shows it: once for each set of events that fails like this."""
    assert kind.schedule is not None, "a known defect is a schedule's"
    assert kind.defect is not None, "only known defects are retold"
    found: dict[frozenset[str], Kind] = {}
    for schedule in whole.retold(kind.schedule):
        events = frozenset(one.action.kind for one in schedule.placed)
        failure = None if events in found else _failure(schedule, signature)
        if failure is not None and failure.signature == signature:
            found[events] = _shown_by(schedule, kind.defect, failure)
    return list(found.values())


def _shown_by(schedule: Schedule, defect: Defect, failure: Failure) -> Kind:
    """Return a known defect as the kind of this failing schedule."""
    kind = Kind(Finding(str(schedule), (), failure, schedule.of), schedule, failure, defect=defect)
    kind.shapes = [_fewest_parts(schedule, failure.signature)]
    return kind


def _fewest_parts(schedule: Schedule, signature: str) -> frozenset[SchedulePart]:
    """Return the parts that a failing schedule needs; a hand-written schedule may have more."""
    needs_starts = _has_starts(schedule)
    for part in sorted(parts_of(schedule)):
        smaller = _without(schedule, part)
        if smaller is not None and (_has_starts(smaller) or not needs_starts) and _fails(smaller, signature):
            schedule = smaller
    return parts_of(schedule)


def _fails(schedule: Schedule | None, signature: str) -> bool:
    """Return whether a schedule fails like this; False if it makes no run."""
    failure = _failure(schedule, signature)
    return failure is not None and failure.signature == signature


def _fails_fixed(schedule: Schedule, signature: str, defects: Collection[Defect]) -> bool:
    """Return whether a schedule fails like this although these defects are fixed."""
    with all_fixed(defects):
        return _fails(schedule, signature)


def _failure(schedule: Schedule | None, signature: str | None = None) -> Failure | None:
    if schedule is None:
        return None
    try:
        return way_to_fail(schedule, signature)[1]
    except (ScriptDefinitionError, HarnessError, ValueError):
        return None
