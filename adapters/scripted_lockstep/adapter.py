"""The adapter ``lockstep``: the engine's own scheduler, driven by the engine's own loop, checked by all its checks."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from engine.core.config import EngineConfig
from engine.core.errors import EngineError
from engine.core.limits import Limits
from engine.core.messages import Event, GetStats
from engine.core.plan import ForwardMode
from engine.core.scheduler import Scheduler, Step, StepRecord, StepResult, carry_out, run_loop
from lockstep.extras import INSTALL_SERVE, serve_is_installed
from scripted.core.action import Action, RunLike
from scripted.core.adapters import DEFAULT_ADAPTER
from scripted.core.base_adapter import BaseAdapter, written_call
from scripted.core.common_actions import HoldResults, ReleaseResults
from scripted.core.mutant import Mutant
from scripted.core.placed_action import Placed
from scripted.core.prompts import PROMPT_CALL, PROMPT_IMPORT
from scripted.core.protocol import ConfigValue, TestHead
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.translation import Translated
from scripted.report.new_files import render_source
from scripted.report.rerun import Rerun
from scripted.report.step_log import StepLog
from scripted.script.harness import ScriptedServer, ServerPool
from scripted.script.loader import find_test
from scripted.script.options import ScriptOptions
from scripted.script.source import ScriptFunction
from scripted.sdk.flight.standing import Stand
from scripted.search.execution import Outcome
from scripted.search.generated import Space
from scripted.search.mutant_search import Found
from scripted_lockstep.actions import (
    Flush,
    HoldTransfers,
    PauseServing,
    Press,
    ReleaseGrammars,
    ReleaseLoras,
    ReleaseTransfers,
    Relieve,
    ResumeServing,
    ResumeStage,
    SleepServing,
    StallStage,
    Update,
    WakeServing,
    all_actions,
)
from scripted_lockstep.configs import config_values, limits_of, smaller_configs
from scripted_lockstep.gallery_page import write_gallery
from scripted_lockstep.machine import EngineMachine, place_of
from scripted_lockstep.mutants import CONTRACTS, KEPT_NUMBERS, MUTANTS, PAIRS
from scripted_lockstep.mutants.fresh import edits_met, fresh_sample
from scripted_lockstep.mutants.gallery import mutant_named, switched_on
from scripted_lockstep.oracle.digests import check_digests
from scripted_lockstep.oracle.step_checks import EngineOracle
from scripted_lockstep.recordings.as_schedule import plan_of, schedule_of_recording
from scripted_lockstep.recordings.replay import replay_engine
from scripted_lockstep.recordings.standing import stands_in_recording
from scripted_lockstep.run_forks import STATES, FrozenRun
from scripted_lockstep.script.context import ScriptContext
from scripted_lockstep.script.execution import ScriptSucceeded
from scripted_lockstep.script.handle import RequestHandle
from scripted_lockstep.script.history import record_step
from scripted_lockstep.script_target import ScriptTarget
from scripted_lockstep.simulated.pipeline import SimulatedPipeline
from scripted_lockstep.space.targets import SPACE
from scripted_lockstep.space.workloads import TEXTS
from scripted_lockstep.step_words import log_of
from scripted_lockstep.tiers.sim.runner import EngineSim

_LONGEST_LINE: Final = 105
EngineRun: TypeAlias = RunLike[
    EngineConfig, Event, Step, StepResult, StepRecord, EngineMachine, SimulatedPipeline, EngineOracle
]
# The quickstart test counts in chunks.
_CHUNK: Final = "chunked_prefill_size"
_FIRST_TEST: Final = Path(__file__).with_name("first_test.py.jinja")


class LockstepAdapter(
    BaseAdapter[EngineConfig, Event, Step, StepResult, StepRecord, EngineMachine, SimulatedPipeline, EngineOracle]
):
    """The engine's adapter, with the engine's own configurations."""

    name = DEFAULT_ADAPTER
    mutants: Mapping[str, Mutant] = {mutant.name: mutant for mutant in MUTANTS}
    states = STATES
    configuration: type = EngineConfig
    # Small, so that results take a few steps and a prompt has several chunks.
    example_settings: Mapping[str, str] = MappingProxyType(
        {"pp_size": "4", "pp_async_depth": "2", "chunked_prefill_size": "64"}
    )
    starts_quickly: bool = True
    actions: tuple[type[Action], ...] = all_actions()
    resuming: Action | None = ResumeServing()
    undoing: tuple[Action, ...] = (
        ResumeServing(),
        ReleaseResults(count=1),
        ReleaseResults(),
        Relieve(),
        ReleaseGrammars(),
        ReleaseTransfers(),
        WakeServing(),
    )
    violations: tuple[type[Exception], ...] = (EngineError, AssertionError)
    packages: tuple[str, ...] = ("engine",)
    workloads: Mapping[str, str] = TEXTS
    windows: Mapping[str, Callable[[EngineRun], bool]] = MappingProxyType(
        {
            "all microbatches are in flight": lambda run: (
                len(run.machine.scheduler.books.in_flight) >= run.machine.depth
            ),
            "results are in flight and no queue holds a request": lambda run: _is_dispatched(run.machine.scheduler),
            "no page is free": lambda run: run.machine.scheduler.memory.pages.free == 0,
            "a request was sent back to the queue": lambda run: run.machine.scheduler.counters.retractions > 0,
            "a cached prefix was hit": lambda run: run.machine.scheduler.counters.cached_tokens > 0,
            "the memory of an ended request is in flight": lambda run: bool(run.machine.scheduler.books.releasing),
        }
    )
    space: Space = SPACE

    # -- configurations --

    def read_config(self, words: Mapping[str, str]) -> EngineConfig:
        """Raises ConfigError."""
        return EngineConfig(**words)

    def config_words(self, config: EngineConfig) -> Mapping[str, ConfigValue]:
        """Return the values that differ from the defaults."""
        return config_values(config)

    def smaller_configs(self, config: EngineConfig) -> Iterator[EngineConfig]:
        return smaller_configs(config)

    def absent_modes(self, config: EngineConfig) -> frozenset[str]:
        limits = limits_of(config)
        absent = {ForwardMode.MIXED: not limits.mixed_chunk, ForwardMode.LORA: not limits.max_loras}
        return frozenset(mode.value for mode, is_absent in absent.items() if is_absent)

    def limits_of(self, config: EngineConfig) -> Limits:
        return limits_of(config)

    def first_commands(self, config: EngineConfig) -> Sequence[str]:
        """Start a prompt of two chunks, and step until all queues are empty and its last chunk is in flight."""
        limits = limits_of(config)
        tokens = max(1, min(2 * limits.prefill_budget_tokens - 3, limits.context_length // 2))
        return f"start prompt_len={tokens} max_new_tokens=2", "until state.in_flight and state.queues_clear", "step"

    # -- a run --

    def new_parts(self, config: EngineConfig, *, record: bool) -> tuple[EngineMachine, SimulatedPipeline, EngineOracle]:
        """Make scheduler, simulated pipeline and checks.

        Only a recorded run keeps digests, and has a twin that is restored from its checkpoints.
        """
        limits = limits_of(config)
        return (
            EngineMachine(limits, digests=record),
            SimulatedPipeline(limits),
            EngineOracle(limits, restores=record, pages=False, twin=record),
        )

    def new_step(self, events: tuple[Event, ...], now: float) -> Step:
        return Step(events, now)

    def drive(self, run: EngineRun) -> None:
        """Run the engine's own loop, so that a search runs the code that serves."""
        run_loop(run, run.machine.scheduler, run.device, run.oracle)

    def take_step(self, run: EngineRun, step: Step) -> StepResult:
        result = run.machine.step(step.events, step.now)
        carry_out(result, run.device, run.oracle)
        return result

    def leave_out(self, run: EngineRun) -> None:
        run.oracle.conformance = None

    def what_is_busy(self, run: EngineRun) -> str:
        return str(run.machine.scheduler.books.what_is_busy())

    def where(self, run: EngineRun, rid: str | None) -> tuple[str, str]:
        return place_of(run.machine.scheduler, rid)

    def obstacle(self, run: EngineRun) -> Action | None:
        """Name the causes for which requests wait: held transfers, grammars or LoRAs, a stalled stage, sleep,
        reserved memory.
        """
        if run.device.transfers.holds_some:
            return ReleaseTransfers()
        if run.stalled:
            return ResumeStage(stage=min(run.stalled))
        if run.device.grammars.is_holding:
            return ReleaseGrammars()
        if run.device.loras.is_holding:
            return ReleaseLoras()
        scheduler = run.machine.scheduler
        if scheduler.books.sleep_level and scheduler.failure is None:
            return Update.of_model(run.config.model) if scheduler.books.sleep_level > 1 else WakeServing()
        return Relieve() if run.machine.is_pressed else None

    def also_due(self, run: EngineRun) -> Sequence[Event]:
        """Return the answers to grammar and LoRA orders, and the ends of transfers."""
        device = run.device
        answers = device.answers(stalled=run.stalled)
        if not device.transfers.open:
            return answers
        if run.previous is not None:
            device.transfers.want(run.previous.replies)
        # Newest first, because a restarted decode engine numbers its transfers from 1 again.
        prompts = [life.message for life in reversed(run.oracle.account.lives) if life.message.deliver is not None]
        return [*answers, *device.ended_transfers(prompts)]

    def finale(self, run: EngineRun, turn: int) -> Sequence[Event]:
        """Return a flush and a request for the counters."""
        if turn:
            return ()
        flush = Flush()
        run.note_implied(flush)
        return flush.message(run.new_call_id()), GetStats(call_id="stats")

    def record_step(
        self, step: Step, stepped: StepResult | None, machine: EngineMachine, error: str | None
    ) -> StepRecord:
        scheduler = machine.scheduler
        if stepped is None:
            stepped = StepResult(scheduler.step_number, None, (), again=False, deadline=None)
        return record_step(step, stepped, scheduler, error=error)

    def as_log(self, records: Sequence[StepRecord], config: EngineConfig) -> StepLog:
        return log_of(records, limits_of(config))

    def check_records(self, records: Sequence[StepRecord]) -> None:
        """Check that digests identify their steps. Raises Violation."""
        check_digests(records)

    def freeze(self, run: EngineRun) -> FrozenRun[EngineRun]:
        return FrozenRun(run, lambda one: (one.oracle,))

    def digests(self, run: EngineRun) -> Iterator[bytes | None]:
        """Yield a digest of engine, pipeline and checks, and one of the specification if the run has one."""
        yield from super().digests(run)
        conformance = run.oracle.conformance
        yield None if conformance is None else STATES.digest(conformance)

    # -- recordings --

    def replay_recording(self, path: Path, *, until: int | None, last_steps: int | None) -> Rerun:
        """Replay a file of ``engine serve --record``. Raises RecordingError for any other file."""
        return replay_engine(path, until=until, last_steps=last_steps)[0]

    def schedule_of_recording(self, path: Path, *, until: int | None) -> Translated:
        """Raises RecordingError for a recording of an engine that the simulated one cannot represent."""
        return schedule_of_recording(path, until=until)

    def stands_in(self, path: Path) -> Sequence[Stand]:
        """Return the requests that make no progress at the end of a recording. Raises RecordingError."""
        return stands_in_recording(path)

    def recording_of_server(self, url: str) -> Path:
        """Have a server of this machine write its last steps. Raises ScriptDefinitionError if it cannot."""
        from scripted_lockstep.recordings.live import recording_of_server  # it needs the server's packages

        return recording_of_server(url)

    def plan_of(self, record: StepRecord) -> object:
        return plan_of(record, {})

    # -- mutants --

    def mutant_named(self, name: str) -> Mutant:
        """Return a mutant of the gallery, a contract, a pair or a fresh mutant. Raises UnknownMutant."""
        return mutant_named(name)

    def switched_on(self, mutant: str | None) -> AbstractContextManager[None]:
        """Switch a mutant on, and clear the cached results of checks. Raises UnknownMutant."""
        return switched_on(mutant)

    def adapter_of(self, mutant: str) -> str:
        """Return the adapter whose targets search for this mutant. Raises UnknownMutant."""
        return mutant_named(mutant).adapter or self.name

    @property
    def contract_names(self) -> tuple[str, ...]:
        """Return mutants of bugs that no engine had: each breaks a promise of this engine, and some need two added
        events.
        """
        return tuple(mutant.name for mutant in (*CONTRACTS, *PAIRS, *KEPT_NUMBERS))

    def bugs_met(self, codes: Container[int]) -> list[str]:
        """Return the mutants and contracts that break code with one of these ids."""
        return [mutant.name for mutant in (*MUTANTS, *CONTRACTS) if mutant.is_met(codes)]

    def edits_met(self, codes: Container[int], count: int) -> Sequence[str]:
        """Return names of fresh mutants of code that ran, the same for the same code."""
        return edits_met(codes, count)

    def fresh_mutants(self, count: int, seed: int) -> Mapping[str, str]:
        """Return single edits of the scheduler and its memory, the same for equal seeds, each with its description."""
        return fresh_sample(count, seed)

    def write_mutants(self, page: Path, found: Sequence[Found]) -> None:
        """Write the gallery's page, and its figures into the README beside it."""
        write_gallery(page, found)

    # -- tests --

    @property
    def names(self) -> Mapping[str, type]:
        return {one.__name__: one for one in (RequestHandle, ScriptContext, ScriptSucceeded)}

    def script_target(self, target: str) -> ScriptTarget:
        """Make a target of the registered script ``FILE::NAME``. Raises ScriptDefinitionError."""
        test = find_test(target)
        if not isinstance(test.config, EngineConfig):
            raise ScriptDefinitionError(
                f"{target} is a script of the adapter {test.adapter}; run it with pytest {target}"
            )
        return ScriptTarget(test)

    def run_script(
        self,
        script: ScriptFunction,
        arguments: Mapping[str, Any],
        *,
        config: EngineConfig,
        options: ScriptOptions,
        mutant: str | None,
    ) -> ScriptSucceeded:
        """Run a script in the sim tier. Raises ScriptError."""
        return self.start_sim(config, mutant=mutant).run(script, options=options, **arguments)

    def check_script(self, config: EngineConfig, *, tiers: tuple[str, ...], oracle: bool, placement: str) -> None:
        """Refuse a placement for a single stage and for an engine with a role."""
        del tiers, oracle
        if placement != "local" and config.pp_size == 1:
            raise ScriptDefinitionError(
                f"placement={placement!r} places stages, and with pp_size=1 there is none beside the scheduler; "
                "write EngineConfig(pp_size=2) or more"
            )
        if placement != "local" and config.role != "both":
            raise ScriptDefinitionError(
                f"placement={placement!r} is for role='both', and the stages of an engine with role={config.role!r} "
                "are local; leave placement out"
            )

    def start_sim(self, config: EngineConfig, *, mutant: str | None) -> EngineSim:
        return EngineSim(config, mutant=mutant)

    def why_no_servers(self) -> str:
        return "" if serve_is_installed() else f"the server tier needs more than is installed; {INSTALL_SERVE}"

    def start_server(
        self, config: EngineConfig, *, mutant: str | None, placement: str
    ) -> ScriptedServer[EngineConfig, ScriptSucceeded]:
        from scripted_lockstep.tiers.server.pool import start_server  # needs what the extra brings

        return start_server(config, mutant=mutant, placement=placement)

    def new_servers(self) -> ServerPool:
        from scripted_lockstep.tiers.server.pool import EngineServers  # needs what the extra brings

        return EngineServers()

    def first_test(self, name: str, settings: Mapping[str, str]) -> str:
        """Return the flush race, on an engine with these settings."""
        config = EngineConfig(**{**self.example_settings, **settings})
        words = {field: repr(value) for field, value in config_values(config).items() if field != _CHUNK}
        return render_source(_FIRST_TEST, name=name, config=config, words=words)

    def run_demo(self, page: Path) -> bool:
        """Run the flush race on four real stage processes, with the bug and without."""
        from scripted_lockstep.demo import run_demo  # needs what the extra brings

        return run_demo(page)

    def settling(self, placed: Sequence[Placed], outcome: Outcome) -> list[Placed]:
        """Return the actions that ended the run, and the actions that end effects that a failed run left open."""
        # The flush that ends every run of the search is not part of the schedule.
        implied = [one for one in outcome.implied if not isinstance(one.action, Flush)]
        open_ends: dict[type[Action], Action] = {}
        for one in (*placed, *implied):
            if (end := _end_of(one.action)) is not None:
                open_ends[type(end)] = end
            elif not (isinstance(one.action, ReleaseResults) and one.action.count is not None):
                open_ends.pop(type(one.action), None)
        return implied + [Placed(outcome.steps + 1, action) for action in open_ends.values()]

    def test_head(self, config: EngineConfig, body: str) -> TestHead:
        values = [f"{name}={value!r}" for name, value in config_values(config).items()]
        return TestHead(
            # The engine at the other end of its transfers is not simulated.
            decorator="@scripted(CONFIG)",
            imports=("from engine import EngineConfig",),
            more=(PROMPT_IMPORT,) if PROMPT_CALL in body else (),
            before=("", f"CONFIG = {written_call('EngineConfig', values, _LONGEST_LINE)}"),
        )


def _is_dispatched(scheduler: Scheduler) -> bool:
    """Return whether no request is in a queue: all prompts are launched, and no result has come back."""
    books = scheduler.books
    return bool(books.in_flight) and not (books.waiting or books.running or books.chunked)


def _end_of(action: Action) -> Action | None:
    """Return the action that ends another one's effect; None for an action without a lasting effect."""
    match action:
        case StallStage():
            return ResumeStage(stage=action.stage)
        case HoldResults():
            return ReleaseResults()
        case HoldTransfers():
            return ReleaseTransfers()
        case Press():
            return Relieve()
        case PauseServing():
            return ResumeServing()
        case SleepServing():
            return WakeServing()
    return None


ADAPTER: Final = LockstepAdapter()
