"""A script's handle for a request on an SDK adapter: the oracle's account of its plans and replies."""

from __future__ import annotations

from scripted.core.account import REFUSED, Account, Life
from scripted.script.clients import ClientView, finish_reason_of
from scripted.script.handles import BaseRequest
from scripted.script.values import Listed
from scripted.sdk.messages import Add, Share


class SdkRequest(BaseRequest):
    """One life of a rid, read from the oracle's account, because each machine keeps requests in its own way."""

    def __init__(self, message: Add, client: ClientView, account: Account, index: int) -> None:
        super().__init__(message.rid, message.prompt_ids, message.max_new_tokens, client)
        # The images of its prompt, for a request that continues this one.
        self.images = message.images
        self._account = account
        # Requests arrive in the order in which the script started them.
        self._index = index
        self._shares: list[Share] = []
        self._parts = 0
        self._retractions = 0

    # -- filled in by the run --

    def note_share(self, share: Share) -> None:
        """Note the request's share of a batch."""
        first = not self._shares
        self._shares.append(share)
        is_part = share.start < len(self.prompt_ids)
        is_whole = first and share.start + share.count >= len(self.prompt_ids)
        self._parts += is_part and not (is_whole and not self._parts)

    def note_retraction(self) -> None:
        """Note the loss of its blocks; a request without computed tokens lost nothing."""
        if self._shares:
            self._retractions += 1
            self._shares.clear()

    # -- for scripts --

    @property
    def _life(self) -> Life | None:
        """Its life in the account; None before the first step that sees it."""
        lives = self._account.lives
        return lives[self._index] if self._index < len(lives) else None

    @property
    def req(self) -> Life | None:
        """The oracle's account of it; None before its first step and after its end."""
        return None if self.finished else self._life

    @property
    def finish_reason(self) -> str | None:
        end = None if self._life is None else self._life.end
        return finish_reason_of("error" if end == REFUSED else end)

    @property
    def error(self) -> str | None:
        return self.client.error

    @property
    def output_ids(self) -> tuple[int, ...]:
        return Listed(() if self._life is None else self._life.said)

    @property
    def computed(self) -> int:
        """Launched positions, a prefix hit included; 0 again after a retraction."""
        return 0 if self._life is None else self._life.computed or 0

    @property
    def is_running(self) -> bool:
        return bool(self._shares) and not self.finished

    @property
    def is_chunking(self) -> bool:
        return self.is_running and self.computed < len(self.prompt_ids)

    @property
    def is_prefilled(self) -> bool:
        return self.is_running and self.computed >= len(self.prompt_ids)

    @property
    def chunks_done(self) -> int:
        return self._parts

    @property
    def cached_tokens(self) -> int:
        return min(self._shares[0].start, len(self.prompt_ids)) if self._shares else 0

    @property
    def remaining_prompt_tokens(self) -> int:
        return 0 if self.finished else max(0, len(self.prompt_ids) - self.computed)

    @property
    def kv_pages(self) -> int:
        return len(self._shares[-1].block_ids) if self.is_running else 0

    @property
    def retractions(self) -> int:
        return self._retractions
