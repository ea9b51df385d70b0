"""The sim tier: the same loop, gate and scripts over a simulated pipeline and simulated clients, in one process.

No torch, no HTTP, no sockets; a script takes milliseconds. Its front end is played with the real one's own rules for
bodies, text and stop strings.
"""

from __future__ import annotations

import inspect
import itertools
import urllib.parse
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Self

import msgspec

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.frontend.admission import request_of
from engine.frontend.answer import Answer, joined
from engine.frontend.problems import ApiError, ProblemType
from engine.frontend.protocol import GenerateAnswer, GenerateBody, parse_body
from engine.limits import Limits, embedded_facts
from engine.messages import (
    Abort,
    AbortAll,
    CallAnswer,
    ClientMessage,
    ContinueGeneration,
    FinishReason,
    FlushCache,
    Generate,
    PauseGeneration,
    PauseMode,
    PipelineEvent,
    Refusal,
    Reply,
    TokenOutput,
    UpdateWeights,
)
from engine.pipeline.simulated import SimulatedPipeline
from engine.pipeline.wire import StageView
from engine.scheduler import Scheduler, run_loop
from scripted.client import Call, Chunk, ClientView
from scripted.decorator import ScriptedTest
from scripted.errors import (
    Overdue,
    ScriptDefinitionError,
    ScriptError,
    ScriptFailed,
    ScriptTimeout,
    ServerDied,
    ServerDirty,
)
from scripted.gallery import mutant_named
from scripted.gate import ScriptedGate
from scripted.report import FailureKind, FailureReport
from scripted.run import Run, ScriptFunction, kind_of
from scripted.stop_watch import ByteDecoder
from scripted.watchdog import watchdog
from scripted.wire import ScriptOptions, ScriptSucceeded

__all__ = ["ScriptedSim", "SimWorld"]


class _OpenRequest:
    """One request on its way to its client: the front end's own answer, given at once or piece by piece."""

    def __init__(self, message: Generate, view: ClientView) -> None:
        self.view = view
        self._answer = Answer(ByteDecoder(), message)
        self._pieces: list[GenerateAnswer] = []

    def take(self, output: TokenOutput) -> bool:
        """Pass an output on; True when a stop string was found in it and the scheduler has to be told."""
        if output.finish_reason is FinishReason.ERROR:
            self.view.fail(
                output.error or "the engine could not compute this request", None if self.view.status else 500
            )
            return False
        found_before = self._answer.stop_found
        self._pieces.append(self._answer.piece(output))
        if self.view.streams:
            self._receive(self._pieces.pop())
        elif output.finish_reason is not None:
            self._receive(joined(self._pieces))
        return self._answer.stop_found and not found_before and output.finish_reason is None

    def _receive(self, piece: GenerateAnswer) -> None:
        reason = piece.meta_info.finish_reason
        if not piece.output_ids and reason is None:
            return
        self.view.status = 200
        self.view.receive(Chunk(text=piece.text, token_ids=piece.output_ids, finish_reason=reason and reason.value))
        self.view.closed = reason is not None


