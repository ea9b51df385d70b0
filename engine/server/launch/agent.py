"""The agent of one stage on another machine: joins a server, then starts, watches and ends the stage's process.

``python -m engine.server.launch.agent PID`` runs an agent for another process, with its order and the secret on stdin.
Single-threaded and event-driven, because it forks. Server, agent and stage end together: if the agent dies, or either
side no longer hears the other, both sides end and leave nothing behind.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import selectors
import signal
import socket
import sys
import time
from typing import Final

import msgspec

from engine import __version__
from engine.core.errors import EngineError, StartupError, death_words
from engine.core.frames import BadFrameError
from engine.core.limits import Limits
from engine.pipeline.progress import StageProgress
from engine.pipeline.stage_process import run_stage_process
from engine.pipeline.wires import StageWires
from engine.process.control import STAGE_PREFIX, Control, Dying, ProcessDied, Shutdown
from engine.process.death import EXIT_FAILED, describe_status
from engine.process.inheritance import take_no_input
from engine.process.links.connection import LinkAddress
from engine.process.links.endpoint import Endpoint
from engine.process.links.listener import LinkListener, bound_at
from engine.process.links.proof import Claim, Role
from engine.process.links.secret import Secret
from engine.process.logs import configure_logging
from engine.process.private_dir import PrivateDir
from engine.process.settings import ServerSettings
from engine.process.signals import SignalWatch
from engine.server.launch.child import Child, fork_child
from engine.server.launch.imports import import_stage
from engine.server.placement.control_link import ControlLink, LinkOver
from engine.server.placement.messages import (
    Assigned,
    Begin,
    Ended,
    Join,
    Prepared,
    Pulse,
    Refused,
    SendSignal,
    StageOrder,
    StagePulse,
    Started,
    ToAgent,
    decode_to_agent,
)
from lockstep.output_files import keep_private
from lockstep.process_control import die_with_parent

EXIT_OK: Final = 0
ANY_STAGE: Final = -1
RETRY_S: Final = 0.2
# Bounds the server's silence until its settings, which have the real bound, arrive.
FIRST_SILENCE_S: Final = 10.0

logger = logging.getLogger(__name__)


def run_agent(order: StageOrder, secret: Secret) -> int:
    """Run one stage until its server ends. Returns the exit status, 0 after an orderly end; stderr has the reasons."""
    keep_private()
    with SignalWatch() as signals:
        try:
            import_stage()
            connection = _connected(order, secret, signals)
            if connection is None:
                return EXIT_FAILED
            agent = Agent(order, secret, connection, signals)
        except EngineError as exc:
            return _failed(str(exc))
        try:
            return agent.run()
        finally:
            agent.close()


def _connected(order: StageOrder, secret: Secret, signals: SignalWatch) -> socket.socket | None:
    """Wait until the server accepts a connection. Returns None if the user ends the agent meanwhile."""
    claim = Claim(Role.CONTROL, ANY_STAGE if order.stage is None else order.stage)
    address = LinkAddress(order.join, secret, claim, FIRST_SILENCE_S)
    deadline = time.monotonic() + order.timeout_s
    has_said = False
    while True:
        try:
            return address.connect()
        except OSError as exc:
            if time.monotonic() >= deadline:
                raise StartupError(
                    f"a server must listen on {order.join}, but: {exc.strerror or exc}; start `engine serve "
                    "--placement join` there, and check that no firewall blocks the port"
                ) from exc
            if not has_said:
                _say(f"waiting for a server at {order.join} ({exc.strerror or exc})")
                has_said = True
        if _is_asked_to_end(signals, RETRY_S):
            return None


def _is_asked_to_end(signals: SignalWatch, wait_s: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(signals, selectors.EVENT_READ)
        return bool(selector.select(wait_s)) and any(number != signal.SIGCHLD for number in signals.take())


class Agent:
    """One stage's life on this machine, from the agent's first message to the end of the stage's process."""

    def __init__(self, order: StageOrder, secret: Secret, connection: socket.socket, signals: SignalWatch) -> None:
        self._order = order
        self._secret = secret
        self._signals = signals
        here = Endpoint(connection.getsockname()[0], 0)
        self._link = ControlLink[ToAgent](connection, decode_to_agent)
        self._listener = bound_at(order.listen or here, "--listen")
        self._folder = PrivateDir()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._link, selectors.EVENT_READ, self._on_server)
        self._selector.register(signals, selectors.EVENT_READ, self._on_signal)
        self._settings: ServerSettings | None = None
        self._stage = ANY_STAGE
        self._stages_here = 1
        self._child: Child | None = None
        self._progress: StageProgress | None = None
        # The agent's exit status, once it is known.
        self.over: int | None = None
        # True once the server has ended the stage: the stage's end is then expected.
        self._was_told = False

    def run(self) -> int:
        listens = self._order.advertise or Endpoint(*self._listener.getsockname()[:2])
        self._link.send(
            Join(
                version=__version__,
                node=self._order.node or platform.node(),
                pid=os.getpid(),
                stage=self._order.stage,
                listens=listens,
                address=self._order.address,
            )
        )
        try:
            while self.over is None:
                now = time.monotonic()
                for key, _ in self._selector.select(self._tend(now)):
                    if self.over is None:
                        key.data()
        except EngineError as exc:
            self._link.send(Dying.of(exc))
            self.over = _failed(str(exc))
        self._end_stage()
        self._link.close_gently()
        return self.over

    def close(self) -> None:
        """End the stage's process, and remove all files and sockets."""
        self._end_stage()
        if self._progress is not None:
            self._progress.close()
        self._link.close()
        self._listener.close()
        self._selector.close()
        self._folder.remove()

    # ---- the server ----

    def _on_server(self) -> None:
        try:
            messages = self._link.receive(time.monotonic())
        except (LinkOver, BadFrameError) as exc:
            self._lose_server(str(exc))
            return
        for message in messages:
            self.obey(message)

    def obey(self, message: ToAgent) -> None:
        match message:
            case Refused():
                raise StartupError(f"the server at {self._order.join} refused this stage: {message.why}")
            case Assigned():
                self._prepare(message)
            case Begin():
                self._begin(message)
            case SendSignal():
                if self._child is not None:
                    self._child.signal(signal.Signals(message.number))
            case Pulse():
                pass
            case _:
                self._was_told = self._was_told or isinstance(message, Shutdown | ProcessDied)
                if isinstance(message, ProcessDied):
                    self._fail(f"the server ended: {death_words(message.process, message.cause, message.node)}")
                elif self._child is not None and self._child.alive:
                    self._child.send(message)
                elif isinstance(message, Shutdown):
                    self.over = EXIT_OK

    def _prepare(self, order: Assigned) -> None:
        """Check the checkpoint, measure the memory for KV, and report both to the server."""
        from engine.model.backend import takes_openvino
        from engine.model.capacity import measure_kv_tokens
        from engine.model.checkpoint import checkpoint_digests, read_all_facts, require_files

        settings = ServerSettings.model_validate_json(order.settings)
        if self._order.model:
            settings = settings.model_copy(update={"model": self._order.model})
        self._settings, self._stage, self._stages_here = settings, order.stage, order.stages_here
        configure_logging(settings)
        _say(f"joined {self._order.join} as {STAGE_PREFIX}{self._stage}")
        require_files(settings)
        takes_openvino(settings)
        facts, is_measured = read_all_facts(settings), settings.max_total_tokens is None
        self._link.send(
            Prepared(
                digests=checkpoint_digests(settings),
                kv_tokens=measure_kv_tokens(settings, facts, stages_here=order.stages_here) if is_measured else None,
                gpu=_gpu_of(settings, order.stage),
            )
        )

    def _begin(self, order: Begin) -> None:
        settings = self._settings
        if settings is None or self._child is not None:
            raise StartupError(f"the server must begin once, after it has assigned a stage, got {order}")
        settings = settings.model_copy(update={"hidden_transport": order.hidden_transport})
        if settings.max_total_tokens is not None:
            self._require_memory(settings, order.limits)
        self._link.watch(settings.heartbeat_timeout_s, time.monotonic())
        self._progress = StageProgress(self._folder.path, order.limits.pp_size)
        listens = [self._listener.fileno()] if self._stage else []
        if not self._stage:
            self._listener.close()  # No stage sends to the first one; its port is for the process group.
        main = functools.partial(self._run_stage, settings, order.limits, order.book)
        child = fork_child(f"{STAGE_PREFIX}{self._stage}", main, keep=listens)
        self._listener.close()
        self._child = child
        self._selector.register(child, selectors.EVENT_READ, self._on_stage)
        self._link.send(Started(child.pid))

    def _require_memory(self, settings: ServerSettings, limits: Limits) -> None:
        """Raise ConfigError when this machine cannot hold its share of the capacity."""
        from engine.model.capacity import require_memory
        from engine.model.checkpoint import read_facts

        require_memory(settings, read_facts(settings), limits, stages_here=self._stages_here)

    def _run_stage(
        self, settings: ServerSettings, limits: Limits, book: tuple[Endpoint, ...], control: Control
    ) -> None:
        stage, silence_s, secret = self._stage, settings.heartbeat_timeout_s, self._secret

        def address(endpoint: Endpoint, role: Role) -> LinkAddress:
            return LinkAddress(endpoint, secret, Claim(role, stage), silence_s)

        wires = StageWires(
            scheduler=address(self._order.join, Role.PLANS),
            before=functools.partial(LinkListener, self._listener, secret, silence_s=silence_s) if stage else None,
            after=address(book[stage + 1], Role.HIDDEN) if stage + 1 < limits.pp_size else None,
        )
        run_stage_process(control, settings, limits, stage, self._folder.path, wires=wires, meeting=book[0])

    def _tend(self, now: float) -> float | None:
        """Send a pulse if it is due, and end if the server is silent. Returns the seconds until the next call."""
        if (why := self._link.tend(now, self._pulse)) is not None:
            self._lose_server(why)
            return 0.0
        due = self._link.due()
        return None if due is None else max(0.0, due - now)

    def _pulse(self) -> StagePulse:
        if self._progress is None or self._child is None:
            return StagePulse()
        microbatch_id, phase = self._progress.of(self._stage)
        return StagePulse(microbatch_id, int(phase), self._child.stopped_since is not None)

    def _lose_server(self, why: str) -> None:
        if self._was_told:
            self.over = EXIT_OK
        else:
            self._fail(f"the server at {self._order.join} is lost: {why}")

    # ---- the stage ----

    def _on_stage(self) -> None:
        child = self._child
        assert child is not None
        message = child.listen()
        if message is not None:
            self._link.send(message)
        if child.alive:
            return
        assert child.status is not None
        self._selector.unregister(child)
        self._link.send(Ended(child.status))
        if self._was_told:
            self.over = EXIT_OK
        elif child.status or child.dying is not None:
            cause = describe_status(child.status) if child.dying is None else child.dying.error
            self._fail(f"the {child.name} process died: {cause}")
        # Otherwise the stage ended because its plan channel closed; the server's message about that may still arrive.

    def _end_stage(self) -> None:
        child = self._child
        if child is None:
            return
        if child.alive:
            child.signal(signal.SIGKILL)
            os.waitpid(child.pid, 0)
            child.status = -signal.SIGKILL
            self._link.send(Ended(child.status))
        child.close()

    def _on_signal(self) -> None:
        """End the stage, and so the server, on a user's signal. Only report a stopped stage: the server decides."""
        for number in self._signals.take():
            if number != signal.SIGCHLD:
                name = signal.Signals(number).name
                raise StartupError(f"the agent of {STAGE_PREFIX}{self._stage} was ordered to end by {name}")
            if self._child is not None:
                self._child.look_for_stop()

    def _fail(self, why: str) -> None:
        self.over = _failed(why)


def _gpu_of(settings: ServerSettings, stage: int) -> str:
    """Identify this stage's GPU on the machine; empty if the CPU computes."""
    import torch

    from engine.model.arithmetic import stage_devices
    from engine.model.backend import takes_openvino

    count = torch.cuda.device_count()
    if settings.device == "cpu" or not count or takes_openvino(settings):
        return ""
    index = stage_devices(settings.device, settings.pp_size, count)[stage]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible[index] if index < len(visible) and visible[index] else str(index)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _failed(why: str) -> int:
    sys.stderr.write(f"error: {why}\n")
    sys.stderr.flush()
    return EXIT_FAILED


def main(parent_pid: int) -> int:
    """Run an agent for the process that started this one, and end with it. Returns the exit status."""
    die_with_parent(parent_pid, signal.SIGKILL)
    order, secret = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[StageOrder, str])
    take_no_input()
    return run_agent(order, Secret(secret))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
