"""The table of operators' routes: body, statuses and the message of each.

Imports no web framework: the HTTP front end, the router and simulated clients read the same table.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, Final, NamedTuple

from pydantic import Field, field_validator

from engine.core.messages import (
    Abort,
    AbortAll,
    ClientMessage,
    ContinueGeneration,
    PauseGeneration,
    PauseMode,
    Sleep,
    StopProfile,
    UpdateWeights,
)
from engine.frontend.schema.errors import ApiError
from engine.frontend.schema.native import (
    MAX_CALL_TIMEOUT_S,
    MAX_PATH_CHARS,
    MAX_RID_CHARS,
    LoraName,
    RuledBody,
    StrictBody,
)


class MessageBody(StrictBody):
    """A body that determines the whole message of its route. ``says`` describes the route."""

    says: ClassVar[str]

    @abstractmethod
    def message(self, call_id: str) -> ClientMessage:
        """Build the message to the scheduler."""


class AbortBody(MessageBody, RuledBody):
    """The body of ``POST /abort_request``: exactly one of an exact ``rid`` and ``abort_all=true``."""

    says: ClassVar = "End one request by its exact rid, all choices of a reply by the reply's rid, or all requests."
    rid: str | None = Field(default=None, min_length=1, max_length=MAX_RID_CHARS)
    abort_all: bool = False

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        if (self.rid is None) != self.abort_all:
            given = "neither" if self.rid is None else "both"
            yield "", f"exactly one of rid and abort_all=true must be given, got {given}; send one of them"

    def message(self, call_id: str) -> Abort | AbortAll:
        return AbortAll(call_id=call_id) if self.rid is None else Abort(rid=self.rid, call_id=call_id)


class PauseBody(MessageBody):
    says: ClassVar = "Stop planning: live requests return to the queue, freeze in place, or end."
    # JSON has no enums: a plain string is accepted.
    mode: PauseMode = Field(default=PauseMode.RETRACT, strict=False)

    def message(self, call_id: str) -> PauseGeneration:
        return PauseGeneration(call_id=call_id, mode=self.mode)


class SleepBody(MessageBody):
    """The body of ``POST /sleep``. After ``level`` 2 the engine wakes only once its weights were updated."""

    says: ClassVar = "Free weights and KV memory; live requests return to the queue, or end."
    level: int = Field(default=1, ge=1, le=2)
    mode: PauseMode = Field(default=PauseMode.RETRACT, strict=False)

    @field_validator("mode")
    @classmethod
    def _keeps_no_kv(cls, mode: PauseMode) -> PauseMode:
        if mode is PauseMode.IN_PLACE:
            raise ValueError("no request keeps its KV over a sleep, got 'in_place'; use retract or abort")
        return mode

    def message(self, call_id: str) -> Sleep:
        return Sleep(call_id=call_id, level=self.level, mode=self.mode)


class NoBody(StrictBody):
    """The body of a route without fields."""


class UpdateWeightsBody(MessageBody):
    """The body of ``POST /update_weights_from_disk``: a folder on the server's machine, or 'embedded:SEED'.

    With ``timeout``, the update waits that many seconds for an idle engine.
    """

    says: ClassVar = "Load other weights of the same model and drop the prefix cache; refused as a flush is."
    model_path: str = Field(min_length=1, max_length=MAX_PATH_CHARS)
    timeout: float | None = Field(default=None, ge=0, le=MAX_CALL_TIMEOUT_S)

    def message(self, call_id: str) -> UpdateWeights:
        return UpdateWeights(call_id=call_id, model_path=self.model_path, timeout_s=self.timeout)


class LoadLoraBody(StrictBody):
    """The body of ``POST /v1/load_lora_adapter``: a folder on the server's machine, or 'embedded-lora:SEED'."""

    lora_name: LoraName
    lora_path: str = Field(min_length=1, max_length=MAX_PATH_CHARS)


class UnloadLoraBody(StrictBody):
    """The body of ``POST /v1/unload_lora_adapter``.

    With ``timeout``, the LoRA accepts no new request, and the call waits that many seconds for running ones.
    """

    lora_name: LoraName
    timeout: float | None = Field(default=None, ge=0, le=MAX_CALL_TIMEOUT_S)


class OperatorRoute(NamedTuple):
    """The body and the statuses of a route. Without a body, ``message`` may make its message, described by ``says``."""

    body: type[StrictBody] | None = None
    body_required: bool = True
    query: tuple[tuple[str, float, str], ...] = ()
    errors: tuple[int, ...] = (400, 429)
    message: Callable[[str], ClientMessage] | None = None
    says: str = ""


def require_no_parameters(query: Mapping[str, str]) -> None:
    """Raise ApiError (400) for query parameters: operators' calls take a body."""
    if query:
        got = ", ".join(sorted(query))
        raise ApiError.invalid(f"parameters must be fields of the JSON body here, got {got} in the query")


OPERATOR_ROUTES: Final[Mapping[str, OperatorRoute]] = {
    "/flush_cache": OperatorRoute(
        query=(("timeout", MAX_CALL_TIMEOUT_S, "seconds to wait for the engine to become idle"),)
    ),
    "/update_weights_from_disk": OperatorRoute(UpdateWeightsBody),
    "/v1/load_lora_adapter": OperatorRoute(LoadLoraBody),
    "/v1/unload_lora_adapter": OperatorRoute(UnloadLoraBody, errors=(400, 404, 429)),
    "/start_profile": OperatorRoute(),
    "/stop_profile": OperatorRoute(
        message=lambda call_id: StopProfile(call_id=call_id),
        says="End the profile; when the reply arrives, the traces are written.",
    ),
    "/abort_request": OperatorRoute(AbortBody, errors=(429,)),
    "/pause_generation": OperatorRoute(PauseBody, body_required=False, errors=(429,)),
    "/continue_generation": OperatorRoute(
        message=lambda call_id: ContinueGeneration(call_id=call_id), says="Resume after a pause."
    ),
    "/sleep": OperatorRoute(SleepBody, body_required=False, errors=(400, 429)),
    "/wake": OperatorRoute(),
}
