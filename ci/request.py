"""The request to a dispatched run, as JSON in a workflow's input, read strictly at both ends."""

from enum import StrEnum
from typing import Annotated

import msgspec

from ci.errors import CiError
from lockstep.documents import DocumentError, document

REPEAT_MAX = 1000
REQUEST_SIZE_MAX_BYTES = 60_000  # GitHub refuses a dispatch whose inputs are larger than 65,535 characters.


class Tier(StrEnum):
    """The tier of scripts; `all` stands for every tier that a script names."""

    SIM = "sim"
    SERVER = "server"
    ALL = "all"


class RerunRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tests to run, the number of rounds, and the tier."""

    specs: tuple[str, ...]
    repeat: Annotated[int, msgspec.Meta(ge=1, le=REPEAT_MAX)] = 1
    tier: Tier | None = None

    @classmethod
    def from_json(cls, text: str) -> "RerunRequest":
        """Read a request. Raises `CiError`. The specs are judged where they are resolved."""
        if len(text) > REQUEST_SIZE_MAX_BYTES:
            raise CiError(f"--request is longer than {REQUEST_SIZE_MAX_BYTES} characters; ask for fewer tests")
        try:
            return document(text, cls)
        except DocumentError as exc:
            raise CiError(f"--request is no rerun request ({exc}); use the JSON that /rerun-test dispatches") from exc

    def to_json(self) -> str:
        """Return the request as one line of JSON."""
        return msgspec.json.encode(self).decode("ascii")
