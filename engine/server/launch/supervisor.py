"""The supervisor: starts the engine's processes, waits on all of them at once, and ends them together.

Driven by control pipes and signals; never polls. All processes are told the first death as the cause; later deaths are
its consequences. Forks before any thread or device context exists and computes nothing itself.
"""

from __future__ import annotations

import functools
import logging
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from engine.core.errors import EngineError, StartupError
from engine.core.limits import Limits, ModelFacts
from engine.pipeline.stage_process import run_stage_process
from engine.process.control import (
    STAGE_PREFIX,
    SUPERVISOR,
    Control,
    Drain,
    Dying,
    ProcessDied,
    Serving,
    Shutdown,
    SupervisorMessage,
)
from engine.process.death import EXIT_FAILED, DeathReport
from engine.process.links.listener import base_url, bind_server
from engine.process.logs import configure_logging, failure_line
from engine.process.private_dir import PrivateDir
from engine.process.settings import ServerSettings
from engine.process.signals import SignalWatch
from engine.process.watched import WatchedProcess, first_death, is_cause
from engine.server.launch.announcement import Announce, Phases, StartView
from engine.server.launch.child import Child, fork_child
from engine.server.launch.imports import import_frontend, import_models, limit_imports
from engine.server.launch.join_port import Meeting, MeetingPlace
from engine.server.launch.resolution import openvino_is_likely, refuse_early, require_descriptors, resolve
from engine.server.placement.joined import JoinedStage
from engine.server.placement.ray_order import RAY
from engine.server.scheduler_process.gate_context import SchedulerPlace, load_attribute
from engine.server.scheduler_process.main import run_scheduler
from lockstep.errors import LockstepError
from lockstep.interruption import EXIT_INTERRUPTED
from lockstep.output_files import keep_private

SCHEDULER = "scheduler"
FRONTEND = "frontend"

# A name instead of an import: the front end is a layer above this one.
FRONTEND_MAIN = "engine.frontend.http.process:run_frontend"

# A death is reported, written and cleaned up within 2 s: the sum of these, and the time to notice it.
DEATH_GRACE_S = 1.1
KILL_WAIT_S = 0.5
CAUSE_WAIT_S = 0.1
REAP_INTERVAL_S = 0.01
# In addition to these: ending a one-node cluster that was started for this server takes one or two seconds.
RAY_END_S = 10.0

logger = logging.getLogger(__name__)


def supervise(settings: ServerSettings, private_dir: Path | None = None, *, announce: Announce | None = None) -> int:
    """Run a server until it is told to stop (exit status 0) or fails (1, with the reason on stderr).

    Returns 130 if SIGINT arrives before it serves.

    Keeps the caller's ``private_dir``, with ``death.json`` in it if the server died. Calls ``announce`` once, when the
    server is ready; without it, prints the announcement on stdout.
    """
    started = time.monotonic()
    keep_private()
    configure_logging(settings)
    limit_imports()
    listener: socket.socket | None = None
    try:
        require_descriptors(settings.pp_size)
        listener = bind_server(settings.host, settings.port)
        place = MeetingPlace(settings) if settings.placement != "local" else None
        refuse_early(settings)
        phases = Phases(shown=announce is None and settings.log_format != "json")
        phases.begin("imports")
        import_models(of_torch=not openvino_is_likely(settings))
        phases.begin("files and memory")
        settings, facts, limits = resolve(settings)
        folder = PrivateDir(private_dir)
        meeting = place.open(settings, folder) if place is not None else None
        phases.begin("loading")
    except LockstepError as exc:
        if listener is not None:
            listener.close()
        _report(_own_failure(str(exc)), private_dir, settings)
        return EXIT_FAILED
    view = StartView(settings, facts, limits, started, phases, announce)
    try:
        return _Supervisor(settings, facts, limits, listener, folder, view, meeting).run()
    finally:
        folder.remove()


def _own_failure(cause: str) -> DeathReport:
    return DeathReport(process=SUPERVISOR, pid=os.getpid(), cause=cause, when=time.time(), exit_code=EXIT_FAILED)


def _report(report: DeathReport, private_dir: Path | None, settings: ServerSettings) -> None:
    """Write the report to stderr, and to the caller's folder if there is one."""
    sys.stderr.write(failure_line(settings, report.cause if report.process == SUPERVISOR else report.sentence()))
    sys.stderr.flush()
    if private_dir is not None and private_dir.is_dir():
        report.write(private_dir)


