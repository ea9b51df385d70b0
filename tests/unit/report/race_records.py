"""Real records of the flush race, from a scheduler and a simulated pipeline, for the tests of what people see."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from scripted_lockstep.configs import config_values
from scripted_lockstep.simulated.pipeline import SimulatedPipeline
from scripted_lockstep.step_words import log_of

from engine import EngineConfig
from engine.core.errors import IntegrityError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import Event, FlushCache, Generate, SamplingParams
from engine.core.scheduler import Books, Scheduler, StepRecord
from scripted.report.trace import Note, Trace, TraceHeader

PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=64)
LIMITS = Limits.of(PP4, EMBEDDED_FACTS)
PROMPT_TOKENS = 125


def generate(rid: str, tokens: int = PROMPT_TOKENS, new: int = 2) -> Generate:
    """A greedy request with a prompt of ``tokens`` tokens."""
    sampling = SamplingParams(max_new_tokens=new, temperature=0.0)
    return Generate(rid=rid, prompt_ids=tuple((7 * i + len(rid)) % 200 for i in range(tokens)), sampling=sampling)


def record_run(
    messages: Callable[[int, StepRecord | None], Sequence[Event]], *, max_steps: int = 100
) -> tuple[StepRecord, ...]:
    """Run until idle; ``messages(step, previous record)`` gives what clients send to each step."""
    scheduler, pipeline = Scheduler(LIMITS), SimulatedPipeline(LIMITS)
    due: deque[int] = deque()
    records: list[StepRecord] = []
    for step in range(1, max_steps + 1):
        events: list[Event] = []
        while due and due[0] <= step:
            due.popleft()
            completion = pipeline.next_completion(0)
            assert completion is not None
            events.append(completion)
        events += messages(step, records[-1] if records else None)
        try:
            result = scheduler.step(events, float(step))
        except IntegrityError as exc:
            records.append(_record(scheduler, events, None, (), f"{type(exc).__name__}: {exc}"))
            break
        if result.microbatch is not None:
            pipeline.launch(result.microbatch)
            due.append(step + LIMITS.depth)
        records.append(_record(scheduler, events, result.microbatch, result.replies, None))
        if scheduler.is_fully_idle and not scheduler.books.in_flight:
            break
    return tuple(records)


def flush_race(rid: str = "a") -> tuple[StepRecord, ...]:
    """One request; the flush comes as soon as the window is open."""
    flushed = False

    def messages(step: int, previous: StepRecord | None) -> list[Event]:
        nonlocal flushed
        if step == 1:
            return [generate(rid)]
        if (
            previous is not None
            and not (previous.waiting or previous.chunked or previous.running)
            and previous.in_flight
            and not flushed
        ):
            flushed = True
            return [FlushCache(call_id="f")]
        return []

    return record_run(messages)


def race_traces(monkeypatch: object, rid: str = "a") -> tuple[Trace, Trace]:
    """The healthy run, and the run whose idle check does not look at what is in flight."""
    healthy = log_of(flush_race(rid), LIMITS)
    with monkeypatch.context() as patch:  # type: ignore[attr-defined]
        patch.setattr(Books, "nothing_in_flight", property(lambda books: True))
        broken = log_of(flush_race(rid), LIMITS)
    title, config = "flush while results are in flight", config_values(PP4)
    passed = TraceHeader(title=title, config=config, outcome="passed")
    window = next(step.step for step in healthy.steps if step.in_window)
    last = broken.steps[-1]
    failed = TraceHeader(
        title=title,
        config=config,
        outcome=f"died at step {last.step}: {last.error}",
        mutant="idle-ignores-in-flight",
        died=True,
    )
    notes = (Note(window, "the window is open"),)
    return Trace(passed, healthy, notes), Trace(failed, broken, notes)


def _record(scheduler, events, microbatch, replies, error) -> StepRecord:  # type: ignore[no-untyped-def]
    books, pages = scheduler.books, scheduler.memory.pages
    return StepRecord(
        step=scheduler.step_number,
        now=scheduler.now,
        events=tuple(events),
        microbatch=microbatch,
        replies=tuple(replies),
        waiting=len(books.waiting),
        chunked=books.chunked.rid if books.chunked else None,
        running=len(books.running),
        in_flight=books.in_flight_ids(),
        pages_free=pages.free,
        pages_cached=pages.cached,
        pages_held=pages.held,
        digest=scheduler.digests.digest,
        waiting_rids=tuple(request.rid for request in books.waiting),
        running_rids=tuple(books.running),
        error=error,
    )