class SimClients:
    """Clients and front end in one: verbs become messages at once, replies become what a client receives."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._sent: list[ClientMessage] = []
        self._open: dict[str, _OpenRequest] = {}
        self._calls: dict[str, Call] = {}
        self._numbers = itertools.count()

    def generate(self, rid: str, body: dict[str, Any]) -> ClientView:
        """Check the body as ``/generate`` does and send it."""
        view = ClientView(rid, streams=bool(body.get("stream")))
        try:
            checked = parse_body(GenerateBody, msgspec.json.encode(body))
            text = checked.text
            ids = tuple(text.encode()) if text is not None else tuple(checked.input_ids or ())
            message = request_of(checked, ids, self._limits)
            self._check_unique(rid)
        except ApiError as exc:
            view.fail(exc.body.error.message, exc.status)
            return view
        self._open[rid] = _OpenRequest(message, view)
        self._sent.append(message)
        return view

    def call(self, path: str, body: dict[str, Any] | None = None) -> Call:
        """Send the message of an administrative route."""
        call = Call(path)
        call_id = f"call-{next(self._numbers)}"
        self._calls[call_id] = call
        self._sent.append(_message_of(path, body or {}, call_id))
        return call

    def disconnect(self, view: ClientView) -> None:
        """Hang up; the front end aborts the request."""
        view.dropped = view.closed = True
        self._sent.append(Abort(rid=view.rid))

    def settle(self, replies: Sequence[Reply], views: Mapping[str, ClientView], calls: Mapping[str, Call]) -> None:
        """Nothing to wait for: replies are with the clients when they are sent."""

    def forget(self) -> None:
        """Drop what is still open."""
        self._open.clear()
        self._calls.clear()
        self._sent.clear()

    def take_sent(self) -> list[ClientMessage]:
        """What was sent since the last call."""
        sent, self._sent = self._sent, []
        return sent

    def send(self, replies: Sequence[Reply]) -> None:
        """The scheduler's outbox: hand replies to the clients."""
        for reply in replies:
            if isinstance(reply, TokenOutput):
                self._output(reply)
            elif isinstance(reply, Refusal):
                self._refusal(reply)
            elif isinstance(reply, CallAnswer) and (call := self._calls.pop(reply.call_id, None)) is not None:
                call.answer(200 if reply.ok else 400, reply.message)

    def _check_unique(self, rid: str) -> None:
        if rid in self._open:
            kind, message = ProblemType.DUPLICATE, f"rid must be unique among live requests, got {rid!r}, which is"
            raise ApiError(409, kind, message, param="rid")

    def _output(self, output: TokenOutput) -> None:
        request = self._open.get(output.rid)
        if request is None:
            return
        if output.finish_reason is not None:
            del self._open[output.rid]
        if not request.view.dropped and request.take(output):
            self._sent.append(Abort(rid=output.rid, finish_reason=FinishReason.STOP))

    def _refusal(self, refusal: Refusal) -> None:
        error = ApiError.of_refusal(refusal)
        request = self._open.pop(refusal.rid, None)
        if request is not None:
            request.view.fail(error.body.error.message, error.status)


def _message_of(path: str, body: dict[str, Any], call_id: str) -> ClientMessage:
    url = urllib.parse.urlsplit(path)
    if url.path == "/flush_cache":
        timeout = dict(urllib.parse.parse_qsl(url.query)).get("timeout")
        return FlushCache(call_id=call_id, timeout_s=None if timeout is None else float(timeout))
    if url.path == "/update_weights_from_disk":
        return UpdateWeights(call_id=call_id, model_path=body["model_path"], timeout_s=body.get("timeout"))
    if url.path == "/abort_request":
        return AbortAll(call_id=call_id) if body.get("abort_all") else Abort(rid=body["rid"], call_id=call_id)
    if url.path == "/pause_generation":
        return PauseGeneration(call_id=call_id, mode=PauseMode(body["mode"]))
    if url.path == "/continue_generation":
        return ContinueGeneration(call_id=call_id)
    raise ValueError(f"no such route: {path}")


class SimWorld:
    """The world of the sim tier."""

    tier = "sim"

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.pipeline = SimulatedPipeline(limits)
        self.clients = SimClients(limits)

    def limit_waits(self, seconds: float) -> None:
        """Nothing waits in here."""

    def take_messages(self) -> list[ClientMessage]:
        """What the clients sent."""
        return self.clients.take_sent()

    def decoder(self) -> ByteDecoder:
        """Tokens as text."""
        return ByteDecoder()

    def wait(self) -> None:
        """Never needed: what can come is there."""
        raise EngineError("a verb waits for a message that its client never sent")

    def take_completion(self, microbatch_id: int) -> PipelineEvent:
        """The completion of the oldest microbatch."""
        event = self.pipeline.next_completion(0)
        assert event is not None, f"microbatch {microbatch_id} is due, but the pipeline has nothing"
        return event

    def answer(self, replies: Sequence[Reply]) -> None:
        """Hand replies to the clients."""
        self.clients.send(replies)

    def corruptions(self) -> Sequence[str]:
        """What requests read that was not theirs."""
        return self.pipeline.corruptions

    def kill_stage(self, stage: int) -> PipelineEvent:
        """Lose the pipeline."""
        self.pipeline.kill_stage(stage)
        event = self.pipeline.next_completion(0)
        assert event is not None
        return event

    def stall_stage(self, stage: int) -> None:
        """Stop a stage."""
        self.pipeline.stall_stage(stage)

    def resume_stage(self, stage: int) -> None:
        """Let a stage go on."""
        self.pipeline.resume_stage(stage)

    def fail_next_step(self, stage: int) -> None:
        """Make the stage's next microbatch fail."""
        self.pipeline.fail_next_step(stage)

    def describe_stage(self, stage: int) -> StageView:
        """The stage's own view."""
        return self.pipeline.describe()[stage]

    def start_over(self) -> None:
        """A new pipeline: the old one's KV is nobody's."""
        self.pipeline.forget()


