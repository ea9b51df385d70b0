"""A row of the page tables that the simulated stages hold."""

from __future__ import annotations

from engine.core.plan import SamplingSpec
from scripted_lockstep.simulated.model import salt_of


class Row:
    """A stage's page table row: its request's pages, and the write counts of those pages when it last looked.

    ``poisoned`` rows miss the KV of a failed microbatch: later launches for the same request, from before the failure
    was known, compute nothing, and their results are dropped. With ``looks_back`` a token depends on all tokens before
    it. ``newest`` is the token chosen last, from which a segment planned ahead continues.
    """

    __slots__ = ("looks_back", "newest", "pages", "poisoned", "salt", "seen", "spec", "window")

    def __init__(self, spec: SamplingSpec) -> None:
        self.spec = spec
        self.salt = 0 if spec.temperature == 0 else salt_of(spec.temperature, spec.top_p, spec.top_k, spec.min_p)
        self.looks_back = spec.has_penalty or spec.grammar_id > 0
        self.pages: list[int] = []
        self.seen: list[int] = []
        self.window: list[int] = []
        self.poisoned = False
        self.newest: int | None = None
