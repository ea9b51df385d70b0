"""Actions on KV transfers between engines: hold them, release them, fail the engine at the other end.

Only for an engine with a role. None of them is a client's message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

from engine.core.messages import PrefillFailed
from scripted.core.action import Action, Culprit, RunLike, SearchBase, verb
from scripted.core.errors import BadCall
from scripted.core.phrases import printable
from scripted_lockstep.actions.action import EngineAction, EventReader

if TYPE_CHECKING:
    from scripted.script.context import BaseContext


def _has_role(base: SearchBase) -> bool:
    return bool(base.limits.prefills or base.limits.receives)


def _require_transfers(t: BaseContext, name: str) -> None:
    limits = t.scheduler.limits
    if not (limits.prefills or limits.receives):
        raise BadCall(f"{name} needs an engine of role='prefill' or role='decode', got role='both'; set the role")


class HoldTransfers(EngineAction, frozen=True, kw_only=True, omit_defaults=True, tag="hold-transfers"):
    """Holds transfers: no page of KV leaves the engine or arrives from this step on."""

    examples: ClassVar = ("hold-transfers",)
    needs_open: ClassVar[bool] = True
    is_control: ClassVar[bool] = True
    caused_by: ClassVar[Culprit] = Culprit.HARDWARE

    @staticmethod
    @verb
    def hold_transfers(t: BaseContext) -> None:
        """From the next step on, no KV leaves this engine or arrives until it is released."""
        _require_transfers(t, "hold_transfers()")
        t.run.act(HoldTransfers())

    def apply(self, run: RunLike) -> None:
        run.device.transfers.is_holding = True

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Only for engines with a role."""
        return (cls(),) if _has_role(base) else ()


class ReleaseTransfers(EngineAction, frozen=True, kw_only=True, omit_defaults=True, tag="release-transfers"):
    """Releases transfers: KV leaves and arrives again."""

    examples: ClassVar = ("release-transfers",)
    is_control: ClassVar[bool] = True

    @staticmethod
    @verb
    def release_transfers(t: BaseContext) -> None:
        """Let all held KV through, and stop holding."""
        _require_transfers(t, "release_transfers()")
        t.run.act(ReleaseTransfers())

    def apply(self, run: RunLike) -> None:
        run.device.transfers.is_holding = False

    def reaches(self, run: RunLike) -> bool:
        return bool(run.device.transfers.is_holding)


class FailTransfer(EngineAction, frozen=True, kw_only=True, omit_defaults=True, tag="fail-transfer"):
    """Fails the other engine of the oldest transfer, after it has sent ``pages`` pages."""

    pages: int = 0

    examples: ClassVar = ("fail-transfer", "fail-transfer pages=1")
    event: ClassVar = PrefillFailed
    caused_by: ClassVar[Culprit] = Culprit.HARDWARE

    @staticmethod
    @verb
    def fail_transfer(t: BaseContext, pages: int = 0) -> None:
        """Make the other engine of the oldest transfer fail; of an incoming prompt this many pages arrive first."""
        _require_transfers(t, "fail_transfer()")
        if not t.run.device.transfers.numbers:
            raise BadCall("fail_transfer() needs a transfer on its way, there is none; wait for t.state.transferring")
        t.run.act(FailTransfer(pages=pages))

    def apply(self, run: RunLike) -> None:
        """Notify a decode engine through its front end, a prefill engine through its stages."""
        transfers = run.device.transfers
        for number in transfers.numbers[:1]:
            transfers.fail(number, self.pages)
            if transfers.is_received(number):
                run.give(PrefillFailed(transfer=number, error="the prefill engine failed as it was told to"))

    def reaches(self, run: RunLike) -> bool:
        return bool(run.device.transfers.numbers)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Return failures after no page and after one, for engines with a role."""
        return (cls(), cls(pages=1)) if _has_role(base) else ()

    def smaller(self) -> Iterator[Action]:
        """Yield the failure after no page."""
        if self.pages:
            yield FailTransfer()

    @classmethod
    def read_back(cls, event: PrefillFailed, reader: EventReader) -> FailTransfer:
        """Read the action back from the later event, which has the number of pages."""
        del event, reader
        return cls()

    @classmethod
    def words(cls, event: PrefillFailed) -> str:
        return f"transfer {event.transfer} FAILED: {printable(event.error)}"
