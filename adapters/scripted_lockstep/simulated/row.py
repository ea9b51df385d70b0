"""A row of the page tables that the simulated stages hold."""

from __future__ import annotations

from engine.core.plan import SamplingSpec
from scripted_lockstep.simulated.model import salt_of


class TableRow:
    """A row of a stage's page table: its request's pages, and the write counts that the pages had when they were read.

    A ``poisoned`` row lacks the KV of a failed microbatch: launches for its request from before the failure was known
    compute nothing, and their results are dropped. With ``needs_history`` each token depends on all tokens before it.
    ``newest`` is the last token chosen, which a segment planned ahead follows.
    """

    __slots__ = ("needs_history", "newest", "pages", "poisoned", "salt", "seen", "spec", "window")

    def __init__(self, spec: SamplingSpec) -> None:
        self.spec = spec
        self.salt = 0 if spec.temperature == 0 else salt_of(spec.temperature, spec.top_p, spec.top_k, spec.min_p)
        self.needs_history = spec.has_penalty or spec.grammar_id > 0
        self.pages: list[int] = []
        self.seen: list[int] = []
        self.window: list[int] = []
        self.poisoned = False
        self.newest: int | None = None
