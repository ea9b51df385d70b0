"""Parts of a standalone test of continuous batching: the processor without a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING, Any

from transformers.generation.continuous_batching.requests import RequestState

from scripted.sdk.standalone import Calls, Standalone
from scripted_transformers import processor

if TYPE_CHECKING:
    from scripted_transformers.machine import TransformersMachine


def launches(plan: Any) -> bool:
    return bool(plan)


class TransformersStandalone(Standalone):
    """Writes tests of the batch processor, whose requests belong to its scheduler."""

    launch = "prepare_next_batch"
    update = "update_batch"
    helpers = (launches,)

    @property
    def engine(self) -> str:
        return f"transformers {version('transformers')}"

    def modules(self, config: Any) -> Sequence[ModuleType]:
        del config
        return (processor,)

    def opening(self, config: Any) -> Sequence[str]:
        del config
        return ("processor = Processor(settings)",)

    def watched(self, machine: TransformersMachine) -> Mapping[str, tuple[Any, Sequence[str]]]:
        real = machine.processor
        return {
            "processor": (real, ("prepare_next_batch", "update_batch")),
            "processor.scheduler": (real.scheduler, ("add_waiting_request", "set_request_cancellation")),
            "processor.inputs_and_outputs": (real.inputs_and_outputs, ("launch", "bring")),
        }

    def spelled(self, value: Any, calls: Calls, arguments: Sequence[Any]) -> str | None:
        del arguments
        if not isinstance(value, RequestState):
            return None
        calls.names[value.request_id.partition("#")[0]] = value.request_id
        fields = ("request_id", "initial_tokens", "max_new_tokens", "eos_token_id", "streaming", "created_time")
        given = [f"{name}={getattr(value, name)!r}" for name in fields]
        return f"RequestState({', '.join(given)})"

    def remark(self, plan: Any) -> str:
        return "a batch" if plan else "nothing"
