"""Mutants of structured output: requests that wait for their grammar, its state, and the grammars that are kept."""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.messages import Abort, Completion, Generate, GrammarReady
from engine.plan import GrammarOrder
from engine.scheduler import Request, Scheduler
from engine.scheduler.admission import Admission
from engine.scheduler.books import Launched
from engine.scheduler.grammars import Grammars
from engine.scheduler.planner import Planner
from scripted.core.mutant import Mutant

__all__ = ["GRAMMARS"]

_TESTS = "tests/registered/structured"

_on_abort = Scheduler._on_abort
_on_results = Scheduler._on_results
_on_ready = Grammars.on_ready
_let_go = Grammars.let_go
_retract = Planner.retract
_admit = Planner._admit
_request_of = Admission.request_of


def _abort_what_does_not_wait_for_a_grammar(scheduler: Scheduler, abort: Abort) -> None:
    request = scheduler.books.requests.get(abort.rid)
    if request is None or request.grammar is None or request.grammar.is_ready:
        _on_abort(scheduler, abort)
    elif abort.call_id is not None:
        scheduler._answer(abort.call_id, ok=True, message=f"{abort.rid}: aborted")


def _swallow_the_error(grammars: Grammars, ready: GrammarReady) -> Sequence[Request]:
    return () if ready.error is not None else _on_ready(grammars, ready)


def _up_to_the_first_that_is_not_ready(grammars: Grammars, waiting: Sequence[Request]) -> Sequence[Request]:
    del grammars
    for index, request in enumerate(waiting):
        if request.grammar is not None and not request.grammar.is_ready:
            return waiting[:index]
    return waiting


def _cancel_with_its_first_user(grammars: Grammars, request: Request) -> None:
    known = request.grammar
    _let_go(grammars, request)
    if known is not None and not known.is_ready and known.users:
        # The answer will be one to a grammar that is not known any more.
        grammars._drop(known)
        grammars._compiling += 1


def _forget_with_any_user(grammars: Grammars, request: Request) -> None:
    known = request.grammar
    _let_go(grammars, request)
    if known is not None and known.users and not grammars._kept:
        grammars._orders.append(GrammarOrder(known.id, None))


def _begin_the_grammar_anew(planner: Planner, request: Request) -> None:
    _retract(planner, request)
    request.spec = msgspec.structs.replace(request.spec, prompt_tokens=len(request.ids))


def _begin_after_the_cached_prefix(planner: Planner, request: Request) -> bool:
    admitted = _admit(planner, request)
    if admitted and request.prefill_start:
        request.spec = msgspec.structs.replace(request.spec, prompt_tokens=request.prefill_start)
    return admitted


def _overlook_dead_ends(scheduler: Scheduler, launched: Launched, completion: Completion) -> None:
    _on_results(scheduler, launched, msgspec.structs.replace(completion, errors=()))


def _request_that_may_ignore_its_end(admission: Admission, message: Generate, arrival: int) -> Request:
    request = _request_of(admission, message, arrival)
    if message.sampling.ignore_eos:
        request.stop_ids = frozenset(message.sampling.stop_token_ids)
    return request


def _forget_used_ones_too(grammars: Grammars) -> None:
    for known in grammars.entries:
        grammars._drop(known)
        grammars._orders.append(GrammarOrder(known.id, None))


def _keep_all(grammars: Grammars) -> None:
    del grammars


