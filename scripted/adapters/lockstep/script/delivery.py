"""An answer's last way: what left the scheduler once has reached its client once. It sees scripts' handles only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from engine.messages import FinishReason
from scripted.adapters.lockstep.script.handle import RequestHandle
from scripted.core.violation import Violation

_COMPLETE: Final = (FinishReason.LENGTH.value, FinishReason.STOP.value)


def check_answers(handles: Iterable[RequestHandle]) -> None:
    """What left the scheduler once has reached its client once. Raises Violation."""
    for handle in handles:
        client = handle.client
        if client.terminal_answers != 1 and client.status is not None and not client.dropped:
            raise Violation(f"the client of {handle.rid} got {client.terminal_answers} terminal answers: {client}")
        due = (None, *[value.logprob for value in handle.prompt_logprobs])
        is_whole = handle.message.prompt_logprobs_from >= 0 and client.finish_reason in _COMPLETE
        if is_whole and client.input_logprobs != due:
            raise Violation(f"the client of {handle.rid} got the logprobs {client.input_logprobs}, but told were {due}")
