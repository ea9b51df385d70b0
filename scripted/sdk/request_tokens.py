"""The tokens of a request on the simulated device: prompt, samples and guesses, with the fingerprint after each."""

from __future__ import annotations

from collections.abc import Sequence

from scripted.core.masks import state_after
from scripted.core.tokens import guesses, links_of, root_of
from scripted.sdk.messages import Add


class RequestTokens:
    """A request's tokens, sampled ones included, and the fingerprint after each.

    ``computed`` is the next position, ``guessed`` the guesses after its last share, and ``held`` counts the guesses of
    that share that held. ``ends`` is the position after its last share, ``ahead`` the distance in blocks from that
    share's place to its state.
    """

    __slots__ = ("ahead", "computed", "ends", "fingerprints", "guessed", "held", "ids", "message")

    def __init__(self, message: Add) -> None:
        self.message = message
        self.ids: list[int] = []
        self.computed = 0
        self.guessed: tuple[int, ...] = ()
        self.held = 0
        self.ends = self.ahead = 0
        self.fingerprints = [root_of(message.lora)]
        self.extend(message.prompt_ids)

    @property
    def mask(self) -> int | None:
        """The state of its grammar; None without one."""
        message = self.message
        return state_after(self.ids[len(message.prompt_ids) :]) if message.grammar else None

    def extend(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.fingerprints += links_of(self.fingerprints[-1], ids)[1:]

    def guess(self, count: int) -> None:
        self.guessed = guesses(self.fingerprints[-1], count, self.mask) if count else ()

    def hold(self, most: int, count: int) -> None:
        """Accept at most this many guesses of the last share."""
        self.cut(len(self.ids) - self.held + most)
        self.computed, self.held = len(self.ids) - 1, most
        self.guess(count)

    def cut(self, count: int) -> None:
        del self.ids[count:]
        del self.fingerprints[count + 1 :]
