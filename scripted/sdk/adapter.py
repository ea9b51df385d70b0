"""The adapter of a machine, with its declarations: configuration, limits, capabilities, workloads, mutants."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeAlias, get_type_hints

import msgspec
from typing_extensions import TypeVar

from scripted.core.account import Account
from scripted.core.action import Action, RunLike
from scripted.core.base_adapter import BaseAdapter, written_call
from scripted.core.common_actions import ReleaseResults
from scripted.core.errors import Overdue
from scripted.core.forks import Copier, Frozen
from scripted.core.machine import Closable, Machine, close_machine
from scripted.core.mutant import Mutant
from scripted.core.phrases import nearest, text_of
from scripted.core.placed_action import Placed
from scripted.core.prompts import PROMPT_CALL, PROMPT_IMPORT
from scripted.core.protocol import ADAPTER_API, ChecksRecords, ConfigValue, SkipsChecks, TestHead, WrittenTest
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.results import Results
from scripted.core.schedule import Schedule, settings_in
from scripted.core.server_description import ServerDescription
from scripted.core.states import StateReader
from scripted.core.translation import Translated
from scripted.core.violation import Violation
from scripted.report.rerun import Rerun
from scripted.report.step_log import StepLog
from scripted.script.harness import ScriptedServer, ScriptedSim, ServerPool
from scripted.script.options import ScriptOptions
from scripted.script.source import ScriptFunction
from scripted.sdk.actions import ResumeAll, WakeAll, actions_of
from scripted.sdk.as_schedule import plan_of, schedule_of, schedule_of_flight
from scripted.sdk.capabilities import Capabilities, Declaration, Limits
from scripted.sdk.flight.frames import FlightHeader
from scripted.sdk.flight.of_machine import MachineOfFlight
from scripted.sdk.flight.reader import is_flight, read_flight
from scripted.sdk.flight.replay import FlightMachine, replay_flight
from scripted.sdk.flight.shown import rerun_of
from scripted.sdk.flight.standing import Stand
from scripted.sdk.fresh import Fresh
from scripted.sdk.live.launch import Launcher
from scripted.sdk.messages import Abort, Event, FlushCache, Record, Step, Stepped, Wake
from scripted.sdk.oracle import SdkOracle
from scripted.sdk.pipeline import SimulatedRunner
from scripted.sdk.recording import read_recording, replayed
from scripted.sdk.shape import wrong_in_machine, wrong_in_step
from scripted.sdk.space import SchedulerSpace
from scripted.sdk.standalone import Standalone, write_standalone
from scripted.sdk.step_words import log_of
from scripted.sdk.workloads import workloads_of
from scripted.search.execution import Outcome
from scripted.search.mutant_search import Found

if TYPE_CHECKING:
    from scripted.script.execution import ScriptOutcome

_WIDTH: Final = 116
# Names with another meaning in @scripted(...).
_OPTIONS: Final = frozenset({"config", "adapter", "tiers", "timeout_s", "max_steps", "oracle", "must_reach"})
# The name of a request that never existed; no schedule uses it.
UNKNOWN_RID: Final = "unknown-rid"


# The windows of every scheduler: the situations in which most races hide.
WINDOWS: Final[Mapping[str, Callable[[RunLike], bool]]] = {
    "all batches are in flight": lambda run: len(run.results) >= run.machine.depth,
    "no block is free": lambda run: run.machine.counts().get("blocks_free") == 0,
    "a preempted request waits": lambda run: any(
        life.launched and life.computed is None for life in run.oracle.account.live.values()
    ),
    "an ended request has a batch in flight": lambda run: any(
        share.rid not in run.oracle.account.live for batch in run.oracle.in_flight for share in batch.shares
    ),
}

_SettingsT = TypeVar("_SettingsT", bound=msgspec.Struct, default=Any)
_MachineT = TypeVar("_MachineT", bound=Machine[Event, Stepped], default=Any)
SdkRunLike: TypeAlias = RunLike[_SettingsT, Event, Step, Stepped, Record, _MachineT, SimulatedRunner, SdkOracle]


class _Declared(msgspec.Struct, Generic[_SettingsT, _MachineT], frozen=True, kw_only=True):
    """The arguments of a ``SchedulerAdapter``, from which a variant with other defaults is made."""

    config: type[_SettingsT]
    machine: Callable[[_SettingsT], _MachineT]
    limits: Callable[[_SettingsT], Limits]
    can: Callable[[_SettingsT], Capabilities]
    workloads: Mapping[str, str]
    settings: Mapping[str, Sequence[object]]
    needed: Mapping[str, Mapping[str, Sequence[object]]]
    crowded: Mapping[str, Sequence[object]]
    scenes: Mapping[str, Mapping[str, tuple[str, ...]]]
    actions: Mapping[type[Action], Mapping[str, Sequence[object]]]
    undoing: Sequence[Action]
    mutants: Sequence[Mutant]
    copier: Copier | None
    may_grow: Collection[str]
    packages: Sequence[str]
    windows: Mapping[str, Callable[[RunLike], bool]]
    standalone: Standalone | None
    live: Launcher | None
    server: ServerDescription[_SettingsT]
    api: int


def _default_of(name: str, config: type[_SettingsT]) -> _SettingsT:
    """Make the default configuration. Raises ScriptDefinitionError unless it is complete and immutable."""
    rule = f"the configuration of {name} is a frozen msgspec.Struct whose fields all have defaults"
    if not (isinstance(config, type) and issubclass(config, msgspec.Struct)):
        raise ScriptDefinitionError(f"{rule}, got {config!r:.80}")
    try:
        default = config()
        hash(default)
    except TypeError as exc:
        raise ScriptDefinitionError(f"{rule}: {exc}") from exc
    return default


def _check_functions(name: str, default: object, **parts: tuple[Callable[..., object], type]) -> None:
    """Raise ScriptDefinitionError for a part that is not a function from a configuration to its type."""
    for part, (function, made) in parts.items():
        if not callable(function) or not isinstance(function(default), made):
            raise ScriptDefinitionError(
                f"{part}= of {name} is a function that returns the {made.__name__} of a configuration"
            )


class SchedulerAdapter(
    BaseAdapter[_SettingsT, Event, Step, Stepped, Record, _MachineT, SimulatedRunner, SdkOracle],
    Generic[_SettingsT, _MachineT],
):
    """Implements the adapter protocol for a machine of the usual shape.

    ``machine`` makes a new machine for a configuration, an object of ``config``: a frozen ``msgspec.Struct`` whose
    fields all have defaults. ``limits`` and ``can`` return the limits and capabilities of a configuration. ``copier``
    copies a machine between two steps; with None every schedule starts at its beginning. ``may_grow`` lists parts of
    container paths that need not be empty at the end. ``workloads`` are further base schedules by name, ``settings``
    further values of settings for generated targets. ``actions`` are further actions, each with the settings and values
    without which it has nothing to act on; ``undoing`` are actions that undo them. ``needed`` lists such settings for
    others that need them: a setting that otherwise makes no machine or no difference, or requests with priorities,
    LoRAs, grammars, sessions or images. ``crowded`` are settings under which requests meet: with them, some generated
    targets consist of such requests and little else; ``scenes`` are further ones by name, each with the features that
    it needs and their levels. ``packages`` are the scheduler's: an exception raised by their code is a finding, even if
    the harness only looked at the machine.
    ``windows`` are situations that a search should reach, by name, besides the common ones (``WINDOWS``).
    ``standalone`` describes how to write a finding without the adapter, ``live`` how to start a real server for the
    server tier of scripts, ``server`` how a configuration relates to a server's settings. ``api`` is the version of
    this interface that the adapter is written for.
    """

    violations: tuple[type[Exception], ...] = ()
    states = StateReader({
        Account: ("calls", "preemptions"),
        Results: ("_has_kept", "_ineffective_holds"),
        SdkOracle: ("_can", "_fresh", "_limits"),
    })  # fmt: skip
    # Another engine's live server takes minutes to start.
    starts_quickly = False

    def __init__(
        self,
        name: str,
        *,
        config: type[_SettingsT],
        machine: Callable[[_SettingsT], _MachineT],
        limits: Callable[[_SettingsT], Limits],
        can: Callable[[_SettingsT], Capabilities],
        workloads: Mapping[str, str] | None = None,
        settings: Mapping[str, Sequence[object]] | None = None,
        needed: Mapping[str, Mapping[str, Sequence[object]]] | None = None,
        crowded: Mapping[str, Sequence[object]] | None = None,
        scenes: Mapping[str, Mapping[str, tuple[str, ...]]] | None = None,
        actions: Mapping[type[Action], Mapping[str, Sequence[object]]] | None = None,
        undoing: Sequence[Action] = (),
        mutants: Sequence[Mutant] = (),
        copier: Copier | None = None,
        may_grow: Collection[str] = (),
        packages: Sequence[str] = (),
        windows: Mapping[str, Callable[[RunLike], bool]] | None = None,
        standalone: Standalone | None = None,
        live: Launcher | None = None,
        server: ServerDescription[_SettingsT] | None = None,
        api: int = ADAPTER_API,
    ) -> None:
        self.name = name
        self.api = api
        self.configuration = config
        self._declared = _Declared(
            config=config,
            machine=machine,
            limits=limits,
            can=can,
            workloads=workloads or {},
            settings=settings or {},
            needed=needed or {},
            crowded=crowded or {},
            scenes=scenes or {},
            actions=actions or {},
            undoing=undoing,
            mutants=mutants,
            copier=copier,
            may_grow=may_grow,
            packages=packages,
            windows=windows or {},
            standalone=standalone,
            live=live,
            server=server or ServerDescription(),
            api=api,
        )
        self._fresh: dict[_SettingsT, Fresh] = {}
        if copier is not None:
            copier.share(Fresh)
        self._describe(self._declared)
        self._build_space(self._declared, _default_of(name, config))

    def _describe(self, declared: _Declared[_SettingsT, _MachineT]) -> None:
        """Set the attributes that describe the scheduler and its findings."""
        self.packages = tuple(declared.packages)
        self.windows: Mapping[str, Callable[[RunLike], bool]] = {**WINDOWS, **declared.windows}
        self.standalone = declared.standalone
        self.live = declared.live
        self.server = declared.server
        self.mutants = {mutant.name: mutant for mutant in declared.mutants}

    def _build_space(self, declared: _Declared[_SettingsT, _MachineT], default: _SettingsT) -> None:
        """Set what a search draws from: workloads, settings, and the actions that some configuration allows."""
        _check_functions(self.name, default, limits=(declared.limits, Limits), can=(declared.can, Capabilities))
        limits, can = self.limits_of(default)
        self.workloads: Mapping[str, str] = {**workloads_of(limits, can), **declared.workloads}
        self.space = SchedulerSpace(
            self,
            declared.config,
            declared.settings,
            declared.actions,
            declared.needed,
            declared.crowded,
            declared.scenes,
        )
        self.actions: tuple[type[Action], ...] = (*actions_of(can), *declared.actions)
        self.resuming: Action | None = ResumeAll() if can.pause_modes else None
        resuming = () if self.resuming is None else (self.resuming,)
        self.undoing: tuple[Action, ...] = (ReleaseResults(count=1), ReleaseResults(), *resuming, *declared.undoing)

    # -- configurations --

    def read_config(self, words: Mapping[str, str]) -> _SettingsT:
        """Parse a configuration. Raises ScriptDefinitionError that names the field."""
        known = self.configuration.__struct_fields__
        for name in words:
            if name not in known:
                raise ScriptDefinitionError(
                    f"{self.name} has no setting {name!r}{nearest(name, known)}; it has {', '.join(known)}"
                )
        try:
            config: _SettingsT = msgspec.convert(dict(words), self.configuration, strict=False)
        except msgspec.ValidationError as exc:
            raise ScriptDefinitionError(f"a setting of {self.name} cannot be read: {exc}") from exc
        return config

    def config_words(self, config: _SettingsT) -> Mapping[str, ConfigValue]:
        """Return the values that are not at their defaults."""
        default = msgspec.structs.asdict(self.configuration())
        return {name: value for name, value in msgspec.structs.asdict(config).items() if value != default[name]}

    def variant(self, name: str, defaults: Mapping[str, str]) -> Self:
        """Return the adapter called ``name`` whose settings have these defaults. Raises ScriptDefinitionError."""
        changed = self.read_config(defaults)
        hints = get_type_hints(self.configuration)
        fields = [(setting, hints[setting], getattr(changed, setting)) for setting in defaults]
        # A process that receives such a configuration finds its class under this name.
        kind = re.sub(r"\W", "_", f"{self.configuration.__name__}_{name}")
        module = sys.modules[self.configuration.__module__]
        config = msgspec.defstruct(
            kind, fields, bases=(self.configuration,), frozen=True, kw_only=True, module=module.__name__
        )
        setattr(module, kind, config)
        made = type(self)(name, **{**msgspec.structs.asdict(self._declared), "config": config})
        made.workloads = {one: text for one, text in made.workloads.items() if made.has_settings_of(text)}
        return made

    def has_settings_of(self, text: str) -> bool:
        """Whether the settings of a schedule agree with the defaults."""
        try:
            self.read_config(settings_in(text))
        except (ValueError, ScriptDefinitionError):
            return False
        return True

    def smaller_configs(self, config: _SettingsT) -> Iterator[_SettingsT]:
        """Yield configurations with one setting at the server's default, or at the adapter's if it is a size."""
        for _, usual in self.server.usual_configs(config):
            yield usual
        default = msgspec.structs.asdict(self.configuration())
        for name in self.server.sizes:
            if name in self.config_words(config):
                with suppress(ValueError):
                    yield msgspec.structs.replace(config, **{name: default[name]})

    def limits_of(self, config: _SettingsT) -> Declaration:
        return Declaration(self._declared.limits(config), self._declared.can(config))

    def first_commands(self, config: _SettingsT) -> Sequence[str]:
        """Start a prompt of two batches, or of one if prompts are not cut, and step until a batch is in flight."""
        limits, can = self.limits_of(config)
        tokens = min(limits.batch_tokens + can.chunked, limits.context_tokens - 2, limits.pool_tokens - 2)
        return f"start prompt_len={max(1, tokens)} max_new_tokens=2", "until state.in_flight", "step"

    # -- a run --

    @property
    def checks_alike(self) -> bool:
        """Return whether every run makes the same checks, recorded or not."""
        return not isinstance(self, (SkipsChecks, ChecksRecords))

    def new_parts(self, config: _SettingsT, *, record: bool) -> tuple[_MachineT, SimulatedRunner, SdkOracle]:
        del record
        limits, can = self.limits_of(config)
        fresh = self._fresh_of(config)
        return self._new_machine(config), SimulatedRunner(limits, can), SdkOracle(limits, can, fresh)

    def _new_machine(self, config: _SettingsT) -> _MachineT:
        try:
            return self._declared.machine(config)
        except Overdue:
            raise
        except (Exception, SystemExit) as exc:
            raise ScriptDefinitionError(
                f"the machine of {self.name} cannot be made of {config!r}: {type(exc).__name__}: {text_of(exc)}"
            ) from exc

    def _fresh_of(self, config: _SettingsT) -> Fresh:
        if config not in self._fresh:
            copier = self._declared.copier
            leaves = () if copier is None else copier.shared
            machine = self._new_machine(config)
            wrong = wrong_in_machine(machine)
            if wrong is not None:
                close_machine(machine)
                raise ScriptDefinitionError(f"the machine of {self.name} {wrong}; docs/adapter_sdk.md")
            self._fresh[config] = Fresh(machine, self.may_grow_of(config), leaves)
            close_machine(machine)
        return self._fresh[config]

    def may_grow_of(self, config: _SettingsT) -> tuple[str, ...]:
        """Return parts of the paths of containers that need not be empty at the end."""
        del config
        return tuple(self._declared.may_grow)

    def new_step(self, events: tuple[Event, ...], now: float) -> Step:
        return Step(events, now)

    def take_step(self, run: SdkRunLike[_SettingsT, _MachineT], step: Step) -> Stepped:
        """Do a single iteration of ``drive``."""
        try:
            stepped = run.machine.step(step.events, step.now)
        except SystemExit as exc:
            raise Violation(f"a step ends the process, by SystemExit({text_of(exc)!r})") from exc
        wrong = wrong_in_step(stepped)
        if wrong is not None:
            run.fault(f"step() of the machine of {self.name} {wrong}")
        run.device.follow(step.events, stepped)
        if stepped.microbatch is not None:
            run.device.launch(stepped.microbatch)
        return stepped

    def where(self, run: SdkRunLike[_SettingsT, _MachineT], rid: str | None) -> tuple[str, str]:
        """Read the coverage cell off the account of replies and computed positions."""
        live = run.oracle.account.live
        if rid is None:
            state = "+".join(sorted({life.state for life in live.values()})) or "no request"
        else:
            state = live[rid].state if rid in live else "not alive"
        batches = run.oracle.in_flight
        full = "full" if len(batches) >= self.limits_of(run.config)[0].depth else "some"
        return state, full if batches else "empty"

    def obstacle(self, run: SdkRunLike[_SettingsT, _MachineT]) -> Action | None:
        """Return the wake that open requests need; an adapter with other obstacles calls this as well."""
        to_wake = () if run.is_settled else run.oracle.to_wake
        return WakeAll(part=to_wake[0]) if to_wake else None

    def finale(self, run: SdkRunLike[_SettingsT, _MachineT], turn: int) -> Sequence[Event]:
        """Abort requests that are not alive, which changes nothing; then wake the device, and flush if declared."""
        if turn == 0:
            ended = [life.message.rid for life in run.oracle.account.lives[-1:]]
            return [Abort(rid=rid) for rid in (UNKNOWN_RID, *ended)]
        if turn != 1:
            return ()
        last: list[Event] = [Wake(call_id=run.new_call_id(), part=part) for part in run.oracle.to_wake]
        last += [FlushCache(call_id=run.new_call_id())] if self.limits_of(run.config)[1].flush else []
        return last

    def record_step(self, step: Step, stepped: Stepped | None, machine: _MachineT, error: str | None) -> Record:
        """Record a step with the machine's counts after it."""
        return Record(step, stepped, dict(machine.counts()), error)

    def as_log(self, records: Sequence[Record], config: _SettingsT) -> StepLog:
        return log_of(records, self._declared.limits(config))

    def freeze(self, run: SdkRunLike[_SettingsT, _MachineT]) -> Frozen[SdkRunLike[_SettingsT, _MachineT]] | None:
        """Freeze the run as it is now; None without a copier, and for a machine that has to be closed."""
        copier = self._declared.copier
        return None if copier is None or isinstance(run.machine, Closable) else Frozen(run, copier)

    # -- recordings --

    def flight_machine(self, header: FlightHeader) -> FlightMachine:
        """Make a machine from the settings of a flight. Raises ScriptDefinitionError."""
        config = self.read_config(header.words)
        return MachineOfFlight(self._new_machine(config), *self.limits_of(config))

    def version(self) -> str:
        """Return an empty text: a scheduler in a file has no release."""
        return ""

    def replay_recording(self, path: Path, *, until: int | None, last_steps: int | None) -> Rerun:
        """Replay a flight or a ``Recorder``'s file. Raises ScriptDefinitionError for any other file."""
        del last_steps
        if is_flight(path):
            flight = read_flight(path)
            return rerun_of(self, flight, replay_flight(self, flight, until=until))
        return replayed(self, read_recording(path), until=until)[0]

    def schedule_of_recording(self, path: Path, *, until: int | None) -> Translated:
        """Translate a flight or a ``Recorder``'s file. Raises ScriptDefinitionError for any other file."""
        if is_flight(path):
            flight = read_flight(path)
            config = self.read_config(flight.header.words)
            return schedule_of_flight(self, config, flight, replay_flight(self, flight, until=until))
        recording = read_recording(path)
        return schedule_of(self, self.read_config(recording.header.config), recording.records[:until])

    def stands_in(self, path: Path) -> Sequence[Stand]:
        """Return the requests that are stuck at the end of a flight. Raises ScriptDefinitionError."""
        return replay_flight(self, read_flight(path)).stands

    def plan_of(self, record: Record) -> object:
        return plan_of(record, {})

    # -- mutants --

    def write_mutants(self, page: Path, found: Sequence[Found]) -> None:
        """Write a table for this adapter; an existing page keeps the text above its first table."""
        from lockstep.output_files import write_output  # a search imports nothing of the engine

        above = page.read_text(encoding="utf-8").split("| bug |", maxsplit=1)[0] if page.exists() else ""
        rows = ["| bug | origin | found |", "| --- | --- | --- |"]
        for one in found:
            mutant = self.mutants[one.mutant]
            nearness = f" ({mutant.nearness})" if mutant.nearness else ""
            rows.append(f"| `{one.mutant}`: {mutant.bug}{nearness} | {mutant.origin} | {one.result} |")
        write_output(page, above + "\n".join(rows) + "\n")

    # -- tests --

    def run_script(
        self,
        script: ScriptFunction,
        arguments: Mapping[str, object],
        *,
        config: _SettingsT,
        options: ScriptOptions,
        mutant: str | None,
    ) -> ScriptOutcome:
        """Run a generator function that takes ``t``. Raises ScriptFailed or ScriptTimeout."""
        from scripted.sdk.script.runner import run_script

        return run_script(self, script, arguments, config=config, options=options, mutant=mutant)

    def check_script(self, config: object, *, tiers: tuple[str, ...], oracle: bool, placement: str) -> None:
        """Allow the server tier only with a live server, and insist on all checks."""
        del config
        if not oracle:
            raise ScriptDefinitionError(
                f"a script of the adapter {self.name} has a judge that checks every token; leave out oracle"
            )
        if placement != "local":
            raise ScriptDefinitionError(f"the adapter {self.name} places no stages, got placement={placement!r}")
        if "server" in tiers and self.live is None:
            raise ScriptDefinitionError(
                f"the adapter {self.name} has no live server, so its scripts run in the sim tier; leave out tiers"
            )

    def start_sim(self, config: object, *, mutant: str | None) -> ScriptedSim[object, ScriptOutcome]:
        from scripted.sdk.script.runner import SdkSim

        return SdkSim(self, config, mutant=mutant)

    def why_no_servers(self) -> str:
        return "" if self.live else f"the adapter {self.name} has no live server; use --tier sim"

    def start_server(
        self, config: object, *, mutant: str | None, placement: str
    ) -> ScriptedServer[object, ScriptOutcome]:
        from scripted.sdk.live.server import LiveServer  # needs ZMQ

        del placement
        return LiveServer(self._launcher, config, mutant=mutant)

    def new_servers(self) -> ServerPool:
        from scripted.sdk.live.server import LiveServers  # needs ZMQ

        return LiveServers(self._launcher)

    @property
    def _launcher(self) -> Launcher:
        assert self.live is not None, "servers_of() has refused an adapter without a live server"
        return self.live

    def settling(self, placed: Sequence[Placed], outcome: Outcome) -> list[Placed]:
        """Return the actions that ended its run; a script ends like a schedule, so a broken run leaves nothing open."""
        del placed
        return list(outcome.implied)

    def standalone_test(self, schedules: Sequence[Schedule], *, name: str) -> WrittenTest:
        """Write the calls of its machine. Raises ScriptDefinitionError if the adapter has no ``standalone``."""
        if self.standalone is None:
            raise ScriptDefinitionError(
                f"the adapter {self.name} writes no standalone tests, for it has no standalone=; leave --standalone out"
            )
        return write_standalone(self.standalone, schedules, name=name)

    def test_head(self, config: _SettingsT, body: str) -> TestHead:
        """Return the head of a test. Raises ScriptDefinitionError if ``@scripted`` cannot express the configuration."""
        words = self.config_words(config)
        taken = sorted(_OPTIONS.intersection(words))
        if taken:
            raise ScriptDefinitionError(
                f"the setting {taken[0]!r} of {self.name} is an option of @scripted too, so no test can be written; "
                "call it something else in the adapter's configuration"
            )
        arguments = [f'adapter="{self.name}"', *(f"{name}={value!r}" for name, value in words.items())]
        more = (PROMPT_IMPORT,) if PROMPT_CALL in body else ()
        return TestHead(written_call("@scripted", arguments, _WIDTH), more=more)
