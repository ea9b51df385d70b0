"""A backend for vLLM's structured output: grammars without text, compiled when the schedule says so.

Standalone tests about grammars contain this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar

from scripted.core.masks import STATES, is_allowed, state_after

# For each masked request of a plan: the guesses that may hold, and the states of its tokens' masks. The state of an
# unmasked token is None.
Masks = Mapping[str, tuple[int, Sequence[int | None]]]
# The token of a worker with a wrong mask: no grammar and no model has it.
MASKED = 0
_BITS = 32
# Greater than all output tokens.
_VOCABULARY = 160
_MASKS = [
    [sum(1 << bit for bit in range(_BITS) if is_allowed(first + bit, state)) for first in range(0, _VOCABULARY, _BITS)]
    for state in range(STATES)
]
# The words of a mask are signed.
_ROWS = [
    torch.tensor([word - (1 << _BITS) if word >> (_BITS - 1) else word for word in mask], dtype=torch.int32)
    for mask in _MASKS
]
_STATES = {tuple(row.tolist()): state for state, row in enumerate(_ROWS)}


class Grammar(StructuredOutputGrammar):
    """The grammar of one request: its states, one more than its accepted tokens."""

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


class Followed(Grammar):
    """A recorded engine's grammar: it accepts every token, because the engine did."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        del request_id, tokens
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return tokens

    def rollback(self, num_tokens: int) -> None:
        """Do nothing: there are no states to roll back."""


class Compiler(StructuredOutputBackend):
    """Compiles grammars on command; vLLM does so in threads. ``requests`` are the scheduler's."""

    def __init__(self, requests: Mapping[str, Any], kind: type[Grammar] = Grammar) -> None:
        self._requests = requests
        self._kind = kind

    def finish(self, request_id: str, compiles: bool = True) -> None:
        """End the compilation of a request's grammar, successfully or not. Ended requests need none."""
        if request_id in self._requests:
            grammar = self._kind() if compiles else ValueError("this grammar does not compile")
            self._requests[request_id].structured_output_request.grammar = grammar

    def compile_grammar(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("grammars are compiled by finish() only")

    def allocate_token_bitmask(self, max_num_seqs: int) -> Any:
        return torch.zeros((max_num_seqs, _VOCABULARY // _BITS), dtype=torch.int32)

    def destroy(self) -> None:
        pass


class Sampler:
    """Samples with a scheduler's masks, as the workers do."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def masks_of(self, plan: SchedulerOutput) -> Masks:
        """Return the scheduler's current masks for a plan."""
        return _masks_of(plan, self._scheduler.get_grammar_bitmask(plan))

    def masked(
        self, plan: SchedulerOutput, tokens: Mapping[str, Sequence[int]], masks: Masks
    ) -> dict[str, Sequence[int]]:
        """Cut each request's tokens before the first that its mask forbids or does not cover.

        The masks of a plan that depend on tokens in flight are made again, now that these are there.
        """
        if plan.pending_structured_output_tokens:
            masks = self.masks_of(plan)
        return {name: _masked(said, masks.get(name)) for name, said in tokens.items()}


def _masked(said: Sequence[int], mask: tuple[int, Sequence[int | None]] | None) -> Sequence[int]:
    if mask is None:
        return said
    holding, states = mask
    # The workers reject the other guesses, whatever the masks in their places are.
    said = said[: holding + 1]
    for place, (token, state) in enumerate(zip(said, states, strict=False)):
        if state is None or not is_allowed(token, state):
            return (*said[:place], MASKED)
    return said


def _masks_of(plan: SchedulerOutput, given: GrammarOutput | None) -> Masks:
    if given is None:
        return {}
    rows = given.grammar_bitmask.tolist()
    sizes = [1 + len(plan.scheduled_spec_decode_tokens.get(one, ())) for one in given.structured_output_request_ids]
    # Since 0.33 all requests have the same number of rows; before, each had one more than its guesses.
    every = None if sum(sizes) == len(rows) else len(rows) // len(sizes)
    masks: dict[str, tuple[int, Sequence[int | None]]] = {}
    first = 0
    for at, request_id in enumerate(given.structured_output_request_ids):
        guesses: Sequence[int] = plan.scheduled_spec_decode_tokens.get(request_id, ())
        # Since 0.32; before, the workers counted the guesses in the plan.
        known = getattr(given, "num_acceptable_drafts", None)
        holding = sum(guess >= 0 for guess in guesses) if known is None else known[at]
        masks[request_id] = holding, [_STATES.get(tuple(row)) for row in rows[first : first + sizes[at]]]
        first += every or sizes[at]
    return masks
