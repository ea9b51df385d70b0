"""A backend of vLLM's structured output: its grammars know no text, and a schedule says when one is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar

from scripted.core.masks import STATES, is_allowed, state_after

_BITS = 32
# More than any token that is said.
_VOCABULARY = 160
_MASKS = [
    [sum(1 << bit for bit in range(_BITS) if is_allowed(first + bit, state)) for first in range(0, _VOCABULARY, _BITS)]
    for state in range(STATES)
]
# A word of a mask is signed.
_ROWS = [
    torch.tensor([word - (1 << _BITS) if word >> (_BITS - 1) else word for word in mask], dtype=torch.int32)
    for mask in _MASKS
]
_STATES = {tuple(row.tolist()): state for state, row in enumerate(_ROWS)}


class Grammar(StructuredOutputGrammar):
    """The grammar of one request: its states, one more than the tokens that it has accepted."""

    def __init__(self) -> None:
        self.states = [0]

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        del request_id
        for token in tokens:
            if not is_allowed(token, self.states[-1]):
                return False
            self.states.append(state_after([token], self.states[-1]))
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        state, valid = self.states[-1], []
        for token in tokens:
            if not is_allowed(token, state):
                break
            valid.append(token)
            state = state_after([token], state)
        return valid

    def rollback(self, num_tokens: int) -> None:
        del self.states[len(self.states) - num_tokens :]

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        bitmask[batch_index].copy_(_ROWS[self.states[-1]])

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None:
        self.states = [0]


class Compiler(StructuredOutputBackend):
    """``requests`` are those of the scheduler. vLLM compiles in threads; here somebody says when one is done."""

    def __init__(self, requests: Mapping[str, Any]) -> None:
        self._requests = requests

    def finish(self, request_id: str, compiles: bool = True) -> None:
        """The grammar of this request is there, or does not compile; a request that has ended needs none."""
        if request_id in self._requests:
            grammar = Grammar() if compiles else ValueError("this grammar does not compile")
            self._requests[request_id].structured_output_request.grammar = grammar

    def compile_grammar(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("somebody says when a grammar is compiled")

    def allocate_token_bitmask(self, max_num_seqs: int) -> Any:
        return torch.zeros((max_num_seqs, _VOCABULARY // _BITS), dtype=torch.int32)

    def destroy(self) -> None:
        pass


def masks_of(plan: SchedulerOutput, given: GrammarOutput | None) -> dict[str, tuple[int, list[int | None]]]:
    """Of each masked request of a plan, how many guesses may hold, and the states that its tokens are masked for.

    None is for a token that is not masked.
    """
    if given is None:
        return {}
    rows = given.grammar_bitmask.tolist()
    sizes = [1 + len(plan.scheduled_spec_decode_tokens.get(one, ())) for one in given.structured_output_request_ids]
    # Since 0.33 all have as many rows; before, each had as many as it has guesses, and one.
    every = None if sum(sizes) == len(rows) else len(rows) // len(sizes)
    masks, first = {}, 0
    for at, request_id in enumerate(given.structured_output_request_ids):
        guesses: Sequence[int] = plan.scheduled_spec_decode_tokens.get(request_id, ())
        # Since 0.32; before, the workers counted the guesses in the plan.
        known = getattr(given, "num_acceptable_drafts", None)
        holding = sum(guess >= 0 for guess in guesses) if known is None else known[at]
        masks[request_id] = holding, [_STATES.get(tuple(row)) for row in rows[first : first + sizes[at]]]
        first += every or sizes[at]
    return masks
