"""Mutants of plain contracts: no race of another engine, but what a test of the core suite must notice.

They are switched on like the gallery's and are not searched for: most of them break a promise that no invariant of a
scheduler knows, such as a priority that is lost.
"""

from __future__ import annotations

import functools
from typing import Final

from scripted.adapters.lockstep.bugs.memory_contracts import MEMORY_CONTRACTS
from scripted.adapters.lockstep.bugs.step_contracts import STEP_CONTRACTS
from scripted.adapters.lockstep.bugs.window_layers import WINDOW_LAYERS
from scripted.core.mutant import GALLERY_TESTS, Mutant

__all__ = ["CONTRACTS"]

_CORE: Final = "tests/registered/core"
_of: Final = functools.partial(Mutant, origin="a contract of the core suite")


CONTRACTS: Final = (
    _of(
        name="what-never-fits-is-admitted",
        bug="a request that can never run is let into the queue",
        signature="assert refused is not None",
        test=f"{GALLERY_TESTS}/test_g26_context_length.py::test_a_prompt_that_fills_the_context_is_refused",
        target="engine.limits:Limits.why_never_fits",
        cut="if prompt_tokens < 1:",
        becomes="return None\n    if prompt_tokens < 1:",
    ),
    _of(
        name="abort-all-of-nothing-kills",
        bug="aborting all while nothing is alive takes the scheduler down",
        signature="there is nothing to abort",
        test=f"{_CORE}/test_aborts.py::test_abort_all_of_nothing",
        target="engine.scheduler.scheduler:Scheduler._on_abort_all",
        cut="for request in live:",
        becomes='assert live, "there is nothing to abort"\n    for request in live:',
    ),
    _of(
        name="waiting-requests-are-not-aborted",
        bug="an abort is answered, but a request in the queue stays there",
        signature="assert None == 'abort'",
        test="tests/registered/abort/test_unusual_aborts.py::test_abort_before_the_first_step",
        target="engine.scheduler.scheduler:Scheduler._on_abort",
        cut="if request is not None:",
        becomes='if request is not None and request.place != "waiting":',
    ),
    _of(
        name="priority-is-lost",
        bug="a request's priority does not reach the scheduler",
        signature="r.req.priority == 7",
        test=f"{_CORE}/test_handles.py::test_priority_is_carried",
        target="engine.scheduler.admission:Admission.request_of",
        cut="priority=message.priority",
        becomes="priority=0",
    ),
    _of(
        name="minimum-length-is-ignored",
        bug="stop tokens end a request before its minimum",
        signature="len(held.output_ids) >= 5",
        test=f"{_CORE}/test_handles.py::test_min_new_tokens_holds_a_stop_back",
        target="engine.scheduler.admission:Admission._spec",
        cut="tuple(sorted(stop_ids)) if sampling.min_new_tokens else ()",
        becomes="()",
    ),
    _of(
        name="logprobs-are-lost",
        bug="tokens come without the logprobs that were asked for",
        signature="len(asked.logprobs) == 3",
        test=f"{_CORE}/test_handles.py::test_logprobs_come_with_the_tokens",
        target="engine.scheduler.replies:output_of",
        cut="() if logprob is None else (logprob,)",
        becomes="()",
    ),
    _of(
        name="one-token-late",
        bug="a request ends one token after its limit",
        signature="== [1, 2, 17]",
        test=f"{_CORE}/test_handles.py::test_ignore_eos_runs_to_the_exact_length",
        target="engine.scheduler.scheduler:Scheduler._why_finished",
        cut=">= request.limit_tokens",
        becomes="> request.limit_tokens",
    ),
    _of(
        name="refusal-names-no-counts",
        bug="a refused flush does not say what is in its way",
        signature="assert 'waiting=1' in",
        test=f"{_CORE}/test_flushes.py::test_flush_is_refused_with_the_counts",
        target="engine.scheduler.books:Books.what_is_busy",
        cut="return (",
        becomes='return "busy" or (',
    ),
    _of(
        name="continue-needs-a-pause",
        bug="a continue without a pause takes the scheduler down",
        signature="nothing is paused",
        test=f"{_CORE}/test_pauses.py::test_continue_without_a_pause_changes_nothing",
        target="engine.scheduler.scheduler:Scheduler._on_continue",
        cut="self.books.paused = None",
        becomes='assert self.books.paused is not None, "nothing is paused"\n    self.books.paused = None',
    ),
    _of(
        name="aborts-count-as-finished",
        bug="an abort is counted as an end like any other",
        signature="requests_aborted",
        test=f"{_CORE}/test_memory_accounts.py::test_totals_are_what_the_clients_saw",
        target="engine.scheduler.counters:Counters.count_end",
        cut="if reason is ABORT:",
        becomes="if False:",
    ),
    _of(
        name="two-profiles-at-once",
        bug="a call for a profile does not wait for the answer to the one before",
        signature="another profile call",
        test=f"{_CORE}/test_profile_calls.py::test_one_profile_at_a_time",
        target="engine.scheduler.profiles:Profiles.is_open",
        cut="self.due is not None or self._launched is not None",
        becomes="False",
    ),
    _of(
        name="a-pause-holds-profiles-up",
        bug="a profile is not begun while generation is paused",
        signature="the predicate never held",
        test=f"{_CORE}/test_profile_calls.py::test_a_pause_does_not_hold_a_profile_up",
        target="engine.scheduler.controls:Controls.microbatch",
        cut="update, profile =",
        becomes="if self._books.paused is not None:\n        return None\n    update, profile =",
    ),
    *STEP_CONTRACTS,
    *MEMORY_CONTRACTS,
    *WINDOW_LAYERS,
)