class _Supervisor:
    """The processes of one server, from the first fork to the last reaping."""

    def __init__(
        self,
        settings: ServerSettings,
        facts: ModelFacts,
        limits: Limits,
        listener: socket.socket,
        folder: PrivateDir,
        view: StartView,
        meeting: Meeting | None = None,
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._limits = limits
        self._meeting = meeting
        self._listener = listener
        self._folder = folder
        self._view = view
        self._base_url = base_url(listener)
        self._selector = selectors.DefaultSelector()
        self._children: list[WatchedProcess] = []
        self._ended: list[WatchedProcess] = []
        self._stop_asked = False
        self._drain_asked = False
        # An interrupt during the start, before the server serves, changes the exit status.
        self._is_interrupted = self._has_served = False

    def run(self) -> int:
        with SignalWatch() as signals:
            self._selector.register(signals, selectors.EVENT_READ, functools.partial(self._on_signal, signals))
            try:
                return self._serve()
            except BaseException as exc:  # noqa: BLE001 - processes and clients must be told about any end
                return self._fail_by_defect(exc)
            finally:
                if self._meeting is not None:
                    self._meeting.close()
                self._selector.close()

    # ---- start ----

    def _serve(self) -> int:
        if self._meeting is None:
            self._fork_stages()
            status = None
        else:
            status = self._gather(self._meeting)
        if status is None:
            self._start()
            status = self._watch()
        self._take_down(Shutdown(), grace_s=0.0)
        return status

    def _fork_stages(self) -> None:
        for stage in range(self._limits.pp_size) if self._limits.pp_size > 1 else range(0):
            main = functools.partial(self._run_stage, stage)
            self._adopt(fork_child(f"{STAGE_PREFIX}{stage}", main))

    def _gather(self, meeting: Meeting) -> int | None:
        """Wait until all stages have joined and started. Returns the exit status if the server ends meanwhile.

        The scheduler and the front end start later: they need limits that the stages' machines report.
        """
        rendezvous = meeting.rendezvous
        self._selector.register(rendezvous, selectors.EVENT_READ, rendezvous.listen)
        self._view.gathering(meeting.gathering)
        if meeting.ray is not None:
            self._adopt(meeting.ray.start(meeting.gathering))
        limit_s = self._settings.start_timeout_s
        if not self._wait_for(lambda: self._leaving or rendezvous.is_prepared, limit_s):
            return self._fail_start(
                StartupError(
                    f"every stage must join within start_timeout_s={limit_s}, but these are missing: "
                    f"{rendezvous.missing()}; {'; '.join(rendezvous.refusals) or 'no agent was refused'}; "
                    f"{'see the log of Ray above' if meeting.ray else 'start them with `engine stage --join`'}, or "
                    "raise --start-timeout-s"
                )
            )
        if not self._leaving:
            try:
                self._limits = Limits.of(self._settings, self._facts, rendezvous.kv_tokens())
            except EngineError as exc:
                return self._fail_start(exc)
            self._view.resolved(self._limits)
            for stage in rendezvous.begin(self._limits):
                self._adopt(stage)
            if not self._wait_for(lambda: self._leaving or all(child.pid for child in self._children), limit_s):
                return self._fail_late_start()
        if self._ended:
            return self._fail_by_death()
        return self._end_status if self._leaving else None

    def _start(self) -> None:
        """Fork the scheduler, which knows the stages' pids, then the front end, which gets the listener."""
        plans = self._meeting.plans if self._meeting is not None else None
        place = SchedulerPlace(
            settings=self._settings,
            limits=self._limits,
            private_dir=self._folder.path,
            base_url=self._base_url,
            stage_pids=tuple(child.pid for child in self._children if child.name.startswith(STAGE_PREFIX)),
            handed=plans.fileno() if plans is not None else None,
        )
        keep = [plans.fileno()] if plans is not None else []
        self._adopt(fork_child(SCHEDULER, lambda control: run_scheduler(control, place), keep=keep))
        if plans is not None:
            plans.close()
        self._adopt(fork_child(FRONTEND, self._run_frontend, keep=[self._listener.fileno()], outlives_supervisor=True))
        # If the socket stayed open here, it would queue connections that nobody accepts after the front end's death.
        self._listener.close()

    def _run_stage(self, stage: int, control: Control) -> None:
        run_stage_process(control, self._settings, self._limits, stage, self._folder.path)

    def _run_frontend(self, control: Control) -> None:
        import_frontend()  # runs while the stages load; a preloaded parent has already done it
        run_frontend = load_attribute(FRONTEND_MAIN)
        run_frontend(control, self._settings, self._limits, self._listener, self._folder)

    def _adopt(self, child: WatchedProcess) -> None:
        self._children.append(child)
        self._selector.register(child, selectors.EVENT_READ, functools.partial(self._on_child, child))

    # ---- events ----

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Handle events until the condition holds. Returns False after ``timeout_s`` seconds."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not condition():
            now = time.monotonic()
            if deadline is not None and deadline <= now:
                return False
            due = [at for at in (deadline, self._end_stopped(now), self._tend(now)) if at is not None]
            for key, _ in self._selector.select(max(0.0, min(due) - now) if due else None):
                key.data()
        return True

    def _end_stopped(self, now: float) -> float | None:
        """End a process that was stopped for too long. Returns when the next one is due; None if none is stopped.

        To the processes that wait for it, a stopped process looks hung.
        """
        limit_s = self._settings.step_timeout_s
        if not limit_s:
            return None
        dues = []
        for child in self._alive():
            if child.stopped_since is None or child.dying is not None:
                continue
            due = child.stopped_since + limit_s
            if due <= now:
                child.end(f"it was stopped by a signal and did not continue within {limit_s} s (step_timeout_s)")
                self._bury_if_dead(child)
                return now
            dues.append(due)
        return min(dues, default=None)

    def _tend(self, now: float) -> float | None:
        """Run the timers of stages on other machines. Returns when the next one is due; None without such stages."""
        if self._meeting is None:
            return None
        dues = [self._meeting.rendezvous.tend(now)]
        for child in self._alive():
            if isinstance(child, JoinedStage):
                dues.append(child.tend(now))
                if not child.alive:
                    self._bury_if_dead(child)
                    dues.append(now)
        return min((due for due in dues if due is not None), default=None)

    def _on_signal(self, signals: SignalWatch) -> None:
        """Drain on the first SIGTERM; stop on any other signal and on a second SIGTERM."""
        for number in signals.take():
            if number == signal.SIGCHLD:
                for child in self._alive():
                    child.look_for_stop()
            elif number == signal.SIGTERM and not self._drain_asked:
                self._drain_asked = True
            else:
                self._stop_asked = True
                self._is_interrupted = self._is_interrupted or (number == signal.SIGINT and not self._has_served)

    def _on_child(self, child: WatchedProcess) -> None:
        if child in self._ended:  # an earlier event of the same poll ended it
            return
        child.listen()
        if not child.ready and child.loading is not None:
            self._view.loaded(child.name, child.loading)
        self._bury_if_dead(child)

    def _bury_if_dead(self, child: WatchedProcess) -> None:
        if not child.alive:
            self._selector.unregister(child)
            child.close()
            self._ended.append(child)

    # ---- life and death ----

    def _watch(self) -> int:
        """Wait until all processes are ready, announce it, and wait for the end. Returns the server's exit status."""
        with self._view.loading():
            in_time = self._wait_for(lambda: self._leaving or self._all_ready(), self._settings.start_timeout_s)
        if not in_time:
            return self._fail_late_start()
        if not self._leaving:
            serving = Serving(
                base_url=self._base_url,
                pids={child.name: child.pid for child in self._children},
                nodes={child.name: child.node for child in self._children if child.node},
            )
            self._tell(serving)
            for child in self._children:
                self._view.learned(child.about)
            self._view.serving(serving)
            self._has_served = True
            self._wait_for(lambda: self._leaving, None)
            if not self._over:
                self._drain()
        if not self._ended:
            self._take_down(Shutdown(), self._settings.shutdown_grace_s)
            return self._end_status
        return self._fail_by_death()

    @property
    def _end_status(self) -> int:
        return EXIT_INTERRUPTED if self._is_interrupted else 0

    @property
    def _over(self) -> bool:
        return self._stop_asked or bool(self._ended)

    @property
    def _leaving(self) -> bool:
        return self._over or self._drain_asked

    def _drain(self) -> None:
        """Wait, within a bound, until the live requests have finished. A second signal or a death ends the wait."""
        frontend = next(child for child in self._children if child.name == FRONTEND)
        frontend.send(Drain())
        if not self._wait_for(lambda: self._over or frontend.drained, self._settings.drain_timeout_s):
            logger.warning(
                "cut off requests that had not finished drain_timeout_s=%s seconds after SIGTERM",
                self._settings.drain_timeout_s,
            )

    def _fail_late_start(self) -> int:
        late = ", ".join(child.who for child in self._children if not child.ready)
        return self._fail_start(
            StartupError(
                f"every process must be ready within start_timeout_s={self._settings.start_timeout_s}, but these "
                f"were not: {late}; raise --start-timeout-s, or see the log above for their state"
            )
        )

    def _fail_start(self, exc: EngineError) -> int:
        self._take_down(Shutdown(), grace_s=0.0)
        self._leave(_own_failure(str(exc)))
        return EXIT_FAILED

    def _fail_by_death(self) -> int:
        report = self._first_death()
        dying = next((child.dying for child in self._ended if child.name == report.process), None)
        if not self._has_served and dying is not None:
            report = msgspec.structs.replace(report, refusal=dying.refusal)
        self._leave(report)
        self._take_down(ProcessDied(process=report.process, cause=report.cause, node=report.node), DEATH_GRACE_S)
        return EXIT_FAILED

    def _fail_by_defect(self, exc: BaseException) -> int:
        """End the server after an exception in this process. Handles no event: the handler may have raised it."""
        dying = Dying.of(exc)
        cause = dying.error if dying.expected else dying.traceback
        self._leave(_own_failure(cause))
        self._tell(ProcessDied(process=SUPERVISOR, cause=cause))
        engine = self._engine()
        for some, grace_s in ((engine, DEATH_GRACE_S), (self._alive(), RAY_END_S)):
            forked = [child for child in some if isinstance(child, Child)]
            deadline = time.monotonic() + grace_s
            while (left := [child for child in forked if not child.reap()]) and time.monotonic() < deadline:
                time.sleep(REAP_INTERVAL_S)
            self._kill(left)
            for child in left:
                child.reap(wait=True)
        return EXIT_FAILED

    def _first_death(self) -> DeathReport:
        """Find the death that caused the others. A consequence may arrive first, so wait a moment for the cause."""
        self._wait_for(lambda: any(map(is_cause, self._ended)), CAUSE_WAIT_S)
        return first_death(self._ended, self._alive())

    def _leave(self, report: DeathReport) -> None:
        _report(report, self._folder.path if self._folder.lent else None, self._settings)

    # ---- the end ----

    def _tell(self, message: SupervisorMessage) -> None:
        """Send a message to all processes, the front end first: its clients are waiting."""
        for child in reversed(self._alive()):
            child.send(message)

    def _take_down(self, message: SupervisorMessage, grace_s: float) -> None:
        """End every process: tell all of them, wait within a bound, then kill the rest."""
        self._tell(message)
        # A stage has no message to send before it ends.
        self._kill(child for child in self._alive() if child.name.startswith(STAGE_PREFIX))
        if not self._wait_for(self._all_ended, grace_s):
            self._kill(self._engine())
            self._wait_for(self._all_ended, KILL_WAIT_S)
        # Clients have their final messages by now, but the driver may still have a cluster to end.
        if not self._wait_for(lambda: not self._alive(), RAY_END_S):
            self._kill(self._alive())
            self._wait_for(lambda: not self._alive(), KILL_WAIT_S)

    def _kill(self, children: Iterable[WatchedProcess]) -> None:
        for child in children:
            child.signal(signal.SIGKILL)

    def _alive(self) -> list[WatchedProcess]:
        return [child for child in self._children if child.alive]

    def _all_ready(self) -> bool:
        return all(child.ready for child in self._children)

    def _engine(self) -> list[WatchedProcess]:
        """List the engine's live processes, without the Ray driver, which ends after them."""
        return [child for child in self._alive() if child.name != RAY]

    def _all_ended(self) -> bool:
        return not self._engine()
