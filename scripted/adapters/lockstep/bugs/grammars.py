"""Mutants of structured output: requests that wait for their grammar, its state, and the grammars that are kept."""

from __future__ import annotations

from typing import Final

from scripted.core.mutant import Mutant

__all__ = ["GRAMMARS"]

_TESTS: Final = "tests/registered/structured"


GRAMMARS: Final = (
    Mutant(
        name="abort-overlooks-the-grammar-queue",
        origin="SGLang pull request 6803",
        bug="an abort does not find a request that waits for its grammar; it starts later, for no client",
        signature="was aborted",
        test=f"{_TESTS}/test_grammar_queue.py::test_abort_while_it_waits",
        target="engine.scheduler.scheduler:Scheduler._on_abort",
        cut="if request is not None:",
        becomes="if request is not None and (request.grammar is None or request.grammar.is_ready):",
    ),
    Mutant(
        name="failed-grammar-is-waited-for",
        origin="vLLM pull request 45012",
        bug="when a grammar cannot be compiled, its requests wait for it for ever",
        signature="BudgetSpent",
        test=f"{_TESTS}/test_grammar_queue.py::test_a_grammar_that_fails_ends_its_requests",
        target="engine.scheduler.grammars:Grammars.on_ready",
        cut="self._drop(known)\n        return tuple(known.users)",
        becomes="return ()",
    ),
    Mutant(
        name="grammar-queue-blocks-the-others",
        origin="vLLM issues 14151 and 53130",
        bug="while a grammar is compiled, requests that came after the one that waits for it are not started",
        signature="BudgetSpent",
        test=f"{_TESTS}/test_grammar_queue.py::test_others_do_not_wait",
        target="engine.scheduler.grammars:Grammars.startable",
        cut="return [request for request in waiting if request.grammar is None or request.grammar.is_ready]",
        becomes=(
            "for index, request in enumerate(waiting):\n"
            "        if request.grammar is not None and not request.grammar.is_ready:\n"
            "            return waiting[:index]\n"
            "    return waiting"
        ),
    ),
    Mutant(
        name="abort-cancels-a-shared-grammar",
        origin="SGLang pull request 6803, the future in its cache",
        bug="the end of one request cancels a compilation that another one with the same grammar waits for",
        signature="BudgetSpent",
        test=f"{_TESTS}/test_grammar_queue.py::test_abort_of_one_leaves_the_other",
        target="engine.scheduler.grammars:Grammars.let_go",
        cut="if not known.users and known.id in self._by_id:",
        becomes=(
            "if known.users and not known.is_ready:\n"
            "        self._drop(known)\n"
            "        self._compiling += 1  # The answer will be one to a grammar that is not known any more.\n"
            "    if not known.users and known.id in self._by_id:"
        ),
    ),
    Mutant(
        name="grammar-begins-anew",
        origin="vLLM pull request 30916 and issue 45014: the automaton and the output part",
        bug="after a retraction the automaton begins anew in the middle of the output",
        signature="does not follow its grammar",
        test=f"{_TESTS}/test_grammar_state.py::test_a_retraction_keeps_the_place",
        target="engine.scheduler.planner:Planner.retract",
        cut="self._books.enqueue(request)",
        becomes=(
            "import msgspec\n"
            "    request.spec = msgspec.structs.replace(request.spec, prompt_tokens=len(request.ids))\n"
            "    self._books.enqueue(request)"
        ),
    ),
    Mutant(
        name="grammar-follows-the-prompt",
        origin="vLLM pull request 29821: with chunked prefill the automaton was fed with the prompt",
        bug="after a prefix hit the rest of the prompt counts as output, which the grammar forbids",
        signature="does not follow its grammar",
        test=f"{_TESTS}/test_grammar_state.py::test_after_a_prefix_hit",
        target="engine.scheduler.planner:Planner._admit",
        cut="request.overtaken = 0",
        becomes=(
            "import msgspec\n"
            "    if request.prefill_start:\n"
            "        request.spec = msgspec.structs.replace(request.spec, prompt_tokens=request.prefill_start)\n"
            "    request.overtaken = 0"
        ),
    ),
    Mutant(
        name="grammar-goes-on-after-its-end",
        origin="vLLM issue 42619",
        bug="a request with ignore_eos goes on after its grammar is complete, and nothing can follow",
        signature="does not follow its grammar",
        test=f"{_TESTS}/test_grammar_state.py::test_what_else_ends_an_output",
        target="engine.scheduler.admission:Admission.request_of",
        cut=" or sampling.grammar is not None",
    ),
    Mutant(
        name="dead-end-is-overlooked",
        origin="vLLM pull request 18780",
        bug="a request whose grammar leads nowhere goes on, with a token that nothing allows",
        signature="does not follow its grammar",
        test=f"{_TESTS}/test_grammar_state.py::test_a_dead_end_ends_its_request_alone",
        target="engine.scheduler.scheduler:Scheduler._on_results",
        cut="for failed in completion.errors:",
        becomes="for failed in ():",
    ),
    Mutant(
        name="flush-forgets-a-grammar-in-use",
        origin="SGLang pull request 22054, the other side",
        bug="a flush forgets the grammar that a request in the queue waits for",
        signature="started without its grammar",
        test=f"{_TESTS}/test_grammar_queue.py::test_flush_and_update_while_it_waits",
        target="engine.scheduler.grammars:Grammars.forget_unused",
        cut="self._shrink(0)",
        becomes="self._unused.update(self._by_id)\n    self._shrink(0)",
    ),
    Mutant(
        name="flush-keeps-grammars",
        origin="SGLang pull request 22054",
        bug="a flush of the cache leaves compiled grammars in it",
        signature="has grown",
        test=f"{_TESTS}/test_grammar_cache.py::test_a_flush_forgets_what_is_not_used",
        target="engine.scheduler.grammars:Grammars.forget_unused",
        cut="self._shrink(0)",
        becomes="pass",
    ),
    Mutant(
        name="grammar-forgotten-in-use",
        origin="SGLang pull request 13947: a grammar that is not cached where it is used",
        bug="the end of one request has a grammar forgotten that another one is still to use",
        signature="must be compiled before it is used",
        test=f"{_TESTS}/test_grammar_cache.py::test_a_grammar_is_kept_for_the_next_user",
        target="engine.scheduler.grammars:Grammars.let_go",
        cut="if not known.users and known.id in self._by_id:",
        becomes=(
            "if known.users and not self._kept:\n"
            "        self._orders.append(GrammarOrder(known.id, None))\n"
            "    if not known.users and known.id in self._by_id:"
        ),
    ),
)
