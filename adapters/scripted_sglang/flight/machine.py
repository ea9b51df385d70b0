"""SGLang's scheduler driven by the frames of a flight, without a server, a model or a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from sglang.srt.managers.io_struct import AbortReq

from scripted.core.refusals import ScriptDefinitionError
from scripted.sdk import Add, Capabilities, Limits
from scripted.sdk.flight.frames import Arrived, Event, Planned
from scripted.sdk.flight.of_machine import MachineOfFlight
from scripted.sdk.flight.packed import planned_from
from scripted.sdk.flight.replay import name_of
from scripted.sdk.flight.standing import Hint
from scripted_sglang.config import SglangSettings
from scripted_sglang.event_loop import request
from scripted_sglang.flight.plans import packed_of
from scripted_sglang.machine import SglangMachine
from scripted_sglang.scheduler_view import rid_of

# Limits on a header: a hostile one would fill the memory before the first frame.
_MOST_TOKENS: Final = 1 << 24
_MOST_CELLS: Final = 1 << 28
# Every recorded token is in this vocabulary, and none ends a request by itself.
_VOCABULARY: Final = 1 << 62


class SglangOfFlight(MachineOfFlight):
    """A new scheduler with these settings, whose requests have the recorded names."""

    def __init__(self, settings: SglangSettings, limits: Limits, can: Capabilities) -> None:
        cells = settings.max_running_requests * settings.context_length
        if settings.max_total_tokens > _MOST_TOKENS or cells > _MOST_CELLS:
            raise ScriptDefinitionError(
                f"a replay has at most {_MOST_TOKENS} tokens of KV and {_MOST_CELLS} of all requests' contexts, the "
                f"flight names {settings.max_total_tokens} and {cells}"
            )
        self._flown = _FlownMachine(settings)
        super().__init__(self._flown, limits, can)

    def take(self, event: Event) -> None:
        if isinstance(event, Arrived):
            self._flown.arrive(event)
        super().take(event)

    def plan(self, plan: int, now: float) -> Planned:
        """Make one plan; an empty plan has no digests."""
        self._flown.begin_plan(plan, now)
        super().plan(plan, now)
        self._flown.end_plan()
        return self._flown.planned or Planned(plan=plan, now=now, shape=0)

    def hints(self) -> Mapping[str, Hint]:
        return self._flown.hints()


class _FlownMachine(SglangMachine):
    """The machine without a front end: the recorded front end has already admitted, held back and refused requests."""

    def __init__(self, settings: SglangSettings) -> None:
        super().__init__(settings)
        self.planned: Planned | None = None
        self._frames: dict[str, Arrived] = {}
        self._numbers: dict[str, int] = {}
        self._plan, self._now = 0, 0.0
        # The request that did not fit when ``batch_is_full`` was set; None while it is not set.
        self._full_for: str | None = None
        config = self.scheduler.model_config
        config.vocab_size, config.hf_eos_token_id = _VOCABULARY, set()
        run = self.scheduler.run_batch

        def noting(batch: Any, *args: Any, **kwargs: Any) -> Any:
            packed = packed_of(self.scheduler, batch, self._plan, self._now, self._numbers)
            self.planned = planned_from(packed)
            return run(batch, *args, **kwargs)

        self.scheduler.run_batch = noting

    def begin_plan(self, plan: int, now: float) -> None:
        self.planned, self._plan, self._now = None, plan, now

    def end_plan(self) -> None:
        """Note which request filled the running batch: the first one left in the queue."""
        if not self.scheduler.running_batch.batch_is_full:
            self._full_for = None
        elif self._full_for is None:
            self._full_for = next(self._queue, "")

    @property
    def _queue(self) -> Iterator[str]:
        return (rid_of(req.rid) for req in self.scheduler.waiting_queue)

    def hints(self) -> Mapping[str, Hint]:
        """Return what a queue waits for if its first request did not fit and has since left it."""
        queue, full_for = list(self._queue), self._full_for
        if not full_for or full_for in queue or full_for in self._running:
            return {}
        text = (
            f"its turn: batch_is_full is set since {full_for} did not fit, which has left the queue, and only a "
            "request that leaves the batch clears it"
        )
        return {rid: Hint("turn", text) for rid in queue}

    @property
    def _running(self) -> list[str]:
        return [rid_of(req.rid) for req in self.scheduler.running_batch.reqs]

    def arrive(self, event: Arrived) -> None:
        name = name_of(event)
        self._frames[name], self._numbers[name] = event, event.id

    def _add(self, event: Add) -> None:
        frame = self._frames.pop(event.rid)
        priority = frame.priority if self.settings.enable_priority_scheduling else None
        message = request(event.rid, event.prompt_ids, event.max_new_tokens, priority, event.stop_token_ids)
        message.sampling_params.min_new_tokens = int(frame.engine.get("min_new_tokens") or 0)
        message.sampling_params.ignore_eos = bool(frame.engine.get("ignore_eos"))
        message.extra_key = frame.salt or None
        self._alive[event.rid] = event
        self._retractions.begin(event.rid)
        self._say(message)

    def _abort(self, rid: str) -> None:
        self._abort_sent.add(rid)
        self._say(AbortReq(rid=rid))