class _OneRun:
    """A source of one script, which keeps how it ended."""

    warms_up = False

    def __init__(self, run: Run, mutant: str | None, config: EngineConfig) -> None:
        self._next: Run | None = run
        self._mutant = mutant
        self._config = config
        self.success: ScriptSucceeded | None = None
        self.error: ScriptError | None = None

    def open(self) -> None:
        """Nothing to open."""

    def close(self) -> None:
        """Nothing to close."""

    def next_run(self) -> Run | None:
        """The script, once."""
        run, self._next = self._next, None
        return run

    def progress(self, gate: ScriptedGate, run: Run | None) -> None:
        """Nobody watches."""

    def ended(self, gate: ScriptedGate, run: Run | None) -> None:
        """Keep the success."""
        del gate
        assert run is not None
        self.success = run.succeeded()

    def failed(self, gate: ScriptedGate, run: Run | None, exc: Exception) -> None:
        """Keep the failure."""
        kind = kind_of(exc)
        self.error = _ERROR_OF[kind](self._report(gate, run, exc, kind))
        self.error.__cause__ = exc

    def crashed(self, gate: ScriptedGate, run: Run | None, exc: BaseException) -> None:
        """The scheduler died; keep that."""
        if isinstance(exc, Overdue):
            self.error = ScriptTimeout(self._report(gate, run, exc, FailureKind.TIMEOUT))
        else:
            self.error = ServerDied(self._report(gate, run, exc, FailureKind.DIED))
        self.error.__cause__ = exc

    def _report(self, gate: ScriptedGate, run: Run | None, exc: BaseException, kind: FailureKind) -> FailureReport:
        assert run is not None
        report = run.report(gate, exc, kind=kind, mutant=self._mutant)
        return msgspec.structs.replace(report, config=config_text(self._config))


_ERROR_OF = {
    FailureKind.FAILED: ScriptFailed,
    FailureKind.TIMEOUT: ScriptTimeout,
    FailureKind.DIED: ServerDied,
    FailureKind.DIRTY: ServerDirty,
}


def config_text(config: EngineConfig) -> str:
    """The fields of a configuration that are not at their default."""
    values = config.model_dump()
    changed = {name: value for name, value in values.items() if value != type(config).model_fields[name].default}
    return ", ".join(f"{name}={value}" for name, value in changed.items()) or "the default configuration"


class ScriptedSim:
    """Runs scripts in the sim tier. Every script gets a scheduler and a pipeline of its own."""

    def __init__(self, config: EngineConfig, *, mutant: str | None = None) -> None:
        self.config = config
        self._limits = Limits.of(config, embedded_facts(config.model))
        self._mutant = mutant
        self._open = True

    @classmethod
    def start(cls, config: EngineConfig, *, mutant: str | None = None) -> AbstractContextManager[ScriptedSim]:
        """A sim for this configuration; ``mutant`` switches one of the gallery's bugs on."""
        return cls(config, mutant=mutant)

    def run(
        self,
        script: ScriptFunction,
        *args: Any,
        timeout_s: float = ScriptOptions().timeout_s,
        options: ScriptOptions | None = None,
        **kwargs: Any,
    ) -> ScriptSucceeded:
        """Run a generator function that takes ``t``. Raises ScriptFailed, ScriptTimeout, ServerDied or ServerDirty."""
        if not self._open:
            raise EngineError("this sim was shut down; start another one")
        spec = getattr(script, "scripted", None)
        script = spec.script if isinstance(spec, ScriptedTest) else script
        if not inspect.isgeneratorfunction(script):
            raise ScriptDefinitionError(f"{script!r} is no generator function; a script yields once for each step")
        options = options or ScriptOptions(timeout_s=timeout_s)
        source = _OneRun(Run(script, args, kwargs, options), self._mutant, self.config)
        with ExitStack() as stack:
            if self._mutant is not None:
                stack.enter_context(mutant_named(self._mutant).switched_on())
            stack.enter_context(watchdog(options.timeout_s))
            self._run_loop(source)
        if source.error is not None:
            raise source.error
        assert source.success is not None
        return source.success

    def _run_loop(self, source: _OneRun) -> None:
        scheduler, world = Scheduler(self._limits), SimWorld(self._limits)
        gate = ScriptedGate(scheduler, world, source)
        try:
            run_loop(gate, scheduler, world.pipeline, world.clients)
        except Exception:
            if source.error is None:
                raise

    def shutdown(self) -> None:
        """Refuse further scripts; idempotent."""
        self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()
