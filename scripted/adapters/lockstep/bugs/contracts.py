"""Mutants of plain contracts: no race of another engine, but what a test of the core suite must notice.

They are switched on like the gallery's and are not searched for: most of them break a promise that no invariant of a
scheduler knows, such as a priority that is lost.
"""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

from typing import Any

import msgspec

from engine.limits import Limits
from engine.messages import Abort, AbortAll, ContinueGeneration, FinishReason, Generate, TokenOutput
from engine.plan import Microbatch
from engine.scheduler import Place, Request, Scheduler
from engine.scheduler import scheduler as scheduler_module
from engine.scheduler.admission import Admission
from engine.scheduler.books import Books
from engine.scheduler.controls import Controls
from engine.scheduler.counters import Counters
from engine.scheduler.profiles import Profiles
from engine.scheduler.replies import output_of
from scripted.adapters.lockstep.bugs.contract import contract
from scripted.adapters.lockstep.bugs.memory_contracts import MEMORY_CONTRACTS
from scripted.adapters.lockstep.bugs.step_contracts import STEP_CONTRACTS
from scripted.adapters.lockstep.bugs.window_layers import WINDOW_LAYERS

__all__ = ["CONTRACTS"]

_request_of = Admission.request_of
_microbatch = Controls.microbatch
_on_abort = Scheduler._on_abort
_on_abort_all = Scheduler._on_abort_all
_on_continue = Scheduler._on_continue


def _fits(limits: Limits, prompt_tokens: int, max_new_tokens: int) -> None:
    del limits, prompt_tokens, max_new_tokens


def _abort_at_least_one(scheduler: Scheduler, abort: AbortAll) -> None:
    assert scheduler.books.requests, "there is nothing to abort"
    _on_abort_all(scheduler, abort)


def _abort_all_but_waiting(scheduler: Scheduler, abort: Abort) -> None:
    request = scheduler.find_request(abort.rid)
    if request is not None and request.place is Place.WAITING:
        scheduler._answer(abort.call_id or "", ok=True, message="aborted")
    else:
        _on_abort(scheduler, abort)


def _without_priority(admission: Admission, message: Generate, arrival: int) -> Request:
    return _request_of(admission, msgspec.structs.replace(message, priority=0), arrival)


def _without_minimum(admission: Admission, message: Generate, arrival: int) -> Request:
    sampling = msgspec.structs.replace(message.sampling, min_new_tokens=0)
    return _request_of(admission, msgspec.structs.replace(message, sampling=sampling), arrival)


def _without_logprobs(request: Request, **details: Any) -> TokenOutput:
    return output_of(request, **{**details, "logprob": None})


def _one_token_late(scheduler: Scheduler, request: Request, token: int) -> FinishReason | None:
    del scheduler
    if token in request.stop_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.ids) > request.limit_tokens else None


def _say_no_more(books: Books) -> str:
    del books
    return "busy"


def _continue_what_is_paused(scheduler: Scheduler, message: ContinueGeneration) -> None:
    assert scheduler.books.paused is not None, "nothing is paused"
    _on_continue(scheduler, message)


def _count_any_end(counters: Counters, reason: FinishReason) -> None:
    del reason
    counters.requests_finished += 1


def _only_when_not_paused(controls: Controls, number: int) -> Microbatch | None:
    return _microbatch(controls, number) if controls._books.paused is None else None


def _is_never_open(profiles: Profiles) -> bool:
    del profiles
    return False


CONTRACTS = (
    contract(
        "what-never-fits-is-admitted",
        "a request that can never run is let into the queue",
        "assert refused is not None",
        "tests/registered/gallery/test_g26_context_length.py::test_a_prompt_that_fills_the_context_is_refused",
        Limits,
        "why_never_fits",
        _fits,
    ),
    contract(
        "abort-all-of-nothing-kills",
        "aborting all while nothing is alive takes the scheduler down",
        "there is nothing to abort",
        "test_aborts.py::test_abort_all_of_nothing",
        Scheduler,
        "_on_abort_all",
        _abort_at_least_one,
    ),
    contract(
        "waiting-requests-are-not-aborted",
        "an abort is answered, but a request in the queue stays there",
        "assert None == 'abort'",
        "tests/registered/abort/test_unusual_aborts.py::test_abort_before_the_first_step",
        Scheduler,
        "_on_abort",
        _abort_all_but_waiting,
    ),
    contract(
        "priority-is-lost",
        "a request's priority does not reach the scheduler",
        "r.req.priority == 7",
        "test_handles.py::test_priority_is_carried",
        Admission,
        "request_of",
        _without_priority,
    ),
    contract(
        "minimum-length-is-ignored",
        "stop tokens end a request before its minimum",
        "len(held.output_ids) >= 5",
        "test_handles.py::test_min_new_tokens_holds_a_stop_back",
        Admission,
        "request_of",
        _without_minimum,
    ),
    contract(
        "logprobs-are-lost",
        "tokens come without the logprobs that were asked for",
        "len(asked.logprobs) == 3",
        "test_handles.py::test_logprobs_come_with_the_tokens",
        scheduler_module,
        "output_of",
        _without_logprobs,
    ),
    contract(
        "one-token-late",
        "a request ends one token after its limit",
        "== [1, 2, 17]",
        "test_handles.py::test_ignore_eos_runs_to_the_exact_length",
        Scheduler,
        "_why_finished",
        _one_token_late,
    ),
    contract(
        "refusal-names-no-counts",
        "a refused flush does not say what is in its way",
        "assert 'waiting=1' in",
        "test_flushes.py::test_flush_is_refused_with_the_counts",
        Books,
        "what_is_busy",
        _say_no_more,
    ),
    contract(
        "continue-needs-a-pause",
        "a continue without a pause takes the scheduler down",
        "nothing is paused",
        "test_pauses.py::test_continue_without_a_pause_changes_nothing",
        Scheduler,
        "_on_continue",
        _continue_what_is_paused,
    ),
    contract(
        "aborts-count-as-finished",
        "an abort is counted as an end like any other",
        "requests_aborted",
        "test_memory_accounts.py::test_totals_are_what_the_clients_saw",
        Counters,
        "count_end",
        _count_any_end,
    ),
    contract(
        "two-profiles-at-once",
        "a call for a profile does not wait for the answer to the one before",
        "another profile call",
        "test_profile_calls.py::test_one_profile_at_a_time",
        Profiles,
        "is_open",
        property(_is_never_open),
    ),
    contract(
        "a-pause-holds-profiles-up",
        "a profile is not begun while generation is paused",
        "the predicate never held",
        "test_profile_calls.py::test_a_pause_does_not_hold_a_profile_up",
        Controls,
        "microbatch",
        _only_when_not_paused,
    ),
    *STEP_CONTRACTS,
    *MEMORY_CONTRACTS,
    *WINDOW_LAYERS,
)