GRAMMARS = (
    Mutant(
        name="abort-overlooks-the-grammar-queue",
        origin="SGLang pull request 6803",
        bug="an abort does not find a request that waits for its grammar; it starts later, for no client",
        signature="was aborted",
        test=f"{_TESTS}/test_grammar_queue.py::test_abort_while_it_waits",
        owner=Scheduler,
        attribute="_on_abort",
        replacement=_abort_what_does_not_wait_for_a_grammar,
    ),
    Mutant(
        name="failed-grammar-is-waited-for",
        origin="vLLM pull request 45012",
        bug="when a grammar cannot be compiled, its requests wait for it for ever",
        signature="BudgetSpent",
        test=f"{_TESTS}/test_grammar_queue.py::test_a_grammar_that_fails_ends_its_requests",
        owner=Grammars,
        attribute="on_ready",
        replacement=_swallow_the_error,
    ),
    Mutant(
        name="grammar-queue-blocks-the-others",
        origin="vLLM issues 14151 and 53130",
        bug="while a grammar is compiled, requests that came after the one that waits for it are not started",
        signature="BudgetSpent",
        test=f"{_TESTS}/test_grammar_queue.py::test_others_do_not_wait",
        owner=Grammars,
        attribute="startable",
        replacement=_up_to_the_first_that_is_not_ready,
    ),
    Mutant(
        name="abort-cancels-a-shared-grammar",
        origin="SGLang pull request 6803, the future in its cache",
        bug="the end of one request cancels a compilation that another one with the same grammar waits for",
        signature="BudgetSpent",
        test=f"{_TESTS}/test_grammar_queue.py::test_abort_of_one_leaves_the_other",
        owner=Grammars,
        attribute="let_go",
        replacement=_cancel_with_its_first_user,
    ),
    Mutant(
        name="grammar-begins-anew",
        origin="vLLM pull request 30916 and issue 45014: the automaton and the output part",
        bug="after a retraction the automaton begins anew in the middle of the output",
        signature="does not follow its grammar",
        test=f"{_TESTS}/test_grammar_state.py::test_a_retraction_keeps_the_place",
        owner=Planner,
        attribute="retract",
        replacement=_begin_the_grammar_anew,
    ),
    Mutant(
        name="grammar-follows-the-prompt",
        origin="vLLM pull request 29821: with chunked prefill the automaton was fed with the prompt",
        bug="after a prefix hit the rest of the prompt counts as output, which the grammar forbids",
        signature="does not follow its grammar",
        test=f"{_TESTS}/test_grammar_state.py::test_after_a_prefix_hit",
        owner=Planner,
        attribute="_admit",
        replacement=_begin_after_the_cached_prefix,
    ),
    Mutant(
        name="grammar-goes-on-after-its-end",
        origin="vLLM issue 42619",
        bug="a request with ignore_eos goes on after its grammar is complete, and nothing can follow",
        signature="does not follow its grammar",
        test=f"{_TESTS}/test_grammar_state.py::test_what_else_ends_an_output",
        owner=Admission,
        attribute="request_of",
        replacement=_request_that_may_ignore_its_end,
    ),
    Mutant(
        name="dead-end-is-overlooked",
        origin="vLLM pull request 18780",
        bug="a request whose grammar leads nowhere goes on, with a token that nothing allows",
        signature="does not follow its grammar",
        test=f"{_TESTS}/test_grammar_state.py::test_a_dead_end_ends_its_request_alone",
        owner=Scheduler,
        attribute="_on_results",
        replacement=_overlook_dead_ends,
    ),
    Mutant(
        name="flush-forgets-a-grammar-in-use",
        origin="SGLang pull request 22054, the other side",
        bug="a flush forgets the grammar that a request in the queue waits for",
        signature="started without its grammar",
        test=f"{_TESTS}/test_grammar_queue.py::test_flush_and_update_while_it_waits",
        owner=Grammars,
        attribute="forget_unused",
        replacement=_forget_used_ones_too,
    ),
    Mutant(
        name="flush-keeps-grammars",
        origin="SGLang pull request 22054",
        bug="a flush of the cache leaves compiled grammars in it",
        signature="has grown",
        test=f"{_TESTS}/test_grammar_cache.py::test_a_flush_forgets_what_is_not_used",
        owner=Grammars,
        attribute="forget_unused",
        replacement=_keep_all,
    ),
    Mutant(
        name="grammar-forgotten-in-use",
        origin="SGLang pull request 13947: a grammar that is not cached where it is used",
        bug="the end of one request has a grammar forgotten that another one is still to use",
        signature="must be compiled before it is used",
        test=f"{_TESTS}/test_grammar_cache.py::test_a_grammar_is_kept_for_the_next_user",
        owner=Grammars,
        attribute="let_go",
        replacement=_forget_with_any_user,
    ),
)
